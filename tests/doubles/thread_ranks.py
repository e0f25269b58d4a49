"""Ranks that are threads of one process."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from cairn.errors import EngineDead
from cairn.layers.communicator import Communicator
from cairn.layers.process_ranks import sum_in_order

__all__ = ["Meeting", "thread_ranks"]

Part = TypeVar("Part")
Whole = TypeVar("Whole")


def thread_ranks(size: int, seconds: float = 30.0) -> tuple[Communicator, ...]:
    """One communicator for each of `size` ranks, each to be used by a thread of its own.

    A rank waits at most `seconds` for the others. After a wait that failed no call succeeds any more.
    """
    meeting = Meeting(size, seconds)
    return tuple(_ThreadRank(meeting, rank) for rank in range(size))


class Meeting:
    """The place where all ranks lay down their parts."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size = size
        self._seconds = seconds
        self._barrier = threading.Barrier(size)
        self._parts: list[object] = [None] * size

    def exchange(self, rank: int, part: Part, combine: Callable[[list[Part]], Whole]) -> Whole:
        """`combine` gets the parts of all ranks, in rank order, and may keep none of them."""
        self._parts[rank] = part
        self._wait(rank)
        whole = combine(self._parts)  # type: ignore[arg-type]
        # Nobody goes on, and perhaps writes over its part, before all have read.
        self._wait(rank)
        return whole

    def _wait(self, rank: int) -> None:
        try:
            self._barrier.wait(self._seconds)
        except threading.BrokenBarrierError:
            raise EngineDead(f"rank {rank} has waited {self._seconds:g} s for the other ranks in vain") from None


class _ThreadRank:
    """Implements `Communicator`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def all_reduce(self, partial: Tensor) -> Tensor:
        return self._meeting.exchange(self._rank, partial, sum_in_order)

    def gather_columns(self, part: Tensor) -> Tensor:
        return self._meeting.exchange(self._rank, part, lambda parts: torch.cat(parts, dim=-1))

    def broadcast(self, numbers: Tensor) -> Tensor:
        return self._meeting.exchange(self._rank, numbers, lambda parts: parts[0].clone())
