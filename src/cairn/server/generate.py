"""One request's way through the engine and back to its client: measured, with a deadline, whole or as a stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cairn.engine.contract import MAX_ANSWERS, GenerateOutput, GenerateRequest
from cairn.errors import CairnError, InvalidRequest, QueueFull, RequestError
from cairn.http.clients import cancel_on_disconnect
from cairn.http.error_responses import ClientDisconnected, encode_error, make_error
from cairn.server.error_handlers import to_request_error
from cairn.server.metrics import RequestMeter
from cairn.server.response_writer import ResponseWriter
from cairn.server.sampling import rename_error_param
from cairn.server.service import Service

_LAST_EVENT_SECONDS = 10.0


class Deadline:
    """A moment until which a request has to be answered."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = asyncio.get_running_loop().time() + seconds

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._at - asyncio.get_running_loop().time())

    def limit(self) -> asyncio.Timeout:
        """A context that raises TimeoutError at the moment."""
        return asyncio.timeout_at(self._at)

    def missed(self) -> CairnError:
        return make_error(f"the answer was not there within {self._seconds:g} s", 504, "deadline_exceeded")


@dataclass(frozen=True, slots=True)
class Job:
    """Requests, one for each prompt, who writes their answers, and by when. `arrived`: seconds of the service's
    clock."""

    requests: tuple[GenerateRequest, ...]
    writer: ResponseWriter
    arrived: float
    deadline: Deadline


PromptOutput: TypeAlias = tuple[int, GenerateOutput]
"""An output, behind the number of its prompt."""


async def respond(http: Request, service: Service, job: Job) -> Response:
    """The response to a job. Raises CairnError if it fails before its first byte, ClientDisconnected."""
    if not job.writer.body.stream:
        content = await cancel_on_disconnect(http.receive, _whole(service, job))
        return Response(content, media_type="application/json")
    news = _outputs(service, job)
    # Wait for the first output: until then a failure still has an HTTP status of its own.
    first = await cancel_on_disconnect(http.receive, _first(news))
    return EventStream(_events(service, job, first, news), job.deadline.seconds_left + _LAST_EVENT_SECONDS)


async def _first(news: AsyncGenerator[PromptOutput, None]) -> PromptOutput:
    return await anext(news)


async def _whole(service: Service, job: Job) -> bytes:
    writer = job.writer
    async with aclosing(_outputs(service, job)) as news:
        async for prompt, output in news:
            writer.add(prompt, output)
    if job.requests[0].prompt_logprobs is not None:
        return await service.tokenizer.run(lambda: msgspec.json.encode(writer.whole()))
    return msgspec.json.encode(writer.whole())


async def _outputs(service: Service, job: Job) -> AsyncGenerator[PromptOutput, None]:
    """The engine's outputs to all prompts, measured; closing this aborts what is open. A job that the engine does not
    take has not begun, and is counted nowhere."""
    numbers = {request.request_id: number for number, request in enumerate(job.requests)}
    meters = {
        (number, index): RequestMeter(service.metrics, job.arrived, None if index else len(request.prompt) // 8)
        for number, request in enumerate(job.requests)
        for index in range(min(request.n, MAX_ANSWERS))  # the core refuses more
    }
    outputs = service.engine.generate(*job.requests)
    outcome, begun = "abort", False
    try:
        left = max(1, len(meters))
        while left:
            try:
                async with job.deadline.limit():
                    output = await anext(outputs)
            except TimeoutError:
                raise job.deadline.missed() from None
            except RequestError as error:
                if not begun:
                    meters.clear()
                raise rename_error_param(error, job.writer.body) from None
            number = numbers[output.request_id]
            meter = meters[number, output.index]
            if output.transfer is not None:
                service.metrics.observe_transfer(output.transfer)
            if output.finish_reason == "error":
                failure = _failure(output)
                if isinstance(failure, QueueFull) and not begun:
                    meters.clear()
                raise failure
            begun = True
            meter.record(output, service.clock.now())
            left -= output.finish_reason is not None
            yield number, _without_tokens(output) if job.writer.body.max_tokens == 0 else output
    except CairnError:
        outcome = "error"
        raise
    finally:
        for meter in meters.values():
            meter.end(outcome)
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()


def _failure(output: GenerateOutput) -> RequestError:
    text = output.error or "the engine could not answer"
    if output.status == InvalidRequest.status:
        return InvalidRequest(text)
    if output.status == QueueFull.status:
        return QueueFull(text)
    return make_error(text, output.status, "engine_error")


def _without_tokens(output: GenerateOutput) -> GenerateOutput:
    """Of a request that wants its prompt echoed and nothing else."""
    finish = None if output.finish_reason is None else "length"
    return msgspec.structs.replace(output, token_ids=[], text="", logprobs=None, finish_reason=finish, stop_reason=None)


async def _events(
    service: Service, job: Job, first: PromptOutput, news: AsyncGenerator[PromptOutput, None]
) -> AsyncGenerator[bytes, None]:
    """The whole stream, from the opening to [DONE]; a failure on the way is an event of its own."""
    writer, options = job.writer, job.writer.body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    usage_everywhere = include_usage and options is not None and bool(options.continuous_usage_stats)
    async with aclosing(news):
        for chunk in writer.opening():
            yield _event(msgspec.json.encode(chunk | ({"usage": writer.usage()} if usage_everywhere else {})))
        try:
            latest: PromptOutput | None = first
            while latest is not None:
                write = partial(writer.chunk, *latest)
                piece = write() if latest[1].prompt_logprobs is None else await service.tokenizer.run(write)
                if piece is not None:
                    if usage_everywhere:
                        piece["usage"] = writer.usage()
                    if writer.complete and not include_usage:
                        piece["cairn"] = writer.cache_use()
                    yield _event(msgspec.json.encode(piece))
                latest = await anext(news, None)
            if include_usage:
                yield _event(msgspec.json.encode(writer.usage_chunk()))
        except CairnError as error:
            yield _event(encode_error(to_request_error(error)))
        yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends the events of a generator, and closes it when the client goes away or takes too long to read.

    `seconds` bounds the whole stream; the generator should have a deadline of its own that comes first.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await cancel_on_disconnect(receive, self._write(send))
        except (ClientDisconnected, TimeoutError, OSError):
            return

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
