"""What the HTTP room knows of the engine: plain records, and three small protocols.

    server --GenerateRequest--> EngineClient --wire--> EngineCore (scheduler + runner)
           <--GenerateOutput--              <--wire--

`EngineCore` is synchronous and lives wherever it is put (a thread, a process of its own); `EngineClient` is its
asynchronous face. All records are msgspec structs, so the process wire is their msgpack form and nothing else.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from cairn.cache.view import MAX_SHOWN, CacheView
from cairn.engine.logprobs import TokenLogprobs
from cairn.types import Boundary

__all__ = [
    "MAX_ANSWERS",
    "MAX_BREAKPOINTS",
    "MAX_HOLD_SECONDS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_PROMPT_LOGPROBS",
    "MAX_SHOWN",
    "STEP_SIZES",
    "Breakpoint",
    "CacheReport",
    "CacheView",
    "EngineClient",
    "EngineConfig",
    "EngineCore",
    "EngineInfo",
    "EngineStats",
    "FinishReason",
    "GenerateOutput",
    "GenerateRequest",
    "ImageInput",
    "KvEventsConfig",
    "KvTransferConfig",
    "Pixels",
    "RenderedPrompt",
    "RequestLogConfig",
    "Structure",
    "TemplateValue",
    "TextStream",
    "TextTokenizer",
    "Timings",
    "TokenLogprobs",
    "TransferReport",
]

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_BREAKPOINTS = 4
"""Places that one request may have held, as at Anthropic."""

MAX_ANSWERS = 128
"""Most answers to one prompt."""

MAX_LOGPROBS = 20
"""Most of the best tokens that are told of beside each."""

MAX_PROMPT_LOGPROBS = 1 << 18
"""Most tokens that are told of because of one prompt."""

MAX_LOGIT_BIAS = 1024
"""Most tokens whose logits one request may change."""

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Steps are counted by how many tokens they had, at most: vLLM's buckets. Larger ones have one more."""

MAX_HOLD_SECONDS = 3600
"""The longest that a place may be held without being used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """Where KV events are published, in vLLM's words. `replay_endpoint` None: no replays.

    `buffer_steps`: steps kept for replays; `max_queue_size`: steps that may wait to be sent; `hwm`: messages that may
    wait for one subscriber.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    encoding: Literal["map", "array"] = "map"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    """How pages and checkpoints go to and come from other servers. Roles are a matter of the request: every server
    with this configuration takes both.

    `host`, `port`: where the side channel listens, and what peers are told. `secret_file`: what peers must know, too;
    None keeps everything on loopback. `peers`: hosts, addresses and networks that may be read from besides loopback.
    `on_failure`: what becomes of a request whose pages do not arrive. `lease_seconds`: how long a prefilled prompt
    waits for its reader. `lease_share`: most of the pool that such prompts may hold together.
    """

    host: str = "localhost"
    port: int = 5600
    secret_file: str | None = None
    peers: tuple[str, ...] = ()
    on_failure: Literal["recompute", "fail"] = "recompute"
    lease_seconds: float = 30.0
    lease_share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLogConfig:
    """Where a line is written for each request that has ended. `max_bytes`: of one file; the file before it is kept."""

    path: str
    max_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that building an engine takes. Sizes in bytes and tokens; `seed` is the default of unseeded sampling.

    `language_model_only`: leave a vision model that the checkpoint has unloaded. `mm_encoder_cache_bytes`: most bytes
    of encoded images that are kept. `in_flight_sharing`: whether a request waits for one in prefill that computes its
    beginning.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    block_size: int = 16
    kv_cache_memory_bytes: int = 1 << 30
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_waiting: int = 1024
    enable_prefix_caching: bool = True
    in_flight_sharing: bool = True
    mamba_cache_mode: Literal["none", "align", "all", "granular", "junction", "auto"] = "auto"
    eviction: Literal["lru", "value"] = "value"
    exact: bool = False
    seed: int = 0
    kv_events: KvEventsConfig | None = None
    kv_transfer: KvTransferConfig | None = None
    request_log: RequestLogConfig | None = None
    tensor_parallel_size: int = 1
    language_model_only: bool = False
    mm_encoder_cache_bytes: int = 256 << 20


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt: tokens [start, start + length) are its placeholders, one for each merged patch of `grid`
    (patches in time, height and width).

    `digest`: sha256 over pixels, size and processor settings. `rgb`: uint8 [height, width, 3], in row order.
    """

    start: int
    length: int
    digest: bytes
    grid: tuple[int, int, int]
    width: int
    height: int
    rgb: bytes


class Pixels(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded image on its way to a prompt. `rgb`: uint8 [height, width, 3], in row order."""

    width: int
    height: int
    rgb: bytes


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """The form that an answer has to have.

    `kind`: what `text` is: a JSON schema, a regular expression, a JSON list of texts to choose from, a grammar (Lark or
    GBNF), or `calls`: JSON, `{"tools": [{"name", "parameters"}], "parallel"}`, one of which has to be called. `field`:
    where the client put it. `reasoning`: the form begins behind `</think>`, because the prompt has `opened` the
    reasoning, or it is `possible` that the answer begins with `<think>`.
    """

    kind: Literal["json", "regex", "choice", "grammar", "calls"]
    text: str
    field: str
    reasoning: Literal["none", "opened", "possible"] = "none"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to be continued.

    `prompt` is the token ids as raw little-endian int64. `max_tokens` None means as many as fit. `boundaries` are
    the places at which the leading system segment, messages and images end, and where clients have put breakpoints:
    ascending, each position in 1..n.
    `seed` None lets the engine choose one. `kv_transfer_params`: that JSON object of the request's body as it came;
    the engine alone knows what it may say, and refuses what it may not. `structure`: the form of the answer.

    `n`: how many answers; with seed s theirs are s, s + 1, and so on. Penalties, `min_p` and `logit_bias` (by
    token id) are those of `cairn.types.SamplingParams`. `min_tokens`: nothing but a full context ends the answer before
    so many tokens. `logprobs`: tell how likely each token was held, and of so many of the best beside it;
    `prompt_logprobs`: the same of the prompt, from its second token on. `priority`: a smaller one comes before others.
    """

    request_id: str
    prompt: bytes
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    cache_salt: str | None = None
    boundaries: list[Boundary] = []
    images: list[ImageInput] = []
    kv_transfer_params: bytes | None = None
    structure: Structure | None = None
    n: int = 1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0


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


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was built: constant for the engine's life. `num_pages` of `page_bytes` each are the whole pool.

    `min_cacheable_tokens`: a prompt shorter than this cannot be hit. `side_channel`: where other servers ask for
    pages, as `host:port`; None when they cannot. Page and checkpoint bytes are those of one rank. `reads_images`: a
    vision model is loaded. `logs_requests`: there is a request log. `shares_in_flight`: requests may wait for others'
    prefill.
    """

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_pages: int
    page_bytes: int
    bytes_per_token: float
    checkpoint_bytes: int
    pages_per_checkpoint: int
    max_num_seqs: int
    min_cacheable_tokens: int
    mamba_cache_mode: str
    enable_prefix_caching: bool
    exact: bool
    tensor_parallel_size: int = 1
    side_channel: str | None = None
    reads_images: bool = False
    logs_requests: bool = False
    shares_in_flight: bool = False


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start (monotone) and gauges of this moment.

    `held_pages`: pages that open leases refer to; `cached_pages`: pages that only the tree refers to;
    `held_checkpoints`: those that clients hold. The prefix
    cache counters are in prompt tokens. `reasons`: requests by miss reason. `lost_tokens`: prompt tokens not cached,
    by the same reasons. `checkpoints_taken`, `_hit`, `_evicted`: by kind. `audits`: how often the accounting was
    recounted and found right.

    `step_sizes`: steps that computed tokens, by how many: each one is counted once, in the first of `STEP_SIZES` that
    it does not exceed, or behind them. `step_tokens`: all their tokens, of prompts and of answers.

    `in_flight_shared_requests`: those that have waited for another one's prefill and started from it, and
    `in_flight_shared_tokens` what that has saved them.

    `images_encoded`: images that went through the vision model; `image_hits`: how often one had been kept instead;
    `image_bytes`: what is kept of them. `request_log_dropped`: requests that the log has no line of.

    Transfers: `external_prefix_cache_queries` and `_hits` are prompt tokens asked of other servers and received from
    them. `leased_pages`: held for other servers; `quarantined_pages`: given up, but a late write may still come.
    `expired_leases`: prompts that nobody fetched in time. `side_channel_dropped`: frames that were no valid record.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    free_pages: int = 0
    held_pages: int = 0
    cached_pages: int = 0
    held_checkpoints: int = 0
    open_leases: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    forward_passes: int = 0
    step_tokens: int = 0
    step_sizes: list[int] = []
    audits: int = 0
    reasons: dict[str, int] = {}
    lost_tokens: dict[str, int] = {}
    checkpoints_taken: dict[str, int] = {}
    checkpoints_hit: dict[str, int] = {}
    checkpoints_evicted: dict[str, int] = {}
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    leased_pages: int = 0
    quarantined_pages: int = 0
    open_transfers: int = 0
    failed_transfers: int = 0
    expired_leases: int = 0
    side_channel_dropped: int = 0
    images_encoded: int = 0
    image_hits: int = 0
    image_bytes: int = 0
    request_log_dropped: int = 0
    in_flight_shared_requests: int = 0
    in_flight_shared_tokens: int = 0


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A chat as token ids, with the places at which messages end (see `GenerateRequest.boundaries`), and its images
    in order."""

    token_ids: list[int]
    boundaries: list[Boundary]
    images: list[ImageInput] = []


TemplateValue: TypeAlias = str | int | float | bool | None


class Breakpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a chat that its client wants held for `seconds` after each use: the end of part `part` of the content
    of message `message`, which is not its last; with part None that of the whole message, and with message None that
    of the tools."""

    message: int | None = None
    part: int | None = None
    seconds: int


class TextStream(Protocol):
    """Turns one answer's tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still open."""
        ...

    def finish(self) -> str:
        """What is left when the answer ends, a cut character as U+FFFD."""
        ...


class TextTokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def image_markers(self) -> tuple[str, ...]:
        """The texts that a chat template writes for images and that nobody else may write; empty where the model reads
        text alone."""
        ...

    @property
    def chat_template(self) -> str:
        """The chat template's text, which shows how answers are written; empty where there is none."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, as UTF-8 that may begin or end within a character."""
        ...

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, TemplateValue] = MappingProxyType({}),
        breakpoints: Sequence[Breakpoint] = (),
        continue_final_message: bool = False,
    ) -> RenderedPrompt:
        """The chat template applied, `template_kwargs` among its variables. With `continue_final_message` the prompt
        ends within the last message, where its text does. Content is text, or parts `{"type": "text",
        "text": ...}` and `{"type": "image", "image": Pixels}`. Raises InvalidRequest when the template refuses the
        messages."""
        ...

    def stream(self, skip_special_tokens: bool = True) -> TextStream: ...


class EngineCore(Protocol):
    """The engine's inside, one thread only: submit and abort requests, and turn the handle."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def has_work(self) -> bool:
        """False when `step` would have nothing to do."""
        ...

    def submit(self, request: GenerateRequest) -> None:
        """Take a request. Raises RequestError (InvalidRequest, Overloaded); then nothing was taken."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored, nothing more is put out for it."""
        ...

    def start(self, wake: Callable[[], None]) -> None:
        """Called once before anything else, by the thread that owns the core. `wake` has it come back to `poll`."""
        ...

    def poll(self) -> list[GenerateOutput]:
        """Called often: what has happened outside. Outputs of requests that it has ended."""
        ...

    def step(self) -> list[GenerateOutput]:
        """One plan, run, apply. Outputs of requests that moved."""
        ...

    def close(self) -> None:
        """Called once, at the end."""
        ...

    def idle(self) -> None:
        """Called when there is no work: recounts the accounting. Raises AuditError."""
        ...

    def stats(self) -> EngineStats: ...

    def cache_view(self, max_paths: int) -> Iterator[CacheView | None]:
        """Look at the prefix cache, a slice at each turn between steps: None until the last item. At most `max_paths`
        paths of its tree are shown one by one, 1 to `MAX_SHOWN`."""
        ...

    def reset_cache(self) -> int:
        """Drop all that is cached, unless a request or another server holds pages: then nothing changes. How many
        pages are held."""
        ...


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def dead(self) -> str | None:
        """Why the engine has ended, or None while it lives."""
        ...

    async def start(self) -> None:
        """Bring the engine up. Raises ConfigError or ModelError from building it, EngineDead if it fell over."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateOutput]:
        """The outputs of one request, until each of its answers has its finish reason, or one of them has `error`.
        Closing the iterator early aborts the request.

        Raises RequestError when the core refuses it and EngineDead when the engine ends meanwhile.
        """
        ...

    async def stats(self) -> EngineStats:
        """Raises EngineDead, also when no answer comes within the deadline."""
        ...

    async def cache_view(self, max_paths: int) -> CacheView:
        """What the prefix cache holds. Raises EngineDead, also when no answer comes within the deadline."""
        ...

    async def reset_cache(self) -> int:
        """Drop all that is cached, unless pages are held: then nothing changes. How many are. Raises EngineDead, also
        when no answer comes within the deadline."""
        ...

    async def wait_dead(self) -> str:
        """Returns the reason when the engine has ended without being told to."""
        ...

    async def stop(self, drain_seconds: float) -> None:
        """Take nothing new, let open requests finish for at most `drain_seconds`, then end the engine."""
        ...
