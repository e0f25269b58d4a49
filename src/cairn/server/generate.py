"""One request's way through the engine and back to its client: measured, with a deadline, whole or as a stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cairn.engine.contract import GenerateOutput, GenerateRequest
from cairn.errors import CairnError
from cairn.http.failures import failed
from cairn.http.leaving import unless_gone
from cairn.server.answers import Answer, AnswerShape, cairn_part, usage_part
from cairn.server.failures import describe
from cairn.server.metrics import RequestMeter
from cairn.server.requests import SamplingFields
from cairn.server.service import Service
from cairn.server.streaming import DONE_EVENT, EventStream, event

__all__ = ["Deadline", "Job", "respond"]

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
        return failed(f"the answer was not there within {self._seconds:g} s", 504, "deadline_exceeded")


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request, how to write its answer, and by when. `arrived`: seconds of the service's clock."""

    request: GenerateRequest
    shape: AnswerShape
    body: SamplingFields
    arrived: float
    deadline: Deadline

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt) // 8


async def respond(http: Request, service: Service, job: Job) -> Response:
    """The answer to a job. Raises CairnError when it fails before its first byte, ClientGone when nobody waits."""
    if not job.body.stream:
        answer = await unless_gone(http.receive, _whole(service, job))
        return Response(msgspec.json.encode(job.shape.whole(answer)), media_type="application/json")
    outputs = _outputs(service, job)
    # Wait for the first output: until then a failure still has an HTTP status of its own.
    first = await unless_gone(http.receive, _first(outputs))
    return EventStream(_events(job, first, outputs), job.deadline.seconds_left + _LAST_EVENT_SECONDS)


async def _first(outputs: AsyncGenerator[GenerateOutput, None]) -> GenerateOutput:
    return await anext(outputs)


async def _whole(service: Service, job: Job) -> Answer:
    answer = Answer(job.prompt_tokens)
    async with aclosing(_outputs(service, job)) as outputs:
        async for output in outputs:
            answer.add(output)
    return answer


async def _outputs(service: Service, job: Job) -> AsyncGenerator[GenerateOutput, None]:
    """The engine's outputs, measured; closing this aborts the request."""
    meter = RequestMeter(service.metrics, job.arrived, job.prompt_tokens)
    outputs = service.engine.generate(job.request)
    outcome = "abort"
    try:
        finished = False
        while not finished:
            try:
                async with job.deadline.limit():
                    output = await anext(outputs)
            except TimeoutError:
                raise job.deadline.missed() from None
            meter.transfer(output)
            if output.finish_reason == "error":
                raise failed(output.error or "the engine could not answer", output.status, "engine_error")
            meter.output(output, service.clock.now())
            finished = output.finish_reason is not None
            yield output
    except CairnError:
        outcome = "error"
        raise
    finally:
        meter.end(outcome)
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()


async def _events(
    job: Job, first: GenerateOutput, outputs: AsyncGenerator[GenerateOutput, None]
) -> AsyncGenerator[bytes, None]:
    """The whole stream, from the opening to [DONE]; a failure on the way is an event of its own."""
    shape, answer = job.shape, Answer(job.prompt_tokens)
    options = job.body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    usage_everywhere = include_usage and options is not None and bool(options.continuous_usage_stats)
    async with aclosing(outputs):
        for chunk in shape.opening():
            yield event(chunk)
        try:
            output: GenerateOutput | None = first
            while output is not None:
                answer.add(output)
                if output.text or output.finish_reason is not None or job.body.return_token_ids:
                    chunk = shape.chunk(output, output is first)
                    if usage_everywhere:
                        chunk["usage"] = usage_part(answer)
                    if output.finish_reason is not None and not include_usage:
                        chunk["cairn"] = cairn_part(answer)
                    yield event(chunk)
                output = await anext(outputs, None)
            if include_usage:
                yield event(shape.usage_chunk(answer))
        except CairnError as error:
            yield event(describe(error)[0])
        yield DONE_EVENT
