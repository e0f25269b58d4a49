"""How many requests may be inside, and whether new ones may come in."""

import asyncio

from cairn.errors import Overloaded, QueueFull


class Gate:
    """Counts the requests that are being answered. Closed for good once the process drains. `who` closes: the server,
    or the proxy."""

    def __init__(self, max_open: int, who: str = "server") -> None:
        self.max_open = max_open
        self.num_open = 0
        self.closed = False
        self._who = who
        self._emptied = asyncio.Event()
        self._emptied.set()

    def enter(self) -> None:
        """Raises Overloaded when closed, QueueFull when full; otherwise `leave` has to follow."""
        if self.closed:
            raise Overloaded(f"the {self._who} is shutting down: send the request to another one")
        if self.num_open >= self.max_open:
            raise QueueFull(f"{self.num_open} requests are open already: try again later")
        self.num_open += 1
        self._emptied.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self._emptied.set()

    def close(self) -> None:
        self.closed = True

    async def wait_empty(self) -> None:
        await self._emptied.wait()
