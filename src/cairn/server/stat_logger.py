"""Log lines: the model and its cache at startup, then throughput and hit rates while serving."""

from cairn.engine.contract import EngineInfo, EngineStats, SpecDecodeStats


def format_startup_lines(info: EngineInfo) -> list[str]:
    """The model and its cache in words."""
    cache = info.cache
    pool = cache.num_pages * cache.page_bytes
    ranks = info.tensor_parallel_size
    weights = f", weights in {info.quantization}" if info.quantization else ""
    lines = [
        f"{info.architecture} in {info.dtype}{weights}: prompt and answer together up to {info.max_model_len} tokens, "
        f"up to {info.max_num_seqs} requests computed at once",
        *([f"tensor parallel over {ranks} processes; bytes below are those of each"] if ranks > 1 else []),
        f"cache: one pool of {cache.num_pages} pages of {cache.page_bytes} bytes ({_size(pool)} in all)",
    ]
    if cache.bytes_per_token:
        tokens = int(pool / cache.bytes_per_token)
        lines.append(f"cache: {cache.bytes_per_token:g} bytes per token; the pool alone would hold {tokens} tokens")
    elif not cache.window_bytes:
        lines.append("cache: this model has no attention layers: tokens cost nothing")
    if cache.window_bytes:
        lines.append(
            f"cache: {_size(cache.window_bytes)} within the reach of windows: what each sequence has, and each "
            "checkpoint that is kept when memory is full"
        )
    if cache.checkpoint_bytes:
        count = cache.num_pages // cache.pages_per_checkpoint
        running = "" if cache.state_dtype == "float32" else f", running ones in {cache.state_dtype}"
        lines.append(
            f"cache: {_size(cache.checkpoint_bytes)} per state checkpoint ({cache.pages_per_checkpoint} pages, states "
            f"in {cache.checkpoint_dtype}{running}); "
            f"the pool alone would hold {count} checkpoints"
        )
    else:
        there = ", as long as there is memory for all windows" if cache.window_bytes else ""
        lines.append(f"cache: this model has no recurrent state: every shared token is a hit{there}")
    if cache.enable_prefix_caching:
        lines.append(
            f"cache: checkpoints by policy '{cache.mamba_cache_mode}'; "
            f"the smallest prefix that can be hit, in tokens: {cache.min_cacheable_tokens}"
        )
    else:
        lines.append("cache: prefix caching is off")
    if info.num_speculative_tokens:
        lines.append(f"speculation: up to {info.num_speculative_tokens} tokens are drafted at a time where that pays")
    if info.side_channel is not None:
        lines.append(f"transfers: other servers ask for pages at {info.side_channel}")
    return lines


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


SIGHTINGS_SECONDS = 3600.0
"""Between two lines about second sightings."""


class ThroughputLogger:
    """vLLM's throughput line from successive counters; none while nothing happens. Where something was drafted, it says
    what that has brought.

    The hit rates are those of the last interval in which prompts were looked up (here, and at other servers).
    """

    def __init__(self, now: float) -> None:
        self._then = now
        self._stats = EngineStats()
        self._hit_rate = 0.0
        self._external_hit_rate = 0.0
        self._was_active = False

    def update(self, stats: EngineStats, now: float) -> str | None:
        """The line for the time since the last update, or None. `now`: seconds of the same clock."""
        old, seconds = self._stats, now - self._then
        self._stats, self._then = stats, now
        busy = bool(stats.num_running or stats.num_waiting)
        prompt = stats.tokens.prompt - old.tokens.prompt
        generated = stats.tokens.generation - old.tokens.generation
        quiet = not (busy or self._was_active or prompt or generated)
        self._was_active = busy
        if quiet or seconds <= 0:
            return None
        queries = stats.prefix_cache.queries - old.prefix_cache.queries
        if queries > 0:
            self._hit_rate = (stats.prefix_cache.hits - old.prefix_cache.hits) / queries
        queried = stats.transfers.queried_tokens - old.transfers.queried_tokens
        if queried > 0:
            self._external_hit_rate = (stats.transfers.received_tokens - old.transfers.received_tokens) / queried
        return (
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"KV cache usage: {stats.pool.usage:.1%}, Prefix cache hit rate: {self._hit_rate:.1%}, "
            f"External prefix cache hit rate: {self._external_hit_rate:.1%}"
            f"{_describe_drafts(old.spec_decode, stats.spec_decode)}"
        )


def _describe_drafts(old: SpecDecodeStats, new: SpecDecodeStats) -> str:
    num_drafts, num_tokens = new.num_drafts - old.num_drafts, new.num_draft_tokens - old.num_draft_tokens
    if num_drafts <= 0 or num_tokens <= 0:
        return ""
    accepted = new.num_accepted_tokens - old.num_accepted_tokens
    return (
        f", Mean acceptance length: {1 + accepted / num_drafts:.2f}, "
        f"Avg draft acceptance rate: {accepted / num_tokens:.1%}"
    )


class SecondSightingsLogger:
    """Every hour a line that says what second sightings have hit: prompts that left an earlier one where nobody had
    left it before. None in an hour without any."""

    def __init__(self, now: float) -> None:
        self._then, self._shared, self._hits = now, 0, 0

    def update(self, stats: EngineStats, now: float) -> str | None:
        """The line when it is time for it. `now`: seconds of the same clock."""
        if now < self._then + SIGHTINGS_SECONDS:
            return None
        shared, hits = stats.prefix_cache.second_shared - self._shared, stats.prefix_cache.second_hits - self._hits
        self._then, self._shared, self._hits = now, self._shared + shared, self._hits + hits
        if shared <= 0:
            return None
        return (
            f"cache: second sightings hit {hits} of {shared} shared tokens in the last hour ({hits / shared:.1%}), "
            f"{self._hits} of {self._shared} since the start"
        )
