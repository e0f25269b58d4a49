"""A service beside a rank, as another process's test needs it: it tells what lies in the rank's pages."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from cairn.engine.ranks.worker import RankPlace


@contextmanager
def page_reader(place: RankPlace, settings: bytes) -> Iterator[None]:
    """Answers each page number with the page's bytes, on a socket named by `settings`, from a thread of its own."""
    context = zmq.Context()
    socket = context.socket(zmq.REP)
    socket.bind(f"ipc://{place.folder}/{settings.decode()}-{place.rank}")

    def serve() -> None:
        try:
            while True:
                page = int(socket.recv())
                socket.send(place.runner.pool[page].numpy().tobytes())
        except zmq.ContextTerminated:
            socket.close(linger=0)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    context.term()
    thread.join(5)
