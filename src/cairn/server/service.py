"""What the routes share: the engine, the gate, the meters, and one thread for the tokenizer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cairn.engine.contract import EngineClient, EngineStats, TextTokenizer
from cairn.errors import EngineDead, Overloaded
from cairn.http.middleware import Gate, random_id
from cairn.server.images import MediaConnector
from cairn.server.logprobs import LogprobsFormatter
from cairn.server.metrics import Metrics
from cairn.server.options import ServerLimits, ServerOptions
from cairn.server.parsers.registry import select_parsers
from cairn.types import Clock, SystemClock

# Together less than the questions that an engine has open at once: none of the three kinds shuts another out.
_MAX_COUNTING = 24
_MAX_EMPTYING = 24
# These share one question.
_MAX_LOOKING = 256

Result = TypeVar("Result")


class BoundedQueries:
    """One kind of question to the engine: each caller has a deadline of its own, and only so many may wait at once.

    `what` the engine is to do, in words; `seconds`: a caller's whole wait, from its arrival on, behind others included;
    `max_waiting`: callers that may wait at once; `dead`: why the engine has ended, None while it lives.
    """

    def __init__(self, what: str, *, seconds: float, max_waiting: int, dead: Callable[[], str | None]) -> None:
        self._what = what
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._dead = dead
        self._waiting = 0

    async def ask(self, asking: Callable[[], Awaitable[Result]]) -> Result:
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


class EngineQueries:
    """What callers ask the engine: to tell its counters, to show its cache, to empty it."""

    def __init__(self, engine: EngineClient, limits: ServerLimits) -> None:
        def queries(what: str, seconds: float, max_waiting: int) -> BoundedQueries:
            return BoundedQueries(what, seconds=seconds, max_waiting=max_waiting, dead=lambda: engine.dead)

        self.counting = queries("tell its counters", limits.stats_seconds, _MAX_COUNTING)
        self.looking = queries("show its cache", limits.view_seconds, _MAX_LOOKING)
        self.emptying = queries("empty its cache", limits.view_seconds, _MAX_EMPTYING)
        self._engine = engine
        self._stats = EngineStats()

    async def stats(self) -> EngineStats:
        """The engine's counters; the last known ones when it does not answer in time."""
        try:
            self._stats = await self.counting.ask(self._engine.stats)
        except (EngineDead, Overloaded):
            return self._stats
        return self._stats


class TokenizerThread:
    """The engine's tokenizer beside the event loop. One thread: fast tokenizers refuse to be used from two at once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cairn-tokenizer")

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await self.run(lambda: self._tokenizer.encode(text, add_special_tokens))

    async def decode(self, token_ids: list[int]) -> str:
        return await self.run(lambda: self._tokenizer.decode(token_ids))

    async def run(self, work: Callable[[], Result]) -> Result:
        """For what asks the tokenizer for many tokens, such as the log-probabilities of a whole prompt."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Service:
    """One server's state. `clock` measures, `wall` dates answers (seconds since 1970), `new_id` names requests."""

    def __init__(
        self,
        engine: EngineClient,
        options: ServerOptions,
        limits: ServerLimits,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
        new_id: Callable[[], str] = random_id,
        images: MediaConnector | None = None,
    ) -> None:
        self.engine = engine
        self.options = options
        self.limits = limits
        self.clock = clock or SystemClock()
        self.wall = wall
        self.new_id = new_id
        self.started = int(wall())
        self.images = images or MediaConnector(limits.images)
        info = engine.info
        self.gate = Gate(limits.max_open if limits.max_open is not None else info.max_num_seqs + info.max_waiting)
        self.metrics = Metrics(engine.info, options.model_name)
        self.parsers = select_parsers(
            engine.tokenizer.chat_template, options.tool_call_parser, options.reasoning_parser
        )
        self.logprobs_formatter = LogprobsFormatter(lambda token: engine.tokenizer.token_bytes(token))
        self.queries = EngineQueries(engine, limits)
        self.tokenizer = TokenizerThread(engine.tokenizer)

    @property
    def healthy(self) -> bool:
        return self.engine.dead is None and not self.gate.closed

    async def aclose(self) -> None:
        self.tokenizer.close()
        await self.images.aclose()
