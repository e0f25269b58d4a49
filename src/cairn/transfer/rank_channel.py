"""What rank 0 and another rank of the same server say to each other: msgpack records on a way that loses nothing.

    rank 0 -> rank   StartRead, CancelRead, Serve, Describe
    rank -> rank 0   ReadEnded, Described

Both ends are processes of one server, started together from the same version; nobody else can reach the way between
them, so there is no proof and no version. What is no record of the schema is still dropped and counted.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec

from cairn.transfer.contract import Peer, PeerGeometry, PullId, ReadOrder
from cairn.transfer.frames import Frames, pack_pages, unpack_pages
from cairn.transfer.links.contract import LinkError

Ended: TypeAlias = Literal["done", "failed", "cancelled"]
"""How a read can end: the values of `ReadState` but "reading"."""

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 26)]


class RankChannel(Protocol):
    """One end of the way between rank 0 and one other rank. Frames arrive whole, once and in order, or not at all when
    the other end is gone."""

    def send(self, frame: bytes) -> None:
        """Put a frame on its way. Never waits, and never raises for the other end's sake."""
        ...

    def receive(self) -> Sequence[bytes]:
        """What has arrived since the last call. Never waits."""
        ...


class StartRead(msgspec.Struct, frozen=True, tag="start"):
    """A `ReadOrder`; page lists as `frames.pack_pages` writes them."""

    pull: _Number
    engine_id: str
    geometry: PeerGeometry
    ranks: list[bytes]
    start: _Tokens
    end: _Tokens
    remote_pages: bytes
    local_pages: bytes
    checkpoint: tuple[bytes, bytes] | None


class CancelRead(msgspec.Struct, frozen=True, tag="cancel"):
    """The read is not wanted any more; ReadEnded comes when nothing can arrive."""

    pull: _Number


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Whether peers may be reading from here."""

    on: bool


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """What does your link say of itself?"""


class ReadEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The answer to StartRead, once: nothing more is written for this pull. `failure`: why it never began."""

    pull: _Number
    state: Ended
    failure: str = ""
    num_bytes: _Number = 0
    num_descriptors: _Number = 0


class Described(msgspec.Struct, frozen=True, tag="described"):
    """Answers Describe."""

    description: bytes


ToRank: TypeAlias = StartRead | CancelRead | Serve | Describe
FromRank: TypeAlias = ReadEnded | Described


def to_rank() -> Frames[ToRank]:
    return Frames(msgspec.msgpack.Decoder(ToRank))


def from_rank() -> Frames[FromRank]:
    return Frames(msgspec.msgpack.Decoder(FromRank))


def start_read(order: ReadOrder) -> StartRead:
    remote, local = order.remote_checkpoint, order.local_checkpoint
    return StartRead(
        order.pull,
        order.peer.engine_id,
        order.peer.geometry,
        list(order.peer.ranks),
        order.start,
        order.end,
        pack_pages(order.remote_pages),
        pack_pages(order.local_pages),
        None if remote is None or local is None else (pack_pages(remote), pack_pages(local)),
    )


def order_of(record: StartRead) -> ReadOrder:
    """The order again. Raises LinkError when a page list is broken."""
    remote_file, local_file = record.checkpoint or (b"", b"")
    lists = [unpack_pages(packed) for packed in (record.remote_pages, record.local_pages, remote_file, local_file)]
    remote, local, remote_checkpoint, local_checkpoint = lists
    if remote is None or local is None or remote_checkpoint is None or local_checkpoint is None:
        raise LinkError("a page list is broken")
    return ReadOrder(
        PullId(record.pull),
        Peer(record.engine_id, record.geometry, tuple(record.ranks)),
        record.start,
        record.end,
        remote,
        local,
        remote_checkpoint if record.checkpoint else None,
        local_checkpoint if record.checkpoint else None,
    )
