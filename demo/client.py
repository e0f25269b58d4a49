"""A client of one server: streams answers, and reads off them what the prefix cache did."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cairn.http.cookies import no_cookies
from demo.server import DemoError

__all__ = ["Client", "Reply", "StreamedAnswer", "counter_total"]

REQUEST_SECONDS = 300.0
EVENT = "data: "


@dataclass(frozen=True, slots=True)
class Reply:
    """One answered request. `first_token_seconds` is the client's own time to first token; `forward_passes` how many
    the model ran for it, read from /metrics before and after."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    text: str
    cached_tokens: int
    reason: str
    first_token_seconds: float
    forward_passes: int = 0


@dataclass(slots=True)
class StreamedAnswer:
    """Puts the chunks of a stream together, completions and chats alike."""

    prompt_ids: list[int] | None = None
    answer_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    cached_tokens: int | None = None
    reason: str | None = None
    first_token_seconds: float | None = None

    def add(self, chunk: Mapping[str, Any], seconds: float) -> None:
        """One chunk that came `seconds` after the request was sent. Raises DemoError if it reports a failure."""
        if "error" in chunk:
            raise DemoError(f"the stream ended with an error: {chunk['error']}")
        for choice in chunk["choices"]:
            if choice.get("token_ids") and self.first_token_seconds is None:
                self.first_token_seconds = seconds
            self.answer_ids += choice.get("token_ids") or []
            self.texts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
            self._take_prompt(choice)
        self._take_prompt(chunk)
        if chunk.get("usage"):
            self.cached_tokens = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.reason = chunk["cairn"]["cache"]["reason"]

    def reply(self) -> Reply:
        """The whole answer. Raises DemoError if the stream broke off."""
        if (
            self.prompt_ids is None
            or self.cached_tokens is None
            or self.reason is None
            or self.first_token_seconds is None
        ):
            raise DemoError("the stream ended before its usage chunk")
        return Reply(
            prompt_ids=tuple(self.prompt_ids),
            answer_ids=tuple(self.answer_ids),
            text="".join(self.texts),
            cached_tokens=self.cached_tokens,
            reason=self.reason,
            first_token_seconds=self.first_token_seconds,
        )

    def _take_prompt(self, part: Mapping[str, Any]) -> None:
        if part.get("prompt_token_ids"):
            self.prompt_ids = part["prompt_token_ids"]


class Client:
    """Speaks to the server at `url`. `clock` gives seconds."""

    def __init__(
        self,
        url: str,
        *,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # trust_env off: a proxy has no business between two ends of the loopback
        self._http = httpx.Client(
            base_url=url, timeout=REQUEST_SECONDS, trust_env=False, cookies=no_cookies(), transport=transport
        )
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Reply:
        """POST /v1/completions with a prompt as text or token ids. Raises DemoError when it is refused."""
        return self._generate("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, messages: Sequence[Mapping[str, str]], **fields: Any) -> Reply:
        """POST /v1/chat/completions."""
        return self._generate("/v1/chat/completions", {"messages": messages, **fields})

    def tokenize(self, text: str) -> list[int]:
        """The token ids of `text`."""
        return self._tokens({"prompt": text, "add_special_tokens": False})

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a chat as the model would be asked to go on with it."""
        return self._tokens({"messages": messages, "add_generation_prompt": True})

    def metric(self, name: str) -> float:
        """The value of a counter or gauge of /metrics, summed over its labels."""
        response = self._http.get("/metrics")
        _check(response)
        return counter_total(response.text, name)

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        response = self._http.post("/tokenize", json=body)
        _check(response)
        tokens: list[int] = response.json()["tokens"]
        return tokens

    def _generate(self, path: str, fields: Mapping[str, Any]) -> Reply:
        body = {**fields, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        before = self.metric("cairn:forward_passes_total")
        answer, start = StreamedAnswer(), self._clock()
        with self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
            _check(response)
            for chunk in _chunks(response.iter_lines()):
                answer.add(chunk, self._clock() - start)
        reply = answer.reply()
        passes = int(self.metric("cairn:forward_passes_total") - before)
        return replace(reply, forward_passes=passes)


def _chunks(lines: Iterable[str]) -> Iterable[Mapping[str, Any]]:
    for line in lines:
        if line.startswith(EVENT) and line != EVENT + "[DONE]":
            yield json.loads(line.removeprefix(EVENT))


def _check(response: httpx.Response) -> None:
    if response.is_error:
        raise DemoError(f"{response.request.url.path} answered {response.status_code}: {response.text[:500]}")


def counter_total(exposition: str, name: str) -> float:
    """The value of metric `name` in Prometheus' text format, summed over its labels. Raises DemoError."""
    samples = [
        sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == name
    ]
    if not samples:
        raise DemoError(f"/metrics has no {name}")
    return sum(samples)
