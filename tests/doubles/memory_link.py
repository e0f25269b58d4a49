"""A link within one process: it copies, slowly if told to, and misbehaves if told to. Of a device's region it knows the
address alone, and reaches it by `FakeDevicePool`'s copies.

Bytes move only inside `poll`, a few descriptors at a time, so a test decides between which two of them something
else happens.
"""

import ctypes
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cairn.transfer.links.contract import Descriptors, LinkError, ReadHandle, ReadState, Region
from doubles.device_pool import FakeDevicePool

__all__ = ["Fault", "MemoryFabric", "MemoryLink", "Move"]

_MAX_MOVES: Final = 1 << 16


class Fault(Enum):
    """What is wrong with a peer, as those who read from it see it."""

    NONE = "none"
    DROP = "drop"
    """Reads that start now are swallowed: never a byte, never an end, until they are cancelled."""
    DEAD = "dead"
    """Its process is gone: what is open fails, what starts is refused."""
    FROZEN = "frozen"
    """Its process stands still: nothing moves and nothing ends, cancelled or not."""


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes that have landed. `late`: after they had been cancelled."""

    peer: str
    remote_page: int
    remote_offset: int
    local_page: int
    local_offset: int
    num_bytes: int
    late: bool


@dataclass(slots=True)
class _Read:
    peer: str
    left: deque[tuple[int, int, int, int, int]]
    delay: int
    dropped: bool
    cancelled: bool = False


class MemoryFabric:
    """What connects the links of one test, and the faults between them.

    `delay`: polls that pass before a new read begins. `late_writes`: what is left of a cancelled read still lands, as
    with an emulated READ over TCP; otherwise a cancel stops it at once.
    """

    def __init__(self, *, descriptors_per_poll: int = 1 << 30, delay: int = 0, late_writes: bool = False) -> None:
        self.descriptors_per_poll = descriptors_per_poll
        self.delay = delay
        self.late_writes = late_writes
        self._links: dict[str, MemoryLink] = {}
        self._faults: dict[str, Fault] = {}

    def link(self, name: str) -> "MemoryLink":
        """A new link; its name must be new, as that of a new process is."""
        if name in self._links:
            raise LinkError(f"there is a link called {name!r} already")
        self._links[name] = MemoryLink(self, name)
        return self._links[name]

    def inject(self, name: str, fault: Fault) -> None:
        """From now on; nobody comes back from the dead."""
        if self.fault(name) is not Fault.DEAD:
            self._faults[name] = fault

    def fault(self, name: str) -> Fault:
        return self._faults.get(name, Fault.NONE)

    def peer(self, name: str) -> "MemoryLink":
        if name not in self._links:
            raise LinkError(f"there is no link called {name!r}")
        return self._links[name]


class MemoryLink:
    """A `Link`. `moved` lists what has landed here, the latest 65536 moves."""

    def __init__(self, fabric: MemoryFabric, name: str) -> None:
        self._fabric = fabric
        self._name = name
        self._reads: dict[ReadHandle, _Read] = {}
        self._peers: set[str] = set()
        self._next = 0
        self._region: Region | None = None
        self.moved: deque[Move] = deque(maxlen=_MAX_MOVES)

    @property
    def num_open(self) -> int:
        return len(self._reads)

    def register(self, region: Region) -> None:
        if self._region is not None:
            raise LinkError("a memory link takes one region")
        self._region = region

    def describe(self) -> bytes:
        self._local_region()
        return self._name.encode()

    def connect(self, description: bytes) -> str:
        try:
            peer = description.decode()
        except UnicodeDecodeError as error:
            raise LinkError("the peer's description is no name of a link") from error
        self._fabric.peer(peer)
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: str) -> None:
        self._peers.discard(peer)
        for handle, read in self._reads.items():
            if read.peer == peer:
                self.cancel(handle)

    def read(self, peer: str, descriptors: Descriptors) -> ReadHandle:
        if peer not in self._peers:
            raise LinkError(f"not connected to {peer!r}")
        remote, local = self._fabric.peer(peer)._local_region(), self._local_region()
        if self._fabric.fault(peer) is Fault.DEAD:
            raise LinkError(f"{peer!r} is gone")
        if not len(descriptors):
            raise LinkError("a read needs at least one descriptor")
        descriptors.check(remote_pages=remote.num_pages, remote_page_bytes=remote.page_bytes, local=local)
        rows = zip(
            descriptors.remote_page.tolist(),
            descriptors.remote_offset.tolist(),
            descriptors.local_page.tolist(),
            descriptors.local_offset.tolist(),
            descriptors.num_bytes.tolist(),
            strict=True,
        )
        self._next += 1
        handle = ReadHandle(self._next)
        dropped = self._fabric.fault(peer) is Fault.DROP
        self._reads[handle] = _Read(peer, deque(rows), self._fabric.delay, dropped)
        return handle

    def poll(self, handle: ReadHandle) -> ReadState:
        read = self._reads.get(handle)
        if read is None:
            raise LinkError(f"there is no read {handle}")
        state = self._drive(read)
        if state is not ReadState.READING:
            del self._reads[handle]
        return state

    def cancel(self, handle: ReadHandle) -> None:
        if (read := self._reads.get(handle)) is not None:
            read.cancelled = True

    def progress(self) -> None:
        """Nothing to do: whoever reads does the work."""

    def close(self) -> int:
        for read in self._reads.values():
            read.cancelled = True
        for handle in list(self._reads):
            self.poll(handle)
        return len(self._reads)

    def _drive(self, read: _Read) -> ReadState:
        match self._fabric.fault(read.peer):
            case Fault.DEAD:
                return ReadState.CANCELLED if read.cancelled else ReadState.FAILED
            case Fault.FROZEN:
                return ReadState.READING
        if read.cancelled and (read.dropped or not self._fabric.late_writes):
            return ReadState.CANCELLED
        if read.dropped:
            return ReadState.READING
        if read.delay:
            read.delay -= 1
            return ReadState.READING
        self._move(read)
        if read.left:
            return ReadState.READING
        return ReadState.CANCELLED if read.cancelled else ReadState.DONE

    def _move(self, read: _Read) -> None:
        source = self._fabric.peer(read.peer)
        for _ in range(min(len(read.left), self._fabric.descriptors_per_poll)):
            remote_page, remote_offset, local_page, local_offset, num_bytes = read.left.popleft()
            data = _read(source._local_region(), remote_page, remote_offset, num_bytes)
            _write(self._local_region(), local_page, local_offset, data)
            self.moved.append(
                Move(read.peer, remote_page, remote_offset, local_page, local_offset, num_bytes, read.cancelled)
            )

    def _local_region(self) -> Region:
        if self._region is None:
            raise LinkError(f"{self._name!r} has registered no memory yet")
        return self._region


def _read(region: Region, page: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """A copy."""
    address = region.address + page * region.page_bytes + offset
    if region.device is not None:
        assert isinstance(region.owner, FakeDevicePool)
        return region.owner.copy_out(address, num_bytes)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address)).copy()


def _write(region: Region, page: int, offset: int, data: NDArray[np.uint8]) -> None:
    address = region.address + page * region.page_bytes + offset
    if region.device is not None:
        assert isinstance(region.owner, FakeDevicePool)
        region.owner.copy_in(address, data)
    else:
        np.ctypeslib.as_array((ctypes.c_uint8 * len(data)).from_address(address))[:] = data
