"""Transfers where the model is cut among processes: every rank reads its own share by its own link.

rank 0   transfer thread: RankedWorker --PAIR socket--> rank r   thread: RankServant -> link -> the rank's pool
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from cairn.engine.ranks.wire import RankService
from cairn.engine.ranks.worker import RankPlace, service_thread
from cairn.engine.transfers.device_pool import open_pool
from cairn.engine.transfers.kv_transfer import MakeLink, RankMemory, nixl_link, rank_worker
from cairn.transfer.geometry import ModelUnits
from cairn.transfer.ranks import RankChannel, RankServant
from cairn.transfer.wire import MAX_FRAME_BYTES

_QUEUED_FRAMES = 4096
_FRAMES_PER_TURN = 256
_READING_MILLISECONDS = 1
_LOOK_MILLISECONDS = 20

logger = logging.getLogger(__name__)


class _Settings(msgspec.Struct, frozen=True):
    """Settings of another rank: the side channel's host, the model's units."""

    host: str
    units: ModelUnits


class _SocketChannel:
    """A `RankChannel` over a PAIR socket within one host. One thread only."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)

    def send(self, frame: bytes) -> None:
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The rank has ended, or stands still: its reads stay open, and their pulls end by their own deadlines.
            logger.warning("a rank takes no orders: %s", error)

    def receive(self) -> Sequence[bytes]:
        frames: list[bytes] = []
        while len(frames) < _FRAMES_PER_TURN:
            try:
                frames.append(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        return frames


class RankSockets:
    """Rank 0's sockets to the other ranks. `others`: of each its channel, and the description of its link."""

    def __init__(self, folder: Path, tp_size: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.others: list[tuple[RankChannel, bytes]] = []
        for rank in range(1, tp_size):
            channel = _SocketChannel(self._context)
            channel.socket.connect(_address(folder, rank))
            self.others.append((channel, _description_of(folder, rank).read_bytes()))

    def close(self) -> None:
        self._context.destroy(linger=0)


def rank_service(host: str, units: ModelUnits) -> RankService:
    """The entry of `RankConfig.services` that has the other ranks serve transfers."""
    settings = msgspec.msgpack.encode(_Settings(host, units))
    return RankService("cairn.engine.ranks.transfer:serve_rank", settings)


@contextmanager
def serve_rank(place: RankPlace, settings: bytes, make_link: MakeLink = nixl_link) -> Iterator[None]:
    """Carries out reads of this rank's share from a thread of its own, as long as the context is open. What others need
    to read from its link is in a file of the private folder then. Raises ConfigError where the link cannot reach the
    rank's memory."""
    decoded = msgspec.msgpack.decode(settings, type=_Settings)
    pool = open_pool(place.runner.pool)
    memory = RankMemory(pool, place.runner.layout, decoded.units, place.rank)
    link = make_link(decoded.host)
    worker = rank_worker(link, memory)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = _SocketChannel(context)
    channel.socket.bind(_address(place.folder, place.rank))
    _description_of(place.folder, place.rank).write_bytes(link.describe())
    servant = RankServant(link, worker, channel)
    stopping = threading.Event()

    def serve() -> None:
        pool.enter_thread()
        while not stopping.is_set():
            channel.socket.poll(_READING_MILLISECONDS if servant.is_reading else _LOOK_MILLISECONDS)
            servant.turn()

    try:
        # without it nobody can read this rank's pages
        with service_thread("transfer", serve, stopping.set):
            yield
    finally:
        link.close()
        context.destroy(linger=0)


def _address(folder: Path, rank: int) -> str:
    return f"ipc://{folder}/transfer-{rank}"


def _description_of(folder: Path, rank: int) -> Path:
    return folder / f"transfer-{rank}.link"
