"""Who gets a file when memory is full, and how the checkpoints that are there are kept in order."""

from math import inf

import pytest
from benchmarks.ablation import WithoutInheritance
from simulation import Simulation

from cairn.cache.checkpoint import Kind
from cairn.cache.checkpoint_store import COPY_TOKENS
from cairn.cache.eviction import MAX_RERANKS, RERANK_AGE, ValuePerByte
from cairn.cache.placement import CheckpointPoint, Junction

PROMPT = tuple(range(1000, 1064))
OTHER = tuple(range(2000, 2064))


def full(unreachable: int = 0, policy: ValuePerByte | None = None) -> Simulation:
    """A pool without a free page: a checkpoint behind 64 tokens, a request of 64 more that is being computed, and
    `unreachable` tokens that can never be hit."""
    sim = Simulation.build(16 + 2 + 16 + -(-unreachable // 4), Junction(64, False), policy or ValuePerByte())
    sim.cache.policy.eviction._own_chance = lambda record: 0.5
    kept = sim.start("kept", PROMPT)
    assert sim.prefill(kept, 64)
    sim.end(kept)
    if unreachable:
        aborted = sim.start("aborted", tuple(range(3000, 3000 + unreachable)))
        assert sim.cache.extend(aborted.lease, unreachable) == []
        sim.cache.commit(aborted.lease, unreachable)
        sim.end(aborted)
    sim.apply()
    request = sim.start("new", OTHER)
    assert sim.cache.extend(request.lease, 64) == [] and sim.cache.pool.num_free == 0
    assert bool(sim.cache.tree.unreachable) == bool(unreachable)
    return sim


def reserved(sim: Simulation, kind: Kind, position: int = 64, worth: float = 0.0) -> bool:
    wanted = CheckpointPoint(position, kind, worth=worth)
    return sim.cache.reserve_checkpoint(sim.requests[0].lease, wanted) is not None


def test_what_can_never_be_hit_goes_before_a_checkpoint():
    sim = full(unreachable=8)
    assert reserved(sim, Kind.PROMPT_END)
    assert not sim.cache.tree.unreachable and len(sim.cache.checkpoints.queue) == 1


@pytest.mark.parametrize("kind", [Kind.PROMPT_END, Kind.JUNCTION, Kind.BREAKPOINT, Kind.PREEMPTION])
def test_what_is_new_takes_the_place_of_what_is_worth_least(kind):
    sim = full()
    assert reserved(sim, kind)
    assert not len(sim.cache.checkpoints.queue) and sim.cache.checkpoints.evicted[Kind.PROMPT_END] == 1


@pytest.mark.parametrize("kind", [Kind.GRID, Kind.INNER_END])
def test_what_is_on_probation_takes_the_place_of_what_is_worth_less(kind):
    sim = full(unreachable=8)
    queue = sim.cache.checkpoints.queue
    assert reserved(sim, kind, 60) and len(queue) == 1, "what can never be hit costs nothing"
    price = queue.price() + COPY_TOKENS / (sim.cache.pool.num_pages * sim.cache.layout.page_bytes)
    assert not reserved(sim, kind, 56, 0.99 * price) and len(queue) == 1
    assert reserved(sim, kind, 56, 1.01 * price) and not queue
    assert queue.price() == inf


def test_a_position_is_given_one_file():
    sim = full(unreachable=16)
    lease = sim.requests[0].lease
    assert reserved(sim, Kind.PROMPT_END) and not reserved(sim, Kind.PROMPT_END)
    pages = sim.cache.force_checkpoint(lease, 64)
    assert pages is lease.pending_states[64].pages and not lease.pending_states[64].forced
    assert sim.cache.force_checkpoint(lease, 32) is not None and lease.pending_states[32].forced
    sim.cache.commit(lease, 64, [32, 64])
    assert lease.node.checkpoint is not None and lease.node.parent.checkpoint is not None
    sim.check()


def test_the_hits_of_what_is_gone_fall_to_what_is_made_above_it_later():
    sim = full(unreachable=8)
    first, policy = sim.requests[0], sim.cache.policy.eviction
    assert reserved(sim, Kind.PROMPT_END)
    sim.cache.commit(first.lease, 64, [64])
    gone = first.lease.node.checkpoint
    sim.cache.checkpoints.queue.remove(gone)
    sim.cache.checkpoints._drop(gone)
    sim.end(first)
    assert policy.chance(gone.node) == 0.5
    lease = sim.cache.lookup(first.namespace, first.lease.keys, "again")
    sim.cache.begin_request(lease)
    assert lease.match.last_checkpoint_node is gone.node and lease.checkpoint is None
    assert sim.cache.reserve_checkpoint(lease, CheckpointPoint(32, Kind.JUNCTION)) is not None
    sim.cache.commit(lease, 64, [32])
    above = lease.node.parent
    assert above.end == 32 and above.checkpoint is not None
    # each alone has 0.5
    assert policy.chance(above) == 1.0
    sim.check()


def test_without_inheritance_they_do_not():
    policy = WithoutInheritance()
    sim = full(policy=policy)
    lease = sim.requests[0].lease
    assert reserved(sim, Kind.JUNCTION, 32) and sim.cache.make_room(0)
    sim.cache.commit(lease, 64, [32])
    assert policy.chance(lease.node.parent) == 0.5


def test_the_young_are_ranked_anew_when_they_are_a_little_older():
    sim = Simulation.build(200, Junction(64, False), ValuePerByte())
    checkpoints, policy = sim.cache.checkpoints, sim.cache.policy.eviction
    policy._rank_at = inf
    kept = sim.start("kept", PROMPT)
    assert sim.prefill(kept, 64)
    (checkpoint,) = list(checkpoints.queue)
    made, ages = policy.now, []
    for now in range(made, made + 2 * RERANK_AGE):
        policy.now = now
        if checkpoint in policy.refresh(checkpoints.queue):
            ages.append(now - made)
    assert ages == [RERANK_AGE]


def test_those_that_wait_to_be_ranked_are_bounded():
    sim = Simulation.build(4 * MAX_RERANKS, Junction(1, False), ValuePerByte())
    for start in range(MAX_RERANKS + 10):
        request = sim.start(f"r{start}", (start,))
        assert sim.prefill(request, 1)
        sim.end(request)
        sim.apply()
    assert sim.cache.checkpoints.taken[Kind.PROMPT_END] > MAX_RERANKS
    assert len(sim.cache.policy.eviction._to_rerank) == MAX_RERANKS
