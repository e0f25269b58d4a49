"""The pools of all ranks of a server as one: what rank 0 asks of the others, and what they do.

    rank 0   RankedTierMemory                     rank r   TierServant
        |-- CopyOrder, with memory for the rows ---->|  copies its share of each page there, or from there
        |<-------------------------------- CopyEnded-|  meanwhile rank 0 has copied its share

    row    [page of rank 0 | page of rank 1 | ...]   a tier's page: that page of all ranks' pools

The rows of each copy are in memory of their own, whose descriptor goes with the orders: a rank that is late never
touches those of another copy. Records are plain msgpack between processes of one server, which were started together
from the same version, over a socket that nobody else can reach.

A rank says that it has carried a plan out before the step counts as applied, and that it has copied before the fetch
counts as ended: so every rank's copies and steps are in the order that they have on one rank. What a rank does that is
late can still reach the pages that it was told of: until it answers, or has ended, they are nobody else's, and no other
copy is begun.
"""

import logging
import mmap
import os
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count

import msgspec
import numpy as np

from cairn.tiers.lanes import LOW_PRIORITY, ThreadLane, current_rests
from cairn.tiers.memory import CopyFailed, TierMemory
from cairn.tiers.store import PIECE_BYTES, PageBytes
from cairn.types import Pages

COPY_SECONDS = 30.0
"""A copy that a rank has not made by then has failed. Whoever waits for a fetch gives up before."""

_ROWS_AT = 4096
"""Rows begin at a multiple of so many bytes."""

_MAX_FRAME = 1 << 16

logger = logging.getLogger(__name__)


class CopyOrder(msgspec.Struct, frozen=True):
    """Copy a rank's share of `num_pages` pages, `into_pool` or out of it. `rests`: see `cairn.tiers.lanes.rest`.
    `deadline`: of `time.monotonic`, which is one clock for all processes; nothing is begun after it."""

    number: int
    num_pages: int
    into_pool: bool
    rests: float
    deadline: float


class CopyEnded(msgspec.Struct, frozen=True):
    """The one answer to a CopyOrder: nothing more is written for it. `failure`: empty where all has been copied."""

    number: int
    failure: str = ""


class SharedRows:
    """Memory of a copy that several processes see: `pages`, int32 [num_pages], and `rows`, uint8 [num_pages,
    row_bytes]. It goes when nobody has any of it any more."""

    def __init__(self, descriptor: int, num_pages: int, row_bytes: int) -> None:
        memory = mmap.mmap(descriptor, _shared_bytes(num_pages, row_bytes))
        first = _shared_bytes(num_pages, 0)
        self.pages = np.frombuffer(memory, np.int32, num_pages)
        self.rows = np.frombuffer(memory, np.uint8, num_pages * row_bytes, first).reshape(num_pages, row_bytes)

    def share(self, rank: int, num_ranks: int) -> PageBytes:
        """A rank's part of all rows, shape [num_pages, page_bytes]; each page of it is contiguous."""
        num_pages, row_bytes = self.rows.shape
        return self.rows.reshape(num_pages, num_ranks, row_bytes // num_ranks)[:, rank]


@contextmanager
def _new_rows(pages: Pages, row_bytes: int) -> Iterator[tuple[SharedRows, int]]:
    """Rows for `pages`, and their descriptor while the context is open."""
    descriptor = os.memfd_create("cairn-tier-rows", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _shared_bytes(len(pages), row_bytes))
        shared = SharedRows(descriptor, len(pages), row_bytes)
        shared.pages[:] = pages
        yield shared, descriptor
    finally:
        os.close(descriptor)


def _shared_bytes(num_pages: int, row_bytes: int) -> int:
    return max(1, -(-4 * num_pages // _ROWS_AT)) * _ROWS_AT + num_pages * row_bytes


def _copy_out(memory: TierMemory, pages: Pages, share: PageBytes) -> None:
    """Piece by piece: what is copied twice is in the processor's cache the second time."""
    size = max(1, PIECE_BYTES // share.shape[1])
    for first in range(0, len(pages), size):
        piece = slice(first, first + size)
        share[piece] = memory.copy_out(pages[piece])


def _copy_in(memory: TierMemory, pages: Pages, share: PageBytes) -> None:
    def fill(rows: Sequence[PageBytes]) -> bool:
        for row, page in zip(rows, share, strict=True):
            np.copyto(row, page)
        return True

    memory.copy_in(pages, fill)


class _Follower:
    """Another rank at the other end of `connection`, as rank 0 sees it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.name = f"rank {rank}"
        self._connection = connection
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Future[str], float]] = {}
        self._has_ended = False
        self._thread = threading.Thread(target=self._receive, name=f"cairn-tier-rank-{rank}", daemon=True)
        self._thread.start()

    @property
    def is_late(self) -> bool:
        """Whether it still owes a copy whose time is over."""
        now = time.monotonic()
        with self._lock:
            return any(deadline < now for _, deadline in self._open.values())

    def send(self, order: CopyOrder, descriptor: int) -> "Future[str]":
        """Why it could not be done, empty when it has been. Never waits."""
        future: Future[str] = Future()
        with self._lock:
            self._open[order.number] = future, order.deadline
            if self._has_ended:
                self._end(order.number, f"{self.name} has ended")
                return future
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
        try:
            self._connection.sendmsg([msgspec.msgpack.encode(order)], [rights], socket.MSG_DONTWAIT)
        except OSError as error:
            with self._lock:
                self._end(order.number, f"{self.name} takes no orders: {error.strerror}")
        return future

    def close(self) -> None:
        with suppress(OSError):  # the other end may have gone first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self._connection.close()

    def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(CopyEnded)
        while frame := self._next_frame():
            ended = decoder.decode(frame)
            with self._lock:
                self._end(ended.number, ended.failure and f"{self.name}: {ended.failure}")
        with self._lock:
            # its process has: nothing else closes the connection
            self._has_ended = True
            for number in list(self._open):
                self._end(number, f"{self.name} has ended")

    def _next_frame(self) -> bytes:
        try:
            return self._connection.recv(_MAX_FRAME)
        except OSError:
            return b""

    def _end(self, number: int, failure: str) -> None:
        """To be called with the lock."""
        future, _ = self._open.pop(number, (None, 0.0))
        if future is not None:
            future.set_result(failure)


class RankedTierMemory:
    """A `TierMemory` of all ranks' pools: `memory` is that of rank 0, with pages of `page_bytes` bytes, and
    `connections` go to the `TierServant`s of the others, in order. `seconds`: how long a copy may take."""

    def __init__(
        self,
        memory: TierMemory,
        page_bytes: int,
        connections: Sequence[socket.socket],
        seconds: float = COPY_SECONDS,
    ) -> None:
        self._memory = memory
        self._seconds = seconds
        self._followers = [_Follower(rank, connection) for rank, connection in enumerate(connections, 1)]
        self._num_ranks = 1 + len(connections)
        self._row_bytes = page_bytes * self._num_ranks
        self._numbers = count(1)

    def copy_out(self, pages: Pages) -> PageBytes:
        self._check()
        with _new_rows(pages, self._row_bytes) as (shared, descriptor):
            self._copy(shared, descriptor, partial(_copy_out, self._memory), into_pool=False)
        return shared.rows

    def copy_in(self, pages: Pages, fill: Callable[[Sequence[PageBytes]], bool]) -> bool:
        self._check()
        with _new_rows(pages, self._row_bytes) as (shared, descriptor):
            if not fill(list(shared.rows)):
                return False
            self._copy(shared, descriptor, partial(_copy_in, self._memory), into_pool=True)
        return True

    def close(self) -> None:
        """No other method is called again."""
        for follower in self._followers:
            follower.close()

    def _copy(
        self, shared: SharedRows, descriptor: int, copy_share: Callable[[Pages, PageBytes], None], *, into_pool: bool
    ) -> None:
        """By all ranks at once."""
        deadline = time.monotonic() + self._seconds
        order = CopyOrder(next(self._numbers), len(shared.pages), into_pool, current_rests(), deadline)
        copies, error = [follower.send(order, descriptor) for follower in self._followers], None
        try:
            copy_share(shared.pages, shared.share(0, self._num_ranks))
        except Exception as raised:
            error = raised
        done, late = wait(copies, max(0.0, deadline - time.monotonic()))
        if late:
            raise CopyFailed(f"{len(late)} other ranks have not copied within {self._seconds:g} s", late) from error
        if error is not None:
            raise error
        if failures := [each.result() for each in done if each.result()]:
            raise CopyFailed(failures[0])

    def _check(self) -> None:
        """Raises CopyFailed where a rank would get to another copy after one that it still owes, if ever."""
        for follower in self._followers:
            if follower.is_late:
                raise CopyFailed(f"{follower.name} has not ended an earlier copy")


class TierServant:
    """Every rank but the first: makes the copies that it is told of, those of each direction in a thread of their own.
    `memory`: its pool's, with pages of `page_bytes` bytes."""

    def __init__(self, memory: TierMemory, page_bytes: int, rank: int, num_ranks: int) -> None:
        self._memory = memory
        self._row_bytes = page_bytes * num_ranks
        self._rank = rank
        self._num_ranks = num_ranks
        # nobody waits for what is copied out
        self._lanes = {
            False: ThreadLane("cairn-tier-out", self._wake_nobody, nice=LOW_PRIORITY),
            True: ThreadLane("cairn-tier-in", self._wake_nobody),
        }

    def serve(self, connection: socket.socket) -> None:
        """Until the other end closes. Raises OSError and msgspec.DecodeError, which mean that rank 0 has a fault."""
        decoder = msgspec.msgpack.Decoder(CopyOrder)
        while True:
            frame, descriptors, _, _ = socket.recv_fds(connection, _MAX_FRAME, 1)
            if not frame:
                return
            order = decoder.decode(frame)
            lane = self._lanes[order.into_pool]
            lane.pace(order.rests)
            lane.submit(partial(self._carry_out, connection, order, descriptors[0]))

    def close(self) -> None:
        """Begin no further copy."""
        for lane in self._lanes.values():
            lane.close()

    def _carry_out(self, connection: socket.socket, order: CopyOrder, descriptor: int) -> None:
        failure = ""
        try:
            self._copy(order, descriptor)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            os.close(descriptor)
        with suppress(OSError):  # rank 0 may have ended
            connection.send(msgspec.msgpack.encode(CopyEnded(order.number, failure)))

    def _copy(self, order: CopyOrder, descriptor: int) -> None:
        if time.monotonic() > order.deadline:
            raise CopyFailed("it was too late to begin")
        shared = SharedRows(descriptor, order.num_pages, self._row_bytes)
        copy_share = _copy_in if order.into_pool else _copy_out
        copy_share(self._memory, shared.pages, shared.share(self._rank, self._num_ranks))

    @staticmethod
    def _wake_nobody() -> None:
        """What follows is the answer."""
