"""The reads of all ranks of a server as one: what rank 0 does, and what every other rank does.

    RankedWorker (rank 0)   own LinkWorker
        | RankChannel       ReadOrder, CancelRead, Serve -> ReadEnded
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


ToRank: TypeAlias = ReadOrder | CancelRead | Serve


TO_RANK: Final = msgspec.msgpack.Decoder(ToRank, dec_hook=decode_array)
FROM_RANK: Final = msgspec.msgpack.Decoder(ReadEnded)


@dataclass(slots=True, eq=False)
class _Read:
    """`reading`: the ranks where it is not over. `end`: the state once it is over on all. `volume`: of the ranks that
    have ended."""

    reading: set[int]
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
        self._serving = False

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
        self._reads[order.pull] = _Read(set(range(1 + len(self._channels))))
        self._broadcast(order)

    def poll(self, pull: PullId) -> ReadEnded | None:
        self._receive()
        read = self._reads.get(pull)
        if read is None:
            raise AssertionError(f"pull {pull} has no read")
        if 0 in read.reading and (ended := self._worker.poll(pull)) is not None:
            self._end(0, ended)
        if read.reading:
            return None
        del self._reads[pull]
        return ReadEnded(pull, read.end, read.failure, read.volume)

    def cancel(self, pull: PullId) -> None:
        if pull in self._reads:
            self._stop(pull, ReadState.CANCELLED)

    def _end(self, rank: int, ended: ReadEnded) -> None:
        read = self._reads[ended.pull]
        read.reading.discard(rank)
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
        for rank in read.reading:
            if rank == 0:
                self._worker.cancel(pull)
            else:
                self._channels[rank - 1].send(encode(CancelRead(pull)))

    def _broadcast(self, record: ToRank) -> None:
        frame = encode(record)
        for channel in self._channels:
            channel.send(frame)

    def _receive(self) -> None:
        for rank, channel in enumerate(self._channels, 1):
            for frame in channel.receive():
                if (ended := self.frames.decode(frame, FROM_RANK)) is not None:
                    read = self._reads.get(ended.pull)
                    if read is None or rank not in read.reading:
                        self.frames.dropped += 1
                    else:
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
                case ReadOrder(pull=pull) if pull in self._open:
                    self.frames.dropped += 1
                case ReadOrder() as order:
                    self._start(order)
                case CancelRead(pull=pull) if pull in self._open:
                    self._worker.cancel(pull)
                case Serve(on=on):
                    self._serving = on
        for pull in list(self._open):
            if (ended := self._worker.poll(pull)) is not None:
                self._open.discard(pull)
                self._channel.send(encode(ended))
        if self._serving:
            self._link.progress()

    def _start(self, order: ReadOrder) -> None:
        try:
            self._worker.start(order)
        except LinkError as error:
            self._channel.send(encode(ReadEnded(order.pull, ReadState.FAILED, str(error))))
        else:
            self._open.add(order.pull)
