"""What has come of the answers to one request body, and what is said of all of them together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cairn.engine.contract import CacheReport, FinishReason, GenerateOutput, TokenLogprobs


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
