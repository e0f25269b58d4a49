"""What rank 0 and another rank of the same server say to each other: msgpack records on a way that loses nothing.

    rank 0 -> rank   StartRead, CancelRead, Serve, Describe
    rank -> rank 0   ReadEnded, Described

Both ends are processes of one server, started together from the same version; nobody else can reach the way between
them, so there is no proof and no version. What is no record of the schema is still dropped and counted.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec

from cairn.transfer.contract import ReadOrder
from cairn.transfer.wire import RecordFrames, decode_array, encode_array

Ended: TypeAlias = Literal["done", "failed", "cancelled"]
"""How a read can end: the values of `ReadState` but "reading"."""

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class RankChannel(Protocol):
    """One end of the way between rank 0 and one other rank. Frames arrive whole, once and in order, or not at all when
    the other end is gone."""

    def send(self, frame: bytes) -> None:
        """Put a frame on its way. Never waits, and never raises for the other end's sake."""
        ...

    def receive(self) -> Sequence[bytes]:
        """What has arrived since the last call. Never waits."""
        ...


class StartRead(msgspec.Struct, frozen=True, tag="start", eq=False):
    """Carry this order out on your rank."""

    order: ReadOrder


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


def to_rank() -> RecordFrames[ToRank]:
    return RecordFrames(msgspec.msgpack.Decoder(ToRank, dec_hook=decode_array), encode_array)


def from_rank() -> RecordFrames[FromRank]:
    return RecordFrames(msgspec.msgpack.Decoder(FromRank))
