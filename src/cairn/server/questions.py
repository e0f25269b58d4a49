"""What callers want to know of the engine: each has a deadline of its own, and only so many may wait at once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cairn.errors import EngineDead, Overloaded

Answer = TypeVar("Answer")


class Questions:
    """One kind of question.

    `what` the engine is to do, in words; `seconds`: a caller's whole wait, from its arrival on, behind others included;
    `max_waiting`: callers that may wait at once; `dead`: why the engine has ended, None while it lives.
    """

    def __init__(self, what: str, *, seconds: float, max_waiting: int, dead: Callable[[], str | None]) -> None:
        self._what = what
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._dead = dead
        self._waiting = 0

    async def ask(self, asking: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `asking` brings. Raises Overloaded (503) when there is no room or no answer in time, EngineDead when
        there will never be one."""
        if self._waiting >= self._max_waiting:
            raise Overloaded(f"{self._waiting} callers wait for the engine to {self._what} already: try again later")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._seconds):
                return await asking()
        except TimeoutError:
            raise Overloaded(f"the engine did not {self._what} within {self._seconds:g} s: try again later") from None
        except EngineDead as error:
            if self._dead() is not None:
                raise
            # The engine lives: it has not answered in its own time, or has too many questions to answer.
            raise Overloaded(f"{error}: try again later") from error
        finally:
            self._waiting -= 1
