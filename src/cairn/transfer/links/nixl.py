"""NIXL 1.5 over UCX: RDMA, NVLink or, on one host, plain process-to-process copies; the same code for all.

Traps of NIXL, and what is done about them here:

- Its progress thread spins on a whole core. It is off; the owner calls `poll` or `progress` while something is open.
- A frozen peer is never reported. `poll` then returns READING for ever; the caller has a deadline and a quarantine.
- Releasing a handle during its READ does not stop late writes. A handle is released only when it has ended, so a
  cancelled one stays READING until NIXL reports DONE or raises.
- Without the right to trace the peer (another user or pid namespace) UCX falls back to TCP, 5 to 20 times slower, and
  then needs `progress` on the other side. Both work.
- UCX writes up to 12 bytes over the beginning of libc's mmap, munmap, madvise and others, to hear of unmapped memory. A
  thread that is in the kernel meanwhile, as one is that populates a pool, returns into the middle of them, and jumps
  to 0. The hooks serve a cache of registrations, which a region registered once does not need: they are off.
- Deregistering does not fence a reader, and an unmapped source kills its connection. The region outlives the link, and
  a peer is given up at the first error of a read: nothing more is read from it under this name.
"""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.errors import ConfigError
from cairn.transfer.links.contract import Descriptors, LinkError, ReadHandle, ReadState, Region

_COPIES = "UCX_CMA_TX_QUOTA"

_HOOKS = "UCX_MEM_MMAP_HOOK_MODE"


def start_agent(name: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """The agent, and what NIXL raises. Raises ConfigError when NIXL is not installed or has no UCX here. Slow, and
    needs torch: only when a link is made."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    # UCX reads it, and sets its hooks, as soon as it is loaded.
    os.environ.setdefault(_HOOKS, "none")
    try:
        # An extra without type hints, installed or not. Both names are those of the wheel that fits torch here.
        from nixl import _bindings  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"--kv-transfer-config needs NIXL: pip install 'cairn-serve[nixl]', or, where torch is for CUDA, "
            f"`nixl` and the wheel of the same CUDA, nixl-cu13 or nixl-cu12 ({error})"
        ) from error
    errors = *(getattr(_bindings, each) for each in dir(_bindings) if each.endswith("Error")), RuntimeError
    try:
        with _many_copies_a_turn():
            return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"])), errors
    except errors as error:
        raise ConfigError(f"NIXL cannot start its UCX backend: {error}") from error


@contextmanager
def _many_copies_a_turn() -> Iterator[None]:
    """For an agent in the making. With its default of 1 UCX looks for news on TCP after every descriptor that it copies
    from process to process. Of a variable that it does not need it warns, so only where all transports may be used, and
    not for child processes."""
    if _COPIES in os.environ or "UCX_TLS" in os.environ:
        yield
        return
    os.environ[_COPIES] = "64"
    try:
        yield
    finally:
        del os.environ[_COPIES]


class Description(msgspec.Struct, frozen=True, tag="nixl1"):
    """What a peer needs to read from here: plain numbers, and NIXL's own metadata, which NIXL checks."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=1 << 20)]
    address: Annotated[int, msgspec.Meta(ge=1)]
    num_pages: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]
    page_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    device: Annotated[int, msgspec.Meta(ge=0, lt=1024)] | None


def read_description(description: bytes) -> Description:
    """Raises LinkError for bytes that are no description of a NIXL link of this version."""
    try:
        remote = msgspec.msgpack.decode(description, type=Description)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError("the peer's description is none of a NIXL link of this version") from error
    if remote.address + remote.num_pages * remote.page_bytes >= 1 << 64:
        raise LinkError("the peer's description has a number out of range")
    return remote


def kind(device: int | None) -> str:
    """NIXL's name for host memory, or for that of an accelerator."""
    return "DRAM" if device is None else "VRAM"


def range_table(address: NDArray[Any], num_bytes: NDArray[np.int64], device: int | None) -> NDArray[np.uint64]:
    """Rows (address, length, device), the form that NIXL takes without a Python loop."""
    rows = np.empty((len(address), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = address, num_bytes, device or 0
    return rows


@dataclass(slots=True)
class _Peer:
    """`failed`: an operation on it has failed."""

    remote: Description
    failed: bool = False
    is_connected: bool = True


@dataclass(slots=True)
class _Read:
    peer: str
    transfer: Any
    cancelled: bool = False
    # NIXL keeps raw addresses only: what a handle was made from has to live as long as the handle.
    buffers: tuple[object, ...] = field(default=())


class NixlLink:
    """A `Link`: one agent and one region. Its name is `role` and a new uuid, so a restarted process is another peer.
    Handles and peers that NIXL would not release are leaked; other reads go on."""

    def __init__(self, role: str, new_uuid: Callable[[], uuid.UUID] = uuid.uuid4) -> None:
        """Raises ConfigError when NIXL is not installed or has no UCX here."""
        self._name = f"{role}-{new_uuid()}"
        self._agent, self._errors = start_agent(self._name)
        self._region: Region | None = None
        self._registered: Any = None
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[ReadHandle, _Read] = {}
        self._next = 0

    @property
    def num_open(self) -> int:
        """Reads that may still write, the cancelled ones included."""
        return len(self._reads)

    def register(self, region: Region) -> None:
        if self._region is not None:
            raise LinkError("a link takes one region")
        size = region.num_pages * region.page_bytes
        try:
            with self._link_errors("register memory"):
                self._registered = self._agent.register_memory(
                    [(region.address, size, region.device or 0, "")], kind(region.device)
                )
        except LinkError as error:
            if region.device is None:
                raise
            raise ConfigError(
                f"--kv-transfer-config with --device cuda: {error}: UCX takes it for no GPU's memory. Install NIXL for "
                "torch's CUDA (`nixl` and nixl-cu13, or nixl-cu12), and have UCX_TLS name `cuda` or do not set it"
            ) from error
        self._region = region

    def describe(self) -> bytes:
        region = self._local_region()
        with self._link_errors("describe the own memory"):
            metadata = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(
            Description(self._name, metadata, region.address, region.num_pages, region.page_bytes, region.device)
        )

    def connect(self, description: bytes) -> str:
        self._local_region()
        remote = read_description(description)
        peer_state = self._peers.get(remote.name)
        if peer_state is not None:
            if peer_state.failed or not peer_state.is_connected or peer_state.remote != remote:
                raise LinkError(f"{remote.name} has failed, or has another description now")
            return remote.name
        self._add_peer(remote)
        return remote.name

    def disconnect(self, peer: str) -> None:
        if peer not in self._peers:
            return
        self._peers[peer].is_connected = False
        for handle, read in self._reads.items():
            if read.peer == peer:
                self.cancel(handle)
        self._remove_peer(peer)

    def read(self, peer: str, descriptors: Descriptors) -> ReadHandle:
        region, peer_state = self._local_region(), self._peers.get(peer)
        if peer_state is None or peer_state.failed or not peer_state.is_connected:
            raise LinkError(f"{peer} is gone" if peer_state else f"not connected to {peer}")
        if not len(descriptors):
            raise LinkError("a read needs at least one descriptor")
        remote = peer_state.remote
        descriptors.check(remote_pages=remote.num_pages, remote_page_bytes=remote.page_bytes, local=region)
        with self._peer_errors(peer_state):
            buffers = self._ranges(descriptors, region, remote)
            transfer = self._agent.initialize_xfer("READ", *buffers, peer)
        try:
            with self._peer_errors(peer_state):
                self._agent.transfer(transfer)
        except LinkError:
            self._release(transfer)
            raise
        self._next += 1
        handle = ReadHandle(self._next)
        self._reads[handle] = _Read(peer, transfer, buffers=buffers)
        return handle

    def poll(self, handle: ReadHandle) -> ReadState:
        read = self._reads.get(handle)
        if read is None:
            raise LinkError(f"there is no read {handle}")
        state = ReadState.CANCELLED if read.cancelled else ReadState.DONE
        try:
            with self._peer_errors(self._peers[read.peer]):
                if self._agent.check_xfer_state(read.transfer) == "PROC":
                    return ReadState.READING
        except LinkError:
            state = ReadState.CANCELLED if read.cancelled else ReadState.FAILED
        del self._reads[handle]
        self._release(read.transfer)
        self._remove_peer(read.peer)
        return state

    def cancel(self, handle: ReadHandle) -> None:
        if (read := self._reads.get(handle)) is not None:
            read.cancelled = True

    def progress(self) -> None:
        with self._link_errors("make progress"):
            self._agent.get_new_notifs()

    def close(self) -> int:
        """Release handles, then peers, then the region, unless reads may still write."""
        for handle in list(self._reads):
            self.cancel(handle)
            self.poll(handle)
        for peer in list(self._peers):
            self.disconnect(peer)
        if not self._reads and self._registered is not None:
            with self._link_errors("deregister memory"):
                self._agent.deregister_memory(self._registered)
            self._registered = self._region = None
        return len(self._reads)

    def _add_peer(self, remote: Description) -> None:
        """Leaves nothing behind when it raises."""
        name = ""
        try:
            with self._link_errors("connect" + self._limit(remote)):
                added = self._agent.add_remote_agent(remote.metadata)
                name = added.decode() if isinstance(added, bytes) else added
                if name != remote.name:
                    raise LinkError("the peer's description names another agent than its metadata")
                self._agent.make_connection(name)
                # Raises where not all of it is registered, or can be reached.
                size = np.array([remote.num_pages * remote.page_bytes])
                whole = range_table(np.array([remote.address]), size, remote.device)
                self._agent.prep_xfer_dlist(name, whole, kind(remote.device)).release()
        except LinkError:
            if name and name not in self._peers:
                with suppress(*self._errors):
                    self._agent.remove_remote_agent(name)
            raise
        self._peers[name] = _Peer(remote)

    def _ranges(self, descriptors: Descriptors, region: Region, remote: Description) -> tuple[object, ...]:
        local = region.address + descriptors.local_page * region.page_bytes + descriptors.local_offset
        there = remote.address + descriptors.remote_page * remote.page_bytes + descriptors.remote_offset
        # What follows on both sides is one range: NIXL joins those of prepared lists alone.
        sizes = descriptors.num_bytes[:-1]
        apart = (np.diff(local) != sizes) | (np.diff(there) != sizes)
        first = np.flatnonzero(np.concatenate(([True], apart)))
        size = np.add.reduceat(descriptors.num_bytes, first)
        return tuple(
            self._agent.get_xfer_descs(range_table(address[first], size, device), kind(device))
            for address, device in ((local, region.device), (there, remote.device))
        )

    def _remove_peer(self, peer: str) -> None:
        """Remove a disconnected peer once none of its reads is open."""
        peer_state = self._peers[peer]
        if peer_state.is_connected or any(read.peer == peer for read in self._reads.values()):
            return
        del self._peers[peer]
        with suppress(*self._errors):
            self._agent.remove_remote_agent(peer)

    def _release(self, transfer: Any) -> None:
        with suppress(*self._errors):
            self._agent.release_xfer_handle(transfer)

    @contextmanager
    def _peer_errors(self, peer: _Peer) -> Iterator[None]:
        """Whatever NIXL raises about a peer's memory makes the peer fail for good."""
        try:
            yield
        except self._errors as error:
            peer.failed = True
            limit = self._limit(peer.remote)
            raise LinkError(f"{peer.remote.name}{limit}: {type(error).__name__}: {error}") from error

    @contextmanager
    def _link_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise LinkError(f"NIXL cannot {what}: {type(error).__name__}: {error}") from error

    def _limit(self, remote: Description) -> str:
        """What reading takes where pages lie in a GPU's memory, on either side."""
        sides = ["host" if device is None else "GPU" for device in (self._local_region().device, remote.device)]
        if "GPU" not in sides:
            return ""
        return (
            f" (pages in {sides[0]} memory here, {sides[1]} memory there; UCX needs CUDA IPC, GPUDirect RDMA or copies "
            "by way of the host for that: UCX_TLS of either side may forbid them)"
        )

    def _local_region(self) -> Region:
        if self._region is None:
            raise LinkError("no memory is registered")
        return self._region
