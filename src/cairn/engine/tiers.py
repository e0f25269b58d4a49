"""The tiers of one engine: from the configuration to stores, threads, a source and a sink. Imports no torch."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cairn import __version__
from cairn.cache.events import BlockEvents, Event, KeyNames
from cairn.cache.layout import CacheLayout
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.view import TierView
from cairn.engine.contract import EngineConfig, TierStats
from cairn.errors import ConfigError
from cairn.machine import map_memory
from cairn.scheduler.transfers import Transfers
from cairn.tiers.announcements import TierEvents
from cairn.tiers.context import TierContext
from cairn.tiers.demotion import Demoter
from cairn.tiers.digests import KEY_BYTES, EntryNames, stride_of
from cairn.tiers.disk import DiskFolder, DiskStore
from cairn.tiers.files import Files
from cairn.tiers.folder import check_folder, open_folder
from cairn.tiers.host import HostStore
from cairn.tiers.index import PathShape
from cairn.tiers.lanes import give_way, thread_lanes
from cairn.tiers.memory import TierMemory
from cairn.tiers.promotion import TierSource
from cairn.tiers.segments import ALIGNMENT, FORMAT
from cairn.tiers.store import PageBytes, TierStore
from cairn.transfer.digest import layout_hash
from cairn.types import Clock

WRITE_BACK_SECONDS = 3.0
"""Most that the end of a server waits for what is not written yet."""

MOST_DISK_BYTES = 64 << 30
"""Unless more is asked for."""

_SEGMENTS = 8
"""Of the largest entry, and what else a folder takes: less would be written anew all the time."""

RESTS = 20.0
"""How many times as long as they work the threads that move bytes rest, where no core is spare: each takes 5 % of a
core at most then, and writes some 50 MB/s, about as much as a model of 333 M parameters computes on two cores. Readers
rest less where requests would wait too long for them."""

_COUNTED = (
    *("num_bytes", "num_entries", "hits", "hit_tokens"),
    *("read_bytes", "written_bytes", "read_seconds", "write_seconds"),
)
"""What a store counts and `TierStats` tells under the same name."""

logger = logging.getLogger(__name__)


def uses_tiers(config: EngineConfig) -> bool:
    """Whether anything is kept below the pool."""
    return bool(config.host_cache_bytes) or config.disk_cache is not None


def check_tiers(config: EngineConfig, layout: CacheLayout) -> None:
    """Raises ConfigError that names the flag and the fix where tiers were asked for that cannot be. `layout`: of one
    rank."""
    if config.disk_cache is None:
        for flag, given in (
            ("--disk-cache-bytes", config.disk_cache_bytes is not None),
            ("--disk-cache-read-only", config.disk_cache_read_only),
        ):
            if given:
                raise ConfigError(f"{flag}: there is no folder: name one with --disk-cache")
    if not uses_tiers(config):
        return
    flag = "--host-cache-bytes" if config.host_cache_bytes else "--disk-cache"
    if not config.enable_prefix_caching or config.mamba_cache_mode == "none":
        raise ConfigError(f"{flag}: nothing is cached: leave it out, or switch the prefix cache on")
    least = least_bytes(layout.of_ranks(config.tensor_parallel_size))
    host_bytes = int(config.host_cache_bytes or 0)
    if 0 < host_bytes < least:
        raise ConfigError(f"--host-cache-bytes {host_bytes}: one entry takes {least}: set more, or 0 for none")
    least_disk = _SEGMENTS * (least + ALIGNMENT)
    if config.disk_cache_bytes is not None and config.disk_cache_bytes < least_disk:
        raise ConfigError(
            f"--disk-cache-bytes {int(config.disk_cache_bytes)}: the least is {least_disk}, {_SEGMENTS} entries: set "
            "more, or leave --disk-cache out"
        )


def check_disk_cache(config: EngineConfig) -> None:
    """Raises ConfigError for a folder that cannot be used, before anything is loaded. Changes nothing there."""
    if config.disk_cache is not None:
        check_folder(str(config.disk_cache), read_only=config.disk_cache_read_only)


def least_bytes(layout: CacheLayout) -> int:
    """Of the largest entry: a state with the pages that are filed with it, or a chunk. `layout`: of all ranks."""
    windows = sum(group.pages_for(group.reach) + 1 for group in layout.groups if group.reach is not None)
    chunk = layout.unlimited_pages_for(stride_of(layout))
    return (layout.pages_per_checkpoint + chunk + windows) * layout.page_bytes


def allocate_arena(num_bytes: int, page_bytes: int) -> PageBytes:
    """Memory of a host tier, uint8 [num_pages, page_bytes]; it is taken as it is first written to. Raises
    ConfigError."""
    num_pages = num_bytes // page_bytes
    try:
        memory = map_memory(num_pages * page_bytes)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host-cache-bytes {num_bytes} does not fit into memory: lower it") from error
    return np.frombuffer(memory, np.uint8).reshape(num_pages, page_bytes)


@dataclass(frozen=True, slots=True)
class PoolEvents:
    """What announces the pool's blocks, and where it does."""

    blocks: BlockEvents
    publish: Callable[[Event], None]


@dataclass(slots=True)
class _Wake:
    """What the threads of tiers call, once the core's thread can be woken."""

    call: Callable[[], None] = field(default=lambda: None)

    def __call__(self) -> None:
        self.call()


@dataclass(frozen=True, slots=True)
class OpenStores:
    """Stores, the fastest first, and how entries are named in them. `close`: lets go of the folder, once the stores
    have been closed."""

    stores: tuple[TierStore, ...]
    names: EntryNames
    close: Callable[[], None]


class EngineTiers:
    """The tiers of one engine. `transfers`: of its scheduler, which gets a source and a sink more."""

    def __init__(
        self,
        layout: CacheLayout,
        opened: OpenStores,
        memory: TierMemory,
        cache: PrefixCache,
        transfers: Transfers,
        clock: Clock,
        contents: KeyNames | None,
        events: PoolEvents | None,
        at_end: Sequence[Callable[[], None]],
        rests: float,
    ) -> None:
        """`layout`: of all ranks, whose pages `memory` and the stores have. `contents`: the images behind key tokens
        below 0. `events`: those of the pool. `at_end`: called when no thread of tiers works any more. `rests`: how many
        times as long as they work threads that move bytes rest while steps are computed."""
        self._wake = _Wake()
        self._stores = stores = opened.stores
        self._at_end = at_end
        self._closed = False
        self._rests = rests
        self.lanes = thread_lanes(self._wake)
        exact = cache.policy.exact
        context = TierContext(layout, stores, opened.names, memory, self.lanes, clock, transfers.prefill_speed, exact)
        announced = None
        if events is not None:
            announced = TierEvents(stores, layout.block_size, events.blocks, events.publish)
        self.demoter = Demoter(cache, context, contents, announced)
        self.source = TierSource(context)
        cache.observe(self.demoter)
        transfers.sources = (*transfers.sources, self.source)
        transfers.sink = self.demoter

    @property
    def names(self) -> tuple[str, ...]:
        """The fastest first."""
        return tuple(store.name for store in self._stores)

    def start(self, wake: Callable[[], None]) -> None:
        """`wake` has the core's thread look at what is done."""
        self._wake.call = wake

    def set_pace(self, *, has_work: bool) -> None:
        """`has_work`: whether steps are computed, which feel what is moved meanwhile."""
        if self._rests:
            self.lanes.pace(self._rests if has_work else 0.0)

    def write_back(self) -> None:
        """Go on writing until nothing is left, for a short while."""
        self.set_pace(has_work=False)
        until = time.monotonic() + WRITE_BACK_SECONDS
        while not self.demoter.is_idle and time.monotonic() < until:
            self.demoter.poll()
            time.sleep(0.001)

    def end_copies(self) -> None:
        """Have nothing of the pool pinned: what has not been copied is not going to be. Waits for one copy at most."""
        self.demoter.give_up_all()
        until = time.monotonic() + WRITE_BACK_SECONDS
        while self.demoter.num_pins and time.monotonic() < until:
            self.demoter.poll()
            time.sleep(0.0005)

    def close(self) -> None:
        """The end of threads, stores and the folder's lock, once."""
        if self._closed:
            return
        self._closed = True
        self.lanes.close()
        for store in self._stores:
            store.close()
        for end in self._at_end:
            end()

    def stats(self) -> TierStats:
        """Counters since the start, and gauges of this moment."""
        counters = {store.name: store.counters for store in self._stores}
        return TierStats(
            **{field: {name: getattr(each, field) for name, each in counters.items()} for field in _COUNTED},
            drops={name: dict(each.drops) for name, each in counters.items()},
            skipped=dict(self.demoter.dropped),
        )

    def views(self) -> list[TierView]:
        """The tiers as `GET /cache` shows them."""
        views = []
        for store in self._stores:
            counters = store.counters
            views.append(
                TierView(
                    name=store.name,
                    bytes=counters.num_bytes,
                    capacity=store.capacity,
                    entries=counters.num_entries,
                    hits=counters.hits,
                    hit_tokens=counters.hit_tokens,
                    read_bytes=counters.read_bytes,
                    written_bytes=counters.written_bytes,
                    read_speed=_speed(counters.read_bytes, counters.read_seconds),
                    write_speed=_speed(counters.written_bytes, counters.write_seconds),
                    drops=dict(counters.drops),
                )
            )
        return views


def open_stores(
    config: EngineConfig,
    facts: Mapping[str, str | int],
    layout: CacheLayout,
    make_arena: Callable[[int, int], PageBytes] = allocate_arena,
) -> OpenStores:
    """`facts`: what decides which bytes a page of the model has. `layout`: of all ranks. `make_arena`: memory of the
    host tier, which a GPU reaches best where it is pinned. Raises ConfigError that names the flag."""
    num_ranks, stores = config.tensor_parallel_size, list[TierStore]()
    facts = {**facts, "block_size": layout.block_size, "format": FORMAT, "version": __version__}
    if num_ranks > 1:
        # how many there are says which share of the model each has
        facts |= {"tensor_parallel_size": num_ranks}
    identity = layout_hash(facts)
    shape = PathShape.of(layout)
    secret, lock, files = b"", None, Files()
    if config.host_cache_bytes:
        stores.append(HostStore(make_arena(int(config.host_cache_bytes), layout.page_bytes), shape))
    if config.disk_cache is not None:
        path, least = str(config.disk_cache), _SEGMENTS * (least_bytes(layout) + ALIGNMENT)
        folder = open_folder(path, identity, facts, least, read_only=config.disk_cache_read_only, files=files)
        secret, lock = folder.secret, folder.lock
        max_bytes = _disk_bytes(config, folder.path, least, files)
        disk = DiskFolder(folder.path, identity, layout.page_bytes, max_bytes, not config.disk_cache_read_only)
        try:
            store = DiskStore(disk, shape, files)
        except OSError as error:
            raise ConfigError(f"--disk-cache {path}: cannot be read: {error.strerror}: name another folder") from error
        counters = store.counters
        num_left_out = counters.drops["damaged"] + counters.drops["io_error"]
        logger.info(
            "--disk-cache %s: %d entries in %d bytes, of %d at most; %d damaged or unreadable segments were left out",
            *(folder.path, counters.num_entries, counters.num_bytes, max_bytes, num_left_out),
        )
        stores.append(store)
    if not secret:
        secret = os.urandom(KEY_BYTES)

    def close() -> None:
        if lock is not None:
            files.close(lock)

    return OpenStores(tuple(stores), EntryNames.of(layout, identity, secret, give_way), close)


def _disk_bytes(config: EngineConfig, folder: str, least: int, files: Files) -> int:
    """The most that a folder may have."""
    if config.disk_cache_bytes is not None:
        return int(config.disk_cache_bytes)
    try:
        return max(least, min(MOST_DISK_BYTES, files.free_bytes(folder) // 2))
    except OSError:
        return MOST_DISK_BYTES


def _speed(num_bytes: int, seconds: float) -> float | None:
    return round(num_bytes / seconds) if num_bytes and seconds else None
