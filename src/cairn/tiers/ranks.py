"""The pools of all ranks of a server as one: what rank 0 asks of the others, and what they do.

    rank 0   RankedTierMemory                     rank r   TierServant
        |-- CopyOrder, with memory for the rows ---->|  copies its share of each page there, or from there
        |<-------------------------------- CopyEnded-|  meanwhile rank 0 has copied its share

    row    [page of rank 0 | page of rank 1 | ...]   a tier's page: that page of all ranks' pools

The rows of a copy are in memory that no other copy has meanwhile, whose descriptor goes with the orders: a rank that is
late never touches those of another one. Records are plain msgpack between processes of one server, which were started
together from the same version, over a socket that nobody else can reach.

A rank says that it has carried a plan out before the step counts as applied, and that it has copied before the fetch
counts as ended: so every rank's copies and steps are in the order that they have on one rank. What a rank does that is
late can still reach the pages that it was told of: until it answers, or has ended, they are nobody else's, and no other
copy is begun.
"""

import errno
import mmap
import os
import socket
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from itertools import count

import msgspec
import numpy as np

from cairn.tiers.lanes import LOW_PRIORITY, RestTurns, ThreadLane, current_rests, rest
from cairn.tiers.memory import CopyFailed, TierMemory
from cairn.tiers.store import PIECE_BYTES, PageBytes
from cairn.types import Pages

COPY_SECONDS = 30.0
"""A copy that a rank has not made by then has failed. Whoever waits for a fetch gives up before."""

_ROWS_AT = 4096
"""Rows begin at a multiple of so many bytes."""

_MAX_FRAME = 1 << 16


class CopyOrder(msgspec.Struct, frozen=True):
    """Copy a rank's share of `num_pages` pages, `into_pool` or out of it. `slot`, `memory`: the numbers of the memory
    that has the rows. `rests`: see `cairn.tiers.lanes.rest`. `deadline`: of `time.monotonic`, which is one clock for
    all processes; nothing is begun after it."""

    number: int
    slot: int
    memory: int
    num_pages: int
    into_pool: bool
    rests: float
    deadline: float


class CopyEnded(msgspec.Struct, frozen=True):
    """The one answer to a CopyOrder: nothing more is written for it. `failure`: empty where all has been copied."""

    number: int
    failure: str = ""


class SharedRows:
    """What a copy is about, in `memory`, which several processes see: `pages`, int32 [num_pages], and `rows`, uint8
    [num_pages, row_bytes]. `at_end` is called when nobody has rows any more."""

    def __init__(
        self, memory: mmap.mmap, num_pages: int, row_bytes: int, at_end: Callable[[], object] | None = None
    ) -> None:
        first = shared_bytes(num_pages, 0)
        self.pages = np.frombuffer(memory, np.int32, num_pages)
        rows = np.frombuffer(memory, np.uint8, num_pages * row_bytes, first)
        if at_end is not None:
            # views refer to it
            weakref.finalize(rows, at_end).atexit = False
        self.rows = rows.reshape(num_pages, row_bytes)

    def share(self, rank: int, num_ranks: int) -> PageBytes:
        """A rank's part of all rows, shape [num_pages, page_bytes]; each page of it is contiguous."""
        num_pages, row_bytes = self.rows.shape
        return self.rows.reshape(num_pages, num_ranks, row_bytes // num_ranks)[:, rank]


def shared_bytes(num_pages: int, row_bytes: int) -> int:
    """That `SharedRows` take."""
    return max(1, -(-4 * num_pages // _ROWS_AT)) * _ROWS_AT + num_pages * row_bytes


class _RowMemory:
    """Memory for rows, by a descriptor that other processes can be given. `slot`: under which they keep it until there
    is another one; `number`: nobody else's. Raises OSError where there is no more."""

    def __init__(self, slot: int, number: int, num_bytes: int) -> None:
        self.slot = slot
        self.number = number
        self.descriptor = os.memfd_create("cairn-tier-rows", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, num_bytes)
        self.memory = mmap.mmap(self.descriptor, num_bytes)


class _RowMemories:
    """Memories for the rows of copies, used again and again: the first touch of a page takes many times as long as to
    copy it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots = count()
        self._numbers = count()
        self._free: list[_RowMemory] = []

    def open(self, pages: Pages, row_bytes: int) -> tuple[SharedRows, _RowMemory]:
        """Rows for `pages`, whose memory is no other copy's until nobody has them any more."""
        num_bytes = shared_bytes(len(pages), row_bytes)
        with self._lock:
            fitting = [each for each in self._free if len(each.memory) >= num_bytes]
            taken = min(fitting or self._free, key=lambda each: len(each.memory), default=None)
            if taken is not None:
                self._free.remove(taken)
        if taken is None or not fitting:
            slot = next(self._slots) if taken is None else taken.slot
            taken = _RowMemory(slot, next(self._numbers), 1 << (num_bytes - 1).bit_length())
        shared = SharedRows(taken.memory, len(pages), row_bytes, partial(self._free.append, taken))
        shared.pages[:] = pages
        return shared, taken


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
            rest()
        return True

    memory.copy_in(pages, fill)


class _Follower:
    """Another rank at the other end of `connection`, as rank 0 sees it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.name = f"rank {rank}"
        self._connection = connection
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Future[str], float, SharedRows]] = {}
        self._has_ended = False
        self._thread = threading.Thread(target=self._receive, name=f"cairn-tier-rank-{rank}", daemon=True)
        self._thread.start()

    @property
    def is_late(self) -> bool:
        """Whether it still owes a copy whose time is over."""
        now = time.monotonic()
        with self._lock:
            return any(deadline < now for _, deadline, _ in self._open.values())

    def send(self, order: CopyOrder, shared: SharedRows, descriptor: int) -> "Future[str]":
        """Why it could not be done, empty when it has been. Never waits. `shared` is kept until then."""
        future: Future[str] = Future()
        with self._lock:
            self._open[order.number] = future, order.deadline, shared
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
        opened = self._open.pop(number, None)
        if opened is not None:
            future = opened[0]
            del opened  # whoever waits may open rows at once
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
        self._memories = _RowMemories()

    def copy_out(self, pages: Pages) -> PageBytes:
        self._check()
        shared, memory = self._memories.open(pages, self._row_bytes)
        self._copy(shared, memory, partial(_copy_out, self._memory), into_pool=False)
        return shared.rows

    def copy_in(self, pages: Pages, fill: Callable[[Sequence[PageBytes]], bool]) -> bool:
        self._check()
        shared, memory = self._memories.open(pages, self._row_bytes)
        if not fill(list(shared.rows)):
            return False
        self._copy(shared, memory, partial(_copy_in, self._memory), into_pool=True)
        return True

    def close(self) -> None:
        """No other method is called again."""
        for follower in self._followers:
            follower.close()

    def _copy(
        self, shared: SharedRows, memory: _RowMemory, copy_share: Callable[[Pages, PageBytes], None], *, into_pool: bool
    ) -> None:
        """By all ranks at once."""
        number, num_pages, deadline = next(self._numbers), len(shared.pages), time.monotonic() + self._seconds
        order = CopyOrder(number, memory.slot, memory.number, num_pages, into_pool, current_rests(), deadline)
        copies = [follower.send(order, shared, memory.descriptor) for follower in self._followers]
        error: Exception | None = None
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
        self._memories: dict[int, tuple[int, mmap.mmap]] = {}
        turns = RestTurns()
        # nobody waits for what is copied out
        self._lanes = {
            False: ThreadLane("cairn-tier-out", self._wake_nobody, turns, nice=LOW_PRIORITY),
            True: ThreadLane("cairn-tier-in", self._wake_nobody, turns),
        }

    def serve(self, connection: socket.socket) -> None:
        """Until the other end closes."""
        decoder = msgspec.msgpack.Decoder(CopyOrder)
        while True:
            frame, descriptors, _, _ = socket.recv_fds(connection, _MAX_FRAME, 1)
            if not frame:
                return
            order = decoder.decode(frame)
            try:
                memory = self._find_memory(order, descriptors)
            except OSError as error:
                self._answer(connection, order, f"no memory for rows: {error.strerror}")
                continue
            lane = self._lanes[order.into_pool]
            lane.pace(order.rests)
            lane.submit(partial(self._carry_out, connection, order, memory))

    def close(self) -> None:
        """Begin no further copy."""
        for lane in self._lanes.values():
            lane.close()

    def _find_memory(self, order: CopyOrder, descriptors: Sequence[int]) -> mmap.mmap:
        """Raises OSError. `descriptors`: one, or none where this process has no room for it."""
        number, memory = self._memories.get(order.slot, (None, None))
        try:
            if memory is None or number != order.memory:
                if not descriptors:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                memory = mmap.mmap(descriptors[0], os.fstat(descriptors[0]).st_size)
                self._memories[order.slot] = order.memory, memory
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return memory

    def _carry_out(self, connection: socket.socket, order: CopyOrder, memory: mmap.mmap) -> None:
        failure = ""
        try:
            self._copy(order, memory)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        self._answer(connection, order, failure)

    @staticmethod
    def _answer(connection: socket.socket, order: CopyOrder, failure: str) -> None:
        with suppress(OSError):  # rank 0 may have ended
            connection.send(msgspec.msgpack.encode(CopyEnded(order.number, failure)))

    def _copy(self, order: CopyOrder, memory: mmap.mmap) -> None:
        if time.monotonic() > order.deadline:
            raise CopyFailed("it was too late to begin")
        shared = SharedRows(memory, order.num_pages, self._row_bytes)
        copy_share = _copy_in if order.into_pool else _copy_out
        copy_share(self._memory, shared.pages, shared.share(self._rank, self._num_ranks))

    @staticmethod
    def _wake_nobody() -> None:
        """What follows is the answer."""
