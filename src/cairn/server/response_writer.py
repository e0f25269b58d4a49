"""What has come of the answers to one body, and their JSON, whole and in pieces. `answers` has the types of that."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from cairn.engine.contract import CacheReport, FinishReason, GenerateOutput, RenderedPrompt, TokenLogprobs
from cairn.server.chat_message import ChatMessage
from cairn.server.logprobs import LogprobsFormatter, TextOffsetTracker, joined
from cairn.server.requests import CompletionRequest, SamplingFields
from cairn.server.sampling import get_num_logprobs


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come: number `index` of all, to prompt number `prompt`. `message`: of a chat's
    stream; `offsets`: how far the tokens of a completion have come in its text."""

    index: int
    prompt: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    message: ChatMessage | None = None
    offsets: TextOffsetTracker = field(default_factory=TextOffsetTracker)

    def add(self, output: GenerateOutput) -> None:
        self.token_ids += output.token_ids
        self.texts.append(output.text)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        if output.logprobs is not None:
            self.logprobs = output.logprobs if self.logprobs is None else self.logprobs.concat(output.logprobs)

    @property
    def truncated(self) -> bool:
        """Whether it has ended at `max_tokens`, a stop string or a stop token, not by itself."""
        return self.finish_reason == "length" or self.stop_reason is not None


@dataclass(slots=True)
class ResponseWriter(ABC):
    """One endpoint's way of writing `n` answers to each of `prompts`, as `body` asks for them. Bodies are plain JSON
    objects; `whole_kind` and `chunk_kind` are what they call themselves. Used once, whole or as a stream.

    `caches`, `prompt_logprobs`: by prompt; `kv_transfer_params`: of the first one. They come with the last outputs.
    """

    id: str
    created: int
    model: str
    body: SamplingFields
    prompts: Sequence[RenderedPrompt]
    n: int
    texts: LogprobsFormatter
    choices: list[Choice] = field(init=False)
    caches: list[CacheReport | None] = field(init=False)
    prompt_logprobs: list[TokenLogprobs | None] = field(init=False)
    kv_transfer_params: bytes | None = field(init=False, default=None)

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __post_init__(self) -> None:
        self.choices = [Choice(index, index // self.n) for index in range(self.n * len(self.prompts))]
        self.caches = [None] * len(self.prompts)
        self.prompt_logprobs = [None] * len(self.prompts)

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before any text."""
        return []

    def chunk(self, prompt: int, output: GenerateOutput) -> dict[str, Any] | None:
        """The next piece of the choice that the output belongs to. None where the output says nothing yet."""
        choice = self.choices[prompt * self.n + output.index]
        first = not choice.texts
        self.add(prompt, output)
        piece = self._piece(choice, output, first)
        if piece is None:
            return None
        # In a stream, `kv_transfer_params` that say null would only be in the way.
        chunk = self._body(self.chunk_kind, [piece])
        if output.kv_transfer_params is not None:
            chunk["kv_transfer_params"] = msgspec.Raw(output.kv_transfer_params)
        return chunk

    @abstractmethod
    def _piece(self, choice: Choice, output: GenerateOutput, first: bool) -> dict[str, Any] | None:
        """`first`: of the choice's pieces."""

    def usage_chunk(self) -> dict[str, Any]:
        return self._body(self.chunk_kind, []) | {"usage": self.usage(), "cairn": self.cache_use()}

    def add(self, prompt: int, output: GenerateOutput) -> None:
        """`output` is news of an answer to prompt number `prompt`."""
        self.choices[prompt * self.n + output.index].add(output)
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

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many answers it has."""
        prompts = sum(len(prompt.token_ids) for prompt in self.prompts)
        told = sum(len(choice.token_ids) for choice in self.choices)
        usage: dict[str, Any] = {"prompt_tokens": prompts, "completion_tokens": told, "total_tokens": prompts + told}
        if self.complete:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(map(_cached_tokens, self.caches))}
        return usage

    def cache_use(self) -> dict[str, Any]:
        """What the prefix cache did, and why not more: a record, or a list of them for several prompts."""
        return {"cache": self.caches[0] if len(self.caches) == 1 else self.caches}

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        params = self.kv_transfer_params
        return self._body(self.whole_kind, choices) | {
            "usage": self.usage(),
            "kv_transfer_params": None if params is None else msgspec.Raw(params),
            "cairn": self.cache_use(),
        }

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self, choice: Choice, name: str, content: object, logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        ending = {"finish_reason": finish, "stop_reason": choice.stop_reason}
        return {"index": choice.index, name: content, "logprobs": logprobs, **ending}


def _cached_tokens(cache: CacheReport | None) -> int:
    """What the client saved: behind a prefill server that is what the prefill server had cached."""
    if cache is None:
        return 0
    return cache.cached_tokens if cache.prefill_cached_tokens is None else cache.prefill_cached_tokens


@dataclass(slots=True)
class CompletionWriter(ResponseWriter):
    """/v1/completions. A prompt's log-probabilities come with the first answer to it, before anything of the others."""

    whole_kind = chunk_kind = "text_completion"

    def whole(self) -> dict[str, Any]:
        return self._whole([self._whole_choice(choice) for choice in self.choices])

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        prompt, prompt_logprobs = self.prompts[choice.prompt], self.prompt_logprobs[choice.prompt]
        logprobs = self._logprobs(choice, choice.logprobs, first=True)
        text = self._echo(choice) + "".join(choice.texts)
        body = self._choice(choice, "text", text, logprobs, choice.finish_reason)
        if self.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = None if prompt_logprobs is None else self.texts.prompt(prompt_logprobs)
        if self.body.return_token_ids:
            body |= {"prompt_token_ids": prompt.token_ids, "token_ids": choice.token_ids}
        return body

    def _piece(self, choice: Choice, output: GenerateOutput, first: bool) -> dict[str, Any] | None:
        text = self._echo(choice) + output.text if first else output.text
        logprobs = self._logprobs(choice, output.logprobs, first=first)
        if not text and logprobs is None and output.finish_reason is None and not self.body.return_token_ids:
            return None
        body = self._choice(choice, "text", text, logprobs, output.finish_reason)
        if self.body.return_token_ids:
            body["token_ids"] = output.token_ids
            if first:
                body["prompt_token_ids"] = self.prompts[choice.prompt].token_ids
        return body

    def _echo(self, choice: Choice) -> str:
        echoes = isinstance(self.body, CompletionRequest) and self.body.echo
        return self.prompts[choice.prompt].text or "" if echoes else ""

    def _logprobs(self, choice: Choice, told: TokenLogprobs | None, *, first: bool) -> dict[str, Any] | None:
        """Of a piece of a choice; of the first one behind those of its prompt, if that is echoed."""
        if get_num_logprobs(self.body) is None:
            return None
        prompt, parts = self.prompt_logprobs[choice.prompt], []
        if first and self._echo(choice) and prompt is not None:
            parts.append(self.texts.echo(self.prompts[choice.prompt].token_ids, prompt, choice.offsets))
        if told is not None:
            parts.append(self.texts.completion(told, choice.offsets))
        return None if not parts else parts[0] if len(parts) == 1 else joined(*parts)


@dataclass(slots=True)
class ChatWriter(ResponseWriter):
    """/v1/chat/completions. `new_message` makes the message of one answer."""

    new_message: Callable[[], ChatMessage] = field(kw_only=True)

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        body = self._whole([self._whole_choice(choice) for choice in self.choices])
        if self.body.return_token_ids:
            body["prompt_token_ids"] = self.prompts[0].token_ids
        if self.body.prompt_logprobs is not None and self.prompt_logprobs[0] is not None:
            body["prompt_logprobs"] = self.texts.prompt(self.prompt_logprobs[0])
        return body

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = self.new_message()
        message.add("".join(choice.texts), last=True, truncated=choice.truncated)
        finish = message.finish_reason(choice.finish_reason)
        body = self._choice(choice, "message", message.message(), self._logprobs(choice.logprobs), finish)
        return body | ({"token_ids": choice.token_ids} if self.body.return_token_ids else {})

    def opening(self) -> list[dict[str, Any]]:
        ids = {"prompt_token_ids": self.prompts[0].token_ids} if self.body.return_token_ids else {}
        delta = {"role": "assistant", "content": ""}
        opened = [self._choice(choice, "delta", delta, None, None) for choice in self.choices]
        return [self._body(self.chunk_kind, [choice]) | ids for choice in opened]

    def _piece(self, choice: Choice, output: GenerateOutput, first: bool) -> dict[str, Any] | None:
        choice.message = message = choice.message or self.new_message()
        logprobs = self._logprobs(output.logprobs)
        delta = message.add(output.text, last=output.finish_reason is not None, truncated=choice.truncated)
        if not delta and logprobs is None and output.finish_reason is None and not self.body.return_token_ids:
            return None
        finish = message.finish_reason(output.finish_reason)
        body = self._choice(choice, "delta", delta or {"content": ""}, logprobs, finish)
        return body | ({"token_ids": output.token_ids} if self.body.return_token_ids else {})

    def _logprobs(self, logprobs: TokenLogprobs | None) -> dict[str, Any] | None:
        return self.texts.chat(logprobs) if get_num_logprobs(self.body) is not None and logprobs is not None else None
