"""What the engine tells of itself: what was built, and what it has done."""

import msgspec

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Steps are counted by how many tokens they had, at most: vLLM's buckets. Larger ones have one more."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was built: constant for the engine's life. `num_pages` of `page_bytes` each are the whole pool.

    `min_cacheable_tokens`: a prompt shorter than this cannot be hit. `max_waiting`: requests that may wait besides the
    `max_num_seqs` that are computed at once. `cpu_threads`: of each rank's computation. `side_channel`: where other
    servers ask for pages, as `host:port`; None when they cannot. Page and checkpoint bytes are those of one rank.
    `reads_images`: a vision model is loaded. `logs_requests`: there is a request log. `shares_in_flight`: requests may
    wait for others' prefill. `quantization`: of the weights, None where they are in `dtype`.
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
    max_waiting: int = 1024
    cpu_threads: int = 1
    tensor_parallel_size: int = 1
    side_channel: str | None = None
    reads_images: bool = False
    logs_requests: bool = False
    shares_in_flight: bool = False
    quantization: str | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start (monotone) and gauges of this moment.

    `held_pages`: pages that open leases refer to; `cached_pages`: pages that only the tree refers to;
    `held_checkpoints`: those that clients hold. The prefix cache counters are in prompt tokens. `prompt_tokens`: those
    of the requests that have been started, and by where what they need came from: `local_compute`, `local_cache_hit`,
    `external_kv_transfer` (only with a side channel). `reasons`: requests by miss reason. `lost_tokens`: prompt tokens
    not cached, by the same reasons. `checkpoints_taken`, `_hit`, `_evicted`: by kind. `audits`: how often the
    accounting was recounted and found right.

    `step_sizes`: steps that computed tokens, by how many: each one is counted once, in the first of `STEP_SIZES` that
    it does not exceed, or behind them. `step_tokens`: all their tokens, of prompts and of answers.

    `in_flight_shared_requests`: those that have waited for another one's prefill and started from it, and
    `in_flight_shared_tokens` what that has saved them.

    `images_encoded`: images that went through the vision model; `image_hits`: how often one had been kept instead;
    `image_bytes`: what is kept of them. `request_log_dropped`: requests that the log has no line of.

    Transfers: `external_prefix_cache_queries` and `_hits` are prompt tokens asked of other servers and received from
    them. `leased_pages`: held for other servers; `quarantined_pages`: given up, but a late write may still come.
    `expired_leases`: prompts that nobody fetched in time. `refused_kv_exports`: requests for another server that were
    refused, by which bound of the leases: that of all (`total`), of one client (`client`), of the time that they wait
    for room (`timeout`). `skipped_transfers`: not tried, because the peer had not answered lately.
    `side_channel_dropped`: frames that were no valid record, and connections without a proof.
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
    prompt_tokens_by_source: dict[str, int] = {}
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
    skipped_transfers: int = 0
    refused_kv_exports: dict[str, int] = {}
    side_channel_dropped: int = 0
    images_encoded: int = 0
    image_hits: int = 0
    image_bytes: int = 0
    request_log_dropped: int = 0
    in_flight_shared_requests: int = 0
    in_flight_shared_tokens: int = 0
