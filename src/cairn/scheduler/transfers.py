"""What is under way between this server and others, as the scheduler remembers it. See `fetch` and `kv_export`."""

from dataclasses import dataclass, field
from typing import Protocol

from cairn.cache.sequence_blocks import PagePin, SequenceBlocks
from cairn.scheduler.page_source import FetchPlan, FetchRequest, FetchTarget, PageSink, PageSource
from cairn.scheduler.peer_source import PeerSource
from cairn.scheduler.request import Request, RequestStats
from cairn.step import GRID, PageCopy
from cairn.transfer.contract import ContentName, LookupRequest, NamedImage, PullId, SchedulerSide
from cairn.types import Keys, RequestId

FetchKey = tuple[PageSource, PullId]
"""A fetch of any source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseQuota:
    """`max_leases`: KV exports that may wait, run or be leased together, and leases of what was asked for by content.
    `max_leases_per_client`: KV exports of one client. `wait_seconds`: how long one waits until leases leave room."""

    max_leases: int = 1024
    max_leases_per_client: int = 64
    wait_seconds: float = 30.0


class RecentSequences(Protocol):
    """Sequences that ended here lately, by the digests of their prefixes: `cairn.transfer.digest.SequenceIndex`."""

    def remember(self, name: ContentName, keys: Keys) -> None: ...

    def find_longest(self, marks: bytes, end: bytes | None = None) -> tuple[ContentName, Keys] | None:
        """Name and key tokens of the longest known prefix with one of these digests, or None; `end` is preferred."""


def content_name(request: Request) -> ContentName:
    """What the request's key tokens are called by all servers."""
    namespace = request.spec.namespace
    images = tuple(NamedImage(image.start, image.length, image.digest) for image in request.spec.images)
    return ContentName(namespace.adapter, namespace.cache_salt, images)


@dataclass(slots=True, eq=False)
class Fetch:
    """A request whose pages are being read into `target`. `copies`: page copies to be made at its first step, should
    less arrive than was there already. `began`: seconds; from `deadline` on nobody waits for it, None: for ever."""

    request: Request
    plan: FetchPlan
    target: FetchTarget
    copies: list[PageCopy]
    began: float
    deadline: float | None = None


@dataclass(slots=True, eq=False)
class OpenLookup:
    """What another server asks for by content, and a tier may have more of than the pool. `wanted`: the content that is
    looked for in `source`; from `deadline` on nobody waits for it. `sequence`, `target`, `key`: where it is read to,
    once it is. `is_over`: it is to be answered from the pool."""

    request: LookupRequest
    wanted: FetchRequest
    source: PageSource
    deadline: float
    sequence: SequenceBlocks | None = None
    target: FetchTarget | None = None
    key: FetchKey | None = None
    is_over: bool = False


@dataclass(slots=True)
class PrefillSpeed:
    """What a prompt token that is computed here takes of its request's time, in seconds, as requests that have ended
    tell."""

    seconds_per_token: float = 0.001

    def learn(self, stats: RequestStats) -> None:
        """From a request that has ended."""
        begun, first, num_tokens = stats.scheduled_time, stats.first_token_time, stats.num_prompt_computed
        if (
            begun is not None
            and first is not None
            and first > begun
            and num_tokens >= GRID
            and not stats.num_preemptions
        ):
            self.seconds_per_token += ((first - begun) / num_tokens - self.seconds_per_token) / 8


@dataclass(frozen=True, slots=True, eq=False)
class OpenLease:
    """What is held for another server. `client`: whose KV export it is, `request_id` of which request; both None of
    what was asked for by content."""

    pin: PagePin
    client: str | None = None
    request_id: RequestId | None = None


@dataclass(eq=False)
class Transfers:
    """`side` None: this server takes no part in transfers. `sequences`: what other servers may ask for by content.

    `sources`: who may bring pages of waiting requests; `peers`: the one that other servers are. `fetching`: what they
    bring now. `ready`: in order of arrival, with the page copies their first step needs. `quarantine`: targets of
    fetches that were given up, until no byte can reach them any more. `lookups`: what tiers are asked for by other
    servers. `offers`: by reference, what is held for other
    servers, and `quota` how much may be. `prefill_speed`: what a fetch has to be faster than. `sink`: copies what is
    cached to somewhere else.
    """

    side: SchedulerSide | None = None
    sequences: RecentSequences | None = None
    quota: LeaseQuota = field(default_factory=LeaseQuota)
    sources: tuple[PageSource, ...] = ()
    peers: PeerSource | None = None
    fetching: dict[FetchKey, Fetch] = field(default_factory=dict)
    ready: dict[Request, list[PageCopy]] = field(default_factory=dict)
    quarantine: dict[FetchKey, PagePin] = field(default_factory=dict)
    lookups: list[OpenLookup] = field(default_factory=list)
    offers: dict[str, OpenLease] = field(default_factory=dict)
    prefill_speed: PrefillSpeed = field(default_factory=PrefillSpeed)
    sink: PageSink | None = None

    @property
    def is_open(self) -> bool:
        """Whether something may still end by itself, and pages come free with it, or requests go on."""
        if self.fetching or self.ready or self.quarantine or self.offers or self.lookups:
            return True
        return self.num_sink_pins > 0 or any(source.is_busy for source in self.sources)

    @property
    def num_sink_pins(self) -> int:
        """Pins of pages that are being copied to somewhere else."""
        return 0 if self.sink is None else self.sink.num_pins
