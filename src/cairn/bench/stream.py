"""One request: sent, its stream read, and every moment on the way written down. What fails is said, never raised."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
from httpx_sse import EventSource, SSEError

from cairn.bench.endpoint import Endpoint
from cairn.types import Clock

MAX_ANSWER_BYTES = 1 << 30
"""Of one answer; a million tokens with all that may stand beside them are less."""

_MAX_ERROR_BYTES = 1 << 16
_MAX_ERROR_TEXT = 300
_MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind`: the class that failures are counted by. `detail`: what was said of this one."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request. Times are seconds of the load's clock.

    `sent`: when; `token_times`: when each event that carried tokens came; `ended`: the last event with a choice, or the
    failure; `prompt_tokens` and `output_tokens`: as the server's usage says, else `prompt_tokens` is what was meant to
    be sent and `output_tokens` the events that carried tokens. `cached_tokens`: None where the server does not say.
    `waited`: seconds between due and sent.
    """

    sent: float
    ended: float
    prompt_tokens: int
    token_times: tuple[float, ...] = ()
    output_tokens: int = 0
    cached_tokens: int | None = None
    has_usage: bool = False
    text: str = ""
    waited: float = 0.0
    failure: Failure | None = None

    @property
    def first_token(self) -> float:
        """Seconds from sending to the first token (TTFT)."""
        return (self.token_times[0] if self.token_times else self.ended) - self.sent

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between one event with tokens and the next (ITL)."""
        return tuple(b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False))

    @property
    def latency(self) -> float:
        """Seconds from sending to the end (E2EL)."""
        return self.ended - self.sent

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first one (TPOT); None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.first_token) / (self.output_tokens - 1)


class Sender(Protocol):
    """Whoever gets a request answered."""

    async def send(self, body: Mapping[str, Any], num_tokens: int) -> RequestOutcome:
        """`num_tokens`: length of the prompt as far as known. Raises nothing but CancelledError."""
        ...


class _StreamFailed(Exception):
    """A stream that cannot be gone on with."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = Failure(kind, detail)


@dataclass(slots=True)
class _StreamState:
    """What has come of one answer."""

    clock: Clock
    token_times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    first_choice: float | None = None
    last_choice: float | None = None
    num_tokens: int = 0
    usage: tuple[int, int, int | None] | None = None
    finished: bool = False

    def take(self, data: str) -> bool:
        """One event; returns whether it is the last. Raises _StreamFailed."""
        if data.strip() == "[DONE]":
            self.finished = True
            return True
        now = self.clock.now()
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _StreamFailed("unreadable event", f"an event is no JSON: {error}") from error
        if not isinstance(event, dict):
            raise _StreamFailed("unreadable event", "an event is no JSON object")
        if event.get("error") is not None:
            raise _StreamFailed("error in the stream", _message(event["error"]))
        for choice in _dicts(event.get("choices")):
            self._take_choice(choice, now)
        self.usage = _usage(event.get("usage")) or self.usage
        return False

    def _take_choice(self, choice: Mapping[str, Any], now: float) -> None:
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


class _Bounded(httpx.AsyncByteStream):
    """A body of at most so many bytes: an event without an end would fill the memory."""

    def __init__(self, stream: httpx.AsyncByteStream, max_bytes: int) -> None:
        self._stream = stream
        self._left = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            if self._left < 0:
                raise _StreamFailed("endless answer", "the answer has more bytes than any answer")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class HttpSender:
    """Streams answers over HTTP. One client, whose pool of connections bounds how many are open."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        endpoint: Endpoint,
        clock: Clock,
        seconds: float,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """`seconds`: the longest that one request may take, from sending to its last byte. `max_bytes`: the most that
        is read of an answer."""
        self._http = http
        self._endpoint = endpoint
        self._clock = clock
        self._seconds = seconds
        self._max_bytes = max_bytes

    async def send(self, body: Mapping[str, Any], num_tokens: int) -> RequestOutcome:
        content = json.dumps(body, ensure_ascii=False).encode()
        reading = _StreamState(self._clock)
        sent = self._clock.now()
        failure: Failure | None = None
        try:
            async with asyncio.timeout(self._seconds):
                await self._read(content, reading)
        except _StreamFailed as broken:
            failure = broken.failure
        except TimeoutError:
            failure = Failure("timeout", f"not answered within {self._seconds:g} s")
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
        return self._outcome(reading, sent, num_tokens, failure or _missing(reading))

    async def _read(self, content: bytes, reading: _StreamState) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **self._endpoint.headers}
        async with self._http.stream("POST", self._endpoint.url, content=content, headers=headers) as response:
            if response.status_code != 200:
                raise _StreamFailed(f"HTTP {response.status_code}", await _said(response))
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _Bounded(response.stream, self._max_bytes)
            async with aclosing(EventSource(response).aiter_sse()) as events:
                async for event in events:
                    if reading.take(event.data):
                        return

    def _outcome(self, reading: _StreamState, sent: float, num_tokens: int, failure: Failure | None) -> RequestOutcome:
        if failure is not None:
            failure = Failure(failure.kind, self._endpoint.without_secrets(failure.detail)[:_MAX_ERROR_TEXT])
        usage = reading.usage
        # An answer whose tokens have no text is there with its first choice.
        times = reading.token_times or ([] if reading.first_choice is None else [reading.first_choice])
        ended = self._clock.now() if failure is not None or reading.last_choice is None else reading.last_choice
        return RequestOutcome(
            sent=sent,
            ended=ended,
            prompt_tokens=num_tokens if usage is None else usage[0],
            token_times=tuple(times),
            output_tokens=reading.num_tokens if usage is None else usage[1],
            cached_tokens=None if usage is None else usage[2],
            has_usage=usage is not None,
            text="".join(reading.texts),
            failure=failure,
        )


def _missing(reading: _StreamState) -> Failure | None:
    """What an answer lacks that has ended without a fault."""
    if not reading.finished:
        return Failure("stream cut short", "the stream ended before its answer did")
    if reading.first_choice is None:
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
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


async def _said(response: httpx.Response) -> str:
    """The message of an answer that is none, or its beginning."""
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
