"""What the engine tells of itself: what was built, and what it has done."""

import msgspec

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Steps are counted by how many tokens they had, at most: vLLM's buckets. Larger ones have one more."""


class CacheInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The cache's configuration. `num_pages` of `page_bytes` each are the whole pool; bytes are those of one rank.
    `bytes_per_token`: of keys and values that stay, without those of a limited reach, of which a sequence and each
    checkpoint have `window_bytes`.

    `min_cacheable_tokens`: a shorter prompt cannot be hit. `shares_in_flight`: requests may wait for others' prefill.
    `state_dtype`: what the recurrent state is in while it runs; `checkpoint_dtype`: its form in checkpoints.
    """

    block_size: int
    num_pages: int
    page_bytes: int
    bytes_per_token: float
    checkpoint_bytes: int
    pages_per_checkpoint: int
    min_cacheable_tokens: int
    mamba_cache_mode: str
    enable_prefix_caching: bool
    shares_in_flight: bool = False
    checkpoint_dtype: str = "float32"
    state_dtype: str = "float32"
    window_bytes: int = 0


class ServedModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model as it was loaded. `quantization`: of the weights, None where they are in `dtype`. `reads_images`: a
    vision model is loaded."""

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    quantization: str | None = None
    reads_images: bool = False


class EngineInfo(ServedModelInfo, frozen=True, kw_only=True):
    """What was built: constant for the engine's life.

    `max_waiting`: requests that may wait besides the `max_num_seqs` that are computed at once. `cpu_threads`: of each
    rank's computation. `side_channel`: where other servers ask for pages, as `host:port`; None when they cannot.
    `logs_requests`: there is a request log. `tiers`: the names of those below the pool, the fastest first.
    `num_speculative_tokens`: most drafts of one verification, 0 where nothing is drafted.
    """

    max_model_len: int
    max_num_seqs: int
    exact: bool
    cache: CacheInfo
    max_waiting: int = 1024
    cpu_threads: int = 1
    tensor_parallel_size: int = 1
    side_channel: str | None = None
    logs_requests: bool = False
    tiers: tuple[str, ...] = ()
    num_speculative_tokens: int = 0


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of the pool now. `held_pages`: those that sequences and pins refer to; `cached_pages`: those that only the
    prefix cache refers to. `open_sequences`: sequences of requests, which have pages."""

    num_pages: int = 0
    free_pages: int = 0
    held_pages: int = 0
    cached_pages: int = 0
    open_sequences: int = 0

    @property
    def usage(self) -> float:
        """The share of the pages that are held, 0 to 1."""
        return self.held_pages / self.num_pages if self.num_pages else 0.0


class TokenStats(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt`: tokens of the prompts of started requests; `prompt_by_source`: the same by where what they need came
    from: `local_compute`, `local_cache_hit`, `external_kv_transfer` (only with a side channel). `computed_prompt`:
    prompt tokens that went through the model. `recomputed`: tokens computed again after a preemption."""

    prompt: int = 0
    prompt_by_source: dict[str, int] = {}
    computed_prompt: int = 0
    generation: int = 0
    recomputed: int = 0

    @property
    def cached_by_source(self) -> dict[str, int]:
        """Prompt tokens that were not computed: found here (`device`), or fetched from another server (`p2p`)."""
        sources = {"device": "local_cache_hit", "p2p": "external_kv_transfer"}
        return {name: self.prompt_by_source[key] for name, key in sources.items() if key in self.prompt_by_source}

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.cached_by_source.values())


class PrefixCacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """`queries`, `hits`: prompt tokens that were looked up and found. `miss_reasons`: requests by why their cached part
    was not longer; `lost_tokens`: prompt tokens that were not cached, by the same reasons. `checkpoints_taken`, `_hit`,
    `_evicted`: by kind; `held_checkpoints`: those that clients hold now. `audits`: recounts of the accounting that came
    out right. `in_flight_shared_requests`: those that waited for another one's prefill and started from it, and
    `in_flight_shared_tokens` the tokens that this has saved. `second_shared`, `second_hits`: prompt tokens shared with
    a prompt that nobody had left there before, and those of them that were hit."""

    queries: int = 0
    hits: int = 0
    second_shared: int = 0
    second_hits: int = 0
    miss_reasons: dict[str, int] = {}
    lost_tokens: dict[str, int] = {}
    checkpoints_taken: dict[str, int] = {}
    checkpoints_hit: dict[str, int] = {}
    checkpoints_evicted: dict[str, int] = {}
    held_checkpoints: int = 0
    audits: int = 0
    in_flight_shared_requests: int = 0
    in_flight_shared_tokens: int = 0


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """`num_tokens`: all tokens that steps computed, of prompts and answers. `sizes`: steps by how many tokens they
    computed, empty ones not counted: each is in the bucket of the first of `STEP_SIZES` that it does not exceed, or in
    the last one."""

    num_steps: int = 0
    forward_passes: int = 0
    num_tokens: int = 0
    sizes: list[int] = []


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers between servers. `queried_tokens`, `received_tokens`: prompt tokens that other servers were asked for,
    and that came from them. `leased_pages`: held for other servers; `quarantined_pages`: given up, but a late write may
    still come. `fetches_by_stage`: requests that wait for pages of another server: for room (`waiting_to_start`), for
    the pages (`in_progress`), or with them for a slot (`completed_waiting`). `num_skipped`: transfers that were not
    tried because the peer had not answered lately. `expired_leases`: prompts that nobody fetched in time.
    `refused_kv_exports`: requests for another server that were refused, by which bound of the leases: that of all
    (`total`), of one client (`client`), of the time that they wait for room (`timeout`). `dropped_frames`: frames on
    the side channel that were no valid record, and connections without a proof of the secret."""

    queried_tokens: int = 0
    received_tokens: int = 0
    leased_pages: int = 0
    quarantined_pages: int = 0
    num_open: int = 0
    fetches_by_stage: dict[str, int] = {}
    num_failed: int = 0
    num_skipped: int = 0
    expired_leases: int = 0
    refused_kv_exports: dict[str, int] = {}
    dropped_frames: int = 0


class ImageStats(msgspec.Struct, frozen=True, kw_only=True):
    """`num_encoded`: images that went through the vision model. `num_hits`: how often the encoder cache had one
    instead. `num_bytes`: what it holds now."""

    num_encoded: int = 0
    num_hits: int = 0
    num_bytes: int = 0

    @property
    def num_queries(self) -> int:
        """How often the encoder cache was asked for an image."""
        return self.num_encoded + self.num_hits


class SpecDecodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding. `num_drafts`: verifications. `accepted_per_pos`: how often the draft at each position was
    accepted, by the position, from 0 on."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: dict[str, int] = {}


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers below the pool, by their names. `num_bytes`, `num_entries`: what they take, and have, now. `hits`:
    requests that were fetched from there, and `hit_tokens` what they had not to compute. `read_bytes`, `written_bytes`:
    moved since the start, and how long that took. `drops`: entries that are gone or never came, by why. `skipped`:
    paths of the pool that were not copied to any tier, by why."""

    num_bytes: dict[str, int] = {}
    num_entries: dict[str, int] = {}
    hits: dict[str, int] = {}
    hit_tokens: dict[str, int] = {}
    read_bytes: dict[str, int] = {}
    written_bytes: dict[str, int] = {}
    read_seconds: dict[str, float] = {}
    write_seconds: dict[str, float] = {}
    drops: dict[str, dict[str, int]] = {}
    skipped: dict[str, int] = {}


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """`num_bypasses`: see `cairn.scheduler.state.Counters`. `requests_by_session`, `wait_seconds_by_session`: requests
    that were admitted, and how long these had waited, by how much their sessions had been served: short, medium or
    long."""

    num_bypasses: int = 0
    requests_by_session: dict[str, int] = {}
    wait_seconds_by_session: dict[str, float] = {}


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start (monotone) and gauges of this moment. `waiting_by_reason`: the waiting by what for: for
    slots, pages and their turn (`capacity`), or for another request or server (`deferred`). `pending_prefill_tokens`:
    those of prompts that are still to be computed, of the waiting by the share that was computed of all so far.
    `request_log_dropped`: requests without a line in the request log."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_by_reason: dict[str, int] = {}
    pending_prefill_tokens: int = 0
    num_preemptions: int = 0
    queue: QueueStats = QueueStats()
    pool: PoolStats = PoolStats()
    tokens: TokenStats = TokenStats()
    prefix_cache: PrefixCacheStats = PrefixCacheStats()
    steps: StepStats = StepStats()
    transfers: TransferStats = TransferStats()
    images: ImageStats = ImageStats()
    spec_decode: SpecDecodeStats = SpecDecodeStats()
    tiers: TierStats = TierStats()
    request_log_dropped: int = 0
