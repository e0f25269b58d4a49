"""One request's way through the engine and back to its client: measured, with a deadline, whole or as a stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cairn.engine.contract import FREE_LOGPROBS, MAX_ANSWERS, EngineClient, GenerateOutput, GenerateRequest
from cairn.errors import CairnError, InvalidRequest, LeasesFull, QueueFull, RequestError
from cairn.http.clients import cancel_on_disconnect
from cairn.http.connections import Connection, get_connection
from cairn.http.error_responses import ClientDisconnected, make_error
from cairn.http.middleware import get_body_send
from cairn.server.error_handlers import to_request_error
from cairn.server.metrics import Metrics, RequestMeter
from cairn.server.openai.engine_request import rename_error_param
from cairn.server.openai.response_writer import Choice, ResponseWriter
from cairn.server.tokenizer_thread import TokenizerThread
from cairn.types import Clock

_LAST_EVENT_SECONDS = 10.0
_MAX_ENTRIES = 1024
"""Log-probabilities of one output that are written in the event loop."""

Result = TypeVar("Result")

PromptOutput: TypeAlias = tuple[int, GenerateOutput]
"""The number of a prompt, and an output for it."""

WriteEvents: TypeAlias = Callable[[Sequence[bytes]], Awaitable[None]]
"""Sends server-sent events to a client, all at once."""


class Deadline:
    """The moment until which a request has to be answered, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = asyncio.get_running_loop().time() + seconds

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._at - asyncio.get_running_loop().time())

    @asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Raises RequestError (504) at the deadline."""
        try:
            async with asyncio.timeout_at(self._at):
                yield
        except TimeoutError:
            raise self.error() from None

    def error(self) -> RequestError:
        """What a client is told that the deadline has passed for (504)."""
        return make_error(f"the answer was not there within {self._seconds:g} s", 504)


class OutputBuffer:
    """Collects an answer's outputs until they have `interval` tokens. The first one and the last one go at once."""

    __slots__ = ("_interval", "_pending")

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._pending: dict[tuple[int, int], GenerateOutput | None] = {}

    def add(self, prompt: int, output: GenerateOutput) -> GenerateOutput | None:
        """What is to be sent now, all that has been collected of the answer; None for nothing yet."""
        if self._interval == 1:
            return output
        answer = prompt, output.index
        is_first = answer not in self._pending
        earlier = self._pending.get(answer)
        collected = output if earlier is None else earlier.concat(output)
        is_due = is_first or output.finish_reason is not None or len(collected.token_ids) >= self._interval
        self._pending[answer] = None if is_due else collected
        return collected if is_due else None


class PromptEvents:
    """Writes outputs in the middle of a stream as they come, to a client that keeps up: `connection`'s, once its first
    output has been sent. What comes otherwise, or tells of more than tokens, is to be waited for. `meters`: of the
    answers, as the writer counts them."""

    __slots__ = ("_clock", "_writer", "buffer", "connection", "meters")

    def __init__(self, writer: ResponseWriter, meters: Sequence[RequestMeter], clock: Clock) -> None:
        self._writer, self.meters, self._clock = writer, meters, clock
        self.buffer = OutputBuffer(writer.body.stream_interval or 1)
        self.connection: Connection | None = None

    def take(self, prompt: int, output: GenerateOutput) -> bool:
        """See `TakeOutput`."""
        connection = self.connection
        if connection is None or not connection.can_write:
            return False
        if output.finish_reason is not None or output.logprobs is not None:
            return False
        if output.transfer is not None or output.prompt_logprobs is not None:
            return False
        due = self.buffer.add(prompt, output)
        if due is not None and (events := self._writer.output_events(prompt, due)):
            connection.write(b"".join(events))
        self.meters[prompt * self._writer.n + output.index].record(output, self._clock.now())
        return True


@dataclass(frozen=True, slots=True)
class Generation:
    """The answers to one HTTP request. `requests`: one for each prompt; `arrival_time`: in seconds of
    `clock`."""

    engine: EngineClient
    tokenizer: TokenizerThread
    metrics: Metrics
    clock: Clock
    requests: tuple[GenerateRequest, ...]
    writer: ResponseWriter
    arrival_time: float
    deadline: Deadline

    async def respond(self, http: Request) -> Response:
        """Raises CairnError if it fails before the response's first byte, ClientDisconnected."""
        if not self.writer.body.stream:
            content = await cancel_on_disconnect(http.receive, self._write_response())
            return Response(content, media_type="application/json")
        prompt_events = PromptEvents(self.writer, self._make_meters(), self.clock)
        outputs = self.outputs(prompt_events)

        async def next_output() -> PromptOutput:
            return await anext(outputs)

        # Wait for the first output: until then a failure still has an HTTP status of its own.
        first = await cancel_on_disconnect(http.receive, next_output())
        return EventStream(
            partial(self._write_events, first, outputs, prompt_events), self.deadline.seconds_left + _LAST_EVENT_SECONDS
        )

    async def _write_response(self) -> bytes:
        async with aclosing(self.outputs()) as outputs:
            async for prompt, output in outputs:
                await self.write(partial(self.writer.add, prompt, output), output)
        content = await self.write(lambda: msgspec.json.encode(self.writer.write_response()))
        self.tell_of_calls(self.writer.choices)
        return content

    def tell_of_calls(self, choices: Iterable[Choice]) -> None:
        """Tell the engine which of these answers were calls, before their client knows: its next request comes after
        that."""
        for choice in choices:
            if choice.calls_tools:
                self.engine.await_tools(self.requests[choice.prompt].request_id, choice.index % self.writer.n)

    async def write(self, work: Callable[[], Result], output: GenerateOutput | None = None) -> Result:
        """What the writer makes of an output, or of all without one: in the tokenizer's thread, beside the event loop,
        where it tells of many tokens."""
        if output is None:
            request = self.requests[0]
            has_many = request.prompt_logprobs is not None or (request.logprobs or 0) > FREE_LOGPROBS
            is_long = has_many and self.writer.formats_at_end
        else:
            is_long = _is_long(output)
        return await self.tokenizer.run(work) if is_long else work()

    def _make_meters(self) -> list[RequestMeter]:
        limit = self.engine.info.max_model_len
        return [
            RequestMeter(self.metrics, self.arrival_time, request, index, lengths, limit)
            for request, lengths in ((request, list[int]()) for request in self.requests)
            for index in range(min(request.num_answers, MAX_ANSWERS))  # the core refuses more
        ]

    async def outputs(self, prompt_events: PromptEvents | None = None) -> AsyncGenerator[PromptOutput, None]:
        """The engine's outputs, measured, but for those that `prompt_events` takes. Closing this aborts what is
        running. Requests that the engine does not take are counted nowhere."""
        metrics, body = self.metrics, self.writer.body
        prompts = {request.request_id: i for i, request in enumerate(self.requests)}
        meters = self._make_meters() if prompt_events is None else prompt_events.meters
        take = None if prompt_events is None else prompt_events.take
        outputs = self.engine.generate(*self.requests, seconds=self.deadline.seconds_left, take=take)
        outcome, has_begun, is_refused = "abort", False, False
        try:
            num_open = max(1, len(meters))
            while num_open:
                try:
                    output = await anext(outputs)
                except TimeoutError:
                    raise self.deadline.error() from None
                except RequestError as error:
                    is_refused = not has_begun
                    if isinstance(error, QueueFull) and not isinstance(error, LeasesFull):
                        metrics.queue_full.inc()
                    raise rename_error_param(error, body) from None
                prompt = prompts[output.request_id]
                if output.transfer is not None:
                    metrics.observe_transfer(output.transfer)
                if output.finish_reason == "error":
                    failure = _error_of(output)
                    is_refused = isinstance(failure, QueueFull) and not has_begun
                    raise failure
                has_begun = True
                num_open -= output.finish_reason is not None
                now = self.clock.now()
                try:
                    yield prompt, _drop_tokens(output) if body.max_tokens == 0 else output
                finally:  # the client does not wait for it
                    meters[self.writer.choice_of(prompt, output).index].record(output, now)
        except CairnError:
            outcome = "error"
            raise
        finally:
            for meter in () if is_refused else meters:
                meter.end(outcome)
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()

    async def _write_events(
        self,
        first: PromptOutput,
        outputs: AsyncGenerator[PromptOutput, None],
        prompt_events: PromptEvents,
        write: WriteEvents,
        connection: Connection | None,
    ) -> None:
        """The whole stream: what an output brings is written at once. A failure on the way is an event of its own."""
        writer = self.writer
        async with aclosing(outputs):
            writer.announce(*first)
            if opening := writer.opening_events():
                await write(opening)
            latest: PromptOutput | None = first
            prompt_events.connection = connection
            try:
                while latest is not None:
                    prompt, output = latest
                    if (due := prompt_events.buffer.add(prompt, output)) is not None:
                        if _is_long(due):
                            events = await self.tokenizer.run(partial(writer.output_events, prompt, due))
                        else:
                            events = writer.output_events(prompt, due)
                        if due.finish_reason is not None:
                            self.tell_of_calls([writer.choice_of(prompt, due)])
                        if events:
                            await write(events)
                    latest = await anext(outputs, None)
                closing = writer.closing_events()
            except CairnError as error:
                closing = writer.error_events(to_request_error(error))
            await write(closing)


def _is_long(output: GenerateOutput) -> bool:
    """Whether it tells of too many tokens for the event loop to put them into words."""
    return output.num_logprob_entries > _MAX_ENTRIES


def _error_of(output: GenerateOutput) -> RequestError:
    text = output.error or "the engine could not answer"
    for kind in (InvalidRequest, QueueFull):
        if output.status == kind.status:
            return kind(text)
    return make_error(text, output.status)


def _drop_tokens(output: GenerateOutput) -> GenerateOutput:
    """For a request that wants its prompt echoed and nothing else."""
    finish = None if output.finish_reason is None else "length"
    return msgspec.structs.replace(output, token_ids=[], text="", logprobs=None, finish_reason=finish, stop_reason=None)


class EventStream(Response):
    """Sends server-sent events as they are written, and cancels what writes them when the client disconnects or does
    not read in time.

    `seconds`: for the whole stream; the deadline of what writes it should come first.
    """

    media_type = "text/event-stream"

    def __init__(
        self, write_events: Callable[[WriteEvents, Connection | None], Coroutine[Any, Any, None]], seconds: float
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._write_events = write_events
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await cancel_on_disconnect(receive, self._send_events(scope, send))
        except (ClientDisconnected, TimeoutError, OSError):
            return

    async def _send_events(self, scope: Scope, send: Send) -> None:
        send_body = get_body_send(scope, send)

        def write(events: Sequence[bytes]) -> Awaitable[None]:
            return send_body({"type": "http.response.body", "body": b"".join(events), "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._write_events(write, get_connection(scope))
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})
