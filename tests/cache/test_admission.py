"""Which checkpoints are taken at all when memory is full, and how those that are there are kept in order."""

import pytest
from simulation import Simulation

from cairn.cache.checkpoint import Kind
from cairn.cache.eviction import ValuePerByte
from cairn.cache.placement import Junction, Wanted
from cairn.cache.ranking import DOUBT, MAX_YOUNG, YOUNG

PROMPT = tuple(range(1000, 1064))
OTHER = tuple(range(2000, 2064))


def full(chance: float, barren: int = 0) -> Simulation:
    """A pool without a free page: a checkpoint behind 64 tokens whose chance is 0.5, a request of 64 more that is being
    computed, whose checkpoints would have `chance`, and `barren` tokens that can never be hit."""
    sim = Simulation.build(16 + 2 + 16 + -(-barren // 4), Junction(64, False), ValuePerByte())
    book = sim.cache.residents.reuse
    book._own_chance = lambda reuse: 0.5
    book.first_chance = lambda kind, ways, lineage, before: chance
    kept = sim.start("kept", PROMPT)
    assert sim.prefill(kept, 64)
    sim.end(kept)
    if barren:
        aborted = sim.start("aborted", tuple(range(3000, 3000 + barren)))
        assert sim.cache.extend(aborted.lease, barren) == []
        sim.cache.commit(aborted.lease, barren)
        sim.end(aborted)
    sim.apply()
    request = sim.start("new", OTHER)
    assert sim.cache.extend(request.lease, 64) == [] and sim.cache.pool.num_free == 0
    assert bool(sim.cache.residents.runs.barren) == bool(barren)
    return sim


def ask(sim: Simulation, kind: Kind, hold_seconds: int = 0) -> bool:
    return sim.cache.want(sim.requests[0].lease, Wanted(64, kind, hold_seconds)) is not None


def test_what_can_never_be_hit_goes_before_a_bet_is_weighed():
    sim = full(chance=0.0, barren=8)
    assert ask(sim, Kind.PROMPT_END)
    assert not sim.cache.residents.runs.barren and len(sim.cache.residents.queue) == 1


def test_a_little_that_can_never_be_hit_does_not_open_the_door():
    # one page of it, and a file takes two
    sim = full(chance=0.0, barren=4)
    assert not ask(sim, Kind.PROMPT_END)
    assert len(sim.cache.residents.queue) == 1


@pytest.mark.parametrize(
    ("junction", "end", "barren", "taken"),
    [
        # room for one file: whoever earns more gets it
        (0.0, 0.1, 8, False),
        (0.1, 0.0, 8, True),
        # room for both
        (0.0, 0.1, 16, True),
    ],
)
def test_a_bet_leaves_the_room_that_the_prompts_end_will_need_if_that_is_worth_more(junction, end, barren, taken):
    sim = full(chance=0.0, barren=barren)
    chances = {Kind.JUNCTION: junction, Kind.PROMPT_END: end}
    sim.cache.residents.reuse.first_chance = lambda kind, ways, lineage, before: chances[kind]
    lease = sim.requests[0].lease
    assert (sim.cache.want(lease, Wanted(32, Kind.JUNCTION)) is not None) is taken
    assert (sim.cache.want(lease, Wanted(64, Kind.PROMPT_END)) is not None) is (barren == 16 or not taken)
    assert len(sim.cache.residents.queue) == 1, "nothing that is of use has gone for them"


def test_a_bet_leaves_no_room_for_a_prompts_end_that_has_its_file():
    sim = full(chance=0.0, barren=16)
    assert ask(sim, Kind.PROMPT_END)
    assert sim.cache.want(sim.requests[0].lease, Wanted(32, Kind.JUNCTION)) is not None


def test_what_statistics_alone_have_named_is_weighed_where_no_page_is_free():
    sim = full(chance=0.0, barren=16)
    assert not ask(sim, Kind.OFFSET) and sim.cache.residents.runs.barren
    assert sim.cache.make_room(2)
    assert ask(sim, Kind.OFFSET)


def test_a_refused_bet_is_remembered_where_it_would_have_been():
    sim = full(chance=0.0)
    request = sim.requests[0]
    assert not ask(sim, Kind.PROMPT_END)
    sim.cache.commit(request.lease, 64)
    node = request.lease.node
    assert node.checkpoint is None and node.reuse is not None and node.reuse.kind is Kind.PROMPT_END
    assert sim.cache.residents.reuse.num_ghosts == 1
    sim.end(request)
    sim.cache.lookup(request.namespace, request.lease.keys, "again")
    sim.check()


def test_what_was_refused_and_is_given_a_file_all_the_same_waits_until_that_is_filled():
    sim = full(chance=0.0)
    lease = sim.requests[0].lease
    assert not ask(sim, Kind.PROMPT_END) and 64 in lease.refused
    assert sim.cache.want_always(lease, 64) is not None
    sim.cache.commit(lease, 64)
    assert lease.node.checkpoint is None and 64 in lease.files
    sim.cache.commit(lease, 64, [64])
    assert lease.node.checkpoint is not None
    sim.check()


def test_a_bet_on_what_is_committed_already_is_remembered_without_another_commit():
    # as at an answer's end: if it is refused, the request ends
    sim = full(chance=0.0)
    lease = sim.requests[0].lease
    sim.cache.commit(lease, 64)
    assert not ask(sim, Kind.ANSWER_END)
    assert not lease.refused and lease.node.checkpoint is None
    assert lease.node.reuse is not None and lease.node.reuse.kind is Kind.ANSWER_END
    sim.check()


def test_the_hits_of_what_is_refused_fall_to_what_is_kept_above_it_in_the_same_commit():
    sim = full(chance=1.0)
    lease, book = sim.requests[0].lease, sim.cache.residents.reuse
    assert sim.cache.want(lease, Wanted(32, Kind.JUNCTION)) is not None
    lease.refused[64] = Kind.PROMPT_END
    sim.cache.commit(lease, 64, [32])
    below, above = lease.node, lease.node.parent
    assert below.checkpoint is None and above.checkpoint is not None
    # each alone has 0.5
    assert book.chance(above.reuse) == 1.0
    sim.check()


def test_the_hits_of_what_is_gone_fall_to_what_is_made_above_it_later():
    sim = full(chance=0.0)
    assert not ask(sim, Kind.PROMPT_END)
    first = sim.requests[0]
    sim.cache.commit(first.lease, 64)
    sim.end(first)
    book = sim.cache.residents.reuse
    book.first_chance = lambda kind, ways, lineage, before: 1.0
    lease = sim.cache.lookup(first.namespace, first.lease.keys, "again")
    sim.cache.admitted(lease)
    assert lease.known is not None and lease.known.position == 64 and lease.checkpoint is None
    assert sim.cache.want(lease, Wanted(32, Kind.JUNCTION)) is not None
    sim.cache.commit(lease, 64, [32])
    above = lease.node.parent
    assert above.end == 32 and above.checkpoint is not None
    assert book.chance(above.reuse) == 1.0
    sim.check()


@pytest.mark.parametrize(
    ("kind", "share", "taken"),
    [
        (Kind.PROMPT_END, 1.1 / DOUBT, True),
        (Kind.PROMPT_END, 0.9 / DOUBT, False),
        (Kind.JUNCTION, 1.1 / DOUBT, True),
        # named by statistics alone, and held to them
        (Kind.OFFSET, 0.9, False),
        (Kind.OFFSET, 1.1, True),
    ],
)
def test_a_bet_is_taken_unless_it_is_worth_far_less_than_what_would_go(kind, share, taken):
    # both save 64 tokens; an end frees its 16 pages of tokens as well, a state in their middle its file alone
    freed = 1 if kind is Kind.PROMPT_END else 2 / (2 + 16)
    assert ask(full(chance=0.5 * share * freed), kind) is taken


@pytest.mark.parametrize("kind", [Kind.BREAKPOINT, Kind.PREEMPTION, Kind.BLOCK])
def test_what_somebody_asked_for_is_no_bet(kind):
    assert ask(full(chance=0.0), kind)


def test_what_a_client_holds_is_no_bet():
    assert ask(full(chance=0.0), Kind.PROMPT_END, hold_seconds=60)


def test_the_young_are_ranked_anew_when_they_are_a_little_older():
    sim = Simulation.build(200, Junction(64, False), ValuePerByte())
    residents = sim.cache.residents
    residents.reuse.look = lambda num_ranked: False
    kept = sim.start("kept", PROMPT)
    assert sim.prefill(kept, 64)
    (checkpoint,) = list(residents.queue)
    made, ages = residents.reuse.now, []
    for now in range(made, made + 2 * YOUNG):
        residents.reuse.now = now
        before = checkpoint.version
        residents.ranking.rank_aged()
        if checkpoint.version != before:
            ages.append(now - made)
    assert ages == [YOUNG]


def test_those_that_wait_to_be_ranked_are_bounded():
    sim = Simulation.build(4 * MAX_YOUNG, Junction(1, False), ValuePerByte())
    for start in range(MAX_YOUNG + 10):
        request = sim.start(f"r{start}", (start,))
        assert sim.prefill(request, 1)
        sim.end(request)
        sim.apply()
    assert sim.cache.residents.taken[Kind.PROMPT_END] > MAX_YOUNG
    assert len(sim.cache.residents.ranking._young) == MAX_YOUNG
