"""How long the requests inside may go on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cairn.errors import Overloaded
from cairn.http.failures import failed
from cairn.http.gate import Gate


class TimedGate(Gate):
    """Ends the requests inside when their time is up. `turned_away` is called for each that may not come in."""

    def __init__(self, max_open: int, request_seconds: float, turned_away: Callable[[], None]) -> None:
        super().__init__(max_open, "proxy")
        self._seconds = request_seconds
        self._turned_away = turned_away
        self._limits: set[asyncio.Timeout] = set()
        self._cut_short = False

    def enter(self) -> None:
        try:
            super().enter()
        except Overloaded:
            self._turned_away()
            raise

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
