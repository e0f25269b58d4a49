"""A server inside the test: answers that come at moments of a loop whose time passes only by waiting."""

import asyncio
import heapq
import json
from dataclasses import dataclass, field

import httpx

from cairn.bench.client import Endpoint, EventLoopClock, HttpSender
from cairn.bench.load import LoadGenerator

URL = "http://server.test/v1/completions"


class VirtualLoop(asyncio.SelectorEventLoop):
    """Goes from one timer to the next at once: what waits a minute takes no time, and ends at second 60 exactly."""

    def __init__(self):
        super().__init__()
        self._virtual = 0.0

    def time(self):
        return self._virtual

    def _run_once(self):
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)._scheduled = False
            self._timer_cancelled_count -= 1
        if not self._ready and self._scheduled:
            self._virtual = max(self._virtual, self._scheduled[0].when())
        super()._run_once()


def virtually(coroutine):
    """The coroutine's result, in a loop with a time of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


@dataclass(frozen=True)
class Answer:
    """What a request gets: `pieces` of the body as (seconds after the request, bytes), then `ending`, if it is an
    error, `after` so many seconds more."""

    pieces: tuple = ()
    status: int = 200
    kind: str = "text/event-stream"
    ending: Exception | None = None
    after: float = 0.0


class _Body(httpx.AsyncByteStream):
    def __init__(self, answer, start, closed):
        self._answer, self._start, self._closed = answer, start, closed

    async def __aiter__(self):
        loop = asyncio.get_running_loop()
        for seconds, data in self._answer.pieces:
            await asyncio.sleep(max(0.0, self._start + seconds - loop.time()))
            yield data
        await asyncio.sleep(self._answer.after)
        if self._answer.ending is not None:
            raise self._answer.ending

    async def aclose(self):
        self._closed()


@dataclass
class Server(httpx.AsyncBaseTransport):
    """Gives its answers one by one, the last one for ever; `answer_to`, where set, makes one from a body instead."""

    answers: list = field(default_factory=list)
    answer_to: object = None
    bodies: list = field(default_factory=list)
    times: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0

    async def handle_async_request(self, request):
        self.bodies.append(json.loads(request.content) if request.content else None)
        self.times.append(asyncio.get_running_loop().time())
        self.headers.append(request.headers)
        if self.answer_to is not None:
            answer = self.answer_to(self.bodies[-1])
        else:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        body = _Body(answer, self.times[-1], self._closed)
        return httpx.Response(answer.status, headers={"content-type": answer.kind}, stream=body)

    def _closed(self):
        self.open_now -= 1


def event(**fields):
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def token(text="x", finish=None, **more):
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish, **more}])


def usage(prompt, output, cached=None):
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return event(choices=[], usage=counts)


DONE = b"data: [DONE]\n\n"


def answer_at(*times, prompt=10, cached=0, with_usage=True):
    """An answer of one token at each of these times."""
    pieces = [(at, token("x", "length" if at == times[-1] else None)) for at in times]
    end = [(times[-1], usage(prompt, len(times), cached))] if with_usage else []
    return Answer((*pieces, *end, (times[-1], DONE)))


async def send(server, *, seconds=600.0, secrets=(), num_tokens=7, max_bytes=1 << 20):
    """One request to it."""
    async with httpx.AsyncClient(transport=server) as http:
        endpoint = Endpoint(URL, "completions", "m", secrets=secrets)
        sender = HttpSender(http, endpoint, EventLoopClock(), seconds, max_bytes)
        return await sender.send({"prompt": [1]}, num_tokens)


async def run(server, work, *, due=None, concurrency=100, kind="completions", stop_at=None, ended=None, seconds=600.0):
    """A load on it."""
    stop = asyncio.Event()
    if stop_at is not None:
        asyncio.get_running_loop().call_later(stop_at, stop.set)
    async with httpx.AsyncClient(transport=server) as http:
        sender = HttpSender(http, Endpoint(URL, kind, "m"), EventLoopClock(), seconds)
        load = LoadGenerator(sender, concurrency)
        return await load.run(work, due or [0.0] * len(work), stop, ended or (lambda outcome: None))
