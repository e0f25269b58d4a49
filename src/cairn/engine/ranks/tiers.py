"""Tiers where the model is cut among processes: every rank copies its share of pages out of its pool and into it.

rank 0   threads of tiers: RankedTierMemory --SEQPACKET socket--> rank r   threads: TierServant -> the rank's pool
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cairn.engine.ranks.wire import RankService
from cairn.engine.ranks.worker import RankPlace, service_thread
from cairn.engine.tier_memory import open_tier_memory
from cairn.tiers.ranks import TierServant


def tier_service() -> RankService:
    """The entry of `RankConfig.services` that has the other ranks copy for tiers."""
    return RankService("cairn.engine.ranks.tiers:serve_tiers")


def connect_tiers(folder: Path, tp_size: int) -> list[socket.socket]:
    """To the servants of the other ranks, in order, all of which serve by now."""
    connections = []
    for rank in range(1, tp_size):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(_address(folder, rank))
        connections.append(connection)
    return connections


@contextmanager
def serve_tiers(place: RankPlace, _settings: bytes) -> Iterator[None]:
    """Copies this rank's share of pages from threads of its own, as long as the context is open."""
    memory = open_tier_memory(place.runner.pool, on_host=place.computes_on_host)
    servant = TierServant(memory, place.runner.layout.page_bytes, place.rank, place.tp_size)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_address(place.folder, place.rank))
    listener.listen(1)
    stopping, sockets = threading.Event(), [listener]

    def serve() -> None:
        try:
            connection, _ = listener.accept()
            sockets.append(connection)
            servant.serve(connection)
        except Exception:
            if not stopping.is_set():
                raise

    def stop() -> None:
        stopping.set()
        servant.close()
        for each in sockets:
            with suppress(OSError):  # it may have been closed at the other end
                each.shutdown(socket.SHUT_RDWR)

    try:
        # without it rank 0 must not take pages for free that this rank may still write to
        with service_thread("tiers", serve, stop):
            yield
    finally:
        for each in sockets:
            each.close()


def _address(folder: Path, rank: int) -> str:
    return f"{folder}/tier-{rank}"
