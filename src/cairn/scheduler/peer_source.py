"""Pages from other servers: each request names the one that may have its prompt."""

from dataclasses import dataclass

import numpy as np

from cairn.addresses import join_host_port
from cairn.cache.layout import CacheLayout
from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.scheduler.page_source import FetchEvent, FetchPlan, FetchRequest, FetchTarget
from cairn.transfer.contract import ContentName, KvSource, PagesFree, PullEnded, PullId, PullSpec, SchedulerSide
from cairn.types import Clock

MAX_RELEASES = 256
"""Releases that are under way at a time; what is not released runs out by itself."""

ROUND_TRIPS_SECONDS = 0.01
"""What a pull takes besides its bytes: hello, claim, confirm."""

SECONDS_PER_BYTE = 1e-9
"""What a link takes, before a pull has said."""


@dataclass(slots=True)
class _OpenPull:
    """A pull whose target may still be written to. `began`: seconds; `ended`: nobody waits for it."""

    peer: KvSource
    began: float
    ended: bool = False


class PeerSource:
    """A `PageSource` that pulls from other servers by way of `side`. `exact`: see `KvSource.exact`.

    A lease that nobody needs is released, once; unless somebody else has claimed it.
    """

    def __init__(self, side: SchedulerSide, layout: CacheLayout, exact: bool, clock: Clock) -> None:
        self._side = side
        self._layout = layout
        self._exact = exact
        self._clock = clock
        self._pulls: dict[PullId, _OpenPull] = {}
        self._releases: set[PullId] = set()
        self._events: list[FetchEvent] = []
        self._seconds_per_byte = SECONDS_PER_BYTE

    @property
    def is_busy(self) -> bool:
        return False

    def may_have(self, request: FetchRequest) -> bool:
        return request.peer is not None

    def is_ready(self, request: FetchRequest) -> bool:
        return True

    def plan(self, request: FetchRequest, sequence: SequenceBlocks) -> FetchPlan | None:
        source, length, layout = self._peer(request), len(request.keys), self._layout
        position = source.reach(length)
        if source.nonce is None and position <= sequence.matched:
            return None
        num_pages = layout.retained_pages(min(position, sequence.matched), position)
        num_bytes = (num_pages + layout.pages_per_checkpoint) * layout.page_bytes
        return FetchPlan(
            position,
            num_bytes,
            ROUND_TRIPS_SECONDS + num_bytes * self._seconds_per_byte,
            promised=source.nonce is not None,
            origin=join_host_port(source.host, source.port),
        )

    def start(self, request: FetchRequest, target: FetchTarget) -> PullId:
        source = self._peer(request)
        start = min((part.first_token for part in target.pages), default=len(request.keys))
        spec = PullSpec(request.request_id, source, request.name, request.keys, start, target.pages, target.state_pages)
        pull = self._side.pull(spec)
        self._pulls[pull] = _OpenPull(source, self._clock.now())
        return pull

    def abort(self, pull: PullId) -> None:
        opened = self._pulls.get(pull)
        if opened is not None and not opened.ended:
            opened.ended = True
            self._side.abort(pull)
            # a pull that has claimed the lease gives it back itself; one that had not come so far knows no peer yet
            self.release(opened.peer)

    def decline(self, request: FetchRequest) -> None:
        self.release(self._peer(request))

    def events(self) -> list[FetchEvent]:
        events, self._events = self._events, []
        return events

    def release(self, source: KvSource) -> None:
        """Tell another server, once, that nothing is wanted of what it has promised: it need not keep it, unless
        somebody else has claimed it."""
        if source.nonce is None or len(self._releases) >= MAX_RELEASES:
            return
        purpose, keys = f"release of {source.request_id}", np.zeros(0, np.int64)
        spec = PullSpec(purpose, source, ContentName(), keys, 0, (), None, release_only=True)
        self._releases.add(self._side.pull(spec))

    def receive(self, event: PullEnded | PagesFree) -> None:
        """News of a pull, from `side`."""
        pull = self._pulls.get(event.pull)
        if pull is None:
            self._releases.discard(event.pull)
            return
        if isinstance(event, PagesFree):
            del self._pulls[event.pull]
        else:
            pull.ended = True
            if event.failure is None and event.volume is not None:
                self._learn(event.volume.num_bytes, self._clock.now() - pull.began)
        self._events.append(event)

    def _learn(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > ROUND_TRIPS_SECONDS:
            # the last pulls count most: links are shared
            measured = (seconds - ROUND_TRIPS_SECONDS) / num_bytes
            self._seconds_per_byte += (measured - self._seconds_per_byte) / 4

    def _peer(self, request: FetchRequest) -> KvSource:
        assert request.peer is not None
        return request.peer.exact(len(request.keys)) if self._exact else request.peer
