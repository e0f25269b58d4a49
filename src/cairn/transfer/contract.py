"""What the rest of cairn knows of a transfer: plain records, and two seams of a few methods each.

    SchedulerSide   offers leases (as prefill server) and starts pulls (as decode server)      one per engine
    WorkerSide      carries out the reads of a pull on one rank                                one per rank

The scheduler speaks in tokens and page numbers, a worker turns them into byte ranges for its link (`links.contract`).
No method of the two waits: all are called again and again by one owner, which may sleep while nothing is open.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, NewType, Protocol

import msgspec
import numpy as np

from cairn.cache.group_pages import GroupPages, page_numbers
from cairn.cache.layout import CacheLayout
from cairn.step import GRID
from cairn.transfer.links.contract import ReadState
from cairn.types import Keys, Pages

LookupId = NewType("LookupId", int)
PullId = NewType("PullId", int)

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 26)]
_Description = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
PullNumber = Annotated[PullId, msgspec.Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True, slots=True)
class NamedImage:
    """Tokens [start, start + length) stand for an image; `digest`, 32 bytes, says which. Their key tokens are numbers
    of one process alone."""

    start: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ContentName:
    """Namespace of key tokens: sequences of different names never share anything. `images`: what the key tokens below 0
    stand for, in order of position."""

    adapter: str = ""
    salt: str | None = None
    images: tuple[NamedImage, ...] = ()


def num_range_pages(start: int, end: int, block_size: int) -> int:
    """How many pages of `block_size` tokens the tokens [start, end) lie in."""
    return -(-end // block_size) - start // block_size if start < end else 0


@dataclass(frozen=True, slots=True)
class Peer:
    """A server, as others know it: this one, or one that has proved itself. `engine_id` is new at every start.
    `geometry`: how its ranks cut pages and checkpoints; `ranks`: what their links say of themselves, one entry per
    rank. `layout`: `digest.layout_hash`."""

    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    geometry: CacheLayout
    ranks: Annotated[tuple[_Description, ...], msgspec.Meta(min_length=1, max_length=1024)]
    layout: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


@dataclass(frozen=True, slots=True)
class OfferedCheckpoint:
    """The pages of a checkpoint that resumes the sequence at `position`."""

    position: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server leases to another: per attention group the pages of `keys`, and checkpoints of their prefixes."""

    request_id: str
    name: ContentName
    keys: Keys
    pages: tuple[GroupPages, ...]
    checkpoints: tuple[OfferedCheckpoint, ...]

    @property
    def all_pages(self) -> Pages:
        """Pages of the tokens and of the checkpoints, shape [n]."""
        return np.concatenate([page_numbers(self.pages), *(checkpoint.pages for checkpoint in self.checkpoints)])


@dataclass(frozen=True, slots=True)
class KvSource:
    """A server that may have the KV pages of a prompt. With the `nonce` of its lease `request_id` it has promised all
    of the prompt. Without one it has promised nothing: it is asked what it still caches of this content; its sequence
    had `end` tokens, where that is known (answers seldom end at a multiple of 64)."""

    engine_id: str
    host: str
    port: int
    request_id: str | None = None
    nonce: bytes | None = None
    end: int | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of its side channel."""
        return self.host, self.port

    def named_end(self, num_prompt_tokens: int) -> int:
        """Tokens of the prefix that is named besides the marks, 0 for none. Without a lease the number came through a
        client, so it counts only if the prompt has so many tokens."""
        if self.nonce is not None:
            return num_prompt_tokens
        return self.end if self.end is not None and 0 < self.end <= num_prompt_tokens else 0

    def reach(self, num_prompt_tokens: int) -> int:
        """How many tokens of the prompt it may provide at most."""
        return self.named_end(num_prompt_tokens) or num_prompt_tokens // GRID * GRID

    def exact(self, num_prompt_tokens: int) -> "KvSource":
        """The same without an `end` that is of no use under `--exact`: off the 64-token grid a state can only be used
        at the end of the prompt."""
        if self.end is None or self.end % GRID == 0 or self.end == num_prompt_tokens:
            return self
        return replace(self, end=None)


@dataclass(frozen=True, slots=True)
class TransferRole:
    """A request's part in a transfer. `source`: a server to pull from. `kv_export`: lease the prompt to another server.
    `prefill_cached_tokens`: what the prefilling server had cached, None where that is not known."""

    source: KvSource | None = None
    kv_export: bool = False
    prefill_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PullSpec:
    """What to pull of `keys` from `source`, and where to.

    `pages`, per attention group, are those to be filled, from the first token on that is needed of the group up to
    len(keys), or none when no page is needed; nothing is needed of tokens before `start`. `checkpoint`: the pages for
    the state, None when none is needed. A lease delivers all of it. Without a lease the source may deliver less: tokens
    up to its `end` or a multiple of 64 beyond `start`, and a state only where it has one.
    `release_only`: nothing is needed; the lease is given back unused. `request_id`: the own request's, for messages.
    """

    request_id: str
    source: KvSource
    name: ContentName
    keys: Keys
    start: int
    pages: tuple[GroupPages, ...]
    checkpoint: Pages | None
    release_only: bool = False


@dataclass(frozen=True, slots=True)
class PullEnded:
    """The outcome of a pull, or of what another page source brings. `failure` None: nothing is written any more, tokens
    up to `position` may be used, and the state at `checkpoint_position`, None where there is none. Otherwise nothing
    may be used, and `failure` says why. `volume`: what was read, where that is known."""

    pull: PullId
    failure: str | None
    position: int = 0
    checkpoint_position: int | None = None
    volume: "Volume | None" = field(default=None, compare=False)

    def resume_position(self, num_prompt_tokens: int, resumes_anywhere: bool) -> int:
        """Where a prompt of so many tokens goes on with what has come. `resumes_anywhere`: keys and values alone are
        enough anywhere but at its end."""
        position = self.checkpoint_position or 0
        return max(position, min(self.position, num_prompt_tokens - 1)) if resumes_anywhere else position


@dataclass(frozen=True, slots=True)
class PagesFree:
    """No write of this pull can come any more: the pages it was to fill may be used again. Comes after `PullEnded`, or
    together with it."""

    pull: PullId


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The pages of an offer need not be kept any longer. `state`: how the lease ended, a `leases.LeaseState`."""

    remote_request_id: str
    state: str


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """Another server claims content without a lease: what is cached of it? `marks`: the digests of its first 64, 128,
    ... tokens, 32 bytes each (`digest.ContentDigest`); `end`: the digest of one more prefix, or None. The other server
    needs tokens from `start` on. Answer with `SchedulerSide.answer_lookup` within `producer.LOOKUP_SECONDS`."""

    lookup: LookupId
    adapter: str
    marks: bytes
    start: int
    end: bytes | None = None


Event = PullEnded | PagesFree | LeaseEnded | LookupRequest


NO_PAGES: Pages = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class LeaseDemand:
    """Pages that leases are going to pin: `pages`, shape [n], in any order and any number of times, and `num_new`
    others that are not allocated yet."""

    pages: Pages = field(default_factory=lambda: NO_PAGES)
    num_new: int = 0

    def __bool__(self) -> bool:
        """Whether there is any page."""
        return len(self.pages) > 0 or self.num_new > 0

    def __add__(self, other: "LeaseDemand") -> "LeaseDemand":
        return LeaseDemand(np.concatenate([self.pages, other.pages]), self.num_new + other.num_new)


NO_DEMAND = LeaseDemand()


class SchedulerSide(Protocol):
    """Transfers as the scheduler sees them."""

    def fits(self, demand: LeaseDemand, promised: LeaseDemand = NO_DEMAND) -> bool:
        """Whether one offer of `demand` fits under the cap of all leases, beside them and what is `promised`: pages
        that are going to be leased, too. A page counts once. While nothing is leased or promised, one offer may exceed
        the cap: a long prompt must be served, too."""

    def offer(self, offer: Offer) -> str:
        """Lease pages, which must stay as they are until `LeaseEnded`. Returns the `remote_request_id`. Call `fits`
        first: what does not fit ends at once."""

    def withdraw(self, remote_request_id: str) -> None:
        """End a lease that nobody has claimed. Does nothing for others."""

    def answer_lookup(self, lookup: LookupId, offer: Offer | None) -> str | None:
        """Answer a `LookupRequest`; None: nothing is cached. `offer.keys` are the cached tokens up to a mark or the end
        of the request. The offer, which has to fit, is leased to the server that asked, and ends in exactly one
        `LeaseEnded`, at once when the answer comes too late. Returns its `remote_request_id`, as `offer` does."""

    def pull(self, spec: PullSpec) -> PullId:
        """Start a pull. It ends in exactly one `PullEnded` and one `PagesFree`."""

    def abort(self, pull: PullId) -> None:
        """Abort a pull. Its `PagesFree` may come much later. Does nothing for ended ones."""

    def events(self) -> list[Event]:
        """Events since the last call, in order."""


class ReadOrder(msgspec.Struct, frozen=True, tag="read", eq=False):
    """What a pull reads of a peer, the same for all ranks: of each attention group the tokens from its first one up to
    `end` from the peer's `remote` pages into the own `local` ones, each in its side's size, and its checkpoint into
    the own state pages, or None. Each rank reads its share."""

    pull: PullNumber
    peer: Peer
    end: Tokens
    remote: tuple[GroupPages, ...]
    local: tuple[GroupPages, ...]
    remote_checkpoint: Pages | None
    local_checkpoint: Pages | None


@dataclass(frozen=True, slots=True)
class Volume:
    """Size of a read, over all ranks."""

    num_bytes: int = 0
    num_descriptors: int = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(self.num_bytes + other.num_bytes, self.num_descriptors + other.num_descriptors)


class ReadEnded(msgspec.Struct, frozen=True, tag="ended"):
    """How a read has ended: nothing more is written for it. `failure`: why another rank could not begin it. `volume`:
    what was read, if it is DONE."""

    pull: PullNumber
    state: ReadState
    failure: str = ""
    volume: Volume = Volume()


class WorkerSide(Protocol):
    """Carries out the reads of one rank, or of all. A read is named by its pull."""

    def start(self, order: ReadOrder) -> None:
        """Post the reads. Raises LinkError when the peer cannot be read; then nothing was posted."""

    def poll(self, pull: PullId) -> ReadEnded | None:
        """Drive the read; None while bytes may arrive. Once it has ended, it is forgotten."""

    def cancel(self, pull: PullId) -> None:
        """Cancel the read. `poll` returns None for as long as a late write may come."""
