"""Each prompt token that was not hit has one reason: requests that lose tokens to several at once."""

import numpy as np
import pytest
from simulation import PLAIN, Simulation

from cairn.cache import lookup
from cairn.cache.eviction import LeastRecentlyUsed
from cairn.cache.placement import Auto, Junction
from cairn.cache.reasons import HintFacts, Reason, first_reason, hint
from cairn.cache.sequence_blocks import Namespace
from cairn.types import Boundary

A, B = tuple(range(1000, 1200)), tuple(range(2000, 2200))


def simulation(placement=None, num_pages=4000, **layout) -> Simulation:
    return Simulation.build(num_pages, placement or Auto(), LeastRecentlyUsed(), **layout)


def run(sim, prompt, namespace=PLAIN):
    request = sim.start("r", prompt, namespace)
    if request.computed < len(prompt):
        sim.prefill(request, len(prompt))
    sim.finish(request)
    return request.lease


def test_one_request_loses_tokens_to_two_reasons():
    # junction keeps the state at 192 of the prompt, and nothing where the second one leaves it at 100
    sim = simulation(Junction(64, False))
    run(sim, A)
    writer = sim.start("writer", A[:100] + B)
    reader = sim.start("r", A[:100] + B[:90] + (7, 8, 9))
    lease = reader.lease
    assert (lease.hit, lease.matched, lease.lost) == (0, 100, {Reason.IN_PROGRESS: 190, Reason.NEVER_SEEN: 3})
    sim.end(writer)
    sim.end(reader)
    lease = sim.cache.lookup(PLAIN, np.array(A[:100] + B, np.int64), "again")
    assert lease.lost == {Reason.NO_CHECKPOINT: 100, Reason.NEVER_SEEN: 200}
    assert lease.match.miss_spans == ((100, Reason.NO_CHECKPOINT), (300, Reason.NEVER_SEEN))
    assert lease.reason is Reason.NO_CHECKPOINT


def test_what_was_dropped_ends_where_its_last_checkpoint_stood():
    sim = simulation(Junction(64, False))
    run(sim, A)
    run(sim, A[:192] + B)
    sim.apply()
    sim.cache.make_room(4000)
    writer = sim.start("writer", A + A)
    lease = sim.start("r", A + A[:50] + (1,)).lease
    assert lease.lost == {Reason.EVICTED: 200, Reason.IN_PROGRESS: 50, Reason.NEVER_SEEN: 1}
    assert lease.reason is Reason.EVICTED
    sim.end(writer)


def test_a_checkpoint_that_was_dropped_is_charged_up_to_where_it_stood():
    sim = simulation(Junction(64, False))
    run(sim, A[:128])
    run(sim, A[:128] + B)
    node = sim.cache.lookup(PLAIN, np.array(A[:128], np.int64), "x").checkpoint
    sim.cache.checkpoints.queue.remove(node)
    sim.cache.checkpoints._drop(node)
    lease = sim.cache.lookup(PLAIN, np.array(A[:128] + B[:60] + (1, 2), np.int64), "y")
    assert (lease.hit, lease.matched) == (0, 188)
    assert lease.match.miss_spans == ((128, Reason.EVICTED), (188, Reason.NO_CHECKPOINT), (190, Reason.NEVER_SEEN))
    sim.cache.release(lease)
    # one that stood beyond what is shared would have saved nothing
    lease = sim.cache.lookup(PLAIN, np.array((*A[:100], 1, 2), np.int64), "z")
    assert lease.match.miss_spans == ((100, Reason.NO_CHECKPOINT), (102, Reason.NEVER_SEEN))


def test_a_salt_is_told_that_the_plain_namespace_has_more_and_no_other_salt():
    sim = simulation()
    mine, yours = Namespace(cache_salt="mine"), Namespace(cache_salt="yours")
    run(sim, A[:130])
    run(sim, A, mine)
    assert run(sim, A, yours).lost == {Reason.NAMESPACE: 130, Reason.NEVER_SEEN: 70}


def test_what_a_transfer_brought_is_not_lost():
    sim = simulation()
    run(sim, A[:70])
    request = sim.fetch("r", A + B, PLAIN, 256, 256)
    # the prompt's end at 70 was a hit, 186 came from elsewhere
    assert (request.lease.hit, request.lease.received) == (256, 186)
    assert request.lease.lost == {Reason.NEVER_SEEN: 144} and request.lease.reason is Reason.NEVER_SEEN
    assert sim.fetch("s", B, PLAIN, 200, 200).lease.lost == {}


def test_blame_for_all():
    sim = simulation()
    lease = sim.cache.lookup(PLAIN, np.array(A, np.int64), "r")
    lease.set_miss_reason(Reason.REMOTE_FAILED)
    assert lease.lost == {Reason.REMOTE_FAILED: 200}
    sim.cache.begin_request(lease)
    assert sim.cache.counters.lost == {Reason.REMOTE_FAILED: 200}


def test_the_first_reason_speaks_for_all():
    assert first_reason({Reason.NEVER_SEEN, Reason.EVICTED, Reason.NO_CHECKPOINT}) is Reason.EVICTED
    assert first_reason(()) is Reason.NONE


def test_what_a_transfer_brought_takes_its_reasons_along():
    sim = simulation(Junction(64, False))
    run(sim, A[:128])
    sim.apply()
    sim.cache.make_room(4000)
    request = sim.fetch("r", A, PLAIN, 192, 192)
    assert request.lease.lost == {Reason.NEVER_SEEN: 8} and request.lease.reason is Reason.NEVER_SEEN
    [(_, part)] = sim.cache.journal.intervals
    assert (part.prompt, part.hit, part.received, sum(part.lost.values())) == (328, 0, 192, 136)


def test_a_preemption_is_remembered_of_what_was_dropped():
    sim = simulation(Junction(256, False))
    request = sim.start("first", A)
    sim.prefill(request, 128)
    sim.finish(request, Reason.PREEMPTED)
    run(sim, A + B)
    sim.apply()
    sim.cache.make_room(4000)
    keys = np.array(A + B, np.int64)
    lease = sim.cache.lookup(PLAIN, keys, "r")
    assert lease.match.miss_spans == ((128, Reason.PREEMPTED), (400, Reason.EVICTED))
    # a resumed request is told of its prompt only
    assert sim.cache.lookup(PLAIN, keys, "s", resumed_from=70).match.miss_spans == ((70, Reason.PREEMPTED),)


def test_what_a_writer_has_committed_is_in_progress_as_long_as_it_is_in_prefill():
    sim = simulation(Junction(64, False))
    writer = sim.start("writer", A)
    sim.prefill(writer, 150)
    keys = np.array((*A[:140], 1, 2), np.int64)
    lease = sim.cache.lookup(PLAIN, keys, "r")
    assert lease.matched == 140 and lease.lost == {Reason.IN_PROGRESS: 140, Reason.NEVER_SEEN: 2}
    sim.cache.release(lease)
    sim.prefill(writer, 200)
    lease = sim.cache.lookup(PLAIN, keys, "r")
    assert lease.lost == {Reason.NO_CHECKPOINT: 140, Reason.NEVER_SEEN: 2}


def test_a_writer_that_left_the_prompt_early_computes_nothing_of_it():
    sim = simulation(Junction(64, False))
    run(sim, A)
    sim.start("writer", (*A[:40], 9, *A[41:]))
    lease = sim.cache.lookup(PLAIN, np.array((*A[:100], 1), np.int64), "r")
    assert lease.lost == {Reason.NO_CHECKPOINT: 100, Reason.NEVER_SEEN: 1}


def test_a_lookup_compares_a_bounded_number_of_tokens(monkeypatch):
    counted = []
    compare = lookup.common_tokens

    def counting(ours, theirs, limit):
        counted.append(compare(ours, theirs, limit))
        return counted[-1]

    monkeypatch.setattr(lookup, "common_tokens", counting)
    monkeypatch.setattr(lookup, "_MAX_COMPARED", 1000)
    sim = simulation(Junction(64, False))
    for number in range(60):
        sim.start(f"w{number}", A[:90] + (number,) * 50)
    counted.clear()
    # one look at the place where it would have to go on tells of all but the first and the right one
    lease = sim.start("r", A[:90] + (40,) * 50 + (1,)).lease
    assert lease.lost == {Reason.IN_PROGRESS: 140, Reason.NEVER_SEEN: 1} and len(counted) == 2
    run(sim, B)
    for number in range(60):
        sim.start(f"v{number}", (*B[:90], number, *B[91:]))
    counted.clear()
    # these all go on there, and are told from it only by comparing
    assert sim.start("s", (*B[:191], 1)).lease.lost == {Reason.NO_CHECKPOINT: 191, Reason.NEVER_SEEN: 1}
    assert 0 < sum(counted) <= 1000


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_hint(reason):
    for auto in (True, False):
        text = hint(reason, 1000, HintFacts(all_bytes=3 << 30, auto=auto, exact=False, min_shared=64))
        assert text and "\n" not in text
    assert ("3.0 GiB" in text) == (reason is Reason.EVICTED)


def test_a_breakpoint_is_advised_where_exact_mode_can_hold_one():
    advice = [hint(Reason.NO_CHECKPOINT, 1000, HintFacts(0, True, exact, 64)) for exact in (False, True)]
    assert advice == [f"a breakpoint (cache_control) at token {at}" for at in ("1,000", "960")]


def test_what_has_come_back_is_not_called_dropped():
    """Neither a run that was computed again, nor a place at which a checkpoint is again."""

    def lost(sim):
        lease = sim.cache.lookup(PLAIN, np.array(A), "probe")
        sim.cache.release(lease)
        return lease.lost

    sim = simulation(exact=True)
    run(sim, A[:150])
    residents = sim.cache.checkpoints
    (tail,) = [checkpoint for checkpoint in residents.queue if checkpoint.position == 150]
    residents.queue.remove(tail)
    residents._drop(tail)
    assert lost(sim) == {Reason.EVICTED: 22, Reason.NEVER_SEEN: 50}
    run(sim, A[:150])
    # a state off the grid serves only a prompt that ends there
    assert lost(sim) == {Reason.NO_CHECKPOINT: 22, Reason.NEVER_SEEN: 50}

    sim = simulation(Junction(64, False))
    run(sim, A)
    sim.apply()
    sim.cache.clear()
    cache, keys = sim.cache, np.array(A)
    lease = cache.lookup(PLAIN, keys, "r")
    assert lease.lost == {Reason.EVICTED: 200}
    assert cache.extend(lease, 200) is not None
    cache.commit(lease, 200)
    cache.release(lease)
    assert lost(sim) == {Reason.NO_CHECKPOINT: 200}


ANSWER = tuple(range(3000, 3050))


@pytest.mark.parametrize(
    ("prompt", "lost"),
    [
        # as it was: the last token of an answer is never computed
        (A + ANSWER + B, {Reason.NEVER_SEEN: 201}),
        # another answer from its 21st token on, and none of it: 29 tokens are computed that come after its 20th
        (A + ANSWER[:20] + B, {Reason.NO_CHECKPOINT: 20, Reason.REWRITTEN: 29, Reason.NEVER_SEEN: 171}),
        (A + B, {Reason.REWRITTEN: 49, Reason.NEVER_SEEN: 151}),
        (A + B[:10], {Reason.REWRITTEN: 10}),
        # the last message ends at 190, and ten tokens open the answer
        (A[:195] + B, {Reason.NO_CHECKPOINT: 3, Reason.REWRITTEN: 54, Reason.NEVER_SEEN: 146}),
        (A[:190] + B, {Reason.REWRITTEN: 59, Reason.NEVER_SEEN: 141}),
        (A[:189] + B, {Reason.NO_CHECKPOINT: 61, Reason.NEVER_SEEN: 200}),
    ],
)
def test_what_stands_in_the_place_of_an_answer_is_rewritten(prompt, lost):
    sim = simulation()
    first = sim.start("first", A, boundaries=(Boundary(128), Boundary(190)))
    sim.prefill(first, len(A))
    for token in ANSWER:
        sim.decode(first, token)
    sim.finish(first)
    lease = sim.start("second", prompt).lease
    assert lease.lost == lost
    assert lease.reason is first_reason(lost)


def test_a_prompt_without_an_answer_is_not_rewritten():
    sim = simulation()
    run(sim, A)
    assert sim.start("second", A[:199] + B).lease.lost.keys() == {Reason.NO_CHECKPOINT, Reason.NEVER_SEEN}
