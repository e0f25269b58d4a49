"""Which replica gets a request."""

import pytest

from cairn.cache.events import BlockRemoved, BlockStored, block_hash, next_digest, root_digest
from cairn.cache.sequence_blocks import Namespace
from cairn.routing.rule import ReplicaLoad, RoutedRequest, RoutingOptions, RoutingRule
from routing.index_audit import audit

NAMES = [f"replica-{number}" for number in range(5)]
BLOCK = 16


def prompt(*parts, session=None):
    """A prompt of so many blocks of each named part: (name, blocks), ..."""
    digest, hashes = root_digest(Namespace()), []
    for name, num_blocks in parts:
        for number in range(num_blocks):
            digest = next_digest(digest, f"{name} {number}".encode())
            hashes.append(block_hash(digest))
    return RoutedRequest(hashes, BLOCK, len(hashes) * BLOCK + 3, session)


def idle(names=NAMES):
    return {name: ReplicaLoad() for name in names}


def has(rule, replica, request, num_blocks=None):
    hashes = tuple(request.block_hashes[:num_blocks])
    rule.index.apply(replica, BlockStored(hashes, None, (1,) * BLOCK * len(hashes), BLOCK, ""))


def test_the_replica_that_has_most_of_the_prompt_is_first():
    rule, request = RoutingRule(), prompt(("a", 200))
    has(rule, NAMES[3], request, 150)
    has(rule, NAMES[1], request, 80)
    assert rule.rank(request, idle(), 0.0)[:2] == [NAMES[3], NAMES[1]]
    assert sorted(rule.rank(request, idle(), 0.0)) == NAMES
    assert rule.rank(request, idle(), 0.0, limit=2) == [NAMES[3], NAMES[1]]
    assert rule.rank(request, {}, 0.0) == []


def has_below(rule, replica, request, medium, num_blocks=None):
    hashes = tuple(request.block_hashes[:num_blocks])
    rule.index.apply(replica, BlockStored(hashes, None, (1,) * BLOCK * len(hashes), BLOCK, "", medium=medium))


@pytest.mark.parametrize("medium", ["CPU", "DISK"])
def test_what_lies_below_a_pool_counts_less_than_what_is_in_one(medium):
    rule, request = RoutingRule(), prompt(("a", 200))
    has_below(rule, NAMES[3], request, medium)
    assert rule.rank(request, idle(), 0.0)[0] == NAMES[3]
    has(rule, NAMES[1], request, 160)
    assert rule.rank(request, idle(), 0.0)[:2] == [NAMES[1], NAMES[3]]
    has_below(rule, NAMES[2], request, medium)
    has(rule, NAMES[2], request, 100)
    assert rule.rank(request, idle(), 0.0)[:3] == [NAMES[2], NAMES[1], NAMES[3]]
    assert rule.record_routed(request, NAMES[3], 0.0) == 3200
    audit(rule.index)


def test_what_leaves_one_tier_may_lie_in_the_other():
    rule, request = RoutingRule(), prompt(("a", 200))
    for medium in ("CPU", "DISK"):
        has_below(rule, NAMES[3], request, medium)
    rule.index.apply(NAMES[3], BlockRemoved(tuple(request.block_hashes[::-1]), "CPU"))
    assert rule.rank(request, idle(), 0.0)[0] == NAMES[3] and rule.index.replicas == (NAMES[3],)
    rule.index.apply(NAMES[3], BlockRemoved(tuple(request.block_hashes[::-1]), "DISK"))
    assert rule.record_routed(prompt(("a", 200)), NAMES[3], 0.0) == 0
    has_below(rule, NAMES[4], request, "DISK")
    rule.index.clear(NAMES[4])
    assert rule.record_routed(request, NAMES[4], 0.0) == 0
    audit(rule.index)


def test_a_wait_that_costs_more_than_the_prefill_is_not_waited():
    options = RoutingOptions(duplicate_cost=0.0, balance_cost=0.0)
    rule, request = RoutingRule(options), prompt(("a", 100))
    has(rule, NAMES[3], request)
    for pending, expected in ((1500, True), (1700, False)):
        replicas = idle() | {NAMES[3]: ReplicaLoad(pending_tokens=pending)}
        assert (rule.rank(request, replicas, 0.0)[0] == NAMES[3]) == expected
    # a copy costs room where memory is full, and nothing where it is free
    rule = RoutingRule(RoutingOptions(duplicate_cost=0.5, balance_cost=0.0))
    has(rule, NAMES[3], request)
    for free_share, expected in ((0.0, True), (1.0, False)):
        replicas = {name: ReplicaLoad(free_share=free_share) for name in NAMES}
        replicas[NAMES[3]] = ReplicaLoad(pending_tokens=1700)
        assert (rule.rank(request, replicas, 0.0)[0] == NAMES[3]) == expected


def test_a_prompt_waits_for_what_is_cached_longer_than_to_compute_it_would_take():
    """For others would wait, too: a prefill that is done again makes the fleet slower, and more of them would move."""
    rule, request = RoutingRule(), prompt(("a", 1000))
    has(rule, NAMES[3], request)
    for pending, stays in ((3 * 16_000, True), (5 * 16_000, False)):
        replicas = idle() | {NAMES[3]: ReplicaLoad(pending_tokens=pending)}
        assert (rule.rank(request, replicas, 0.0)[0] == NAMES[3]) == stays


def test_a_replica_that_has_more_to_do_than_was_expected_gets_nothing_new():
    """Though by what was routed there it has computed least: prompts that waited may have lost what was cached."""
    rule = RoutingRule()
    for number, name in enumerate(NAMES[:3]):
        routed = prompt((f"before {number}", 4000))
        rule.record_routed(routed, name, 0.0)
        rule.record_prefilled(routed, name)
    replicas = idle() | {name: ReplicaLoad(pending_tokens=80_000) for name in NAMES[3:]}
    assert rule.rank(prompt(("new", 4000)), replicas, 1.0)[0] in NAMES[:3]


def test_a_hot_prefix_is_copied_when_its_replica_is_the_bottleneck():
    rule, served = RoutingRule(), dict.fromkeys(NAMES, 0)
    system = ("system", 100)
    for number in range(200):
        request = prompt(system, (f"user {number}", 20))
        best = rule.rank(request, idle(), number / 1000)[0]
        rule.record_routed(request, best, number / 1000)
        served[best] += 1
    assert min(served.values()) > 30, served
    # each has computed the shared part once
    assert all(rule.index.matched_by(name, prompt(system).block_hashes) == 100 for name in NAMES)


def test_a_prefix_is_copied_at_no_extra_price_when_the_replicas_that_have_it_are_crowded():
    rule, request = RoutingRule(), prompt(("a", 60))
    has(rule, NAMES[3], request)
    for num_open, stays in ((20, True), (30, False)):
        replicas = idle() | {NAMES[3]: ReplicaLoad(num_running=num_open)}
        assert (rule.rank(request, replicas, 0.0)[0] == NAMES[3]) == stays
    # one that has it, too, and is not crowded, gets it
    has(rule, NAMES[1], request)
    assert rule.rank(request, replicas, 0.0)[0] == NAMES[1]
    # where all have as many, none is crowded
    replicas = {name: ReplicaLoad(num_running=20) for name in NAMES}
    assert rule.rank(request, replicas, 0.0)[0] in (NAMES[1], NAMES[3])


def test_what_nobody_has_goes_where_nothing_runs():
    rule = RoutingRule()
    replicas = {name: ReplicaLoad(num_running=1) for name in NAMES} | {NAMES[2]: ReplicaLoad()}
    assert all(rule.rank(prompt((f"cold {number}", 5)), replicas, 0.0)[0] == NAMES[2] for number in range(20))


def test_near_ties_go_to_the_less_loaded():
    rule, request = RoutingRule(), prompt(("a", 100))
    has(rule, NAMES[0], request, 99)
    has(rule, NAMES[1], request, 100)
    free = ReplicaLoad(free_share=1.0)
    replicas = {NAMES[0]: free, NAMES[1]: ReplicaLoad(pending_tokens=70, free_share=1.0)}
    assert rule.rank(request, replicas, 0.0)[0] == NAMES[0]


def test_cold_prompts_go_the_same_way_in_every_router_and_only_those_of_a_dead_replica_move():
    requests = [prompt((f"cold {number}", 10)) for number in range(500)]
    first = [RoutingRule().rank(request, idle(), 0.0)[0] for request in requests]
    backwards = [RoutingRule().rank(request, idle(NAMES[::-1]), 7.0)[0] for request in requests]
    assert first == backwards and all(60 < first.count(name) < 140 for name in NAMES)
    left = [RoutingRule().rank(request, idle(NAMES[1:]), 0.0)[0] for request in requests]
    assert all(new == old for new, old in zip(left, first, strict=True) if old != NAMES[0])


def test_prompts_without_a_block_are_spread():
    rule = RoutingRule()
    firsts = [rule.rank(RoutedRequest(num_tokens=5), idle(), 0.0)[0] for _ in range(500)]
    assert all(60 < firsts.count(name) < 140 for name in NAMES)


def test_cold_work_is_spread_evenly():
    rule, computed = RoutingRule(), dict.fromkeys(NAMES, 0)
    for number in range(1000):
        request = prompt((f"cold {number}", 20 + number * 7 % 50))
        best = rule.rank(request, idle(), float(number) / 10)[0]
        rule.record_routed(request, best, number / 10)
        rule.record_prefilled(request, best)
        computed[best] += request.num_tokens
    assert max(computed.values()) <= 1.3 * sum(computed.values()) / len(NAMES)


def test_a_session_stays_unless_that_costs_more_than_it_saves():
    rule = RoutingRule()
    request = prompt(("a", 10), session="s")
    rule.record_routed(request, NAMES[2], 0.0)
    rule.record_finished(request, NAMES[2])
    # nothing is known of this prompt
    again = prompt(("another", 10), session="s")
    assert rule.rank(again, idle(), 500.0)[0] == NAMES[2]
    busy = idle() | {NAMES[2]: ReplicaLoad(pending_tokens=10_000)}
    assert rule.rank(again, busy, 500.0)[0] != NAMES[2]
    assert rule.rank(again, idle(NAMES[3:]), 500.0)[0] in NAMES[3:]


def test_what_is_routed_counts_until_it_is_prefilled_or_reported():
    options = RoutingOptions(balance_cost=0.0, balance_step=1e9)  # what it has computed lately does not count
    rule, request = RoutingRule(options), prompt(("a", 1000))
    first = rule.rank(request, idle(), 10.0)[0]
    rule.record_routed(request, first, 10.0)

    def waits(load=None):
        """Whether another prompt keeps away from the replica."""
        chosen = {rule.rank(prompt((f"b {number}", 1)), idle() | ({first: load} if load else {}), 11.0)[0]
                  for number in range(50)}  # fmt: skip
        return first not in chosen

    assert waits() and waits(ReplicaLoad(as_of=9.0))
    assert not waits(ReplicaLoad(as_of=10.5)), "it is in the report"
    rule.record_routed(request, first, 12.0)
    other = prompt(("c", 1000))
    rule.record_routed(other, first, 12.0)
    assert waits()
    rule.record_prefilled(other, first)
    rule.record_finished(other, first)
    rule.record_finished(request, first)
    rule.record_finished(request, "nobody")
    assert not waits()


def test_a_prefill_that_is_never_reported_is_over_some_day():
    rule = RoutingRule(RoutingOptions(prefill_seconds=600.0, balance_cost=0.0))
    for number in range(3000):
        rule.record_routed(prompt((f"a {number}", 5)), NAMES[0], float(number))
    state = rule._replicas[NAMES[0]]
    assert len(state.prefills) <= 601 and state.pending_tokens == 83 * len(state.prefills)


def test_balance_is_forgotten_in_time():
    options = RoutingOptions(balance_seconds=60.0)
    rule, request = RoutingRule(options), prompt(("a", 1000))
    has(rule, NAMES[0], request, 30)
    cold = prompt(("work", 1000))
    rule.record_routed(cold, NAMES[0], 0.0)
    rule.record_finished(cold, NAMES[0])
    assert rule.rank(request, idle(), 1.0)[0] != NAMES[0]
    assert rule.rank(request, idle(), 1e5)[0] == NAMES[0]


def test_a_removed_replica_is_forgotten_and_may_join_again():
    rule, request = RoutingRule(), prompt(("a", 50))
    rule.record_routed(request, NAMES[1], 0.0)
    rule.record_finished(request, NAMES[1])
    assert rule.rank(request, idle(), 300.0)[0] == NAMES[1]
    rule.remove(NAMES[1])
    rule.remove("nobody")
    assert NAMES[1] not in rule.rank(request, idle(NAMES[2:]), 0.0)
    assert rule.index.matched_masks(request.block_hashes) == []
    assert set(rule.rank(request, idle(), 0.0)) == set(NAMES)


def test_an_index_that_clears_a_replica_is_followed():
    rule, request = RoutingRule(), prompt(("a", 50))
    for name in NAMES[:3]:
        has(rule, name, request)
    rule.rank(request, idle(), 0.0)
    for name in (NAMES[0], NAMES[2]):
        rule.index.clear(name)
    assert rule.rank(request, idle(), 0.0)[0] == NAMES[1]
    has(rule, NAMES[4], request)
    assert set(rule.rank(request, idle(), 0.0, limit=2)) == {NAMES[1], NAMES[4]}


def test_sessions_are_bounded():
    rule = RoutingRule(RoutingOptions(max_sessions=10))
    for number in range(100):
        rule.record_routed(prompt((f"a {number}", 1), session=str(number)), NAMES[number % 5], 0.0)
    assert len(rule._sessions) == 10


@pytest.mark.parametrize(("ends", "num_blocks", "tokens"), [(16, 3, 48), (16, 9, 100), ([5, 90], 2, 90), ([5], 0, 0)])
def test_tokens_of_blocks(ends, num_blocks, tokens):
    assert RoutedRequest([1] * 9, ends, 100).tokens_in(num_blocks) == tokens


def test_of_idle_replicas_the_one_that_has_computed_least_lately():
    rule = RoutingRule()
    chosen = []
    for number in range(len(NAMES)):
        request = prompt((f"long {number}", 1000))
        chosen.append(rule.rank(request, idle(), 10.0 * number)[0])
        rule.record_routed(request, chosen[-1], 10.0 * number)
        rule.record_finished(request, chosen[-1])
    assert sorted(chosen) == NAMES, "each has had one"


def test_of_a_long_prompt_a_short_wait_is_no_reason():
    """Costs that differ by less than a twentieth are the same: then what was computed lately decides."""
    rule = RoutingRule()
    first = prompt(("first", 1000))
    rule.record_routed(first, NAMES[0], 0.0)
    rule.record_finished(first, NAMES[0])
    waiting = {name: ReplicaLoad(pending_tokens=700) for name in NAMES[1:]}
    loads = {NAMES[0]: ReplicaLoad()} | waiting
    assert rule.rank(prompt(("long", 1000)), loads, 1.0)[0] != NAMES[0]
    assert (
        rule.rank(
            prompt(("short", 1)),
            {NAMES[0]: ReplicaLoad()} | {name: ReplicaLoad(pending_tokens=90_000) for name in NAMES[1:]},
            1.0,
        )[0]
        == NAMES[0]
    )
