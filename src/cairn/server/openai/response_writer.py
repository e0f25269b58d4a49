"""The answers to one body so far, and their JSON: one response or a stream's chunks, of the types in `responses`."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from cairn.engine.contract import (
    CacheReport,
    DraftReport,
    FinishReason,
    GenerateOutput,
    RenderedPrompt,
    Timings,
    TokenLogprobs,
)
from cairn.errors import RequestError
from cairn.http.error_responses import encode_error
from cairn.server.openai.chat_message import ChatMessage
from cairn.server.openai.logprobs import LogprobsFormatter, TextOffsetTracker, concat_logprobs
from cairn.server.openai.requests import ChatRequest, CompletionRequest, SamplingFields
from cairn.server.options import AnswerOptions

_MARK = "\0"
_MARK_JSON = msgspec.json.encode(_MARK)
"""Stands for a text that is not there yet. No text's JSON has it but this one's."""


@dataclass(slots=True)
class Choice:
    """One answer so far: number `index` of all, to prompt number `prompt`. `frame`: what is before and behind the text
    in an event of a stream that says nothing else, once there has been one, behind which `texts` are not kept;
    `message`: of a chat's stream; `offsets`: positions of a completion's tokens in its text."""

    index: int
    prompt: int
    frame: tuple[bytes, bytes] | None = None
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprob_parts: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    drafts: DraftReport | None = None
    message: ChatMessage | None = None
    offsets: TextOffsetTracker = field(default_factory=TextOffsetTracker)

    def add(self, output: GenerateOutput) -> None:
        self.token_ids += output.token_ids
        self.texts.append(output.text)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
            self.drafts = output.drafts
        if output.logprobs is not None:
            self.logprob_parts.append(output.logprobs)

    @property
    def logprobs(self) -> TokenLogprobs | None:
        """Of all its tokens."""
        return self.logprob_parts[0].concat(*self.logprob_parts[1:]) if self.logprob_parts else None

    @property
    def is_truncated(self) -> bool:
        """Whether it ended at `max_tokens`, a stop string or a stop token, not by itself."""
        return self.finish_reason == "length" or self.stop_reason is not None

    @property
    def calls_tools(self) -> bool:
        """Whether it has ended, and its client is going to run tools before it goes on."""
        return self.message is not None and self.message.finish_reason(self.finish_reason) == "tool_calls"


@dataclass(slots=True)
class ResponseWriter(ABC):
    """Writes `n` answers to each of `prompts` as one endpoint does; used once, for one response or one stream. All it
    writes is plain JSON objects. What there is not is null in a response, and left out of a chunk where vLLM does so.

    `new_message` makes the message of one answer of a chat; `options` say what an answer tells beside it.
    `caches`, `prompt_logprobs`: by prompt; `kv_transfer_params`, `timings`: of the first one. They come with the last
    outputs.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str
    body: SamplingFields
    prompts: Sequence[RenderedPrompt]
    n: int
    formatter: LogprobsFormatter
    new_message: Callable[[], ChatMessage]
    options: AnswerOptions
    choices: list[Choice] = field(init=False)
    caches: list[CacheReport | None] = field(init=False)
    prompt_logprobs: list[TokenLogprobs | None] = field(init=False)
    kv_transfer_params: bytes | None = field(init=False, default=None)
    timings: Timings | None = field(init=False, default=None)

    formats_at_end: ClassVar[bool] = True
    """Whether a whole response's log-probabilities are put into words at its end, not as they come."""

    response_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __post_init__(self) -> None:
        self.choices = [Choice(index, index // self.n) for index in range(self.n * len(self.prompts))]
        self.caches = [None] * len(self.prompts)
        self.prompt_logprobs = [None] * len(self.prompts)

    def add(self, prompt: int, output: GenerateOutput) -> Choice:
        """Add an output for prompt number `prompt` to the choice that it belongs to."""
        choice = self.choice_of(prompt, output)
        choice.add(output)
        if output.cache is not None:
            self.caches[prompt] = output.cache
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = output.prompt_logprobs
        if prompt == 0 and output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params
        if output.timings is not None:
            self.timings = output.timings
        return choice

    def choice_of(self, prompt: int, output: GenerateOutput) -> Choice:
        """The choice that an output for prompt number `prompt` belongs to."""
        return self.choices[prompt * self.n + output.index]

    @property
    def is_complete(self) -> bool:
        """Whether every answer has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def write_response(self) -> dict[str, Any]:
        """The whole response, once all outputs have been added."""
        params = self.kv_transfer_params
        return self._envelope(self.response_object, [self._write_choice(choice) for choice in self.choices]) | {
            "service_tier": None,
            "system_fingerprint": self.system_fingerprint,
            "usage": {"prompt_tokens_details": None, "completion_tokens_details": None} | self.usage(),
            "kv_transfer_params": None if params is None else msgspec.Raw(params),
            "ec_transfer_params": None,
            "metrics": self.write_metrics(),
            "cairn": self.cache_use(),
        }

    def write_opening(self) -> list[dict[str, Any]]:
        """The chunks before any text."""
        return []

    def announce(self, prompt: int, output: GenerateOutput) -> None:
        """Look at the first output before the opening events: it knows what the prefix cache did."""
        if output.cache is not None:
            self.caches[prompt] = output.cache

    def opening_events(self) -> list[bytes]:
        """The server-sent events before any output."""
        return [self._chunk_event(chunk) for chunk in self.write_opening()]

    def output_events(self, prompt: int, output: GenerateOutput) -> list[bytes]:
        """Add an output for prompt number `prompt`. The events that it brings: none if there is nothing to say yet."""
        choice = self.choices[prompt * self.n + output.index]
        frame = choice.frame
        if frame is not None and output.finish_reason is None and output.logprobs is None:
            # nearly all of a stream is tokens and nothing else
            choice.token_ids += output.token_ids
            body = output.text or None if choice.message is None else self._write_delta(choice, output)
        else:
            self.add(prompt, output)
            body = self._write_delta(choice, output)
        if body is None:
            return []
        if isinstance(body, str):
            assert frame is not None
            return [b"%b%b%b" % (frame[0], msgspec.json.encode(body), frame[1])]
        chunk = self._envelope(self.chunk_object, [body])
        # In a stream, `kv_transfer_params` of null would only be in the way.
        if output.kv_transfer_params is not None:
            chunk["kv_transfer_params"] = msgspec.Raw(output.kv_transfer_params)
        if output.finish_reason is not None and not self._includes_usage:
            chunk["system_fingerprint"] = self.system_fingerprint
            if self.is_complete:
                chunk["cairn"] = self.cache_use()
        is_plain = not self.body.return_token_ids and not self._counts_usage
        if choice.frame is None and output.finish_reason is None and is_plain:
            framed = self._envelope(self.chunk_object, [self._write_text(choice, _MARK)])
            before, _, after = self._chunk_event(framed).partition(_MARK_JSON)
            choice.frame = before, after
        return [self._chunk_event(chunk)]

    def closing_events(self) -> list[bytes]:
        """The events after the last output."""
        usage = [encode_event(msgspec.json.encode(self.write_usage_chunk()))] if self._includes_usage else []
        return [*usage, encode_event(b"[DONE]")]

    def error_events(self, error: RequestError) -> list[bytes]:
        """The events of a failure, which ends the stream."""
        return [encode_event(encode_error(error)), encode_event(b"[DONE]")]

    def _chunk_event(self, chunk: dict[str, Any]) -> bytes:
        if self._counts_usage:
            chunk["usage"] = self.usage()
        return encode_event(msgspec.json.encode(chunk))

    @property
    def _counts_usage(self) -> bool:
        """Whether each chunk has the usage so far."""
        options = self.body.stream_options
        return options is not None and bool(options.continuous_usage_stats and options.include_usage)

    @property
    def _includes_usage(self) -> bool:
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    def write_usage_chunk(self) -> dict[str, Any]:
        ending = {"usage": self.usage(), "system_fingerprint": self.system_fingerprint, "cairn": self.cache_use()}
        if (metrics := self.write_metrics()) is not None:
            ending["metrics"] = {name: value for name, value in metrics.items() if value is not None}
        return self._envelope(self.chunk_object, []) | ending

    def write_metrics(self) -> dict[str, float | None] | None:
        """vLLM's metrics of one request; None where they are not shown, or are those of several answers."""
        if not self.options.enable_per_request_metrics or self.timings is None or len(self.choices) > 1:
            return None
        times, num_tokens = self.timings, len(self.choices[0].token_ids)
        computing = times.prefill + times.decode
        return {
            "time_to_first_token_ms": times.prefill * 1000,
            "generation_time_ms": times.decode * 1000,
            "queue_time_ms": times.queue * 1000,
            "mean_itl_ms": times.decode / (num_tokens - 1) * 1000 if num_tokens > 1 else None,
            "tokens_per_second": num_tokens / computing if computing > 0 else None,
        }

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many answers it has."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_generated = sum(len(choice.token_ids) for choice in self.choices)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }
        if self.is_complete and self.options.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(map(count_cached_tokens, self.caches))}
        if self.is_complete and (details := self._count_by_kind()):
            usage["completion_tokens_details"] = details
        return usage

    def _count_by_kind(self) -> dict[str, int]:
        """Tokens of the complete answers by what they are. Drafts count where there were some, or might have been."""
        drafts = [choice.drafts for choice in self.choices if choice.drafts is not None]
        if not drafts and getattr(self.body, "prediction", None) is None:
            return {}
        accepted = sum(report.num_accepted_tokens for report in drafts)
        rejected = sum(report.num_draft_tokens for report in drafts) - accepted
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}

    def cache_use(self) -> dict[str, Any]:
        """What the prefix cache did, and why not more: a record, or a list of them for several prompts."""
        return {"cache": self.caches[0] if len(self.caches) == 1 else self.caches}

    @abstractmethod
    def _write_choice(self, choice: Choice) -> dict[str, Any]:
        """A complete choice."""

    @abstractmethod
    def _write_delta(self, choice: Choice, output: GenerateOutput) -> dict[str, Any] | str | None:
        """What `output`, which has been added to it, brings to a choice; a text for what `_write_text` makes of it."""

    @abstractmethod
    def _write_text(self, choice: Choice, text: str) -> dict[str, Any]:
        """What a text and nothing else brings to a choice."""

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _ids_if_asked_for(self, token_ids: list[int]) -> list[int] | None:
        return token_ids if self.body.return_token_ids else None


def encode_event(data: bytes, name: str | None = None) -> bytes:
    """One server-sent event."""
    named = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (named, data)


def count_cached_tokens(cache: CacheReport | None) -> int:
    """What the client saved: behind a prefill server, what the prefill server had cached."""
    if cache is None:
        return 0
    return cache.cached_tokens if cache.prefill_cached_tokens is None else cache.prefill_cached_tokens


@dataclass(slots=True)
class CompletionWriter(ResponseWriter):
    """/v1/completions. A prompt's log-probabilities come with the first answer to it, before anything of the others."""

    response_object = chunk_object = "text_completion"

    def _write_choice(self, choice: Choice) -> dict[str, Any]:
        text = self._echo(choice) + "".join(choice.texts)
        prompt_logprobs = None if self.body.prompt_logprobs is None else self.prompt_logprobs[choice.prompt]
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._write_logprobs(choice, choice.logprobs, is_first=True),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": self._ids_if_asked_for(choice.token_ids),
            "prompt_logprobs": None if prompt_logprobs is None else self.formatter.prompt(prompt_logprobs),
            "prompt_token_ids": self._ids_if_asked_for(self.prompts[choice.prompt].token_ids),
            "routed_experts": None,
        }

    def _write_text(self, choice: Choice, text: str) -> dict[str, Any]:
        absent = ("logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
        return {"index": choice.index, "text": text, **dict.fromkeys(absent)}

    def _write_delta(self, choice: Choice, output: GenerateOutput) -> dict[str, Any] | None:
        is_first = len(choice.texts) == 1
        text = self._echo(choice) + output.text if is_first else output.text
        logprobs = self._write_logprobs(choice, output.logprobs, is_first=is_first)
        if not text and logprobs is None and output.finish_reason is None and not self.body.return_token_ids:
            return None
        return self._write_text(choice, text) | {
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": self._ids_if_asked_for(self.prompts[choice.prompt].token_ids) if is_first else None,
            "token_ids": self._ids_if_asked_for(output.token_ids),
        }

    def _echo(self, choice: Choice) -> str:
        is_echoed = isinstance(self.body, CompletionRequest) and self.body.echo
        return self.prompts[choice.prompt].text or "" if is_echoed else ""

    def _write_logprobs(
        self, choice: Choice, logprobs: TokenLogprobs | None, *, is_first: bool
    ) -> dict[str, Any] | None:
        """Of a piece of a choice; of the first one after those of its prompt, if that is echoed."""
        if self.body.get_num_logprobs() is None:
            return None
        prompt_logprobs, parts = self.prompt_logprobs[choice.prompt], []
        if is_first and self._echo(choice) and prompt_logprobs is not None:
            token_ids = self.prompts[choice.prompt].token_ids
            parts.append(self.formatter.echo(token_ids, prompt_logprobs, choice.offsets))
        if logprobs is not None:
            parts.append(self.formatter.completion(logprobs, choice.offsets))
        return concat_logprobs(*parts) if parts else None


@dataclass(slots=True)
class ChatWriter(ResponseWriter):
    """/v1/chat/completions."""

    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def write_response(self) -> dict[str, Any]:
        prompt_logprobs = self.prompt_logprobs[0]
        return ResponseWriter.write_response(self) | {
            "prompt_logprobs": None if prompt_logprobs is None else self.formatter.prompt(prompt_logprobs),
            **self._write_prompt(),
        }

    def write_opening(self) -> list[dict[str, Any]]:
        begun = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        opened = [{"index": choice.index, **begun} for choice in self.choices]
        chunks = [self._envelope(self.chunk_object, [choice]) | self._write_prompt() for choice in opened]
        if echoed := self._echoed_text:
            deltas = [{**choice, "delta": {"content": echoed}} for choice in opened]
            chunks += [self._envelope(self.chunk_object, [choice]) for choice in deltas]
        return chunks

    def _write_prompt(self) -> dict[str, Any]:
        """The prompt as ids and as text, where they are asked for."""
        prompt, body = self.prompts[0], self.body
        shows_text = isinstance(body, ChatRequest) and body.return_prompt_text
        ids = self._ids_if_asked_for(prompt.token_ids)
        return {"prompt_token_ids": ids, "prompt_text": prompt.text if shows_text else None}

    def _write_choice(self, choice: Choice) -> dict[str, Any]:
        choice.message = message = self.new_message()
        message.add("".join(choice.texts), last=True, truncated=choice.is_truncated)
        logprobs, token_ids = self._write_tokens(message, choice.logprobs, choice.token_ids)
        written = message.message()
        if echoed := self._echoed_text:
            written["content"] = echoed + (written["content"] or "")
        return {
            "index": choice.index,
            "message": written,
            "logprobs": logprobs,
            "finish_reason": message.finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": token_ids,
            "routed_experts": None,
        }

    def _count_by_kind(self) -> dict[str, int]:
        """With the reasoning's tokens, shown or not, where the model's answers may have some."""
        details = ResponseWriter._count_by_kind(self)
        if all(choice.message is not None and choice.message.looks_for_reasoning for choice in self.choices):
            details["reasoning_tokens"] = sum(map(self.count_reasoning, self.choices))
        return details

    def count_reasoning(self, choice: Choice) -> int:
        """Tokens of the reasoning, shown or not: those before its end, which is a mark or a call, newlines too,
        without those of the mark that it begins with."""
        if choice.message is None or not choice.message.has_reasoning:
            return 0
        spelled = [self.formatter.spell(token) for token in choice.token_ids]
        text = b"".join(spelled)
        start, stop = (mark.encode() for mark in choice.message.reasoning_marks)
        opened, end = text.find(start), text.find(stop)
        begin = opened + len(start) if opened >= 0 and not text[:opened].strip(b"\n") else 0
        ends = list(itertools.accumulate(map(len, spelled)))
        return sum(
            begin < last and (end < 0 or last - len(part) < end) for part, last in zip(spelled, ends, strict=True)
        )

    @property
    def _echoed_text(self) -> str:
        return self.body.echoed_text if isinstance(self.body, ChatRequest) else ""

    def _write_text(self, choice: Choice, text: str) -> dict[str, Any]:
        absent = ("logprobs", "finish_reason", "token_ids")
        return {"index": choice.index, "delta": {"content": text}, **dict.fromkeys(absent)}

    def _write_delta(self, choice: Choice, output: GenerateOutput) -> dict[str, Any] | str | None:
        choice.message = message = choice.message or self.new_message()
        delta = message.add(output.text, last=output.finish_reason is not None, truncated=choice.is_truncated)
        is_framed = choice.frame is not None and delta.keys() <= {"content"}
        if is_framed and output.finish_reason is None and output.logprobs is None:
            return delta.get("content")
        logprobs, token_ids = self._write_tokens(message, output.logprobs, output.token_ids)
        if not delta and logprobs is None and token_ids is None and output.finish_reason is None:
            return None
        body = {
            "index": choice.index,
            "delta": delta or {"content": ""},
            "logprobs": logprobs,
            "finish_reason": message.finish_reason(output.finish_reason),
            "token_ids": token_ids,
        }
        if output.finish_reason is not None:
            body["stop_reason"] = output.stop_reason
        return body

    def _write_tokens(
        self, message: ChatMessage, logprobs: TokenLogprobs | None, token_ids: list[int]
    ) -> tuple[dict[str, Any] | None, list[int] | None]:
        """Log-probabilities and ids of a piece of an answer; neither where they would show the reasoning."""
        if message.hides_reasoning:
            return None, None
        is_asked = logprobs is not None and self.body.get_num_logprobs() is not None
        shown = self.formatter.chat(logprobs) if logprobs is not None and is_asked else None
        return shown, self._ids_if_asked_for(token_ids)
