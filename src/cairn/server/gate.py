"""How many requests may be inside, and whether new ones may come in."""

import asyncio

from cairn.errors import Overloaded

__all__ = ["Gate"]


class Gate:
    """Counts the requests that are being answered. Closed for good once the server drains."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._num_open = 0
        self._closed = False
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def num_open(self) -> int:
        return self._num_open

    def enter(self) -> None:
        """Raises Overloaded when closed or full; otherwise `leave` has to follow."""
        if self._closed:
            raise Overloaded("the server is shutting down: send the request to another one")
        if self._num_open >= self._max_open:
            raise Overloaded(f"{self._num_open} requests are open already: try again later")
        self._num_open += 1
        self._emptied.clear()

    def leave(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._emptied.set()

    def close(self) -> None:
        self._closed = True

    async def wait_empty(self) -> None:
        await self._emptied.wait()
