"""Whether a grammar compiles, found out in a process that can be ended."""

import asyncio
import contextlib
import math
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cairn.engine.contract import Structure
from cairn.errors import InvalidRequest, Overloaded
from cairn.types import Clock, SystemClock

_COMMAND = (sys.executable, "-P", "-m", "cairn.engine.grammar_worker")
_SECONDS = 5.0
_START_SECONDS = 30.0
_WAIT_SECONDS = 20.0
_KEPT = 256
_DOUBTFUL_SECONDS = 60.0
_LINE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class _Answer:
    """Why a grammar is refused, None for one that compiles; `until`: for how long that is believed, in seconds of the
    clock."""

    reason: str | None
    until: float = math.inf


class GrammarCheck:
    """Asks one child process at a time, started when it is first needed. Lives in one event loop.

    `seconds`: how long a grammar may take. One that takes longer is refused, and the child replaced. Answers are
    remembered, refusals too, so that nobody pays twice for the same grammar; but time and memory may have been short
    for another reason, so a refusal for want of them holds for a minute.
    """

    def __init__(
        self, seconds: float = _SECONDS, command: Sequence[str] = _COMMAND, clock: Clock | None = None
    ) -> None:
        self._seconds = seconds
        self._command = command
        self._clock = clock or SystemClock()
        self._known: OrderedDict[Structure, _Answer] = OrderedDict()
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def check(self, structure: Structure) -> None:
        """Raises InvalidRequest naming the field, or Overloaded when others have kept the child busy for too long."""
        answer = self._remembered(structure)
        if answer is None:
            try:
                async with asyncio.timeout(_WAIT_SECONDS):
                    await self._turn.acquire()
            except TimeoutError:
                raise Overloaded("too many grammars wait to be compiled: try again later") from None
            try:
                answer = self._remembered(structure)
                if answer is None:
                    answer = await self._ask(structure)
                    self._remember(structure, answer)
            finally:
                self._turn.release()
        if answer.reason is not None:
            raise InvalidRequest(answer.reason, structure.field.partition(".")[0])

    async def aclose(self) -> None:
        """End the child. It may be asked again: then there is a new one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _remembered(self, structure: Structure) -> _Answer | None:
        answer = self._known.get(structure)
        if answer is None or answer.until <= self._clock.now():
            return None
        self._known.move_to_end(structure)
        return answer

    def _remember(self, structure: Structure, answer: _Answer) -> None:
        self._known[structure] = answer
        self._known.move_to_end(structure)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    async def _ask(self, structure: Structure) -> _Answer:
        process = await self._child()
        assert process.stdin is not None and process.stdout is not None
        done = False
        try:
            async with asyncio.timeout(self._seconds):
                process.stdin.write(msgspec.json.encode(structure) + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
                done = bool(line)
        except TimeoutError:
            return self._doubtful(f"{structure.field} takes more than {self._seconds:g} s to compile: simplify it")
        except (ConnectionError, ValueError):
            line = b""
        finally:
            if not done:
                await self.aclose()
        if not line:
            return self._doubtful(f"{structure.field} takes too much memory to compile: simplify it")
        return _Answer(msgspec.json.decode(line, type=str | None))

    def _doubtful(self, reason: str) -> _Answer:
        return _Answer(reason, self._clock.now() + _DOUBTFUL_SECONDS)

    async def _child(self) -> asyncio.subprocess.Process:
        """The child, which has said that it is there: to start it is not to count against a grammar."""
        if self._process is None or self._process.returncode is not None:
            # what ends this early, a client that leaves too, must not leave the first answer for the next question
            ready = False
            try:
                async with asyncio.timeout(_START_SECONDS):
                    self._process = await asyncio.create_subprocess_exec(
                        *self._command,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=asyncio.subprocess.DEVNULL,
                        limit=_LINE_BYTES,
                    )
                    assert self._process.stdin is not None and self._process.stdout is not None
                    self._process.stdin.write(msgspec.json.encode(_HARMLESS) + b"\n")
                    ready = bool(await self._process.stdout.readline())
            except (TimeoutError, OSError):
                pass
            finally:
                if not ready:
                    await self.aclose()
            if not ready or self._process is None:
                raise Overloaded("grammars cannot be compiled at the moment: try again later")
        return self._process


_HARMLESS = Structure(kind="regex", text="a", field="regex")
