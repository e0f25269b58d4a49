"""Into a slot: from the queue by a lookup, or with what has been fetched; the restore, and the first chunk."""

from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.scheduler.advance import add_prefill, next_prefill_end
from cairn.scheduler.fetch import (
    cancel_slow_fetch,
    count_bypassed,
    requeue_youngest_fetched,
    set_fetch_reason,
)
from cairn.scheduler.kv_export import (
    fits_leases,
    needs_prompt_checkpoint,
    pin_prompt_checkpoint,
    reserve_prompt_checkpoint,
)
from cairn.scheduler.lease_limits import wait_for_lease_room
from cairn.scheduler.plan_builder import PlanBuilder, ScheduledSequence
from cairn.scheduler.request import Phase, Request
from cairn.scheduler.state import SchedulerState
from cairn.scheduler.turns import choose_turn
from cairn.step import GRID, PageCopy, Restore


def admit_fully_fetched(state: SchedulerState, builder: PlanBuilder) -> bool:
    """Admit requests that have received all of their prompt from another server, while others run: their first tokens
    are sampled in a step without a forward pass, not at the end of one that the others need. False if there are
    none."""
    if not state.running or not state.transfers.ready:
        return False
    for request in sorted(state.transfers.ready, key=lambda request: request.sort_key):
        if request.sequence is None or request.sequence.hit < request.num_tokens or not _may_bypass(state, request):
            break
        if not _admit_fetched(state, builder, request):
            break
    return bool(builder.scheduled)


def _may_bypass(state: SchedulerState, request: Request) -> bool:
    """Whether no request before it could have its slot, and the leases leave room for it."""
    if any(not state.in_flight.is_waiting(other) for other in state.waiting.plain.before(request)):
        return False
    if not request.spec.role.kv_export:
        return True
    return next(state.waiting.kv_exports.before(request), None) is None and fits_leases(state, request)


def admit(state: SchedulerState, builder: PlanBuilder) -> None:
    """Take requests in, each in its turn, while there are slots, tokens and pages for all that is known of them: those
    whose pages have been fetched hold these already. Passed over are those that wait for what another one computes,
    which leave a slot free each, and KV exports that the leases leave no room for. Those that are still going to fetch
    their pages do so beside the queue."""
    state.in_flight.refresh()
    num_reserved_slots, leases_full, last = 0, False, None
    while (
        len(state.slots.free) > num_reserved_slots
        and (request := _next_candidate(state, last, leases_full)) is not None
    ):
        if request.spec.role.kv_export and (leases_full or not fits_leases(state, request)):
            wait_for_lease_room(state, request)
            leases_full, last = True, request
            continue
        if request.phase is Phase.WAITING and _should_wait(state, builder, request):
            num_reserved_slots, last = num_reserved_slots + 1, request
            continue
        if builder.budget <= 0:
            return
        if request.phase is Phase.READY:
            if not _admit_fetched(state, builder, request):
                return
            continue
        if _try_admit(state, builder, request):
            continue
        if builder.budget >= GRID:
            if requeue_youngest_fetched(state, before=request):
                continue
            cancel_slow_fetch(state)
        if state.running or state.ending or state.cache.pinned.steps or state.transfers.is_open:
            return
        # alone, and its own hit stands in its way: the state and the pages do not fit together
        while state.parallel_sampling.release_last():
            pass
        state.cache.clear()
        if not _try_admit(state, builder, request):
            raise AssertionError(f"{request.id} does not fit an empty pool: submit should have refused it")


def _next_candidate(state: SchedulerState, last: Request | None, leases_full: bool) -> Request | None:
    """Whose turn it is when all up to `last` have been passed over; with `leases_full` not those that are known to wait
    for room among the leases."""
    if last is None:
        choose_turn(state)
    ready = [request for request in state.transfers.ready if last is None or request.sort_key > last.sort_key]
    candidates = [
        state.waiting.plain.after(last),
        None if leases_full else state.waiting.kv_exports.after(last),
        *ready,
    ]
    return min(
        (request for request in candidates if request is not None), key=lambda request: request.sort_key, default=None
    )


def _admit_fetched(state: SchedulerState, builder: PlanBuilder, request: Request) -> bool:
    """Plan the first share of one whose pages have been fetched; False if it cannot go now."""
    sequence = request.sequence
    assert sequence is not None
    request.num_scheduled, request.prefill_until = sequence.hit, request.num_prompt_tokens
    if len(state.slots.free) <= state.in_flight.num_before(request):
        return False
    place = len(builder.copies)
    if not _schedule_first_chunk(state, builder, request, sequence):
        if not state.running and not state.ending:
            requeue_youngest_fetched(state)
        return False
    builder.copies[place:place] = state.transfers.ready.pop(request)
    return True


def _should_wait(state: SchedulerState, builder: PlanBuilder, request: Request) -> bool:
    if state.parallel_sampling.has_pinned_prompt(request):
        return False
    return state.in_flight.should_wait_for_prefix(builder, request, lambda request: _lookup(state, request))


def _try_admit(state: SchedulerState, builder: PlanBuilder, request: Request) -> bool:
    sequence = state.parallel_sampling.branch(request) or _lookup(state, request)
    request.sequence, request.num_scheduled = sequence, sequence.hit
    by_prompt = state.config.exact or request.spec.role.kv_export
    request.prefill_until = request.num_prompt_tokens if by_prompt else request.num_tokens
    if _schedule_first_chunk(state, builder, request, sequence):
        return True
    request.sequence = None
    state.cache.discard(sequence)
    return False


def _lookup(state: SchedulerState, request: Request) -> SequenceBlocks:
    spec = request.spec
    resumed_from = request.num_prompt_tokens if request.resumed else None
    # what is leased is the state at the prompt's end: a deeper one would pass it by
    keys = spec.prompt if spec.role.kv_export else request.keys()
    bypass = spec.prompt_logprobs is not None and not request.output
    sequence = state.cache.lookup(spec.namespace, keys, request.id, resumed_from, bypass, probe=True)
    for token in request.output[len(keys) - request.num_prompt_tokens :]:
        sequence.append(token)
    return sequence


def _schedule_first_chunk(
    state: SchedulerState, builder: PlanBuilder, request: Request, sequence: SequenceBlocks
) -> bool:
    """Plan the request's first share; False if it has to go on waiting."""
    if sequence.hit == request.num_tokens:
        _explain(state, request, sequence)
        _start_running(state, builder, request, sequence)
        builder.add_sample(request, sequence.hit)
        builder.scheduled.append(ScheduledSequence(request, sequence.hit, sequence.hit, samples=True))
        request.num_in_flight += 1
        return True
    # resumed at a state of its own answer it has nothing to prefill: it goes on decoding with the next step
    decodes = sequence.hit >= request.prefill_until
    end = sequence.hit if decodes else next_prefill_end(state, request, builder.budget)
    if end == sequence.hit and not decodes:
        return False
    num_states = needs_prompt_checkpoint(request, sequence)
    if not state.cache.could_extend(sequence, request.num_tokens, num_states, step_end=end):
        return False
    if not state.in_flight.leaves_room(request, sequence, num_states):
        return False
    _explain(state, request, sequence)
    # pages for all that is known, not for the first chunk alone: half a prompt that has to give way is computed twice,
    # and one that is resumed has to come further than before, or it would be sent back for ever
    copies: list[PageCopy] | None = state.cache.extend(sequence, request.num_tokens, end)
    if copies is None or not reserve_prompt_checkpoint(state, request, sequence):
        return False
    if state.parallel_sampling.needs_checkpoint(request):
        state.cache.force_checkpoint(sequence, request.num_prompt_tokens)
    _start_running(state, builder, request, sequence)
    if decodes:
        builder.copies += copies
        builder.scheduled.append(ScheduledSequence(request, sequence.hit, sequence.hit))
        request.num_in_flight += 1
    else:
        add_prefill(builder, request, end, copies)
    return True


def _explain(state: SchedulerState, request: Request, sequence: SequenceBlocks) -> None:
    """The request is about to begin, which may drop what is cached: say first why it has not hit more."""
    state.cache.explain(sequence)
    set_fetch_reason(request, sequence)


def _start_running(state: SchedulerState, builder: PlanBuilder, request: Request, sequence: SequenceBlocks) -> None:
    if request.phase is Phase.WAITING:
        count_bypassed(state, request)
        state.waiting.remove(request)
    request.transfer.no_lease_room_since = None
    parallel_sampling = state.parallel_sampling
    group = parallel_sampling.group_of(request)
    if not parallel_sampling.has_pinned_prompt(request):
        # a prompt counts once, also where another answer to it has to look it up again
        counted = request.resumed or (group is not None and group.counted)
        state.cache.begin_request(sequence, resumed=counted)
        state.counters.prompt_tokens += 0 if counted else request.num_prompt_tokens
        state.counters.tier_hits += sequence.received if request.transfer.from_tier and not counted else 0
    if group is not None and not group.counted:
        group.counted, request.stats.is_parallel_sample = True, False
    if request.resumed:
        state.counters.recomputed_tokens += max(0, request.stats.max_computed - sequence.hit)
        assert request.stats.first_sequence is not None
        sequence.retained_breakpoints = request.stats.first_sequence.retained_breakpoints
    else:
        request.stats.first_sequence = sequence
        request.stats.scheduled_time = state.clock.now()
        state.waiting.sessions.count(request)
        state.waiting.sessions.add(request.spec, request.num_prompt_tokens - sequence.hit)
    request.outcome.prompt_logprobs.clear()
    state.cache.retain_breakpoints(sequence, request.spec.boundaries)
    request.num_computed = sequence.hit
    request.facts = state.cache.prompt_facts(sequence, request.prefill_until, request.spec.boundaries)
    slot = state.slots.free.pop()
    request.take_slot(slot, state.slots.row(slot))
    request.kv_write_from = sequence.kv_write_from
    request.min_tokens_until = request.num_prompt_tokens + request.spec.min_tokens
    sequence.tokens.follow(request.output, request.num_prompt_tokens)
    request.set_phase(Phase.RUNNING)
    state.running.put(request)
    state.in_flight.add_leader(request)
    builder.add_admit(request)
    if sequence.restore is not None:
        builder.restores.append(Restore(request.slot, sequence.restore))
    if sequence.hit == request.num_prompt_tokens:
        if request.spec.role.kv_export:
            pin_prompt_checkpoint(state, request)
        if parallel_sampling.is_leader(request):
            parallel_sampling.pin_checkpoint(request)
            parallel_sampling.queue_others(request)
    parallel_sampling.start(request)
