"""What operators ask of the engine: its counters, to show its cache, to empty it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from cairn.engine.contract import EngineClient, EngineStats
from cairn.errors import EngineDead, Overloaded
from cairn.server.options import ServerLimits

# Both together are fewer than the queries that an engine has open at once, so that no kind shuts out another.
_MAX_STATS_QUERIES = 24
_MAX_RESET_QUERIES = 24
_MAX_VIEW_QUERIES = 256  # these share one query to the engine

Result = TypeVar("Result")


class BoundedQueries:
    """One kind of query to the engine: each caller has a deadline of its own, and only so many may wait at once.

    `what`: the engine's task, in words; `seconds`: a caller's whole wait, that for others included; `max_waiting`:
    callers that may wait at once; `get_death`: why the engine has ended, None while it lives.
    """

    def __init__(self, what: str, *, seconds: float, max_waiting: int, get_death: Callable[[], str | None]) -> None:
        self._what = what
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._get_death = get_death
        self._num_waiting = 0

    async def run(self, query: Callable[[], Awaitable[Result]]) -> Result:
        """The query's result. Raises Overloaded (503) if there is no room or no result in time, EngineDead."""
        if self._num_waiting >= self._max_waiting:
            text = f"{self._num_waiting} callers wait for the engine to {self._what} already: try again later"
            raise Overloaded(text)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._seconds):
                return await query()
        except TimeoutError:
            raise Overloaded(f"the engine did not {self._what} within {self._seconds:g} s: try again later") from None
        except EngineDead as error:
            if self._get_death() is not None:
                raise
            # The engine lives: it has not answered in its own time, or has too many queries to answer.
            raise Overloaded(f"{error}: try again later") from error
        finally:
            self._num_waiting -= 1


class OperatorQueries:
    """All kinds of queries to one engine. `views`: to show its cache, for those who share what it says."""

    def __init__(self, engine: EngineClient, limits: ServerLimits) -> None:
        def queries(what: str, seconds: float, max_waiting: int) -> BoundedQueries:
            return BoundedQueries(what, seconds=seconds, max_waiting=max_waiting, get_death=lambda: engine.dead)

        self.views = queries("show its cache", limits.view_seconds, _MAX_VIEW_QUERIES)
        self._engine = engine
        self._stats_queries = queries("tell its counters", limits.stats_seconds, _MAX_STATS_QUERIES)
        self._resets = queries("empty its cache", limits.view_seconds, _MAX_RESET_QUERIES)
        self._stats = EngineStats()

    async def fetch_stats(self) -> EngineStats:
        """The engine's counters. Raises EngineDead, Overloaded."""
        return await self._stats_queries.run(self._engine.stats)

    async def get_stats(self) -> EngineStats:
        """The engine's counters; the last known ones if it does not answer in time."""
        with suppress(EngineDead, Overloaded):
            self._stats = await self.fetch_stats()
        return self._stats

    async def reset_cache(self) -> int:
        """See `EngineClient.reset_cache`. Raises Overloaded, too."""
        return await self._resets.run(self._engine.reset_cache)
