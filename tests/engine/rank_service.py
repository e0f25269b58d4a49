"""What the ranks' processes import for a test: a service that tells what lies in a rank's pages, and graphs that only
rank 0 has."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from cairn.engine.ranks.worker import RankPlace

OWNER_OF_GRAPHS = "OWNER_OF_GRAPHS"
"""The variable with the process id of the only rank that has graphs."""


def make_graphs_on_rank_zero() -> None:
    """Raises RuntimeError in any other process, as a recording that fails does."""
    if os.environ[OWNER_OF_GRAPHS] != str(os.getpid()):
        raise RuntimeError("no graphs today\nCUDA kernel errors might be ...")


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
