"""The EngineClient over a transport: open requests and queries, their deadlines, and what comes back."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

from cairn.engine.contract import (
    CacheView,
    EngineInfo,
    EngineStats,
    GenerateOutput,
    GenerateRequest,
    TakeOutput,
    TextTokenizer,
)
from cairn.engine.detokenizer import Detokenizer
from cairn.engine.wire import (
    Abort,
    AwaitTools,
    CacheQuery,
    CacheReply,
    Fatal,
    FromCore,
    Outputs,
    Refusal,
    ReleaseKvTransfer,
    Reset,
    ResetReply,
    StatsQuery,
    StatsReply,
    Submit,
    ToCore,
)
from cairn.errors import EngineDead, InvalidRequest, Overloaded, QueueFull, RequestError
from cairn.types import Clock, SystemClock

__all__ = ["CoreClient", "EngineDeadlines", "OutputQueue", "Transport"]

_MAX_QUERIES = 64

_Reply: TypeAlias = EngineStats | CacheView | int


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


class OutputQueue:
    """The outputs of requests that were submitted together, on their way to their reader.

    Outputs of one answer that come while the reader is busy are merged into one, so a slow reader costs at most its own
    answers.
    """

    __slots__ = ("_error", "_outputs", "_reader", "take")

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], GenerateOutput] = {}
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self.take: TakeOutput | None = None
        """While the reader waits, and nothing else does: to be asked before `put`."""

    def put(self, output: GenerateOutput) -> None:
        """Nothing is taken after a failure."""
        if self._error is not None:
            return
        answer = output.request_id, output.index
        old = self._outputs.get(answer)
        self._outputs[answer] = output if old is None else old.concat(output)
        self._wake_reader()

    def fail(self, error: Exception) -> None:
        """What has been put before is still delivered."""
        self._error = error
        self._wake_reader()

    async def get(self, take: TakeOutput | None = None) -> GenerateOutput:
        """For one reader at a time. `take` is asked for each output that comes meanwhile; those that it takes are done
        with: to wake the reader for them would take longer than all that it does."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            self.take = take
            try:
                await self._reader
            finally:
                self.take = None
        return self._outputs.pop(next(iter(self._outputs)))

    def _wake_reader(self) -> None:
        self.take = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _OpenRequest(Detokenizer):
    """Request `number` of those that share a queue. One object: what a token has to look at is in no near cache
    when it comes, and takes most of its time."""

    __slots__ = ("number", "queue")

    def __init__(self, queue: OutputQueue, number: int, tokenizer: TextTokenizer, request: GenerateRequest) -> None:
        super().__init__(tokenizer, request)
        self.queue, self.number = queue, number


class Transport(Protocol):
    """The way to a core, which it brings up and ends: `process.ProcessTransport`."""

    async def start(self, receive: Callable[[FromCore], None], fail: Callable[[str], None]) -> EngineInfo:
        """Returns when the core has been built; from then on `receive` gets its messages, and `fail` why it has ended.
        Raises ConfigError or ModelError from building it, and EngineDead if it fell over."""

    def send(self, message: ToCore) -> None:
        """Never blocks. Raises Overloaded when too much waits already, but never for an Abort or a Shutdown."""

    async def close(self, seconds: float) -> None:
        """Ends the core: it is told to, and given so many seconds."""


class CoreClient:
    """An EngineClient of the core behind `transport`. Lives in one event loop. `load_tokenizer` is called in a thread
    while the core is built."""

    def __init__(
        self,
        transport: Transport,
        load_tokenizer: Callable[[], TextTokenizer],
        deadlines: EngineDeadlines | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.transport = transport
        self._load_tokenizer = load_tokenizer
        self._deadlines = deadlines or EngineDeadlines()
        self._clock = clock = clock or SystemClock()
        self._info: EngineInfo | None = None
        self._tokenizer: TextTokenizer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._open: dict[str, _OpenRequest] = {}
        self._queries: dict[int, asyncio.Future[_Reply]] = {}
        self._numbers = itertools.count()
        self._last_heard = clock.now()
        self._closing = False
        self._dead: str | None = None
        self._died = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() first"
        return self._info

    @property
    def tokenizer(self) -> TextTokenizer:
        assert self._tokenizer is not None, "start() first"
        return self._tokenizer

    @property
    def dead(self) -> str | None:
        return self._dead

    async def start(self) -> None:
        loading = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        building = asyncio.create_task(self.transport.start(self.receive, self.fail))
        try:
            async with asyncio.timeout(self._deadlines.start):
                self._info, self._tokenizer = await asyncio.gather(building, loading)
        except BaseException as error:
            loading.cancel()
            building.cancel()
            await asyncio.gather(building, loading, return_exceptions=True)
            await self._end(0.0)
            if isinstance(error, TimeoutError):
                raise EngineDead(f"the engine core was not built within {self._deadlines.start} s") from None
            raise
        self._watching = asyncio.create_task(self.watch())

    async def stop(self, drain_seconds: float) -> None:
        if self._watching is None:
            return
        alive = self._dead is None
        if alive:
            await self._drain(drain_seconds)
        await self._end(self._deadlines.stop if alive else 0.0)

    async def _end(self, seconds: float) -> None:
        await self.transport.close(seconds)
        self.fail("the engine has been stopped", requested=True)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None

    async def generate(
        self, *requests: GenerateRequest, seconds: float | None = None, take: TakeOutput | None = None
    ) -> AsyncIterator[GenerateOutput]:
        """See EngineClient.generate. Holds its places from the first `anext` to the last finish reason or `aclose`."""
        queue = self._submit(requests)
        # One timer for all outputs: to set a timeout for each of them would take longer than to pass them on.
        timer = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, queue.fail, TimeoutError())
        unfinished = {request.request_id: request.num_answers for request in requests}
        try:
            while unfinished:
                output = await queue.get(take)
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
            if timer is not None:
                timer.cancel()
            self._release(requests, unfinished)

    async def stats(self) -> EngineStats:
        reply = await self._ask(StatsQuery(next(self._numbers)), "tell its counters", self._deadlines.stats)
        return cast(EngineStats, reply)

    async def cache_view(self, max_paths: int) -> CacheView:
        reply = await self._ask(CacheQuery(next(self._numbers), max_paths), "show its cache", self._deadlines.view)
        return cast(CacheView, reply)

    async def reset_cache(self) -> int:
        reply = await self._ask(Reset(next(self._numbers)), "empty its cache", self._deadlines.view)
        return cast(int, reply)

    def await_tools(self, request_id: str, index: int = 0) -> None:
        self._tell(AwaitTools(request_id, index))

    def release_kv_transfer(self, kv_transfer_params: bytes) -> None:
        self._tell(ReleaseKvTransfer(kv_transfer_params))

    def _tell(self, message: AwaitTools | ReleaseKvTransfer) -> None:
        if self._dead is None:
            # a core that does not keep up has others to serve
            with contextlib.suppress(InvalidRequest, Overloaded):
                self.transport.send(message)

    async def _ask(self, query: StatsQuery | CacheQuery | Reset, what: str, seconds: float) -> _Reply:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if len(self._queries) >= _MAX_QUERIES:
            raise EngineDead(f"{_MAX_QUERIES} questions to the engine are open already")
        self._restart_silence()
        future: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._queries[query.number] = future
        try:
            self.transport.send(query)
            async with asyncio.timeout(seconds):
                return await future
        except (TimeoutError, Overloaded) as error:
            raise EngineDead(f"the engine did not {what} within {seconds} s") from error
        finally:
            del self._queries[query.number]

    def receive(self, message: FromCore) -> None:
        """Deliver a message of the core to the request or query that waits for it."""
        self._last_heard = self._clock.now()
        match message:
            case Outputs(outputs):
                for output in outputs:
                    if request := self._open.get(output.request_id):
                        try:
                            request.add_text(output)
                            take = request.queue.take
                            if take is None or not take(request.number, output):
                                request.queue.put(output)
                        except Exception as error:  # what is wrong with one answer is its reader's, not the core's
                            request.queue.fail(error)
            case Refusal(request_id):
                if request := self._open.get(request_id):
                    request.queue.fail(message.error())
            case StatsReply(number, answer) | CacheReply(number, answer) | ResetReply(number, answer):
                future = self._queries.get(number)
                if future is not None and not future.done():
                    future.set_result(answer)
            case Fatal(text):
                self.fail(text)

    def fail(self, reason: str, *, requested: bool = False) -> None:
        """The core has ended: fail all open requests and queries. Only the first reason counts."""
        if self._dead is not None:
            return
        self._dead = reason
        if not requested:
            self._died.set()
        for request in self._open.values():
            request.queue.fail(EngineDead(reason))
        for future in self._queries.values():
            if not future.done():
                future.set_exception(EngineDead(reason))

    async def wait_dead(self) -> str:
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    async def _drain(self, seconds: float) -> None:
        """Take nothing new, and wait at most `seconds` for the open requests to end."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._emptied.wait()

    async def watch(self) -> None:
        """Fail when the core has been silent for too long. Runs until cancelled."""
        while self._dead is None:
            await asyncio.sleep(self._deadlines.silence / 10)
            silence = self._clock.now() - self._last_heard
            if (self._open or self._queries) and silence > self._deadlines.silence:
                self.fail(f"the engine core has said nothing for {silence:.0f} s")

    def _submit(self, requests: Sequence[GenerateRequest]) -> OutputQueue:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._closing:
            raise Overloaded("the engine is shutting down: no new requests")
        max_open = self.info.max_num_seqs + self.info.max_waiting
        if len(requests) > max_open:
            raise InvalidRequest(f"{len(requests)} prompts are more than may be open: send fewer at a time", "prompt")
        if len(self._open) + len(requests) > max_open:
            raise QueueFull(f"{len(self._open)} requests are open already: try again later")
        ids = [request.request_id for request in requests]
        for place, request_id in enumerate(ids):
            if request_id in self._open or request_id in ids[:place]:
                raise InvalidRequest(f"a request with the id {request_id!r} is open already", "request_id")
        self._restart_silence()
        self.transport.send(Submit(list(requests)))
        queue = OutputQueue()
        for number, request in enumerate(requests):
            self._open[request.request_id] = _OpenRequest(queue, number, self.tokenizer, request)
        self._emptied.clear()
        return queue

    def _release(self, requests: Sequence[GenerateRequest], unfinished: Container[str]) -> None:
        for request in requests:
            del self._open[request.request_id]
            if request.request_id in unfinished and self._dead is None:
                self.transport.send(Abort(request.request_id))
        if not self._open:
            self._emptied.set()

    def _restart_silence(self) -> None:
        if not self._open and not self._queries:
            self._last_heard = self._clock.now()
