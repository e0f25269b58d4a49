"""Which requests may be inside, and how long the ones inside may go on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cairn.errors import Overloaded, QueueFull
from cairn.http.failures import failed


class Gate:
    """Counts the requests that are being answered, and ends them when their time is up. Closed for good on draining."""

    def __init__(self, max_open: int, request_seconds: float) -> None:
        self._max_open = max_open
        self._seconds = request_seconds
        self._limits: set[asyncio.Timeout] = set()
        self._cut_short = False
        self._emptied = asyncio.Event()
        self._emptied.set()
        self.closed = False
        self.num_open = 0

    def enter(self) -> None:
        """Raises Overloaded when closed, QueueFull when full; otherwise `leave` has to follow."""
        if self.closed:
            raise Overloaded("the proxy is shutting down: send the request to another one")
        if self.num_open >= self._max_open:
            raise QueueFull(f"{self.num_open} requests are open already: try again later")
        self.num_open += 1
        self._emptied.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self._emptied.set()

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """The time that one answer may take. Raises RequestError when it is up."""
        try:
            async with asyncio.timeout(0 if self._cut_short else self._seconds) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self._cut_short:
                raise Overloaded("the proxy is shutting down: the answer was cut short") from None
            raise failed(f"the answer was not there within {self._seconds:g} s", 504, "deadline_exceeded") from None

    def cut_short(self) -> None:
        """End what is still open, now."""
        self._cut_short = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)

    async def wait_empty(self) -> None:
        await self._emptied.wait()
