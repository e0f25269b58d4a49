"""NIXL 1.5 over UCX: RDMA, NVLink or, on one host, plain process-to-process copies; the same code for all.

What one has to know of it, and what is done about it here:

- Its progress thread spins on a whole core. It is off; the owner calls `poll` or `progress` while something is open.
- A frozen peer is never reported. `poll` then says READING for ever; whoever waits has a deadline and a quarantine.
- Releasing a handle whose READ is under way does not stop late writes. A handle is released only when it has ended,
  so a cancelled one stays READING until NIXL says DONE or raises.
- Without the right to trace the peer (another user or pid namespace) UCX falls back to TCP, 5 to 20 times slower, and
  then needs `progress` on the other side. Both work.
- Deregistering does not fence a reader, and an unmapped source kills its connection. The region outlives the link, and
  an error of a peer's read is the end of that peer: nothing more is read from it under this name.
"""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.errors import ConfigError
from cairn.transfer.links.contract import Descriptors, LinkError, ReadHandle, ReadState, Region

_LOCAL = "NIXL_INIT_AGENT"

_COPIES = "UCX_CMA_TX_QUOTA"

_MAX_METADATA = 1 << 20


def start_agent(name: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """The agent, and what NIXL raises. Raises ConfigError when NIXL is not installed or has no UCX here."""
    agent_class, config_class, errors = _load()
    try:
        with _many_copies_a_turn():
            return agent_class(name, config_class(enable_prog_thread=False, backends=["UCX"])), errors
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


def _load() -> tuple[Any, Any, Any]:
    """(agent class, configuration class, what NIXL raises). Slow, and needs torch: only when a link is made."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        # An extra without type hints, installed or not. Both names are those of the wheel that fits torch here.
        from nixl import _bindings  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise ConfigError(f"--kv-transfer-config needs NIXL: pip install 'cairn-serve[nixl]' ({error})") from error
    errors = tuple(getattr(_bindings, name) for name in dir(_bindings) if name.endswith("Error"))
    return nixl_agent, nixl_agent_config, (*errors, RuntimeError)


class Description(msgspec.Struct, frozen=True, tag="nixl1"):
    """What a peer must know: plain numbers, and NIXL's own metadata, which it checks itself."""

    name: str
    metadata: bytes
    address: int
    num_pages: int
    page_bytes: int
    device: int | None


def read_description(description: bytes) -> Description:
    """Raises LinkError for what no NIXL link of this version says of itself."""
    try:
        about = msgspec.msgpack.decode(description, type=Description)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError("the peer's description is none of a NIXL link of this version") from error
    size = about.num_pages * about.page_bytes
    if not (
        about.num_pages in range(1, 1 << 24)
        and about.page_bytes in range(1, 1 << 40)
        and 0 < about.address < 1 << 64
        and about.address + size < 1 << 64
        and about.device in (None, *range(1024))
        and 0 < len(about.metadata) <= _MAX_METADATA
        and 0 < len(about.name) <= 256
    ):
        raise LinkError("the peer's description has a number out of range")
    return about


def kind(device: int | None) -> str:
    """NIXL's word for host memory, and for that of an accelerator."""
    return "DRAM" if device is None else "VRAM"


def page_table(region: Region) -> NDArray[np.uint64]:
    """All pages as one strided row (address, length, device, stride, count), shape [1, 5]."""
    row = (region.address, region.page_bytes, region.device or 0, region.page_bytes, region.num_pages)
    return np.array([row], np.uint64)


def range_table(address: NDArray[np.int64], num_bytes: NDArray[np.int64], device: int | None) -> NDArray[np.uint64]:
    """Rows (address, length, device), the form that NIXL takes without a Python loop."""
    rows = np.empty((len(address), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = address, num_bytes, device or 0
    return rows


def is_whole(descriptors: Descriptors, remote_page_bytes: int, local_page_bytes: int) -> bool:
    """Whether pages are read whole, so that lists of pages serve."""
    return bool(
        remote_page_bytes == local_page_bytes
        and (descriptors.num_bytes == local_page_bytes).all()
        and not descriptors.remote_offset.any()
        and not descriptors.local_offset.any()
    )


@dataclass(slots=True)
class _Peer:
    """`pages`: descriptor list of all its pages, prepared once. `dead`: an operation on it has failed."""

    about: Description
    pages: Any
    dead: bool = False
    wanted: bool = True


@dataclass(slots=True)
class _Read:
    peer: str
    transfer: Any
    cancelled: bool = False
    # NIXL keeps raw addresses only; what a handle was made from lives as long as the handle.
    made_from: tuple[object, ...] = field(default=())


class NixlLink:
    """A `Link`: one agent and one region. Its name is `role` and a new uuid, so a restarted process is another peer.
    `num_leaked` counts handles and peers that NIXL would not let go of."""

    def __init__(self, role: str, new_uuid: Callable[[], uuid.UUID] = uuid.uuid4) -> None:
        """Raises ConfigError when NIXL is not installed or has no UCX here."""
        self._name = f"{role}-{new_uuid()}"
        self._agent, self._errors = start_agent(self._name)
        self._region: Region | None = None
        self._registered: Any = None
        self._pages: Any = None
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[ReadHandle, _Read] = {}
        self._next = 0
        self.num_leaked = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def num_open(self) -> int:
        """Reads that may still write, the cancelled ones included."""
        return len(self._reads)

    def register(self, region: Region) -> None:
        if self._region is not None:
            raise LinkError("a link takes one region")
        size = region.num_pages * region.page_bytes
        with self._translated("register memory"):
            self._registered = self._agent.register_memory(
                [(region.address, size, region.device or 0, "")], kind(region.device)
            )
            self._pages = self._agent.prep_xfer_dlist(_LOCAL, page_table(region), kind(region.device))
        self._region = region

    def describe(self) -> bytes:
        region = self._own_region()
        with self._translated("describe the own memory"):
            metadata = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(
            Description(self._name, metadata, region.address, region.num_pages, region.page_bytes, region.device)
        )

    def connect(self, description: bytes) -> str:
        self._own_region()
        about = read_description(description)
        known = self._peers.get(about.name)
        if known is not None:
            if known.dead or not known.wanted or known.about != about:
                raise LinkError(f"{about.name} has failed, or says something else of itself now")
            return about.name
        self._peers[about.name] = _Peer(about, self._prepare(about))
        return about.name

    def disconnect(self, peer: str) -> None:
        if peer not in self._peers:
            return
        self._peers[peer].wanted = False
        for handle, read in self._reads.items():
            if read.peer == peer:
                self.cancel(handle)
        self._forget(peer)

    def read(self, peer: str, descriptors: Descriptors) -> ReadHandle:
        region, known = self._own_region(), self._peers.get(peer)
        if known is None or known.dead or not known.wanted:
            raise LinkError(f"{peer} is gone" if known else f"not connected to {peer}")
        if not len(descriptors):
            raise LinkError("a read needs at least one descriptor")
        about = known.about
        descriptors.check(remote_pages=about.num_pages, remote_page_bytes=about.page_bytes, local=region)
        made_from: tuple[object, ...]
        with self._failing(known):
            if is_whole(descriptors, about.page_bytes, region.page_bytes):
                made_from = (descriptors.local_page.astype(np.int32), descriptors.remote_page.astype(np.int32))
                transfer = self._agent.make_prepped_xfer("READ", self._pages, made_from[0], known.pages, made_from[1])
            else:
                made_from = self._ranges(descriptors, region, about)
                transfer = self._agent.initialize_xfer("READ", *made_from, peer)
        try:
            with self._failing(known):
                self._agent.transfer(transfer)
        except LinkError:
            self._release(transfer)
            raise
        self._next += 1
        handle = ReadHandle(self._next)
        self._reads[handle] = _Read(peer, transfer, made_from=made_from)
        return handle

    def poll(self, handle: ReadHandle) -> ReadState:
        read = self._reads.get(handle)
        if read is None:
            raise LinkError(f"there is no read {handle}")
        state = ReadState.CANCELLED if read.cancelled else ReadState.DONE
        try:
            with self._failing(self._peers[read.peer]):
                if self._agent.check_xfer_state(read.transfer) == "PROC":
                    return ReadState.READING
        except LinkError:
            state = ReadState.CANCELLED if read.cancelled else ReadState.FAILED
        del self._reads[handle]
        self._release(read.transfer)
        self._forget(read.peer)
        return state

    def cancel(self, handle: ReadHandle) -> None:
        if (read := self._reads.get(handle)) is not None:
            read.cancelled = True

    def progress(self) -> None:
        with self._translated("make progress"):
            self._agent.get_new_notifs()

    def close(self) -> int:
        """Handles, then descriptor lists, then peers, then the region; what may still write is left registered."""
        for handle in list(self._reads):
            self.cancel(handle)
            self.poll(handle)
        for peer in list(self._peers):
            self.disconnect(peer)
        if not self._reads and self._registered is not None:
            self._pages.release()
            with self._translated("deregister memory"):
                self._agent.deregister_memory(self._registered)
            self._registered = self._pages = self._region = None
        return len(self._reads)

    def _prepare(self, about: Description) -> Any:
        """Add the agent; returns the list of all its pages. Leaves nothing behind when it raises."""
        name = ""
        try:
            with self._translated("connect"):
                added = self._agent.add_remote_agent(about.metadata)
                name = added.decode() if isinstance(added, bytes) else added
                if name != about.name:
                    raise LinkError("the peer's description names another agent than its metadata")
                self._agent.make_connection(name)
                table = page_table(Region(about.address, about.num_pages, about.page_bytes, None, about.device))
                return self._agent.prep_xfer_dlist(name, table, kind(about.device))
        except LinkError:
            if name and name not in self._peers:
                with self._cleaning_up():
                    self._agent.remove_remote_agent(name)
            raise

    def _ranges(self, descriptors: Descriptors, region: Region, about: Description) -> tuple[object, ...]:
        lists = []
        for start, page_bytes, device, page, offset in (
            (region.address, region.page_bytes, region.device, descriptors.local_page, descriptors.local_offset),
            (about.address, about.page_bytes, about.device, descriptors.remote_page, descriptors.remote_offset),
        ):
            rows = range_table(start + page * page_bytes + offset, descriptors.num_bytes, device)
            lists.append(self._agent.get_xfer_descs(rows, kind(device)))
        return tuple(lists)

    def _forget(self, peer: str) -> None:
        """Drop an unwanted peer once none of its reads is open: a descriptor list must outlive its handles."""
        known = self._peers[peer]
        if known.wanted or any(read.peer == peer for read in self._reads.values()):
            return
        del self._peers[peer]
        with self._cleaning_up():
            known.pages.release()
            self._agent.remove_remote_agent(peer)

    def _release(self, transfer: Any) -> None:
        with self._cleaning_up():
            self._agent.release_xfer_handle(transfer)

    @contextmanager
    def _failing(self, peer: _Peer) -> Iterator[None]:
        """Whatever NIXL raises about a peer's memory is the end of that peer."""
        try:
            yield
        except self._errors as error:
            peer.dead = True
            raise LinkError(f"{peer.about.name}: {type(error).__name__}: {error}") from error

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise LinkError(f"NIXL cannot {what}: {type(error).__name__}: {error}") from error

    @contextmanager
    def _cleaning_up(self) -> Iterator[None]:
        """What NIXL does not let go of is lost, but nobody else's read ends for it."""
        try:
            yield
        except self._errors:
            self.num_leaked += 1

    def _own_region(self) -> Region:
        if self._region is None:
            raise LinkError("no memory is registered")
        return self._region
