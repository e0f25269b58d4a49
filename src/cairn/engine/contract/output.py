"""What the engine answers."""

from typing import Literal

import msgspec

from cairn.engine.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefix cache did for one request: the response's `cairn.cache`.

    `matched_tokens`: tokens whose keys and values were found; `cached_tokens`: tokens that were not computed again;
    `computed_tokens`: prompt tokens that went through the model, recomputation after preemption included;
    `reason`: why `cached_tokens` is not more, a name of `cairn.cache.reasons.Reason`. `received_tokens`: tokens on top
    of `cached_tokens` that came from another server; `prefill_cached_tokens`: what that server said it had cached.
    `held_breakpoints`: how many of the client's breakpoints have a checkpoint that is held for it. `lost_tokens`:
    prompt tokens that came from nowhere, by why: with `cached_tokens` and `received_tokens` they are the prompt.
    """

    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    computed_tokens: int
    reason: str
    received_tokens: int = 0
    prefill_cached_tokens: int | None = None
    held_breakpoints: int = 0
    lost_tokens: dict[str, int] = {}


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer that brought something: seconds from its start to its confirmation, and what was read."""

    seconds: float
    num_bytes: int
    num_descriptors: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds one request spent waiting, in prefill and in decode."""

    queue: float
    prefill: float
    decode: float


class GenerateOutput(msgspec.Struct, frozen=True, kw_only=True):
    """News of answer `index` of a request. `text`, `token_ids` and `logprobs` are what has been added since the last
    output; `prompt_logprobs` come with the first one. An `error` ends all answers of its request.

    `finish_reason` is set on an answer's last output only; `timings` come with it, and `cache` with that of answer 0.
    `stop_reason` is the stop string or stop token that ended the answer (None for end-of-sequence). With finish reason
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
    index: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
