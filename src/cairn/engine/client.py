"""The part of an EngineClient that does not care where the core runs: who asked what, and who is told."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import msgspec

from cairn.engine.contract import CacheView, EngineStats, GenerateOutput, GenerateRequest
from cairn.engine.grammar_check import GrammarCheck
from cairn.engine.wire import (
    Abort,
    CacheQuery,
    CacheReply,
    Fatal,
    FromCore,
    Outputs,
    Refusal,
    Reset,
    ResetReply,
    StatsQuery,
    StatsReply,
    Submit,
    ToCore,
)
from cairn.errors import EngineDead, InvalidRequest, Overloaded, QueueFull, RequestError
from cairn.types import Clock, SystemClock

__all__ = ["EngineDeadlines", "Mailbox", "Switchboard"]

_MAX_QUERIES = 64

Answer: TypeAlias = EngineStats | CacheView | int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeadlines:
    """How long a client waits for its core, in seconds.

    `start`: to be built. `silence`: a core that owes an answer and says nothing for that long counts as dead; one step
    has to fit. `stats`: to tell its counters. `view`: to show its cache, which it does between steps. `stop`: to end
    once it has been told to.
    """

    start: float = 1800.0
    silence: float = 600.0
    stats: float = 5.0
    view: float = 60.0
    stop: float = 10.0


class Mailbox:
    """The outputs of requests that were submitted together, on their way to their reader.

    Outputs of one answer that come while the reader is busy are merged into one, so a slow reader costs at most its own
    answers.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], GenerateOutput] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: GenerateOutput) -> None:
        answer = output.request_id, output.index
        old = self._outputs.get(answer)
        self._outputs[answer] = output if old is None else _merged(old, output)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """What has been put before is still delivered."""
        self._error = error
        self._news.set()

    async def get(self) -> GenerateOutput:
        await self._news.wait()
        if self._outputs:
            output = self._outputs.pop(next(iter(self._outputs)))
            if self._error is None and not self._outputs:
                self._news.clear()
            return output
        assert self._error is not None
        raise self._error


def _merged(old: GenerateOutput, new: GenerateOutput) -> GenerateOutput:
    return msgspec.structs.replace(
        new,
        token_ids=old.token_ids + new.token_ids,
        text=old.text + new.text,
        logprobs=new.logprobs if old.logprobs is None else old.logprobs.then(new.logprobs),
        prompt_logprobs=new.prompt_logprobs if old.prompt_logprobs is None else old.prompt_logprobs,
    )


class Switchboard:
    """Joins the requests of many readers with one core. Lives in one event loop.

    `send` hands a message to the core and never blocks; when the line is full it raises Overloaded, but never for an
    Abort. `max_open` bounds the open requests; it can be set until the first one comes.
    """

    def __init__(
        self, send: Callable[[ToCore], None], *, max_open: int, deadlines: EngineDeadlines, clock: Clock | None = None
    ) -> None:
        self._send = send
        self.max_open = max_open
        self._silence_seconds = deadlines.silence
        self._stats_seconds = deadlines.stats
        self._view_seconds = deadlines.view
        self._clock = clock = clock or SystemClock()
        self._open: dict[str, Mailbox] = {}
        self._queries: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        self._last_heard = clock.now()
        self._closing = False
        self._dead: str | None = None
        self._died = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._grammars = GrammarCheck()

    @property
    def dead(self) -> str | None:
        return self._dead

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[GenerateOutput]:
        """See EngineClient.generate. Holds its places from the first `anext` to the last finish reason or `aclose`."""
        for structure in dict.fromkeys(request.structure for request in requests):
            if structure is not None:
                await self._grammars.check(structure)
        mailbox = self._enter(requests)
        unfinished = {request.request_id: request.n for request in requests}
        try:
            while unfinished:
                output = await mailbox.get()
                if output.request_id not in unfinished:
                    continue  # another answer to its prompt has failed
                if output.finish_reason is not None:
                    unfinished[output.request_id] -= 1
                    if output.finish_reason == "error" or not unfinished[output.request_id]:
                        del unfinished[output.request_id]
                yield output
        except (EngineDead, RequestError):
            unfinished.clear()
            raise
        finally:
            self._leave(requests, unfinished)

    async def stats(self) -> EngineStats:
        reply = await self._ask(StatsQuery(next(self._numbers)), "tell its counters", self._stats_seconds)
        return cast(EngineStats, reply)

    async def cache_view(self, max_paths: int) -> CacheView:
        reply = await self._ask(CacheQuery(next(self._numbers), max_paths), "show its cache", self._view_seconds)
        return cast(CacheView, reply)

    async def reset_cache(self) -> int:
        reply = await self._ask(Reset(next(self._numbers)), "empty its cache", self._view_seconds)
        return cast(int, reply)

    async def _ask(self, query: StatsQuery | CacheQuery | Reset, what: str, seconds: float) -> Answer:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if len(self._queries) >= _MAX_QUERIES:
            raise EngineDead(f"{_MAX_QUERIES} questions to the engine are open already")
        self._mark_owed()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._queries[query.number] = future
        try:
            self._send(query)
            async with asyncio.timeout(seconds):
                return await future
        except (TimeoutError, Overloaded) as error:
            raise EngineDead(f"the engine did not {what} within {seconds} s") from error
        finally:
            del self._queries[query.number]

    def receive(self, message: FromCore) -> None:
        """Pass a message of the core on to whom it is for."""
        self._last_heard = self._clock.now()
        match message:
            case Outputs(outputs):
                for output in outputs:
                    if mailbox := self._open.get(output.request_id):
                        mailbox.put(output)
            case Refusal(request_id):
                if mailbox := self._open.get(request_id):
                    mailbox.fail(message.error())
            case StatsReply(number, answer) | CacheReply(number, answer) | ResetReply(number, answer):
                future = self._queries.get(number)
                if future is not None and not future.done():
                    future.set_result(answer)
            case Fatal(text):
                self.fail(text)

    def fail(self, reason: str, *, asked_for: bool = False) -> None:
        """The core has ended: tell everybody. Only the first reason counts."""
        if self._dead is not None:
            return
        self._dead = reason
        if not asked_for:
            self._died.set()
        for mailbox in self._open.values():
            mailbox.fail(EngineDead(reason))
        for future in self._queries.values():
            if not future.done():
                future.set_exception(EngineDead(reason))

    async def wait_dead(self) -> str:
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    async def drain(self, seconds: float) -> None:
        """Take nothing new, and wait at most `seconds` for the open requests to end."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._emptied.wait()

    async def aclose(self) -> None:
        """The end: the child that looks at grammars ends, too."""
        await self._grammars.aclose()

    async def watch(self) -> None:
        """Fail when the core has been silent for too long. Runs until cancelled."""
        while self._dead is None:
            await asyncio.sleep(self._silence_seconds / 10)
            silence = self._clock.now() - self._last_heard
            if (self._open or self._queries) and silence > self._silence_seconds:
                self.fail(f"the engine core has said nothing for {silence:.0f} s")

    def _enter(self, requests: Sequence[GenerateRequest]) -> Mailbox:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._closing:
            raise Overloaded("the engine is shutting down: no new requests")
        if len(requests) > self.max_open:
            raise InvalidRequest(f"{len(requests)} prompts are more than may be open: send fewer at a time", "prompt")
        if len(self._open) + len(requests) > self.max_open:
            raise QueueFull(f"{len(self._open)} requests are open already: try again later")
        ids = [request.request_id for request in requests]
        for place, request_id in enumerate(ids):
            if request_id in self._open or request_id in ids[:place]:
                raise InvalidRequest(f"a request with the id {request_id!r} is open already", "request_id")
        self._mark_owed()
        self._send(Submit(list(requests)))
        mailbox = Mailbox()
        self._open.update(dict.fromkeys(ids, mailbox))
        self._emptied.clear()
        return mailbox

    def _leave(self, requests: Sequence[GenerateRequest], unfinished: Container[str]) -> None:
        for request in requests:
            del self._open[request.request_id]
            if request.request_id in unfinished and self._dead is None:
                self._send(Abort(request.request_id))
        if not self._open:
            self._emptied.set()

    def _mark_owed(self) -> None:
        if not self._open and not self._queries:
            self._last_heard = self._clock.now()
