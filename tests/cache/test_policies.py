"""The contracts of placement and eviction, run on every policy, and what each one is for."""

import pytest

from cairn.cache.checkpoint import Kind, Origin
from cairn.cache.checkpoint_store import PEEKED, EvictionQueue
from cairn.cache.eviction import EvictionPolicy, LeastRecentlyUsed, ValuePerByte, eviction_for
from cairn.cache.placement import Auto, CheckpointPoint, PromptFacts, placement_for
from cairn.cache.tree import Checkpoint, Node
from cairn.types import Boundary

MODES = ["align", "all", "junction", "auto"]


def ends(*positions):
    return tuple(map(Boundary, positions))


def in_chunks(mode, facts, chunk, block_size=16):
    placement = placement_for(mode, block_size, facts.exact)
    start, wanted = facts.hit, []
    while start < facts.num_tokens:
        end = min(facts.num_tokens, (start // 64 + chunk) * 64)
        wanted += placement.in_prefill(facts, start, end)
        start = end
    return wanted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 1000, 4096, 5000, 131072])
def test_every_placement_keeps_the_contract(mode, exact, length):
    predicted = {position // 64 * 64: 1.0 for position in range(70, length, max(97, length // 20))}
    boundaries = ends(1, length // 3 + 1, length)
    facts = PromptFacts(length, 0, length * 3 // 4, boundaries, exact, predicted)
    for chunk in (1, 3, 1 << 20):
        positions = [w.position for w in in_chunks(mode, facts, chunk)]
        assert positions == sorted(set(positions))
        assert all(0 < position <= length for position in positions)
        assert sum(position % 64 != 0 for position in positions) <= 6 or mode == "all"
        if exact and mode != "auto":
            assert all(position % 64 == 0 for position in positions)


@pytest.mark.parametrize("mode", ["junction", "auto"])
def test_chunking_does_not_change_what_is_kept(mode):
    facts = PromptFacts(3000, 0, 1500, ends(70, 2900), predicted={640: 1.0, 2000: 0.5})
    assert in_chunks(mode, facts, 1) == in_chunks(mode, facts, 32)


def test_auto_names_every_position_that_earns_it():
    marked = (Boundary(300, "system_end"), Boundary(1000), Boundary(2190))
    facts = PromptFacts(2200, 0, 1500, marked, predicted={640: 0.1, 1000: 0.2})
    kinds = {w.position: w.kind for w in in_chunks("auto", facts, 100)}
    assert kinds[2200] is Kind.PROMPT_END and kinds[2190] is Kind.MESSAGE_END
    assert kinds[300] is Kind.SYSTEM_END and kinds[1500] is Kind.JUNCTION
    assert kinds[640] is Kind.GRID and kinds[1000] is Kind.INNER_END and len(kinds) == 6


def test_what_is_at_the_hit_already_takes_nobodys_place():
    """Six positions off the grid may be named: the prompt's end and five others."""
    inner = (101, 201, 301, 401, 501)
    here = Boundary(70, "message_end", retain_seconds=300)
    facts = PromptFacts(1001, 70, 70, (here, *ends(*inner)), predicted=dict.fromkeys(inner, 1.0))
    named = [w.position for w in placement_for("auto", 16, False).in_prefill(facts, 70, 1001) if w.position % 64]
    assert named == [*inner, 1001]


def test_auto_in_exact_mode_keeps_the_grid_point_below():
    facts = PromptFacts(100_000, 0, 0, ends(333), exact=True)
    kinds = {w.position: w.kind for w in in_chunks("auto", facts, 2000)}
    assert kinds[320] is Kind.MESSAGE_END and kinds[333] is Kind.MESSAGE_END


@pytest.mark.parametrize(("length", "points"), [(64, 0), (65, 1), (16384, 255), (32768, 511), (131072, 511)])
def test_the_grid_is_64_tokens_apart_or_has_at_most_512_places(length, points):
    fixed, candidates = Auto().candidates(PromptFacts(length, 0, 0))
    assert fixed.tolist() == [length] and len(candidates) == points and not (candidates % 64).any()


def test_what_is_earned_is_no_candidate_and_what_is_marked_is_one():
    marked = (Boundary(300), Boundary(1000), Boundary(1500))
    for exact in (False, True):
        facts = PromptFacts(2000, 128, 1000, marked, exact)
        fixed, candidates = Auto().candidates(facts)
        assert fixed.tolist() == [960, 1000, 1472, 1500, 1984, 2000] if exact else [1000, 1500, 2000]
        inner = set() if exact else {300}
        assert candidates.tolist() == sorted({*range(192, 2000, 64)} - {*fixed.tolist()} | inner)


def test_places_off_the_grid_that_recur_come_before_inner_ends():
    recurring, inner = (1001, 90, 960, 3000, 1501), ends(*range(201, 207), 1501, 1600)
    facts = PromptFacts(2000, 128, 0, inner, recurring=recurring)
    candidates = Auto().candidates(facts)[1].tolist()
    # not what is hit already, nor behind the end, and the prompt's end is one of the six
    assert [p for p in candidates if p % 64] == [204, 205, 206, 1001, 1501]
    facts.predicted = dict.fromkeys(candidates, 1.0)
    kinds = {w.position: w.kind for w in in_chunks("auto", facts, 3)}
    assert kinds[1001] is Kind.GRID and kinds[1501] is Kind.INNER_END and kinds[960] is Kind.GRID
    exact = Auto().candidates(PromptFacts(2000, 128, 0, exact=True, recurring=recurring))[1]
    assert not (exact % 64).any()
    # of a long prompt not all places of the grid come into question, but these do
    long = Auto().candidates(PromptFacts(100_000, 0, 0, recurring=(64,)))[1]
    assert long[:2].tolist() == [64, 256]


def test_align_keeps_the_last_boundary_of_each_step():
    facts = PromptFacts(200, 0, 0)
    assert [w.position for w in in_chunks("align", facts, 2, block_size=48)] == [96, 192]
    assert [w.position for w in in_chunks("all", facts, 2, block_size=48)] == [48, 96, 144, 192]
    align = placement_for("align", 48, False)
    assert align.in_decode(facts, 240) == CheckpointPoint(240, Kind.BLOCK)
    assert align.in_decode(facts, 241) is None


def test_junction_hits_only_what_was_seen_before():
    assert in_chunks("junction", PromptFacts(200, 0, 0), 9) == [CheckpointPoint(192, Kind.PROMPT_END)]
    wanted = in_chunks("junction", PromptFacts(200, 0, 100), 9)
    assert wanted == [CheckpointPoint(96, Kind.JUNCTION), CheckpointPoint(192, Kind.PROMPT_END)]


def test_unknown_policies_are_named():
    with pytest.raises(ValueError, match="bogus"):
        placement_for("bogus", 16, False)
    with pytest.raises(ValueError, match="bogus"):
        eviction_for("bogus")


def checkpoint(kind=Kind.PROMPT_END):
    return Checkpoint(Node(None, b"", 0, 0), None, kind, Origin.GRID, "r")


def queue_of(policy):
    """A queue in which each checkpoint has its `places`: (whether it is retained, tokens saved, bytes freed)."""
    places = {}

    def place_of(checkpoint):
        retained, *size = places.get(checkpoint, (False, 100, 100))
        return retained, policy.priority(checkpoint, *size)

    return EvictionQueue(place_of), places


def push(queue, item, last_used=0):
    item.last_used = last_used
    queue.push(item)


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, ValuePerByte])
def test_every_eviction_queue_keeps_the_contract(policy):
    queue, _ = queue_of(policy())
    kept = [checkpoint() for _ in range(50)]
    for tick, item in enumerate(kept):
        push(queue, item, tick)
    for _ in range(20):
        for item in kept:
            push(queue, item, 99)
    assert len(queue) == 50 and len(queue._heap) <= 2 * 50 + 65
    queue.remove(kept[7])
    queue.remove(kept[7])
    popped = []
    while (item := queue.pop()) is not None:
        popped.append(item)
    assert len(popped) == 49 and kept[7] not in popped and len(queue) == 0


def test_prices_are_those_of_what_goes_next():
    queue, places = queue_of(LeastRecentlyUsed())
    assert queue.prices() == []
    kept = [checkpoint() for _ in range(100)]
    places[kept[99]] = (True, 100, 100)
    for tick, item in enumerate(kept):
        push(queue, item, 100 - tick)
    queue.remove(kept[97])
    prices = queue.prices()
    assert prices == sorted(prices) and prices[:2] == [2, 4], "what is held or was taken out has no price"
    assert len(prices) <= PEEKED


def test_lru_drops_the_longest_unused():
    queue, _ = queue_of(LeastRecentlyUsed())
    old, new = checkpoint(), checkpoint()
    push(queue, new, 2)
    push(queue, old, 1)
    push(queue, old, 3)
    assert queue.pop() is new


def test_value_per_byte_weighs_chance_tokens_and_bytes():
    policy = ValuePerByte()
    queue, places = queue_of(policy)
    big, small, likely, deep = checkpoint(), checkpoint(), checkpoint(), checkpoint()
    policy.chance = lambda node: 0.3 if node is likely.node else 0.1
    places |= {big: (False, 100, 1000), small: (False, 100, 10), likely: (False, 100, 1000), deep: (False, 200, 1000)}
    for item in (big, small, likely, deep):
        queue.push(item)
    assert [queue.pop() for _ in range(4)] == [big, deep, likely, small]


def test_what_is_worth_more_by_now_than_when_it_was_ranked_stays():
    policy = ValuePerByte()
    queue, places = queue_of(policy)
    item, other, held = checkpoint(), checkpoint(), checkpoint()
    chances = {item.node: 0.1, other.node: 0.5, held.node: 0.0}
    policy.chance = lambda node: chances[node]
    places[held] = (True, 100, 100)
    for each in (item, other, held):
        queue.push(each)
    chances[item.node] = 0.9
    assert queue.price() == pytest.approx(0.1), "as it was ranked last"
    assert [queue.pop() for _ in range(4)] == [other, item, held, None]


def test_a_policy_that_overrides_nothing_ranks_nothing():
    policy = EvictionPolicy()
    assert policy.recorded_origin(checkpoint().node) is None and not policy.records() and not policy.refresh([])
    with pytest.raises(NotImplementedError):
        policy.priority(checkpoint(), 100, 100)
