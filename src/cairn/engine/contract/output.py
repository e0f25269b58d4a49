"""What the engine answers."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from cairn.step import Logprobs

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of n tokens, before any transform of the logits. `token_ids`: int32 [n, width], the token
    itself and then the most likely ones, best first; `values`: float32 [n, width]; `ranks`: int32 [n], 1 for the most
    likely."""

    width: int
    token_ids: bytes
    values: bytes
    ranks: bytes

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def __iter__(self) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """For each token its rank and `width` pairs of token and value."""
        ids = np.frombuffer(self.token_ids, "<i4").reshape(-1, self.width).tolist()
        values = np.frombuffer(self.values, "<f4").reshape(-1, self.width).tolist()
        ranks = np.frombuffer(self.ranks, "<i4").tolist()
        for rank, row_ids, row_values in zip(ranks, ids, values, strict=True):
            yield rank, list(zip(row_ids, row_values, strict=True))

    @property
    def num_entries(self) -> int:
        """Pairs of token and value."""
        return len(self) * self.width

    def concat(self, *others: "TokenLogprobs | None") -> "TokenLogprobs":
        """These and the others, which have the same width."""
        if not any(others):
            return self
        parts = [self, *(other for other in others if other is not None)]
        return TokenLogprobs(
            width=self.width,
            token_ids=b"".join(part.token_ids for part in parts),
            values=b"".join(part.values for part in parts),
            ranks=b"".join(part.ranks for part in parts),
        )


def pack_logprobs(parts: Sequence[Logprobs], top: int) -> TokenLogprobs:
    """`parts` concatenated; each has `top` tokens besides the token itself, or a whole vocabulary that is smaller."""
    return TokenLogprobs(
        width=parts[0].token_ids.shape[1] if parts else 1 + top,
        token_ids=b"".join(part.token_ids.astype("<i4").tobytes() for part in parts),
        values=b"".join(part.values.astype("<f4").tobytes() for part in parts),
        ranks=b"".join(part.ranks.astype("<i4").tobytes() for part in parts),
    )


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefix cache did for one request: the response's `cairn.cache`.

    `matched_tokens`: tokens whose keys and values were found; `cached_tokens`: tokens that were not computed again;
    `computed_tokens`: prompt tokens that went through the model, recomputation after preemption included;
    `reason`: why `cached_tokens` is not more, a name of `cairn.cache.reasons.Reason`. `received_tokens`: tokens on top
    of `cached_tokens` that came from another server; `prefill_cached_tokens`: what that server said it had cached.
    `tier_tokens`: those of `cached_tokens` that came from this server's host memory or disk.
    `held_breakpoints`: how many of the client's breakpoints have a checkpoint that is held for it. `lost_tokens`:
    prompt tokens that came from nowhere, by why: with `cached_tokens` and `received_tokens` they are the prompt.
    """

    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    computed_tokens: int
    reason: str
    received_tokens: int = 0
    tier_tokens: int = 0
    prefill_cached_tokens: int | None = None
    held_breakpoints: int = 0
    lost_tokens: dict[str, int] = {}


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer that brought something: seconds from its start to its confirmation, and what was read."""

    seconds: float
    num_bytes: int
    num_descriptors: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds one request spent waiting, in prefill and in decode, and how often it was preempted meanwhile."""

    queue: float
    prefill: float
    decode: float
    num_preemptions: int = 0


class DraftReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was drafted for one answer: tokens that were verified, and how many of them were accepted."""

    num_draft_tokens: int
    num_accepted_tokens: int


class GenerateOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """News of answer `index` of a request. `text`, `token_ids` and `logprobs` are what has been added since the last
    output; `prompt_logprobs` come with the first one. An `error` ends all answers of its request.
    From the core, `text` is empty where no stop string can end the answer: the client makes it, and sets it
    (`GenerateRequest.has_stop_strings`). Nothing else is changed.

    `finish_reason` is set on an answer's last output only; `timings` come with it, and `drafts` where there were some.
    `cache` comes with the first and the last output of answer 0, only the last of which knows what a preemption has
    cost.
    `stop_reason` is the stop string or stop token that ended the answer (None for end-of-sequence), or
    `repetition_detected`. With finish reason
    `error`, `error` says what happened and `status` is the HTTP status to answer with. `kv_transfer_params`: that JSON
    object for the response, on the last output; None where the response says null.
    """

    request_id: str
    token_ids: list[int] = []
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cache: CacheReport | None = None
    timings: Timings | None = None
    error: str | None = None
    status: int = 500
    kv_transfer_params: bytes | None = None
    transfer: TransferReport | None = None
    drafts: DraftReport | None = None
    index: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None

    @property
    def num_logprob_entries(self) -> int:
        """Tokens that it tells of, those of the prompt included: what makes an output large."""
        logprobs, prompt = self.logprobs, self.prompt_logprobs
        # for every output of every step: most have neither
        return (0 if logprobs is None else logprobs.num_entries) + (0 if prompt is None else prompt.num_entries)

    def concat(self, later: "GenerateOutput") -> "GenerateOutput":
        """This and a later output of the same answer as one. This one must not be the answer's last."""
        return msgspec.structs.replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            cache=self.cache if later.cache is None else later.cache,
            logprobs=later.logprobs if self.logprobs is None else self.logprobs.concat(later.logprobs),
            prompt_logprobs=later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs,
        )
