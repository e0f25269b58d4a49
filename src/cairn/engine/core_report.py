"""The core's counters as records for the client: one request's, and the engine's."""

from bisect import bisect_left

from cairn.cache.reasons import Reason
from cairn.engine.contract import (
    STEP_SIZES,
    CacheReport,
    DraftReport,
    EngineStats,
    ImageStats,
    PoolStats,
    PrefixCacheStats,
    QueueStats,
    SpecDecodeStats,
    StepStats,
    TierStats,
    Timings,
    TokenStats,
    TransferStats,
)
from cairn.engine.tiers import EngineTiers
from cairn.engine.transfers.kv_transfer import KvTransfer
from cairn.runner.contract import EncoderCounters
from cairn.scheduler.request import Request
from cairn.scheduler.speculation import SpecDecodeCounters
from cairn.scheduler.state import SchedulerState
from cairn.step import StepPlan


def num_step_tokens(plan: StepPlan) -> int:
    """Tokens of prompts that go through the model, and tokens of answers: one for each decode, drafts, and those that
    are drawn where a prompt ends, or for one more answer to it."""
    num_tokens = len(plan.decodes)
    for row in plan.long_rows:
        num_tokens += len(row.tokens)
    if not plan.admits and not plan.prefills:
        return num_tokens
    return num_tokens + len(set(plan.samples.slots.tolist()).difference(plan.decodes.slots.tolist()))


class StepSizes:
    """Counts steps by their size; empty ones are none."""

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_SIZES) + 1)
        self.num_tokens = 0

    def add(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self.counts[bisect_left(STEP_SIZES, num_tokens)] += 1
            self.num_tokens += num_tokens


def engine_stats(
    state: SchedulerState,
    transfer: KvTransfer | None,
    images: EncoderCounters | None,
    steps: StepSizes,
    *,
    forward_passes: int,
    audits: int,
    request_log_dropped: int,
    num_speculative_tokens: int = 0,
    tiers: EngineTiers | None = None,
) -> EngineStats:
    """Counters since the start, and gauges of this moment. `images`: None for a model that reads none.
    `num_speculative_tokens`: positions of drafts that are told one by one."""
    cache, counters, transfers = state.cache, state.counters, state.transfers
    held, hits, received = cache.pinned.num_pages(), cache.counters.hits, cache.counters.received
    below = counters.tier_hits
    sources = {"local_compute": counters.prompt_tokens - hits - received, "local_cache_hit": hits + below}
    sources |= {} if transfer is None else {"external_kv_transfer": received - below}
    cache.checkpoints.end_expired_retentions()
    return EngineStats(
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        waiting_by_reason={"capacity": state.num_waiting - state.num_deferred, "deferred": state.num_deferred},
        pending_prefill_tokens=pending_prefill_tokens(state),
        num_preemptions=counters.preemptions,
        queue=QueueStats(
            num_bypasses=counters.bypasses,
            requests_by_session={**state.waiting.sessions.num_requests},
            wait_seconds_by_session={**state.waiting.sessions.wait_seconds},
        ),
        pool=PoolStats(
            num_pages=cache.pool.num_pages,
            free_pages=cache.pool.num_free,
            held_pages=held,
            cached_pages=cache.pool.num_pages - cache.pool.num_free - held,
            open_sequences=len(cache.pinned.sequences),
        ),
        tokens=TokenStats(
            prompt=counters.prompt_tokens,
            prompt_by_source=sources,
            computed_prompt=counters.computed_prompt_tokens,
            generation=counters.generation_tokens,
            recomputed=counters.recomputed_tokens,
        ),
        prefix_cache=PrefixCacheStats(
            queries=cache.counters.queries,
            hits=hits,
            second_shared=cache.counters.second_shared,
            second_hits=cache.counters.second_hits,
            miss_reasons={reason.value: cache.counters.reasons[reason] for reason in Reason},
            lost_tokens={reason.value: cache.counters.lost[reason] for reason in Reason},
            checkpoints_taken={kind.value: count for kind, count in cache.checkpoints.taken.items()},
            checkpoints_hit={kind.value: count for kind, count in cache.counters.used.items()},
            checkpoints_evicted={kind.value: count for kind, count in cache.checkpoints.evicted.items()},
            held_checkpoints=len(cache.checkpoints.retained),
            audits=audits,
            in_flight_shared_requests=counters.shared.requests,
            in_flight_shared_tokens=counters.shared.tokens,
        ),
        steps=StepStats(
            num_steps=counters.steps,
            forward_passes=forward_passes,
            num_tokens=steps.num_tokens,
            sizes=list(steps.counts),
        ),
        transfers=TransferStats(
            queried_tokens=counters.external_queries,
            received_tokens=counters.external_hits,
            leased_pages=0 if transfer is None else transfer.loop.producer.leases.num_pages,
            quarantined_pages=sum(len(pin.pages) for pin in transfers.quarantine.values()),
            num_open=len(transfers.fetching),
            fetches_by_stage={
                "waiting_to_start": len(state.waiting.fetches),
                "in_progress": len(transfers.fetching),
                "completed_waiting": len(transfers.ready),
            },
            num_failed=counters.failed_pulls,
            num_skipped=0 if transfer is None else transfer.loop.consumer.unresponsive.num_skipped,
            expired_leases=counters.expired_offers,
            refused_kv_exports=dict(counters.refused_kv_exports),
            dropped_frames=0 if transfer is None else transfer.loop.dropped,
        ),
        images=ImageStats()
        if images is None
        else ImageStats(num_encoded=images.encodes, num_hits=images.hits, num_bytes=images.cached_bytes),
        spec_decode=_spec_decode_stats(counters.spec_decode, num_speculative_tokens),
        tiers=TierStats() if tiers is None else tiers.stats(),
        request_log_dropped=request_log_dropped,
    )


def _spec_decode_stats(counters: SpecDecodeCounters, num_positions: int) -> SpecDecodeStats:
    return SpecDecodeStats(
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        accepted_per_pos={str(i): count for i, count in enumerate(counters.accepted_per_pos[:num_positions])},
    )


def cache_report(request: Request) -> CacheReport | None:
    """None for a request that was never admitted."""
    first = request.stats.first_sequence
    if first is None:
        return None
    below = first.received if request.transfer.from_tier else 0
    prefill_cached_tokens = request.spec.role.prefill_cached_tokens
    # it came by the client: more tokens than the prompt has are nothing that a server would report
    believed = prefill_cached_tokens is not None and prefill_cached_tokens <= request.num_prompt_tokens
    # a prompt whose log-probabilities are told has been computed here, all of it
    believed = believed and request.spec.prompt_logprobs is None
    return CacheReport(
        prompt_tokens=request.num_prompt_tokens,
        matched_tokens=first.matched,
        cached_tokens=first.hit - first.received + below,
        computed_tokens=request.stats.num_prompt_computed,
        reason=first.reason.value,
        received_tokens=first.received - below,
        tier_tokens=below,
        held_breakpoints=len(first.retained_breakpoints),
        lost_tokens={reason.value: tokens for reason, tokens in first.lost.items()},
        prefill_cached_tokens=prefill_cached_tokens if believed and not request.transfer.remote_failed else None,
    )


def timings(request: Request) -> Timings | None:
    """None for a request that ended without a token."""
    stats = request.stats
    if stats.scheduled_time is None or stats.first_token_time is None or stats.finished_time is None:
        return None
    return Timings(
        queue=stats.scheduled_time - stats.arrival_time,
        prefill=stats.first_token_time - stats.scheduled_time,
        decode=stats.finished_time - stats.first_token_time,
        num_preemptions=stats.num_preemptions,
    )


def draft_report(request: Request) -> DraftReport | None:
    """None for a request that nothing was drafted for."""
    stats = request.stats
    if not stats.num_draft_tokens:
        return None
    return DraftReport(num_draft_tokens=stats.num_draft_tokens, num_accepted_tokens=stats.num_accepted_draft_tokens)


def pending_prefill_tokens(state: SchedulerState) -> int:
    """What is cached of a waiting prompt is found out when its turn comes: until then it counts as prompts do in the
    mean."""
    counters = state.counters
    share = counters.computed_prompt_tokens / counters.prompt_tokens if counters.prompt_tokens else 1.0
    running = sum(max(0, request.prefill_until - request.num_computed) for request in state.running)
    return running + round(min(1.0, share) * sum(request.num_tokens for request in state.waiting.plain))
