"""Ends a poll from another thread."""

import contextlib
import socket
from collections.abc import Callable


class Waker:
    """A pipe to oneself. `register` has the poll look at a socket for something to read. The thread that polls owns
    everything but `wake`."""

    def __init__(self, register: Callable[[socket.socket], object]) -> None:
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        register(self._woken)

    def fileno(self) -> int:
        """What a poll names when it was woken; then call `clear`."""
        return self._woken.fileno()

    def wake(self) -> None:
        """For other threads."""
        # a full pipe wakes just as well, and after `close` nobody waits
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def clear(self) -> None:
        """Let the next poll wait again."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def close(self) -> None:
        self._waker.close()
        self._woken.close()
