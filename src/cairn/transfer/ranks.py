"""The reads of all ranks of a server as one: what rank 0 does, and what every other rank does.

    RankedWorker (rank 0)   own LinkWorker
        | RankChannel       ReadOrder, CancelRead, Serve, Describe -> ReadEnded, Described
    RankServant (rank r)    own Link, own LinkWorker

The records are plain msgpack. Both ends are processes of one server, started together from the same version, and nobody
else can reach the way between them, so there is no proof and no version. A frame that is no record is dropped and
counted.

A read is done when it is done on every rank. When it fails on one, it is cancelled on the others, and stays READING
until none of them can be written to any more: only then does the consumer ask for confirmation, or free the pages. A
rank that does not answer keeps its read READING for ever. Its pull fails by its own deadline, and its pages stay in
quarantine: a process that stands still may go on and write at any time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import msgspec

from cairn.transfer.contract import PullId, PullNumber, ReadEnded, ReadOrder, Volume, WorkerSide
from cairn.transfer.links.contract import Link, LinkError, ReadState
from cairn.transfer.wire import FrameReader, decode_array, encode

_MAX_DESCRIPTIONS = 1 << 20


class RankChannel(Protocol):
    """One end of the way between rank 0 and one other rank. Frames arrive whole, once and in order, or not at all when
    the other process has ended."""

    def send(self, frame: bytes) -> None:
        """Send a frame. Never waits, and never raises because of the other process."""

    def receive(self) -> Sequence[bytes]:
        """Frames since the last call. Never waits."""


class CancelRead(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel a read; ReadEnded comes when nothing can be written any more."""

    pull: PullNumber


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Whether peers may be reading from this server, so that links have to make progress."""

    on: bool


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Ask for the description of the rank's link."""


class Described(msgspec.Struct, frozen=True, tag="described"):
    """Answers Describe."""

    description: bytes


ToRank: TypeAlias = ReadOrder | CancelRead | Serve | Describe
FromRank: TypeAlias = ReadEnded | Described


TO_RANK: Final = msgspec.msgpack.Decoder(ToRank, dec_hook=decode_array)
FROM_RANK: Final = msgspec.msgpack.Decoder(FromRank)


@dataclass(slots=True, eq=False)
class _Read:
    """`states`: by rank. `end`: the state of all once none is READING. `volume`: of the ranks that have ended."""

    states: list[ReadState]
    end: ReadState = ReadState.DONE
    failure: str = ""
    volume: Volume = field(default_factory=Volume)


class RankedWorker:
    """A `WorkerSide` over rank 0, whose link and worker are here, and the ranks at the other ends of `channels`, in
    order."""

    def __init__(self, link: Link, worker: WorkerSide, channels: Sequence[RankChannel]) -> None:
        self.link = link
        self._worker = worker
        self._channels = tuple(channels)
        self.frames = FrameReader()
        self._reads: dict[PullId, _Read] = {}
        self._descriptions: dict[int, bytes] = {}
        self._serving = False

    def describe(self) -> tuple[bytes, ...] | None:
        """The descriptions of all ranks' links, for `Peer.ranks`; None until all have answered. Call it again and
        again; the caller has the deadline."""
        if not self._descriptions:
            self._descriptions[0] = self.link.describe()
            self._broadcast(Describe())
        self._receive()
        if len(self._descriptions) <= len(self._channels):
            return None
        return tuple(self._descriptions[rank] for rank in range(1 + len(self._channels)))

    def serve(self, on: bool) -> None:
        """Whether peers may be reading from here: then the other ranks make progress by themselves, and this one
        with every call."""
        if on is not self._serving:
            self._serving = on
            self._broadcast(Serve(on))
        if on:
            self.link.progress()

    def start(self, order: ReadOrder) -> None:
        if sum(map(len, order.peer.ranks)) > _MAX_DESCRIPTIONS:
            raise LinkError(f"the peer's ranks have descriptions of more than {_MAX_DESCRIPTIONS} bytes")
        self._worker.start(order)
        self._reads[order.pull] = _Read([ReadState.READING] * (1 + len(self._channels)))
        self._broadcast(order)

    def poll(self, pull: PullId) -> ReadEnded | None:
        self._receive()
        read = self._reads.get(pull)
        if read is None:
            raise AssertionError(f"pull {pull} has no read")
        if read.states[0] is ReadState.READING and (ended := self._worker.poll(pull)) is not None:
            self._end(0, ended)
        if ReadState.READING in read.states:
            return None
        del self._reads[pull]
        return ReadEnded(pull, read.end, read.failure, read.volume)

    def cancel(self, pull: PullId) -> None:
        if pull in self._reads:
            self._stop(pull, ReadState.CANCELLED)

    def _end(self, rank: int, ended: ReadEnded) -> None:
        read = self._reads[ended.pull]
        read.states[rank] = ended.state
        read.volume += ended.volume
        if ended.failure:
            read.failure = f"rank {rank}: {ended.failure}"
        if ended.state is not ReadState.DONE:
            self._stop(ended.pull, ReadState.FAILED)

    def _stop(self, pull: PullId, end: ReadState) -> None:
        """Cancel the read on the ranks where it is not over; the first reason counts."""
        read = self._reads[pull]
        if read.end is not ReadState.DONE:
            return
        read.end = end
        if read.states[0] is ReadState.READING:
            self._worker.cancel(pull)
        for channel, state in zip(self._channels, read.states[1:], strict=True):
            if state is ReadState.READING:
                channel.send(encode(CancelRead(pull)))

    def _broadcast(self, record: ToRank) -> None:
        frame = encode(record)
        for channel in self._channels:
            channel.send(frame)

    def _receive(self) -> None:
        for rank, channel in enumerate(self._channels, 1):
            for frame in channel.receive():
                match self.frames.decode(frame, FROM_RANK):
                    case Described(description=description):
                        self._descriptions[rank] = description
                    case ReadEnded(pull=pull) as ended:
                        read = self._reads.get(pull)
                        if read is None or read.states[rank] is not ReadState.READING:
                            self.frames.dropped += 1
                            continue
                        self._end(rank, ended)


class RankServant:
    """Every rank but the first: carries out what comes by `channel`. Call `turn` whenever a frame may have come and,
    while it is not idle, again and again."""

    def __init__(self, link: Link, worker: WorkerSide, channel: RankChannel) -> None:
        self._link = link
        self._worker = worker
        self._channel = channel
        self.frames = FrameReader()
        self._open: set[PullId] = set()
        self._serving = False

    @property
    def is_reading(self) -> bool:
        """Whether a read is open here."""
        return bool(self._open)

    def turn(self) -> None:
        """Handle the frames that have come, drive the reads, answer those that have ended."""
        for frame in self._channel.receive():
            match self.frames.decode(frame, TO_RANK):
                case ReadOrder() as order:
                    self._start(order)
                case CancelRead(pull=pull) if pull in self._open:
                    self._worker.cancel(pull)
                case Serve(on=on):
                    self._serving = on
                case Describe():
                    self._send(Described(self._link.describe()))
        for pull in list(self._open):
            if (ended := self._worker.poll(pull)) is not None:
                self._open.discard(pull)
                self._send(ended)
        if self._serving:
            self._link.progress()

    def _start(self, order: ReadOrder) -> None:
        if order.pull in self._open:
            self.frames.dropped += 1
            return
        try:
            self._worker.start(order)
        except LinkError as error:
            self._send(ReadEnded(order.pull, ReadState.FAILED, str(error)))
        else:
            self._open.add(order.pull)

    def _send(self, record: FromRank) -> None:
        self._channel.send(encode(record))
