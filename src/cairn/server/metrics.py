"""Prometheus metrics: vLLM's names where the meaning is the same, `cairn:` for what only cairn has.

Engine counters are exported from one `EngineStats` per scrape; request times are measured here. The registry belongs
to this object, so two servers in one process do not mix.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cairn.engine.contract import (
    STEP_SIZES,
    EngineInfo,
    EngineStats,
    GenerateOutput,
    GenerateRequest,
    TransferReport,
)
from cairn.server.tier_metrics import TIER_COUNTERS, TIER_GAUGES

_LABELS = ("model_name", "engine")
_FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")

# vLLM's buckets, so that dashboards can lay both engines over each other.
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

_TRANSFER_BUCKETS = (
    ("nixl_xfer_time_seconds", (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)),
    ("nixl_bytes_transferred", tuple(float(1 << power) for power in range(11, 35, 2))),
    (
        "nixl_num_descriptors",
        (
            *(10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0),
            *(1000.0, 2000.0, 4000.0, 10000.0, 20000.0, 50000.0),
        ),
    ),
)

# A row: name, place in EngineStats, help, and, if the field is a dictionary, the label that its keys are.
_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_cache.queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_cache.hits", "Prompt tokens found in the prefix cache."),
    (
        *("cairn:second_sighting_tokens", "prefix_cache.second_shared"),
        "Prompt tokens shared with an earlier prompt where nobody had left it before.",
    ),
    (
        *("cairn:second_sighting_hit_tokens", "prefix_cache.second_hits"),
        "Those of cairn:second_sighting_tokens that were found in the prefix cache.",
    ),
    ("vllm:prompt_tokens", "tokens.prompt", "Prompt tokens of requests that were started, cached ones included."),
    (
        *("vllm:prompt_tokens_by_source", "tokens.prompt_by_source"),
        *("Prompt tokens of requests that were started, by where what they need came from.", "source"),
    ),
    ("vllm:prompt_tokens_cached", "tokens.cached", "Prompt tokens of requests that were started, not computed here."),
    (
        *("vllm:prompt_tokens_cached_by_source", "tokens.cached_by_source"),
        *("Prompt tokens of requests that were started, not computed here, by where they came from.", "source"),
    ),
    ("vllm:generation_tokens", "tokens.generation", "Tokens generated."),
    ("vllm:num_preemptions", "num_preemptions", "Running requests that had to give their memory up."),
    (
        *("cairn:request_bypasses", "queue.num_bypasses"),
        "How often a request went before one that came earlier: not to lose what it was going to hit, or as its "
        "session had been served less.",
    ),
    (
        *("cairn:session_requests", "queue.requests_by_session"),
        *("Requests that were started, by how much their sessions had been served: short, medium or long.", "session"),
    ),
    (
        *("cairn:session_wait_seconds", "queue.wait_seconds_by_session"),
        "Seconds that requests had waited when they were started, by how much their sessions had been served.",
        "session",
    ),
    ("cairn:forward_passes", "steps.forward_passes", "Forward passes of the model."),
    ("cairn:steps", "steps.num_steps", "Engine steps."),
    ("cairn:computed_prompt_tokens", "tokens.computed_prompt", "Prompt tokens that went through the model."),
    ("cairn:recomputed_tokens", "tokens.recomputed", "Tokens computed again after a preemption."),
    ("cairn:audits", "prefix_cache.audits", "Recounts of the cache's accounting that came out right."),
    ("cairn:miss_requests", "prefix_cache.miss_reasons", "Requests by why their cached part was not longer.", "reason"),
    ("cairn:lost_tokens", "prefix_cache.lost_tokens", "Prompt tokens that were not cached, by why.", "reason"),
    ("cairn:checkpoints_taken", "prefix_cache.checkpoints_taken", "State checkpoints taken.", "kind"),
    ("cairn:checkpoints_hit", "prefix_cache.checkpoints_hit", "State checkpoints that a request started from.", "kind"),
    (
        "cairn:checkpoints_evicted",
        "prefix_cache.checkpoints_evicted",
        "State checkpoints dropped for want of memory.",
        "kind",
    ),
)
_TRANSFER_COUNTERS = (
    (
        *("vllm:external_prefix_cache_queries", "transfers.queried_tokens"),
        "Prompt tokens that other servers were asked for.",
    ),
    ("vllm:external_prefix_cache_hits", "transfers.received_tokens", "Prompt tokens received from other servers."),
    ("vllm:nixl_num_failed_transfers", "transfers.num_failed", "Transfers that did not bring what they were to bring."),
    ("vllm:nixl_num_kv_expired_reqs", "transfers.expired_leases", "Prefilled prompts that nobody fetched in time."),
    ("cairn:skipped_transfers", "transfers.num_skipped", "Transfers not tried, as the peer had not answered lately."),
    (
        *("cairn:side_channel_dropped", "transfers.dropped_frames"),
        "Frames on the side channel that were no valid record, and connections without a proof of the secret.",
    ),
    (
        *("cairn:hand_overs_refused", "transfers.refused_kv_exports"),
        *("KV exports (prompts for other servers) that were refused with 429, by the bound that they met.", "reason"),
    ),
)
_IMAGE_COUNTERS = (
    ("vllm:mm_cache_queries", "images.num_queries", "How often the encoder cache was asked for an image."),
    ("vllm:mm_cache_hits", "images.num_hits", "How often it had the image."),
    ("cairn:images_encoded", "images.num_encoded", "Images that went through the vision model."),
    ("cairn:image_hits", "images.num_hits", "How often an image was found encoded, in the steps that needed it."),
)
_SHARING_COUNTERS = (
    (
        *("cairn:in_flight_shared_requests", "prefix_cache.in_flight_shared_requests"),
        "Requests that waited for another one's prefill and started from it.",
    ),
    (
        "cairn:in_flight_shared_tokens",
        "prefix_cache.in_flight_shared_tokens",
        "Prompt tokens that this waiting has saved.",
    ),
)
_SPEC_DECODE_COUNTERS = (
    ("vllm:spec_decode_num_drafts", "spec_decode.num_drafts", "Drafts, each verified in one step."),
    ("vllm:spec_decode_num_draft_tokens", "spec_decode.num_draft_tokens", "Tokens that were drafted and verified."),
    ("vllm:spec_decode_num_accepted_tokens", "spec_decode.num_accepted_tokens", "Drafted tokens that were accepted."),
    (
        *("vllm:spec_decode_num_accepted_tokens_per_pos", "spec_decode.accepted_per_pos"),
        *("Drafted tokens that were accepted, by their position in the draft.", "position"),
    ),
)
_LOG_COUNTERS = (("cairn:request_log_dropped", "request_log_dropped", "Requests that the request log has no line of."),)
_GAUGES = (
    ("vllm:num_requests_running", "num_running", "Requests being computed."),
    ("vllm:num_requests_waiting", "num_waiting", "Requests waiting for their turn."),
    (
        *("vllm:num_requests_waiting_by_reason", "waiting_by_reason"),
        *("Waiting requests by what they wait for: capacity, or another request or server (deferred).", "reason"),
    ),
    (
        *("cairn:pending_prefill_tokens", "pending_prefill_tokens"),
        "Tokens of running and waiting prompts that are still to be computed, estimated for the waiting.",
    ),
    ("cairn:held_checkpoints", "prefix_cache.held_checkpoints", "Checkpoints that clients hold with cache_control."),
    ("cairn:held_pages", "pool.held_pages", "Pages that running requests refer to."),
    ("cairn:cached_pages", "pool.cached_pages", "Pages that only the cache refers to."),
    ("cairn:free_pages", "pool.free_pages", "Pages that nobody refers to."),
    ("cairn:open_leases", "pool.open_sequences", "Sequences of requests that have pages."),
)
_TRANSFER_GAUGES = (
    (
        *("vllm:num_requests_kv_fetch_by_stage", "transfers.fetches_by_stage"),
        *("Requests that wait for pages of another server, by how far they are.", "stage"),
    ),
    ("cairn:leased_pages", "transfers.leased_pages", "Pages that are held for other servers."),
    (
        "cairn:quarantined_pages",
        "transfers.quarantined_pages",
        "Pages given up into which a late write may still come.",
    ),
    ("cairn:open_transfers", "transfers.num_open", "Transfers from other servers that are under way."),
)
_IMAGE_GAUGES = (("cairn:image_bytes", "images.num_bytes", "Bytes of encoded images that are kept."),)

# The second column: the field of EngineInfo without which a group is left out: a number that cannot change says less
# than none.
_GROUPS: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str | None, Sequence[tuple[str, ...]]], ...] = (
    (CounterMetricFamily, None, _COUNTERS),
    (CounterMetricFamily, "side_channel", _TRANSFER_COUNTERS),
    (CounterMetricFamily, "reads_images", _IMAGE_COUNTERS),
    (CounterMetricFamily, "cache.shares_in_flight", _SHARING_COUNTERS),
    (CounterMetricFamily, "num_speculative_tokens", _SPEC_DECODE_COUNTERS),
    (CounterMetricFamily, "logs_requests", _LOG_COUNTERS),
    (GaugeMetricFamily, None, _GAUGES),
    (GaugeMetricFamily, "side_channel", _TRANSFER_GAUGES),
    (GaugeMetricFamily, "reads_images", _IMAGE_GAUGES),
    (CounterMetricFamily, "tiers", TIER_COUNTERS),
    (GaugeMetricFamily, "tiers", TIER_GAUGES),
)


class _EngineCollector(Collector):
    """The engine's own counters, as they were when `stats` was set, and the seconds between answers' tokens: as many as
    there are tokens, and a Histogram takes two locks and looks through its buckets for each."""

    def __init__(self, info: EngineInfo, labels: Sequence[str]) -> None:
        self._info = info
        self._labels = labels
        self._intervals, self._seconds = [0] * (len(_TOKEN_BUCKETS) + 1), 0.0
        self.stats = EngineStats()

    def collect(self) -> Iterator[Metric]:
        stats, info = self.stats, self._info
        for family, needs, rows in _GROUPS:
            for name, place, text, *label in rows if needs is None or attrgetter(needs)(info) else ():
                value = attrgetter(place)(stats)
                yield self._family(family, name, text, label, _samples(value, len(label)))
        text = "Share of the pages that running requests hold, 0 to 1."
        yield self._family(GaugeMetricFamily, "vllm:kv_cache_usage_perc", text, (), {(): stats.pool.usage})
        facts = {
            "block_size": str(info.cache.block_size),
            "num_gpu_blocks": str(info.cache.num_pages),
            "page_bytes": str(info.cache.page_bytes),
            "pages_per_checkpoint": str(info.cache.pages_per_checkpoint),
            "enable_prefix_caching": str(info.cache.enable_prefix_caching),
            "mamba_cache_mode": info.cache.mamba_cache_mode,
            "cache_dtype": info.dtype,
            **_capacity(info),
        }
        text = "The cache's configuration; the value is always 1."
        yield self._family(GaugeMetricFamily, "vllm:cache_config_info", text, [*facts], {tuple(facts.values()): 1.0})
        steps, counts = stats.steps, stats.steps.sizes or [0] * (len(STEP_SIZES) + 1)
        yield self._histogram("iteration_tokens_total", "Tokens of one step.", STEP_SIZES, counts, steps.num_tokens)
        name, text = "inter_token_latency_seconds", "Inter token latency seconds."
        yield self._histogram(name, text, _TOKEN_BUCKETS, self._intervals, self._seconds)

    def observe_interval(self, seconds: float) -> None:
        self._intervals[bisect_left(_TOKEN_BUCKETS, seconds)] += 1
        self._seconds += seconds

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> HistogramMetricFamily:
        """`counts`: of values up to each of `bounds` and above the one before, and of those above all."""
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        places = [*(str(float(bound)) for bound in bounds), "+Inf"]
        family.add_metric(self._labels, list(zip(places, accumulate(counts), strict=True)), total)
        return family

    def _family(
        self,
        family: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
        samples: Mapping[tuple[str, ...], float],
    ) -> Metric:
        """A metric with a sample for each value of `labels`, which come after those of all metrics."""
        metric = family(name, text, labels=(*_LABELS, *labels))
        for values, number in samples.items():
            metric.add_metric((*self._labels, *values), number)
        return metric


def _samples(value: Any, num_labels: int) -> dict[tuple[str, ...], float]:
    """A number, or as many levels of mappings to numbers, by the values of its labels."""
    if not num_labels:
        return {(): value}
    below = ((key, _samples(value[key], num_labels - 1)) for key in sorted(value))
    return {(key, *rest): number for key, samples in below for rest, number in samples.items()}


def _capacity(info: EngineInfo) -> dict[str, str]:
    """Labels: how many tokens the pool holds, and how many requests of the greatest length that are. Without attention
    layers tokens need no pages, and the slots are what there is of."""
    num_tokens, cache = info.max_num_seqs * info.max_model_len, info.cache
    if cache.bytes_per_token:
        num_tokens = int(cache.num_pages * cache.page_bytes / cache.bytes_per_token)
    concurrency = round(num_tokens / info.max_model_len, 2)
    return {"kv_cache_size_tokens": str(num_tokens), "kv_cache_max_concurrency": str(concurrency)}


class Metrics:
    """All metrics of one server. `queue_full`: counts requests that the queue has no place for."""

    def __init__(self, info: EngineInfo, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._engine = _EngineCollector(info, self._labels)
        self._registry.register(self._engine)
        self.first_token = self._histogram("time_to_first_token_seconds", _FIRST_TOKEN_BUCKETS)
        self.observe_interval = self._engine.observe_interval
        self.per_output_token = self._histogram("request_time_per_output_token_seconds", _TOKEN_BUCKETS)
        self.whole_request = self._histogram("e2e_request_latency_seconds", _REQUEST_BUCKETS)
        self.queue_time = self._histogram("request_queue_time_seconds", _REQUEST_BUCKETS)
        self.prefill_time = self._histogram("request_prefill_time_seconds", _REQUEST_BUCKETS)
        self.decode_time = self._histogram("request_decode_time_seconds", _REQUEST_BUCKETS)
        self.inference_time = self._histogram("request_inference_time_seconds", _REQUEST_BUCKETS)
        self.preemptions = self._histogram("request_num_preemptions", _PREEMPTION_BUCKETS)
        self.num_answers = self._histogram("request_params_n", _N_BUCKETS)
        tokens = [float(digit * 10**power) for power in range(9) for digit in (1, 2, 5)]
        tokens = [bucket for bucket in tokens if bucket <= info.max_model_len]
        self.prompt_tokens = self._histogram("request_prompt_tokens", tokens)
        self.computed_tokens = self._histogram("request_prefill_kv_computed_tokens", tokens)
        self.generation_tokens = self._histogram("request_generation_tokens", tokens)
        self.longest_answer = self._histogram("request_max_num_generation_tokens", tokens)
        self.max_tokens = self._histogram("request_params_max_tokens", tokens)
        text = "Requests that found a queue full."
        rejections = Counter("vllm:admission_rejections", text, ("model_name", "reason"), registry=self._registry)
        self.queue_full = rejections.labels(model_name, "max_num_queued_reqs")
        self._transfers: Sequence[Histogram] = ()
        if info.side_channel is not None:
            self._transfers = [self._histogram(name, buckets) for name, buckets in _TRANSFER_BUCKETS]
        labels = (*_LABELS, "finished_reason")
        finished = Counter("vllm:request_success", "Answers by how they ended.", labels, registry=self._registry)
        self.finished = {reason: finished.labels(*self._labels, reason) for reason in _FINISHED_REASONS}

    def exposition(self, stats: EngineStats) -> bytes:
        """Everything in Prometheus' text format."""
        self._engine.stats = stats
        return generate_latest(self._registry)

    def observe_transfer(self, report: TransferReport) -> None:
        """What a request has fetched from another server."""
        sizes = (report.seconds, report.num_bytes, report.num_descriptors)
        for histogram, size in zip(self._transfers, sizes, strict=False):  # none without a side channel
            histogram.observe(size)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        family = Histogram(f"vllm:{name}", text, _LABELS, registry=self._registry, buckets=buckets)
        return family.labels(*self._labels)


@dataclass(slots=True)
class RequestMeter:
    """Measures one answer to a request from its arrival to its end. Times are seconds of one clock.

    `index`: which answer it is, so that the prompt counts once. `lengths`: of those of its answers that have ended, in
    tokens: one list for all meters of the request. `max_model_len`: tokens of prompt and answer at most.
    """

    metrics: Metrics
    arrival_time: float
    request: GenerateRequest
    index: int
    lengths: list[int]
    max_model_len: int
    _first: float | None = field(init=False, default=None)
    _last: float = field(init=False, default=0.0)
    _num_tokens: int = field(init=False, default=0)
    _ended: bool = field(init=False, default=False)

    def record(self, output: GenerateOutput, now: float) -> None:
        metrics = self.metrics
        if output.token_ids:
            if self._first is None:
                self._first = now
                metrics.first_token.observe(now - self.arrival_time)
            else:
                metrics.observe_interval((now - self._last) / len(output.token_ids))
            self._last = now
            self._num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self._finish(output, now)

    def end(self, reason: str) -> None:
        """The request ended without a last output, or has ended already."""
        if not self._ended:
            self._ended = True
            self.metrics.finished[reason].inc()

    def _finish(self, output: GenerateOutput, now: float) -> None:
        metrics = self.metrics
        metrics.whole_request.observe(now - self.arrival_time)
        num_prompt_tokens = len(self.request.prompt) // 8
        max_tokens = 1 if self.request.prefill_only else self.request.stop_conditions.max_tokens
        if self.index == 0:
            metrics.prompt_tokens.observe(num_prompt_tokens)
        if output.cache is not None:
            num_reused = output.cache.cached_tokens + output.cache.received_tokens
            metrics.computed_tokens.observe(num_prompt_tokens - num_reused)
        metrics.max_tokens.observe(self.max_model_len - num_prompt_tokens if max_tokens is None else max_tokens)
        metrics.generation_tokens.observe(self._num_tokens)
        self.lengths.append(self._num_tokens)
        if len(self.lengths) == self.request.num_answers:
            metrics.num_answers.observe(self.request.num_answers)
            metrics.longest_answer.observe(max(self.lengths))
        if output.timings is not None:
            metrics.inference_time.observe(output.timings.prefill + output.timings.decode)
            metrics.preemptions.observe(output.timings.num_preemptions)
            metrics.queue_time.observe(output.timings.queue)
            metrics.prefill_time.observe(output.timings.prefill)
            metrics.decode_time.observe(output.timings.decode)
        if self._first is not None and self._num_tokens > 1:
            metrics.per_output_token.observe((self._last - self._first) / (self._num_tokens - 1))
        self.end(output.finish_reason or "error")
