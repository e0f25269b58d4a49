"""The reads of all ranks of a server as one: what rank 0 does, and what every other rank does.

    RankedWorker (rank 0)   own LinkWorker
        | RankChannel       StartRead, CancelRead -> ReadEnded
    RankServant (rank r)    own Link, own LinkWorker

What they say to each other are msgpack records on a way that loses nothing: StartRead, CancelRead, Serve and Describe
to a rank, ReadEnded and Described from it. Both ends are processes of one server, started together from the same
version; nobody else can reach the way between them, so there is no proof and no version. What is no record of the
schema is still dropped and counted.

A read is done when it is done on every rank. The first rank that fails has it cancelled on the others, and it stays
READING until none of them can be written to any more: only then does the consumer ask for confirmation, or give pages
back. A rank that does not answer keeps its read READING for ever. Its pull fails by its own deadline, and its pages
stay in quarantine: no clock can say that a process which stands still will not go on and write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec

from cairn.transfer.contract import PullId, ReadOrder, Volume, WorkerSide
from cairn.transfer.links.contract import Link, LinkError, ReadState
from cairn.transfer.wire import RecordFrames, decode_array, encode_array

_MAX_DESCRIPTIONS = 1 << 20

Ended: TypeAlias = Literal["done", "failed", "cancelled"]
"""How a read can end: the values of `ReadState` but "reading"."""

_ENDED: Mapping[ReadState, Ended] = MappingProxyType(
    {ReadState.DONE: "done", ReadState.FAILED: "failed", ReadState.CANCELLED: "cancelled"}
)

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


@dataclass(slots=True, eq=False)
class _Read:
    """`states`: by rank. `end`: what is said once none of them is READING. `volume`: of the ranks that are done."""

    states: list[ReadState]
    end: ReadState = ReadState.DONE
    volume: Volume = field(default_factory=Volume)

    @property
    def is_open(self) -> bool:
        return ReadState.READING in self.states


class RankedWorker:
    """A `WorkerSide` over rank 0, whose link and worker are here, and the ranks at the other ends of `channels`, in
    order. `last_failure`: what a rank said when it could not begin. `dropped` counts frames that were no answer."""

    def __init__(self, link: Link, worker: WorkerSide, channels: Sequence[RankChannel]) -> None:
        self._link = link
        self._worker = worker
        self._channels = tuple(channels)
        self._to = to_rank()
        self._from = from_rank()
        self._reads: dict[PullId, _Read] = {}
        self._volumes: dict[PullId, Volume] = {}
        self._descriptions: list[bytes | None] = [None] * len(channels)
        self._described = False
        self._serving = False
        self._ignored = 0
        self.last_failure: str | None = None

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    @property
    def dropped(self) -> int:
        return self._from.dropped + self._ignored

    def describe(self) -> tuple[bytes, ...] | None:
        """What the links of all ranks say of themselves, for `Peer.ranks`; None until all have answered. Call it again
        and again; how long is the caller's affair."""
        if not self._described:
            self._described = True
            self._tell(Describe())
        self._hear()
        known = [description for description in self._descriptions if description is not None]
        return (self._link.describe(), *known) if len(known) == len(self._channels) else None

    def serve(self, on: bool) -> None:
        """Whether peers may be reading from here: then the other ranks make progress by themselves, and this one
        with every call."""
        if on is not self._serving:
            self._serving = on
            self._tell(Serve(on))
        if on:
            self._link.progress()

    def start(self, order: ReadOrder) -> None:
        if sum(map(len, order.peer.ranks)) > _MAX_DESCRIPTIONS:
            raise LinkError(f"the peer's ranks say more than {_MAX_DESCRIPTIONS} bytes of themselves")
        self._worker.start(order)
        self._reads[order.pull] = _Read([ReadState.READING] * (1 + len(self._channels)))
        self._tell(StartRead(order))

    def poll(self, pull: PullId) -> ReadState:
        self._hear()
        read = self._reads.get(pull)
        if read is None:
            raise AssertionError(f"pull {pull} has no read")
        if read.states[0] is ReadState.READING:
            self._look_at_own(pull, read)
        if read.is_open:
            return ReadState.READING
        del self._reads[pull]
        if read.end is ReadState.DONE:
            self._volumes[pull] = read.volume
        return read.end

    def take_volume(self, pull: PullId) -> Volume:
        return self._volumes.pop(pull)

    def _look_at_own(self, pull: PullId, read: _Read) -> None:
        state = self._worker.poll(pull)
        if state is ReadState.DONE:
            read.volume += self._worker.take_volume(pull)
        self._ended(pull, 0, state)

    def cancel(self, pull: PullId) -> None:
        if (read := self._reads.get(pull)) is not None:
            self._stop(pull, read, ReadState.CANCELLED)

    def _stop(self, pull: PullId, read: _Read, end: ReadState) -> None:
        if read.end is not ReadState.DONE:
            return
        read.end = end
        if read.states[0] is ReadState.READING:
            self._worker.cancel(pull)
        for channel, state in zip(self._channels, read.states[1:], strict=True):
            if state is ReadState.READING:
                channel.send(self._to.encode(CancelRead(pull)))

    def _ended(self, pull: PullId, rank: int, state: ReadState) -> None:
        read = self._reads[pull]
        read.states[rank] = state
        if state in (ReadState.FAILED, ReadState.CANCELLED):
            self._stop(pull, read, ReadState.FAILED)

    def _tell(self, record: ToRank) -> None:
        frame = self._to.encode(record)
        for channel in self._channels:
            channel.send(frame)

    def _hear(self) -> None:
        for rank, channel in enumerate(self._channels, 1):
            for frame in channel.receive():
                record = self._from.decode(frame)
                if record is not None:
                    self._take(rank, record)

    def _take(self, rank: int, record: FromRank) -> None:
        match record:
            case Described(description=description):
                self._descriptions[rank - 1] = description
            case ReadEnded(pull=number, state=state, failure=failure, num_bytes=size, num_descriptors=count):
                pull = PullId(number)
                read = self._reads.get(pull)
                if read is None or read.states[rank] is not ReadState.READING:
                    self._ignored += 1
                    return
                if failure:
                    self.last_failure = f"rank {rank}: {failure}"
                read.volume += Volume(size, count)
                self._ended(pull, rank, ReadState(state))


@dataclass(slots=True, eq=False)
class RankServant:
    """Every rank but the first: carries out what comes by `channel`. Call `turn` whenever a frame may have come and,
    while it is not idle, again and again. `dropped` counts frames that were no order."""

    link: Link
    worker: WorkerSide
    channel: RankChannel
    dropped: int = 0
    _open: set[PullId] = field(default_factory=set, init=False)
    _serving: bool = field(default=False, init=False)

    @property
    def is_idle(self) -> bool:
        """Whether nothing has to be done until the next frame."""
        return not self._open and not self._serving

    @property
    def is_reading(self) -> bool:
        """Whether a read is open here: then every look counts."""
        return bool(self._open)

    def turn(self) -> None:
        """Take the frames that are there, drive the reads, tell what has ended."""
        orders = to_rank()
        for frame in self.channel.receive():
            record = orders.decode(frame)
            if record is not None:
                self._take(record)
        self.dropped += orders.dropped
        for pull in list(self._open):
            state = self.worker.poll(pull)
            if state is not ReadState.READING:
                self._open.discard(pull)
                volume = self.worker.take_volume(pull) if state is ReadState.DONE else Volume()
                self._tell(ReadEnded(pull, _ENDED[state], "", volume.num_bytes, volume.num_descriptors))
        if self._serving:
            self.link.progress()

    def _take(self, record: ToRank) -> None:
        match record:
            case StartRead(order=order):
                self._start(order)
            case CancelRead(pull=pull):
                if pull in self._open:
                    self.worker.cancel(PullId(pull))
            case Serve(on=on):
                self._serving = on
            case Describe():
                self._tell(Described(self.link.describe()))

    def _start(self, order: ReadOrder) -> None:
        if order.pull in self._open:
            self.dropped += 1
            return
        try:
            self.worker.start(order)
        except LinkError as error:
            self._tell(ReadEnded(order.pull, "failed", str(error)))
        else:
            self._open.add(order.pull)

    def _tell(self, record: FromRank) -> None:
        self.channel.send(from_rank().encode(record))
