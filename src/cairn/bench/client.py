"""A client of one server with OpenAI's API: its address, the bodies of requests, and their streamed answers.

Every moment of a request is recorded. A request that fails is a record with its failure; nothing is raised.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import httpx
from httpx_sse import EventSource, SSEError

from cairn.bench.work import Turn
from cairn.errors import CairnError
from cairn.types import Clock

MAX_ANSWER_BYTES = 1 << 30
"""Of one answer; a million tokens with all that may stand beside them are less."""

_MAX_ERROR_BYTES = 1 << 16
_MAX_ERROR_TEXT = 300
_MAX_TOKENS = 1 << 40
_MODELS_SECONDS = 10.0
_READY_POLL_SECONDS = 0.5
_REST_SECONDS = 1.0
"""For what follows the last event of an answer: its end, mostly there already."""
_ROLES = MappingProxyType({"system": "System", "user": "User", "assistant": "Assistant"})


class EventLoopClock:
    """The time of the running event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def wait_until(self, moment: float) -> None:
        """Return at `moment`, or at once when it is past."""
        await asyncio.sleep(max(0.0, moment - self.now()))


ChatMessage = Mapping[str, str]
"""`role` (system, user or assistant) and `content`, as requests have them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of requests, and the fields that all of them have.

    `url`: the endpoint's whole address; `base_url`: its server's. `kind`: which of OpenAI's request bodies it takes;
    `backend`: the user's name for that. `model`: empty for the first one of the server. `fields`: sampling parameters
    and whatever else goes into every body. `headers` and `secrets` are never printed: `redact` removes `secrets` from
    what servers say, too.
    """

    url: str
    kind: Literal["completions", "chat"]
    model: str
    ignore_eos: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    base_url: str = ""
    backend: str = "openai"

    def body(self, history: Sequence[ChatMessage], turn: Turn) -> dict[str, Any]:
        """A streaming request for the turn's answer after `history`, with usage at the end."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.kind == "chat":
            body["messages"] = [*history, {"role": "user", "content": _text(turn)}]
            body["max_completion_tokens"] = turn.max_tokens
        else:
            body["prompt"] = _transcript(history, turn) if history else turn.prompt
            body["max_tokens"] = turn.max_tokens
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.fields)

    def redact(self, text: str) -> str:
        """`text` without the secrets in it."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def _text(turn: Turn) -> str:
    assert isinstance(turn.prompt, str), "chats are made of text: spell token ids first"
    return turn.prompt


def _transcript(history: Sequence[ChatMessage], turn: Turn) -> str:
    """A conversation as one text. Each turn's text is a prefix of the next one's."""
    lines = [f"{_ROLES[message['role']]}: {message['content']}\n" for message in history]
    return "".join(lines) + f"User: {_text(turn)}\nAssistant: "


async def wait_until_ready(http: httpx.AsyncClient, endpoint: Endpoint, clock: EventLoopClock, seconds: float) -> None:
    """Return once the server answers /v1/models with any status below 500. Raises CairnError after `seconds`."""
    deadline = clock.now() + seconds
    while True:
        try:
            response = await _list_models(http, endpoint)
            if response.status_code < 500:
                return
            answer = f"HTTP {response.status_code}"
        except httpx.HTTPError as error:
            answer = str(error) or type(error).__name__
        if clock.now() + _READY_POLL_SECONDS > deadline:
            raise CairnError(f"{endpoint.base_url} was not ready within {seconds:g} s: {answer}")
        await clock.wait_until(clock.now() + _READY_POLL_SECONDS)


async def first_model(http: httpx.AsyncClient, endpoint: Endpoint) -> str:
    """The first model of /v1/models. Raises CairnError that says what to do."""
    try:
        response = await _list_models(http, endpoint)
        answer = f"HTTP {response.status_code}"
        if response.status_code == 200:
            match response.json():
                case {"data": [{"id": str(name)}, *_]}:
                    return name
    except (httpx.HTTPError, ValueError) as error:
        answer = str(error) or type(error).__name__
    url = f"{endpoint.base_url}/v1/models"
    raise CairnError(f"{url} names no model ({answer}): is the server there? Name its model with --model")


async def _list_models(http: httpx.AsyncClient, endpoint: Endpoint) -> httpx.Response:
    return await http.get(f"{endpoint.base_url}/v1/models", headers=dict(endpoint.headers), timeout=_MODELS_SECONDS)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. `kind`: failures are counted by it; `detail`: the message of this one."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are seconds of the load's clock.

    `sent`: when the request was sent; `token_times`: when each event with tokens came; `ended`: time of the last event
    with a choice, or of the failure. `prompt_tokens`, `output_tokens`: from the server's usage, else the prompt's
    intended length and the number of events with tokens. `cached_tokens`: None if the server does not report it.
    `queue_time`: seconds between due and sent.
    """

    sent: float
    ended: float
    prompt_tokens: int
    token_times: tuple[float, ...] = ()
    output_tokens: int = 0
    cached_tokens: int | None = None
    has_usage: bool = False
    text: str = ""
    queue_time: float = 0.0
    failure: Failure | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token (TTFT)."""
        return (self.token_times[0] if self.token_times else self.ended) - self.sent

    @property
    def itls(self) -> tuple[float, ...]:
        """Seconds between one event with tokens and the next (ITL)."""
        return tuple(b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False))

    @property
    def latency(self) -> float:
        """Seconds from sending to the end (E2EL)."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first one (TPOT); None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


class _StreamError(Exception):
    """A stream whose rest is not worth reading."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = Failure(kind, detail)


@dataclass(slots=True)
class _AnswerReader:
    """Reads the events of one answer."""

    clock: Clock
    token_times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    first_choice: float | None = None
    last_choice: float | None = None
    num_tokens: int = 0
    usage: tuple[int, int, int | None] | None = None
    finished: bool = False

    def read_event(self, data: str) -> bool:
        """One event; returns whether it is the last. Raises _StreamError."""
        if data.strip() == "[DONE]":
            self.finished = True
            return True
        now = self.clock.now()
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _StreamError("unreadable event", f"an event is no JSON: {error}") from error
        if not isinstance(event, dict):
            raise _StreamError("unreadable event", "an event is no JSON object")
        if event.get("error") is not None:
            raise _StreamError("error in the stream", _message(event["error"]))
        for choice in _dicts(event.get("choices")):
            self._read_choice(choice, now)
        self.usage = _usage(event.get("usage")) or self.usage
        return False

    def _read_choice(self, choice: Mapping[str, Any], now: float) -> None:
        delta = choice.get("delta")
        part = delta if isinstance(delta, dict) else choice
        text = part.get("content" if isinstance(delta, dict) else "text")
        ids = choice.get("token_ids")
        count = len(ids) if isinstance(ids, list) else 0
        thought = part.get("reasoning_content") or part.get("reasoning") or part.get("tool_calls")
        if text or count or thought:
            self.token_times.append(now)
            self.num_tokens += max(1, count)
        if isinstance(text, str) and choice.get("index", 0) == 0:
            self.texts.append(text)
        self.first_choice = now if self.first_choice is None else self.first_choice
        self.last_choice = now
        self.finished = self.finished or choice.get("finish_reason") is not None


class _BoundedStream(httpx.AsyncByteStream):
    """A body of at most so many bytes: an event without an end would fill the memory."""

    def __init__(self, stream: httpx.AsyncByteStream, max_bytes: int) -> None:
        self._stream = stream
        self._remaining = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._remaining -= len(part)
            if self._remaining < 0:
                raise _StreamError("endless answer", "the answer has more bytes than any answer")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


@dataclass(frozen=True, slots=True)
class HttpSender:
    """Streams answers over HTTP. One client, whose pool of connections bounds how many are open. `seconds`: limit of
    one request, from sending to its last byte; `max_bytes`: of one answer."""

    http: httpx.AsyncClient
    endpoint: Endpoint
    clock: EventLoopClock
    seconds: float
    max_bytes: int = MAX_ANSWER_BYTES

    async def send(self, body: Mapping[str, Any], num_tokens: int) -> RequestRecord:
        """`num_tokens`: length of the prompt as far as known. Raises nothing but CancelledError."""
        content = json.dumps(body, ensure_ascii=False).encode()
        reader = _AnswerReader(self.clock)
        sent = self.clock.now()
        failure: Failure | None = None
        try:
            async with asyncio.timeout(self.seconds):
                await self._ask(content, reader)
        except _StreamError as error:
            failure = error.failure
        except TimeoutError:
            failure = Failure("timeout", f"not answered within {self.seconds:g} s")
        except httpx.ConnectTimeout:
            failure = Failure("connection failed", "the server did not accept the connection in time")
        except httpx.TimeoutException as error:
            failure = Failure("timeout", f"the server was silent for too long ({type(error).__name__})")
        except httpx.ConnectError as error:
            failure = Failure("connection failed", str(error) or type(error).__name__)
        except SSEError as error:
            failure = Failure("no event stream", str(error))
        except httpx.HTTPError as error:
            failure = Failure("connection broken", str(error) or type(error).__name__)
        return self._record(reader, sent, num_tokens, failure or _find_missing(reader))

    async def _ask(self, content: bytes, reader: _AnswerReader) -> None:
        """A server may close a connection that is kept at the very moment at which it is used again: then another one
        is."""
        steps: set[str] = set()

        async def trace(step: str, info: Mapping[str, Any]) -> None:
            steps.add(step)

        try:
            await self._read(content, reader, {"trace": trace})
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            was_kept = "http11.send_request_headers.started" in steps and "connection.connect_tcp.started" not in steps
            if not was_kept or "http11.receive_response_headers.complete" in steps:
                raise
            await self._read(content, reader, {})

    async def _read(self, content: bytes, reader: _AnswerReader, extensions: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **self.endpoint.headers}
        async with self.http.stream(
            "POST", self.endpoint.url, content=content, headers=headers, extensions=extensions
        ) as response:
            if response.status_code != 200:
                raise _StreamError(f"HTTP {response.status_code}", await _error_text(response))
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _BoundedStream(response.stream, self.max_bytes)
            async with aclosing(EventSource(response).aiter_sse()) as events:
                async for event in events:
                    if reader.read_event(event.data):
                        break
                # A connection whose answer was not read to its end is closed, and the next request waits for a new one.
                with suppress(TimeoutError, httpx.HTTPError, SSEError, _StreamError):
                    async with asyncio.timeout(_REST_SECONDS):
                        async for _ in events:
                            pass

    def _record(self, reader: _AnswerReader, sent: float, num_tokens: int, failure: Failure | None) -> RequestRecord:
        if failure is not None:
            failure = Failure(failure.kind, self.endpoint.redact(failure.detail)[:_MAX_ERROR_TEXT])
        usage = reader.usage
        # An answer whose tokens have no text is there with its first choice.
        times = reader.token_times or ([] if reader.first_choice is None else [reader.first_choice])
        ended = self.clock.now() if failure is not None or reader.last_choice is None else reader.last_choice
        return RequestRecord(
            sent=sent,
            ended=ended,
            prompt_tokens=num_tokens if usage is None else usage[0],
            token_times=tuple(times),
            output_tokens=reader.num_tokens if usage is None else usage[1],
            cached_tokens=None if usage is None else usage[2],
            has_usage=usage is not None,
            text="".join(reader.texts),
            failure=failure,
        )


def _find_missing(reader: _AnswerReader) -> Failure | None:
    """The failure of a stream that ended without an error but has no complete answer."""
    if not reader.finished:
        return Failure("stream cut short", "the stream ended before its answer did")
    if reader.first_choice is None:
        return Failure("no answer", "the stream had no choice in it")
    return None


def _usage(usage: Any) -> tuple[int, int, int | None] | None:
    """(prompt, output, cached or None) tokens, where a usage has both of the first."""
    if not isinstance(usage, dict):
        return None
    prompt, output = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if prompt is None or output is None:
        return None
    details = usage.get("prompt_tokens_details")
    return prompt, output, _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_TOKENS else None


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


async def _error_text(response: httpx.Response) -> str:
    """The message of an error response, or its beginning."""
    parts, size = [], 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > _MAX_ERROR_BYTES:
            break
    text = b"".join(parts)[:_MAX_ERROR_BYTES].decode(errors="replace")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _message(content.get("error", content) if isinstance(content, dict) else content)


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
