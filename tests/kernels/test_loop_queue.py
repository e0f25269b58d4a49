"""Sequences of loops run once each, in the order in which they are given, on whatever thread takes them."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cairn.kernels.cpu import loop_queue
from cairn.kernels.cpu.compiled import I64, INT, kernel
from cairn.kernels.cpu.graphs import LoopSequence
from cairn.kernels.cpu.loop_queue import LoopQueue


@kernel({"any": (I64, INT)})
def _note(begin: int, end: int, notes: Any, number: int) -> None:
    """`notes`: how many there are, and then these."""
    for _ in range(begin, end):
        notes[0] += 1
        notes[notes[0]] = number


@kernel({"any": (INT,)})
def _fail(begin: int, end: int, most: int) -> None:
    for item in range(begin, end):
        if item >= most:
            raise ValueError("too many")


@pytest.fixture(params=[0, 1, 3])
def queue(request: pytest.FixtureRequest) -> Iterator[LoopQueue]:
    made = LoopQueue(request.param)
    yield made
    made.close()


def wait_for(queue: LoopQueue, number: int) -> None:
    deadline = time.monotonic() + 30
    while not queue.is_done(number):
        assert time.monotonic() < deadline
        if not queue.run_next():
            time.sleep(0.0001)


def test_all_run_once_and_beside_each_other_at_most_as_many_as_there_are_threads(queue: LoopQueue) -> None:
    """More of them than the queue has places, each with notes of its own."""
    notes = np.zeros((1500, 8), np.int64)
    kept = []
    for number, each in enumerate(notes):
        sequence = LoopSequence([_note["any"].later(1, each.ctypes.data, 10 * number + k) for k in range(3)])
        kept.append(sequence)
        assert queue.add(sequence) == number
        queue.give()
        if number >= 500:
            wait_for(queue, number - 500)
    for number in range(1000, 1500):
        wait_for(queue, number)
    assert all(
        each[:4].tolist() == [3, 10 * number, 10 * number + 1, 10 * number + 2] for number, each in enumerate(notes)
    )


def test_one_thread_runs_them_in_their_order() -> None:
    notes, kept, queue = np.zeros(400, np.int64), [], LoopQueue(1)
    for number in range(300):
        kept.append(LoopSequence([_note["any"].later(1, notes.ctypes.data, number)]))
        queue.add(kept[-1]), queue.give()
    deadline = time.monotonic() + 30
    while not queue.is_done(299):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    queue.close()
    assert notes[:301].tolist() == [300, *range(300)]


def test_nothing_runs_before_it_is_given(queue: LoopQueue) -> None:
    notes = np.zeros(8, np.int64)
    kept = [LoopSequence([_note["any"].later(1, notes.ctypes.data, number)]) for number in range(2)]
    for each in kept:
        queue.add(each)
    assert not queue.run_next()
    time.sleep(0.01)
    assert notes[0] == 0 and not queue.is_done(0)
    threading.Thread(target=queue.give).start()
    wait_for(queue, 0)
    assert notes[:2].tolist() == [1, 0] and not queue.is_done(1)


def test_a_loop_that_fails_is_told_by_its_place_and_the_next_ones_run(queue: LoopQueue) -> None:
    notes = np.zeros(8, np.int64)
    noted, failing = _note["any"].later(1, notes.ctypes.data, 5), _fail["any"].later(2, 1)
    kept = [LoopSequence([noted, failing, noted, failing]), LoopSequence([noted])]
    for number, each in enumerate(kept):
        queue.add(each), queue.give()
        wait_for(queue, number)
    assert queue.failed(0) == 1 and kept[0].name(1) == "_fail"
    assert queue.failed(1) is None
    assert notes[0] == 3


def test_a_closed_queue_runs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, queue = np.zeros(8, np.int64), LoopQueue(2)
    queue.close()
    sequence = LoopSequence([_note["any"].later(1, notes.ctypes.data, 1)])
    queue.add(sequence), queue.give()
    assert not queue.run_next() and notes[0] == 0
    monkeypatch.setattr(loop_queue, "_CAPACITY", 1)
    with pytest.raises(AssertionError):
        queue.add(sequence)
