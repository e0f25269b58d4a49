"""The JSON of answers, whole and in pieces, as OpenAI defines it and vLLM and cairn add to it."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from cairn.engine.contract import CacheReport, FinishReason, GenerateOutput

__all__ = ["Answer", "AnswerShape", "ChatShape", "CompletionShape", "cairn_part", "usage_part"]


@dataclass(slots=True)
class Answer:
    """What has come so far. `cache` and `kv_transfer_params` (JSON) are known once `finish_reason` is."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cache: CacheReport | None = None
    kv_transfer_params: bytes | None = None

    def add(self, output: GenerateOutput) -> None:
        self.token_ids += output.token_ids
        self.texts.append(output.text)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.cache = output.cache
        self.kv_transfer_params = output.kv_transfer_params


def usage_part(answer: Answer) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.token_ids),
        "total_tokens": answer.prompt_tokens + len(answer.token_ids),
    }
    if answer.finish_reason is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": _cached_tokens(answer.cache)}
    return usage


def _cached_tokens(cache: CacheReport | None) -> int:
    """What the client saved: behind a prefill server that is what the prefill server had cached."""
    if cache is None:
        return 0
    return cache.cached_tokens if cache.prefill_cached_tokens is None else cache.prefill_cached_tokens


def cairn_part(answer: Answer) -> dict[str, Any]:
    """What the prefix cache did, and why not more."""
    return {"cache": None if answer.cache is None else msgspec.structs.asdict(answer.cache)}


def _transfer_part(params: bytes | None) -> msgspec.Raw | None:
    """`kv_transfer_params` as the engine wrote them."""
    return None if params is None else msgspec.Raw(params)


def _handed_over(output: GenerateOutput) -> dict[str, Any]:
    """What a chunk carries besides its choice: in a stream, keys that say null would only be in the way."""
    if output.kv_transfer_params is None:
        return {}
    return {"kv_transfer_params": _transfer_part(output.kv_transfer_params)}


class AnswerShape(Protocol):
    """One endpoint's way of writing an answer. Bodies are plain JSON objects."""

    def whole(self, answer: Answer) -> dict[str, Any]: ...

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before any text."""
        ...

    def chunk(self, output: GenerateOutput, first: bool) -> dict[str, Any]: ...

    def usage_chunk(self, answer: Answer) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """/v1/completions. `prompt_token_ids` is None unless the client asked for token ids."""

    id: str
    created: int
    model: str
    prompt_token_ids: list[int] | None

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = self._choice("".join(answer.texts), answer.finish_reason, answer.stop_reason)
        if self.prompt_token_ids is not None:
            choice |= {"prompt_token_ids": self.prompt_token_ids, "token_ids": answer.token_ids}
        return self._body([choice]) | {
            "usage": usage_part(answer),
            "kv_transfer_params": _transfer_part(answer.kv_transfer_params),
            "cairn": cairn_part(answer),
        }

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunk(self, output: GenerateOutput, first: bool) -> dict[str, Any]:
        choice = self._choice(output.text, output.finish_reason, output.stop_reason)
        if self.prompt_token_ids is not None:
            choice |= {"token_ids": output.token_ids}
            choice |= {"prompt_token_ids": self.prompt_token_ids} if first else {}
        return self._body([choice]) | _handed_over(output)

    def usage_chunk(self, answer: Answer) -> dict[str, Any]:
        return self._body([]) | {"usage": usage_part(answer), "cairn": cairn_part(answer)}

    def _choice(self, text: str, finish: str | None, stop: str | int | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": stop}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return head | {"choices": choices}


@dataclass(frozen=True, slots=True)
class ChatShape:
    """/v1/chat/completions. `prompt_token_ids` is None unless the client asked for token ids."""

    id: str
    created: int
    model: str
    prompt_token_ids: list[int] | None

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(answer.texts)}
        choice = self._choice("message", message, answer.finish_reason, answer.stop_reason)
        body = self._body("chat.completion", [choice])
        if self.prompt_token_ids is not None:
            choice["token_ids"] = answer.token_ids
            body["prompt_token_ids"] = self.prompt_token_ids
        return body | {
            "usage": usage_part(answer),
            "kv_transfer_params": _transfer_part(answer.kv_transfer_params),
            "cairn": cairn_part(answer),
        }

    def opening(self) -> list[dict[str, Any]]:
        choice = self._choice("delta", {"role": "assistant", "content": ""}, None, None)
        body = self._body("chat.completion.chunk", [choice])
        return [body if self.prompt_token_ids is None else body | {"prompt_token_ids": self.prompt_token_ids}]

    def chunk(self, output: GenerateOutput, first: bool) -> dict[str, Any]:
        choice = self._choice("delta", {"content": output.text}, output.finish_reason, output.stop_reason)
        if self.prompt_token_ids is not None:
            choice["token_ids"] = output.token_ids
        return self._body("chat.completion.chunk", [choice]) | _handed_over(output)

    def usage_chunk(self, answer: Answer) -> dict[str, Any]:
        body = self._body("chat.completion.chunk", [])
        return body | {"usage": usage_part(answer), "cairn": cairn_part(answer)}

    def _choice(self, key: str, content: dict[str, Any], finish: str | None, stop: str | int | None) -> dict[str, Any]:
        return {"index": 0, key: content, "logprobs": None, "finish_reason": finish, "stop_reason": stop}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
