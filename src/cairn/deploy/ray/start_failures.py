"""Why no replica could be started: what a replica says then, and what is found of it in Ray's status."""

import asyncio
from collections.abc import Callable

from cairn.errors import CairnError
from cairn.types import Clock, SystemClock

_MARK = "cairn: "
_MAX_CHARACTERS = 400
_ASK_SECONDS = 2.0
_KEEP_SECONDS = 5.0


def start_failure(error: CairnError) -> RuntimeError:
    """What a replica raises: Ray has the text in the status of its deployment, among a traceback."""
    return RuntimeError(f"{_MARK}{' '.join(str(error).split())}")


def find_failure(message: str) -> str:
    """The reason in the message of a deployment's status, in one line; empty where there is none. Of an error that is
    not cairn's own it is the last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    failures = [line.partition(_MARK)[2] for line in lines if f"RuntimeError: {_MARK}" in line]
    return (failures or lines or [""])[-1][:_MAX_CHARACTERS]


class StartFailures:
    """Asks for the status at most every 5 s, and waits for it at most 2 s. `read_message`: blocks."""

    def __init__(self, read_message: Callable[[], str], clock: Clock | None = None) -> None:
        self._read_message = read_message
        self._clock = clock or SystemClock()
        self._reading: asyncio.Future[str] | None = None
        self._next = 0.0

    async def find(self) -> str:
        """As `find_failure`."""
        if self._reading is None or (self._reading.done() and self._clock.now() >= self._next):
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read_message))
            self._next = self._clock.now() + _KEEP_SECONDS
        await asyncio.wait((self._reading,), timeout=_ASK_SECONDS)
        if not self._reading.done() or self._reading.exception() is not None:
            return ""
        return find_failure(self._reading.result())
