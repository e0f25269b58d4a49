"""The cache's promises, one by one, at the edges."""

import numpy as np
import pytest
from simulation import Simulation, small_layout

from cairn.cache.audit import audit
from cairn.cache.checkpoint import Kind, Origin
from cairn.cache.eviction import LeastRecentlyUsed, ValuePerByte
from cairn.cache.layout import CacheLayout
from cairn.cache.placement import Align, Auto, CheckpointPoint, Junction
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace
from cairn.cache.tree_store import pages_freed

LONG = tuple(range(1000, 1200))


def simulation(num_pages=400, placement=None, exact=False, **layout) -> Simulation:
    return Simulation.build(num_pages, placement or Auto(), LeastRecentlyUsed(), exact, **layout)


def run(sim: Simulation, prompt, answer=(), name="r", **arguments):
    """A whole request; returns its first lease's hit, match and reason."""
    request = sim.start(name, tuple(prompt), **arguments)
    first = (request.lease.hit, request.lease.matched, request.lease.reason)
    if request.computed < len(prompt):
        assert sim.prefill(request, len(prompt))
    for token in answer:
        assert sim.decode(request, token)
    sim.finish(request)
    sim.apply()
    sim.check()
    return first


def test_a_repeated_prompt_is_hit_as_a_whole():
    sim = simulation()
    assert run(sim, LONG) == (0, 0, Reason.NEVER_SEEN)
    assert run(sim, LONG) == (200, 200, Reason.NONE)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200])
def test_full_hits_of_every_length(length):
    sim = simulation()
    run(sim, LONG[:length])
    assert run(sim, LONG[:length])[0] == length


@pytest.mark.parametrize("shared", [64, 65, 100, 127, 128, 129, 191, 192, 199])
def test_a_shared_beginning_is_hit_at_the_second_sighting(shared):
    sim = simulation()
    run(sim, LONG)
    hit, matched, reason = run(sim, LONG[:shared] + (1, 2, 3) * 20)
    assert (hit, matched) == (shared // 64 * 64, shared)
    assert reason is (Reason.NEVER_SEEN if hit == shared else Reason.NO_CHECKPOINT)


def test_a_declared_boundary_is_hit_exactly():
    sim = simulation()
    run(sim, LONG, boundaries=(37, 151))
    assert run(sim, LONG[:151] + (7,) * 30)[0] == 151
    assert run(sim, LONG[:37] + (8,) * 30)[0] == 37


def test_a_junction_is_hit_exactly_the_third_time():
    sim = simulation()
    run(sim, LONG)
    run(sim, LONG[:150] + (1,) * 40)
    assert run(sim, LONG[:150] + (2,) * 40)[0] == 150


def test_the_answer_continues():
    sim = simulation()
    run(sim, LONG, answer=range(30))
    # 30 tokens sampled, the last of them not computed
    assert run(sim, LONG + tuple(range(30)) + (5,) * 10)[:2] == (229, 229)


def test_exact_mode_does_not_read_what_decode_built():
    sim = simulation(exact=True)
    run(sim, LONG, answer=range(70))
    follow_up = LONG + tuple(range(70)) + (5,) * 100
    assert run(sim, follow_up)[:2] == (192, 200)
    # computed by prefill meanwhile, so the grid point inside the answer serves
    assert run(sim, LONG + tuple(range(70)) + (6,) * 100)[:2] == (256, 270)
    assert run(sim, follow_up)[0] == len(follow_up)


def test_exact_mode_rejects_a_decode_state_on_a_path_computed_again():
    sim = simulation(num_pages=400, placement=Align(64, True), exact=True)
    run(sim, LONG, answer=range(30))
    assert any(c.origin is Origin.DECODE for c in sim.cache.checkpoints.queue)
    run(sim, LONG + tuple(range(30)) + (5,) * 9)
    assert run(sim, LONG + tuple(range(30)) + (6,) * 9)[:2] == (192, 230)


def test_exact_mode_accepts_an_unaligned_state_for_that_prompt_alone():
    sim = simulation(exact=True)
    run(sim, LONG[:100])
    assert run(sim, LONG[:150])[:2] == (64, 100)
    assert run(sim, LONG[:100])[0] == 100


def test_a_preempted_request_reads_its_own_decode_steps_in_exact_mode():
    sim = simulation(exact=True)
    request = sim.start("r", LONG)
    sim.prefill(request, len(LONG))
    for token in range(10):
        sim.decode(request, token)
    sim.finish(request, kind=Kind.PREEMPTION)
    sim.resume(request)
    assert (request.lease.hit, request.lease.matched) == (209, 209)
    other = sim.start("other", request.keys)
    assert (other.lease.hit, other.lease.matched) == (192, 200)
    sim.end(other)
    sim.end(request)
    sim.check()


def test_a_preempted_request_does_not_read_anothers_decode_steps_in_exact_mode():
    sim = simulation(exact=True)
    requests = [sim.start(name, LONG) for name in ("first", "second")]
    for request in requests:
        assert sim.prefill(request, len(LONG))
        for token in range(10):
            sim.decode(request, token)
    first, second = requests
    # both have computed the same; the first's keys and values are the tree's, and only it has a state at the end
    sim.finish(first, kind=Kind.PREEMPTION)
    sim.finish(second, Reason.PREEMPTED)
    sim.resume(second)
    assert (second.lease.hit, second.lease.matched) == (200, 200)
    sim.end(second)
    sim.resume(first)
    assert (first.lease.hit, first.lease.matched) == (209, 209)
    sim.end(first)
    sim.apply()
    sim.check()


def test_a_preempted_request_does_not_take_anothers_decode_state_in_exact_mode():
    sim = simulation(exact=True)
    requests = [sim.start(name, LONG) for name in ("first", "second")]
    for request in requests:
        assert sim.prefill(request, len(LONG))
        for token in range(10):
            sim.decode(request, token)
    first, second = requests
    # the first's keys and values are the tree's, but the state at the end is the second's
    sim.finish(first, Reason.PREEMPTED)
    sim.finish(second, kind=Kind.PREEMPTION)
    sim.resume(first)
    assert (first.lease.hit, first.lease.matched) == (200, 209)
    sim.end(first)
    sim.apply()
    sim.check()


def test_exact_mode_tells_what_decode_has_built_from_the_prompt_also_in_one_commit():
    cache = simulation(exact=True).cache
    lease = cache.lookup(Namespace(), np.array(LONG[:100]), "first")
    for token in LONG[100:150]:
        lease.append(token)
    assert cache.extend(lease, 150) is not None
    cache.commit(lease, 150)
    cache.release(lease)
    assert [(node.start, node.end, node.decode_by) for node in cache.tree.nodes()] == [
        (0, 100, None),
        (100, 150, "first"),
    ]
    assert cache.lookup(Namespace(), np.array(LONG), "second").matched == 100


def test_what_a_running_request_reads_is_not_replaced_in_exact_mode():
    sim = simulation(exact=True)
    first = sim.start("first", LONG[:100])
    assert sim.prefill(first, 100)
    for token in LONG[100:150]:
        sim.decode(first, token)
    sim.finish(first, kind=Kind.PREEMPTION)
    sim.resume(first)
    assert first.lease.matched == 149
    run(sim, LONG, name="second")
    # the second has computed the same tokens by prefill, and the first goes on with its own
    assert (sim.cache.pool.counts[first.lease.tables[0].pages] > 0).all()
    sim.check_hit(first)
    sim.end(first)
    run(sim, LONG, name="third")
    sim.apply()
    sim.check()


def test_keys_and_values_below_the_match_are_neither_written_nor_allocated_twice():
    sim = simulation(placement=Align(128, False))
    run(sim, LONG)
    free = sim.cache.pool.num_free
    request = sim.start("second", LONG[:190] + (1,) * 10)
    assert (request.lease.hit, request.lease.kv_write_from) == (128, 190)
    copies = sim.cache.extend(request.lease, 200)
    # 190 tokens lie in 48 pages of 4, the last of them copied; 200 tokens need two more
    assert copies is not None and len(copies) == 1
    assert sim.cache.pool.num_free == free - 3
    sim.end(request)


def test_salts_never_share_and_only_the_unsalted_is_named():
    sim = simulation()
    run(sim, LONG, namespace=Namespace(cache_salt="mine"))
    assert run(sim, LONG) == (0, 0, Reason.NEVER_SEEN)
    assert run(sim, LONG, namespace=Namespace(cache_salt="yours")) == (0, 0, Reason.NAMESPACE)
    assert run(sim, LONG, namespace=Namespace(cache_salt="mine")) == (200, 200, Reason.NONE)


def test_what_was_evicted_is_called_so():
    sim = simulation(num_pages=60)
    run(sim, LONG)
    sim.cache.checkpoints.make_room(60)
    assert sim.cache.pool.num_free == 60
    assert run(sim, LONG) == (0, 0, Reason.EVICTED)


def test_a_writer_still_running_is_called_so():
    sim = simulation()
    first = sim.start("first", LONG)
    second = sim.start("second", (*LONG[:150], 1))
    assert second.lease.reason is Reason.IN_PROGRESS
    sim.end(first)
    sim.end(second)


@pytest.mark.parametrize("salt", [None, "yours"])
def test_a_writer_of_another_salt_is_not_told_of(salt):
    sim = simulation()
    first = sim.start("first", LONG, namespace=Namespace(cache_salt="mine"))
    second = sim.start("second", (*LONG[:150], 1), namespace=Namespace(cache_salt=salt))
    assert second.lease.lost == {Reason.NEVER_SEEN: 151}
    sim.end(first)
    sim.end(second)


def test_a_preempted_writer_is_called_so():
    sim = simulation(placement=Junction(256, False))
    request = sim.start("first", LONG)
    sim.prefill(request, 128)
    sim.finish(request, Reason.PREEMPTED)
    assert run(sim, LONG + LONG) == (0, 128, Reason.PREEMPTED)


def test_a_prompt_below_the_stride_is_too_short():
    sim = simulation(placement=Align(64, False))
    assert run(sim, LONG[:63])[2] is Reason.NEVER_SEEN
    assert run(sim, LONG[:50])[2] is Reason.TOO_SHORT
    run(sim, LONG)
    assert run(sim, LONG[:40] + (1,) * 100)[2] is Reason.TOO_SHORT


def test_the_cache_switched_off_keeps_nothing():
    sim = Simulation.build(60, None, LeastRecentlyUsed())
    for _ in range(2):
        assert run(sim, LONG) == (0, 0, Reason.DISABLED)
        assert sim.cache.pool.num_free == 60


def test_the_grid_takes_free_pages():
    sim = simulation(num_pages=58)
    run(sim, LONG)
    kinds = [checkpoint.kind for checkpoint in sim.cache.checkpoints.queue]
    # 50 pages of keys leave 8 of 58; each file is 2 pages, so the prompt end and all three grid points fit
    assert kinds.count(Kind.GRID) == 3 and sim.cache.pool.num_free == 0


def test_dropping_a_checkpoint_frees_its_file_and_what_only_it_makes_useful():
    sim = simulation(placement=Junction(64, False))
    run(sim, LONG[:192])
    run(sim, LONG[:128] + tuple(range(64)))
    run(sim, LONG[:128] + tuple(range(500, 564)))
    layout, queue = sim.cache.layout, sim.cache.checkpoints.queue
    freed = {checkpoint.position: pages_freed(layout, checkpoint) for checkpoint in queue}
    # three ways on from 128, of 64 tokens each: what is above is of use to all of them
    assert freed == {192: 16 + 2, 128: 2}
    (above,) = [checkpoint for checkpoint in queue if checkpoint.position == 128]
    queue.remove(above)
    sim.cache.checkpoints._drop(above)
    assert {pages_freed(layout, checkpoint) for checkpoint in queue} == {16 + 2}


def test_runs_without_a_checkpoint_go_before_any_checkpoint():
    sim = simulation(num_pages=120, placement=Junction(64, False))
    run(sim, LONG[:64])
    request = sim.start("aborted", LONG[:64] + (9,) * 50)
    sim.prefill(request, 64 + 50)
    sim.cache.checkpoints.make_room(1)
    for checkpoint in [c for c in sim.cache.checkpoints.queue if c.position > 64]:
        sim.cache.checkpoints.queue.remove(checkpoint)
        sim.cache.checkpoints._drop(checkpoint)
    sim.end(request)
    before = len(sim.cache.checkpoints.queue)
    assert sim.cache.tree.unreachable
    sim.cache.checkpoints.make_room(sim.cache.pool.num_free + 1)
    assert len(sim.cache.checkpoints.queue) == before
    sim.apply()


def test_a_file_named_by_an_unapplied_step_outlives_its_eviction():
    sim = simulation(num_pages=60)
    run(sim, LONG)
    request = sim.start("reader", LONG)
    pages = request.lease.checkpoint.pages
    sim.cache.checkpoints.make_room(60)
    assert (sim.cache.pool.counts[pages] > 0).all()
    sim.end(request)
    sim.check()
    sim.apply()
    sim.check()


def test_a_page_table_view_does_not_change_under_a_reader():
    sim = simulation()
    run(sim, LONG[:150])
    request = sim.start("reader", LONG[:150] + (1,) * 10)
    view = request.lease.tables[0].pages
    before = view.copy()
    sim.cache.extend(request.lease, 160)
    assert np.array_equal(view, before) and request.lease.tables[0].pages[37] != before[37]
    sim.end(request)


def test_ghosts_are_bounded():
    sim = simulation(num_pages=60)
    for start in range(40):
        run(sim, tuple(range(1000 * start, 1000 * start + 150)))
    assert 0 < sim.cache.tree.num_ghost_tokens <= 4 * 60 * 4
    assert len(sim.cache.tree.ghosts) < 60


def test_an_empty_namespace_is_forgotten():
    sim = simulation(num_pages=30)
    for salt in range(200):
        run(sim, LONG[:50], namespace=Namespace(cache_salt=str(salt)))
    assert len(sim.cache.tree.roots) < 60


def test_a_model_without_recurrent_state_hits_at_the_match():
    sim = simulation(state_bytes=0)
    run(sim, LONG)
    assert run(sim, LONG[:131] + (1,) * 9)[:2] == (131, 131)
    assert run(sim, LONG)[:2] == (200, 200)


def test_what_cannot_go_is_held():
    sim = simulation(state_bytes=0, num_pages=20)
    for length in (5, 10, 15):
        run(sim, LONG[:length])
    lease = sim.cache.lookup(Namespace(), np.array(LONG[:40]), "w")
    held = sim.cache.pinned.num_pages()
    # four pages, those that were copied where the shorter prompts had ended, and the file of the hit
    assert (lease.matched, held) == (15, 4 + 2 + 1)
    # 13 are left, one of them for a copy of the last page
    assert sim.cache.could_extend(lease, 4 * (4 + 12)) and not sim.cache.could_extend(lease, 4 * (4 + 12) + 1)
    assert not sim.cache.clear() and held == sim.cache.pool.num_pages - sim.cache.pool.num_free
    sim.cache.release(lease)


def test_a_model_without_attention_has_checkpoints_alone():
    layout = CacheLayout(64, 4096, 1, (), 8, 10_000, 1)
    cache = PrefixCache(layout, 40, CachePolicy(Auto(), ValuePerByte()))
    keys = np.arange(130)
    lease = cache.lookup(Namespace(), keys, "a")
    assert cache.extend(lease, 130) == [] and lease.tables == ()
    assert cache.reserve_checkpoint(lease, CheckpointPoint(128, Kind.GRID)) is not None
    cache.commit(lease, 130, [128])
    cache.release(lease)
    audit(cache)
    assert cache.lookup(Namespace(), keys, "b").hit == 128


def test_runs_without_pages_are_bounded():
    layout = CacheLayout(16, 4096, 1, (), 8, 10_000, 1)
    cache = PrefixCache(layout, 40, CachePolicy(Auto(), ValuePerByte()))
    kept = np.arange(100)
    for number in range(600):
        keys = kept if number == 300 else np.arange(1000 * number, 1000 * number + 15)
        lease = cache.lookup(Namespace(cache_salt=str(number % 7)), keys, "r")
        if number == 300:
            cache.reserve_checkpoint(lease, CheckpointPoint(100, Kind.PROMPT_END))
        cache.commit(lease, len(keys), lease.pending_states.copy())
        cache.release(lease)
        audit(cache)
    nodes = list(cache.tree.nodes())
    assert [node.end for node in nodes if node.resident] == [100]
    assert 0 < cache.tree.num_ghost_tokens == sum(node.num_tokens for node in nodes) - 100 <= 4 * 40 * 16
    assert cache.clear() and not any(node.resident for node in cache.tree.nodes())
    audit(cache)


def test_a_long_chain_of_runs_without_pages_goes_at_once():
    layout = CacheLayout(16, 4096, 1, (), 8, 10_000, 1)
    cache = PrefixCache(layout, 40_000, CachePolicy(Auto(), ValuePerByte()))
    lease = cache.lookup(Namespace(), np.arange(2000), "r")
    for end in range(1, 2001):
        cache.commit(lease, end)
    cache.release(lease)
    assert len(cache.tree.ghosts) == 2000 and cache.clear()
    audit(cache)


def test_the_layout_checks_itself():
    layout = small_layout()
    assert (layout.pages_per_checkpoint, layout.bytes_per_token) == (2, 16)
    with pytest.raises(ValueError, match="page_bytes"):
        CacheLayout(16, 63, 2, (), 8, 100, 1)
