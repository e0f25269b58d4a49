"""Ends a ZMQ poll from another thread."""

import contextlib
import socket

import zmq


class Waker:
    """A pipe to oneself. The thread that polls owns everything but `wake`."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        poller.register(self._woken, zmq.POLLIN)

    def wake(self) -> None:
        """For other threads."""
        # a full pipe wakes just as well
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def take(self, ready: dict[object, int]) -> None:
        """Let the next poll wait again, if `ready`, what a poll returned, says that this one was woken."""
        if ready.pop(self._woken.fileno(), None):
            self._woken.recv(4096)

    def close(self) -> None:
        self._waker.close()
        self._woken.close()
