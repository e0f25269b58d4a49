"""What the rest of cairn knows of a transfer: plain records, and two seams of a few methods each.

    SchedulerSide   offers leases (as prefill server) and starts pulls (as decode server)      one per engine
    WorkerSide      carries out the reads of a pull on one rank                                one per rank

The scheduler speaks in tokens and page numbers, a worker turns them into byte ranges for its link (`links.contract`).
No method of the two waits: all are called again and again by one owner, which may sleep while nothing is open.
"""

from dataclasses import dataclass, field
from typing import Annotated, NewType, Protocol

import msgspec
import numpy as np

from cairn.transfer.links.contract import ReadState
from cairn.types import Keys, Pages

AskId = NewType("AskId", int)
PullId = NewType("PullId", int)

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 26)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


@dataclass(frozen=True, slots=True)
class NamedImage:
    """Tokens [start, start + length) stand for an image; `digest`, 32 bytes, says which. Their key tokens are numbers
    of one process alone."""

    start: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ContentName:
    """Under which root the key tokens stand: prompts of different names never share anything. `images`: in order, what
    stands behind key tokens below 0."""

    adapter: str = ""
    salt: str | None = None
    images: tuple[NamedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerGeometry:
    """How one rank of a server cuts its pages and checkpoints. Sizes in bytes, see `cairn.cache.layout`."""

    block_size: _Count
    page_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    page_units: _Count
    header_bytes: _Size
    state_bytes: _Size
    state_units: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1


def num_range_pages(start: int, end: int, block_size: int) -> int:
    """How many pages of `block_size` tokens the tokens [start, end) lie in."""
    return -(-end // block_size) - start // block_size if start < end else 0


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that has proved itself. `ranks`: what its links say of themselves, one entry per rank."""

    engine_id: str
    geometry: PeerGeometry
    ranks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this server is to others. `me.engine_id` is new at every start; `layout` is `digest.layout_hash`."""

    me: Peer
    layout: bytes


@dataclass(frozen=True, slots=True)
class HeldCheckpoint:
    """A checkpoint file that resumes the sequence at `position`."""

    position: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Offer:
    """What a prefill server holds for one decode server: pages that cover `keys`, and checkpoints on the way."""

    request_id: str
    name: ContentName
    keys: Keys
    pages: Pages
    checkpoints: tuple[HeldCheckpoint, ...]

    @property
    def all_pages(self) -> Pages:
        """Those of the tokens and of the checkpoints."""
        return np.concatenate([self.pages, *(checkpoint.pages for checkpoint in self.checkpoints)])


@dataclass(frozen=True, slots=True)
class Want:
    """What a decode server lacks of one offer.

    Tokens [start, len(keys)) are to land in `pages`; `start` is a multiple of the own block size, or len(keys) when
    no page is lacking. `checkpoint`: the file that is to receive the state, None when the own one is deep enough.
    `release_only`: nothing is lacking at all; the offer is given back unused.
    """

    request_id: str
    nonce: bytes
    engine_id: str
    host: str
    port: int
    name: ContentName
    keys: Keys
    start: int
    pages: Pages
    checkpoint: Pages | None
    release_only: bool = False


@dataclass(frozen=True, slots=True)
class ContentWant:
    """What a server lacks of `keys` and another one may hold, without a lease: a hint says where.

    Tokens [start, position) land in the first of `pages`. `position` is the other side's word: a multiple of 64 or
    `end`, greater than `start`, at most len(keys). `end`: how many tokens the other side's sequence had, where the hint
    says so: answers, and the checkpoints at their ends, seldom end at a multiple of 64. `start` is a multiple of the
    own block size; `pages` cover all of [start, len(keys)), or are empty when no page is lacking. `checkpoint`: the
    file that may receive a state, None when none is wanted; it stays as it is where the other side has none.
    `request_id`: the own request's, for messages alone.
    """

    request_id: str
    engine_id: str
    host: str
    port: int
    name: ContentName
    keys: Keys
    start: int
    pages: Pages
    checkpoint: Pages | None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class PullEnded:
    """The pull's outcome is known. `failure` None: tokens up to `position` may be used, and the checkpoint at
    `checkpoint_position` where one was wanted (of a ContentWant: where there was one, else None). Otherwise nothing of
    it may be, and the text says why. `volume`: what was read."""

    pull: PullId
    failure: str | None
    position: int = 0
    checkpoint_position: int | None = None
    volume: "Volume | None" = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PagesFree:
    """No write of this pull can come any more: the pages of its `Want` are their owner's again. Comes with or after
    `PullEnded`, never before it."""

    pull: PullId


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The pages of an offer need not be held any longer. `state`: how it ended."""

    remote_request_id: str
    state: str


@dataclass(frozen=True, slots=True)
class ContentAsked:
    """Another server asks what is held of a sequence that it knows by digests alone: `marks` are those of its first 64,
    128, ... tokens, 32 bytes each (`digest.ContentDigest`), `end` is that of one more prefix, or None. It lacks tokens
    from `start` on, and a checkpoint when `checkpoint`. To be answered by `SchedulerSide.answer` within
    `content_lookups.LookupLimits.seconds`."""

    ask: AskId
    adapter: str
    marks: bytes
    start: int
    checkpoint: bool
    end: bytes | None = None


Event = PullEnded | PagesFree | LeaseEnded | ContentAsked


class SchedulerSide(Protocol):
    """The connector as the scheduler sees it."""

    def has_room(self, pages: Pages, num_more: int = 0) -> bool:
        """Whether leases of these pages, and of `num_more` that nobody leases, stay within the share of the pool that
        leases may hold. Pages that are leased already count once. `offer` takes one that is larger than all of it,
        too, while nothing else is leased: a long prompt must be handed over some time."""
        ...

    def offer(self, offer: Offer) -> str:
        """Lease pages that must stay as they are until `LeaseEnded`. Returns the `remote_request_id`."""
        ...

    def withdraw(self, remote_request_id: str) -> None:
        """End an offer early. Unknown or ended ones are left as they are."""
        ...

    def answer(self, ask: AskId, offer: Offer | None) -> str | None:
        """Answer a `ContentAsked`; None: nothing is held. Otherwise `offer.keys` are the tokens held, up to a mark or
        the end of the ask; `has_room` is to be asked first. The offer is leased to whoever asked, and ends in exactly
        one `LeaseEnded`, at once when the answer comes too late. Returns its `remote_request_id`, which is
        `offer.request_id`, "~" and a nonce, as for offers."""
        ...

    def pull(self, want: Want | ContentWant) -> PullId:
        """Start a transfer. Ends in exactly one `PullEnded` and one `PagesFree`."""
        ...

    def abort(self, pull: PullId) -> None:
        """Give a transfer up. Its `PagesFree` may come much later. Ended ones are left as they are."""
        ...

    def events(self) -> list[Event]:
        """What has ended or was asked since the last call, in order."""
        ...


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """Read the peer's `remote_pages` and `remote_checkpoint` into the own pages.

    Tokens [start, end); `remote_pages` cover them in the peer's block size, `local_pages` in the own one.
    """

    pull: Annotated[PullId, msgspec.Meta(ge=0, lt=1 << 62)]
    peer: Peer
    start: _Tokens
    end: _Tokens
    remote_pages: Pages
    local_pages: Pages
    remote_checkpoint: Pages | None
    local_checkpoint: Pages | None


@dataclass(frozen=True, slots=True)
class Volume:
    """What a read took, over all ranks."""

    num_bytes: int = 0
    num_descriptors: int = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(self.num_bytes + other.num_bytes, self.num_descriptors + other.num_descriptors)


class WorkerSide(Protocol):
    """One rank's hands. A read is named by its pull."""

    def start(self, order: ReadOrder) -> None:
        """Post the reads. Raises LinkError when the peer cannot be read; then nothing was posted."""
        ...

    def poll(self, pull: PullId) -> ReadState:
        """How far it is; drives it. Once it is not READING the read is forgotten."""
        ...

    def take_volume(self, pull: PullId) -> Volume:
        """What a read that `poll` has called DONE took; to be asked once."""
        ...

    def cancel(self, pull: PullId) -> None:
        """No longer wanted. `poll` says READING for as long as a late write may come."""
        ...
