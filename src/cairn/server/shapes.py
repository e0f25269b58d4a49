"""What has come of the answers to one request body, and their JSON, whole and in pieces, as OpenAI defines it and vLLM
and cairn add to it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from cairn.engine.contract import CacheReport, FinishReason, GenerateOutput, TokenLogprobs
from cairn.server.chat_message import ChatMessage
from cairn.server.logprobs import TextOffsets, TokenTexts, joined


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come: number `index` of all, to prompt number `prompt`."""

    index: int
    prompt: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, output: GenerateOutput) -> None:
        self.token_ids += output.token_ids
        self.texts.append(output.text)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        if output.logprobs is not None:
            self.logprobs = output.logprobs if self.logprobs is None else self.logprobs.then(output.logprobs)

    @property
    def begun(self) -> bool:
        """Whether anything has come of it."""
        return bool(self.texts)

    @property
    def cut_off(self) -> bool:
        """Whether it has ended at `max_tokens`, a stop string or a stop token, not by itself."""
        return self.finish_reason == "length" or self.stop_reason is not None


class RequestAnswers:
    """`n` answers to each of one or more prompts, of so many tokens each.

    By prompt: `caches`, what the prefix cache did for it, and `prompt_logprobs`. `kv_transfer_params` (JSON): of the
    first prompt. All of them come with the last outputs.
    """

    def __init__(self, prompt_tokens: Sequence[int], n: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.choices = [Choice(index, index // n) for index in range(n * len(prompt_tokens))]
        self.caches: list[CacheReport | None] = [None] * len(prompt_tokens)
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * len(prompt_tokens)
        self.kv_transfer_params: bytes | None = None
        self._n = n

    def choice(self, prompt: int, output: GenerateOutput) -> Choice:
        """Which of them an output to this prompt belongs to."""
        return self.choices[prompt * self._n + output.index]

    def add(self, prompt: int, output: GenerateOutput) -> None:
        self.choice(prompt, output).add(output)
        if output.cache is not None:
            self.caches[prompt] = output.cache
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = output.prompt_logprobs
        if prompt == 0 and output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params

    @property
    def complete(self) -> bool:
        """Whether every answer has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)


def usage_part(answer: RequestAnswers) -> dict[str, Any]:
    """A prompt counts once, however many answers it has."""
    prompts, said = sum(answer.prompt_tokens), sum(len(choice.token_ids) for choice in answer.choices)
    usage: dict[str, Any] = {"prompt_tokens": prompts, "completion_tokens": said, "total_tokens": prompts + said}
    if answer.complete:
        usage["prompt_tokens_details"] = {"cached_tokens": sum(map(_cached_tokens, answer.caches))}
    return usage


def _cached_tokens(cache: CacheReport | None) -> int:
    """What the client saved: behind a prefill server that is what the prefill server had cached."""
    if cache is None:
        return 0
    return cache.cached_tokens if cache.prefill_cached_tokens is None else cache.prefill_cached_tokens


def cairn_part(answer: RequestAnswers) -> dict[str, Any]:
    """What the prefix cache did, and why not more: a record, or a list of them for several prompts."""
    records = [None if cache is None else msgspec.structs.asdict(cache) for cache in answer.caches]
    return {"cache": records[0] if len(records) == 1 else records}


def transfer_part(params: bytes | None) -> msgspec.Raw | None:
    """`kv_transfer_params` as the engine wrote them."""
    return None if params is None else msgspec.Raw(params)


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What answers show besides their text. By prompt: its `prompts` as token ids, and the text to `echo`, empty for
    none. `token_ids`: of prompts and answers; `logprobs` and `prompt_logprobs`: as the client has asked for them."""

    prompts: tuple[list[int], ...]
    echo: tuple[str, ...]
    token_ids: bool
    logprobs: bool
    prompt_logprobs: bool
    texts: TokenTexts


@dataclass(frozen=True, slots=True)
class AnswerShape(ABC):
    """One endpoint's way of writing the answers to one body. Bodies are plain JSON objects; `whole_kind` and
    `chunk_kind` are what they call themselves."""

    id: str
    created: int
    model: str
    options: ResponseOptions

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def whole(self, answer: RequestAnswers) -> dict[str, Any]: ...

    @abstractmethod
    def opening(self, answer: RequestAnswers) -> list[dict[str, Any]]:
        """The chunks before any text."""

    @abstractmethod
    def chunk(self, choice: Choice, output: GenerateOutput, first: bool) -> dict[str, Any] | None:
        """The choice's next piece; `first`: of its pieces. None where the output says nothing yet."""

    def usage_chunk(self, answer: RequestAnswers) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage_part(answer), "cairn": cairn_part(answer)}

    def _whole_body(self, answer: RequestAnswers, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._body(self.whole_kind, choices) | {
            "usage": usage_part(answer),
            "kv_transfer_params": transfer_part(answer.kv_transfer_params),
            "cairn": cairn_part(answer),
        }

    def _chunk(self, choices: list[dict[str, Any]], output: GenerateOutput | None = None) -> dict[str, Any]:
        """In a stream, `kv_transfer_params` that say null would only be in the way."""
        params = None if output is None else transfer_part(output.kv_transfer_params)
        return self._body(self.chunk_kind, choices) | ({} if params is None else {"kv_transfer_params": params})

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self, choice: Choice, content: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        said = {"logprobs": logprobs, "finish_reason": finish, "stop_reason": choice.stop_reason}
        return {"index": choice.index} | content | said


@dataclass(frozen=True, slots=True)
class CompletionShape(AnswerShape):
    """/v1/completions. `offsets`: how far the tokens of a stream's choices have come in their texts. `prompt_logprobs`:
    those of a stream's prompts, which come with the first answer to each and before anything of the others."""

    offsets: dict[int, TextOffsets] = field(default_factory=dict)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    whole_kind = chunk_kind = "text_completion"

    def whole(self, answer: RequestAnswers) -> dict[str, Any]:
        return self._whole_body(answer, [self._whole(answer, choice) for choice in answer.choices])

    def _whole(self, answer: RequestAnswers, choice: Choice) -> dict[str, Any]:
        options, prompt_logprobs = self.options, answer.prompt_logprobs[choice.prompt]
        text = options.echo[choice.prompt] + "".join(choice.texts)
        logprobs = self._logprobs(choice, choice.logprobs, prompt_logprobs, echoes=True)
        body = self._choice(choice, {"text": text}, logprobs, choice.finish_reason)
        if options.prompt_logprobs:
            body["prompt_logprobs"] = None if prompt_logprobs is None else options.texts.prompt(prompt_logprobs)
        if options.token_ids:
            body |= {"prompt_token_ids": options.prompts[choice.prompt], "token_ids": choice.token_ids}
        return body

    def opening(self, answer: RequestAnswers) -> list[dict[str, Any]]:
        return []

    def chunk(self, choice: Choice, output: GenerateOutput, first: bool) -> dict[str, Any] | None:
        options = self.options
        text = options.echo[choice.prompt] + output.text if first else output.text
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[choice.prompt] = output.prompt_logprobs
        logprobs = self._logprobs(choice, output.logprobs, self.prompt_logprobs.get(choice.prompt), echoes=first)
        if not text and logprobs is None and output.finish_reason is None and not options.token_ids:
            return None
        body = self._choice(choice, {"text": text}, logprobs, output.finish_reason)
        if options.token_ids:
            body |= {"token_ids": output.token_ids}
            body |= {"prompt_token_ids": options.prompts[choice.prompt]} if first else {}
        return self._chunk([body], output)

    def _logprobs(
        self, choice: Choice, said: TokenLogprobs | None, prompt: TokenLogprobs | None, *, echoes: bool
    ) -> dict[str, Any] | None:
        """Of a piece of a choice, behind those of its prompt if that is part of the piece."""
        options = self.options
        if not options.logprobs:
            return None
        offsets, parts = self.offsets.setdefault(choice.index, TextOffsets()), []
        if echoes and options.echo[choice.prompt] and prompt is not None:
            parts.append(options.texts.echoed(options.prompts[choice.prompt], prompt, offsets))
        if said is not None:
            parts.append(options.texts.completion(said, offsets))
        return None if not parts else parts[0] if len(parts) == 1 else joined(*parts)


@dataclass(frozen=True, slots=True)
class ChatShape(AnswerShape):
    """/v1/chat/completions. `new_message` makes the message of one answer; `growing`: those of a stream."""

    new_message: Callable[[], ChatMessage]
    growing: dict[int, ChatMessage] = field(default_factory=dict)

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, answer: RequestAnswers) -> dict[str, Any]:
        options = self.options
        body = self._whole_body(answer, [self._whole(choice) for choice in answer.choices])
        if options.token_ids:
            body["prompt_token_ids"] = options.prompts[0]
        if options.prompt_logprobs and (prompt_logprobs := answer.prompt_logprobs[0]) is not None:
            body["prompt_logprobs"] = options.texts.prompt(prompt_logprobs)
        return body

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message = self.new_message()
        message.add("".join(choice.texts), last=True, cut_off=choice.cut_off)
        finish = message.finish_reason(choice.finish_reason)
        body = self._choice(choice, {"message": message.message()}, self._logprobs(choice.logprobs), finish)
        return body | ({"token_ids": choice.token_ids} if self.options.token_ids else {})

    def opening(self, answer: RequestAnswers) -> list[dict[str, Any]]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        named = {"prompt_token_ids": self.options.prompts[0]} if self.options.token_ids else {}
        return [self._chunk([self._choice(choice, delta, None, None)]) | named for choice in answer.choices]

    def chunk(self, choice: Choice, output: GenerateOutput, first: bool) -> dict[str, Any] | None:
        if choice.index not in self.growing:
            self.growing[choice.index] = self.new_message()
        message, logprobs = self.growing[choice.index], self._logprobs(output.logprobs)
        delta = message.add(output.text, last=output.finish_reason is not None, cut_off=choice.cut_off)
        if not delta and logprobs is None and output.finish_reason is None and not self.options.token_ids:
            return None
        finish = message.finish_reason(output.finish_reason)
        body = self._choice(choice, {"delta": delta or {"content": ""}}, logprobs, finish)
        if self.options.token_ids:
            body["token_ids"] = output.token_ids
        return self._chunk([body], output)

    def _logprobs(self, logprobs: TokenLogprobs | None) -> dict[str, Any] | None:
        return self.options.texts.chat(logprobs) if self.options.logprobs and logprobs is not None else None
