"""A connection between two servers that hold the same secret: frames, whole, once and in order, until it is lost."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from cairn.transfer.peers import Address


class ConnectionLost(Exception):
    """The connection has ended, or could not be made; the text says why."""


class Stream(Protocol):
    """One end of a connection whose other end has proved that it holds the secret."""

    async def send(self, frame: bytes) -> None:
        """Returns when there was room for the frame; whoever waits has a deadline. Raises ConnectionLost."""

    async def receive(self) -> bytes:
        """The next frame. Raises ConnectionLost."""

    def close(self, reason: str) -> None:
        """End the connection, without waiting for what the sockets have not taken yet. Does nothing for one that has
        ended."""


Connect: TypeAlias = Callable[[Address], Awaitable[Stream]]
"""Makes a connection to a producer, whose host may be connected to. Raises ConnectionLost."""
