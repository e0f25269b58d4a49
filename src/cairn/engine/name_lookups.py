"""Host names to addresses, beside the thread that must not wait for a name server."""

import queue
import socket
import threading
from collections.abc import Callable

_MAX_OPEN = 16


class NameLookups:
    """`wake` is called, by another thread, when there is something to `take`. At most 16 lookups at a time; how long
    one takes is the system's resolver's to say, and whoever waits for it has a deadline of its own."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._done: queue.SimpleQueue[tuple[str, str | Exception]] = queue.SimpleQueue()
        self._open: set[str] = set()

    def start(self, host: str) -> bool:
        """Look this name up, if it is not being looked up already; False if there are too many."""
        if host not in self._open:
            if len(self._open) >= _MAX_OPEN:
                return False
            self._open.add(host)
            threading.Thread(target=self._look_up, args=(host,), name="cairn-name-lookup", daemon=True).start()
        return True

    def take(self) -> list[tuple[str, str | Exception]]:
        """Names and their addresses, or why there is none, since the last call."""
        found: list[tuple[str, str | Exception]] = []
        while not self._done.empty():
            found.append(self._done.get_nowait())
            self._open.discard(found[-1][0])
        return found

    def _look_up(self, host: str) -> None:
        try:
            entries = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
            self._done.put((host, str(entries[0][4][0])))
        # UnicodeError: a label that is no host name's
        except (OSError, UnicodeError) as error:
            self._done.put((host, error))
        self._wake()
