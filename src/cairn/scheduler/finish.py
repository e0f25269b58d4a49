"""The end of a request: its slot and pages go when no step names it any more, and its last state may be saved first."""

from cairn.cache.checkpoint import Kind
from cairn.cache.placement import CheckpointPoint
from cairn.scheduler.fetch import cancel_fetch, decline_sources
from cairn.scheduler.kv_export import offer_prompt
from cairn.scheduler.kv_lookup import remember_sequence
from cairn.scheduler.request import Finish, Phase, Request
from cairn.scheduler.state import SchedulerState


def finish(state: SchedulerState, request: Request, reason: Finish) -> bool:
    """End a request now. False if it has ended already."""
    if request.phase in (Phase.FINISHING, Phase.FINISHED):
        return False
    request.outcome.finish_reason = reason
    request.stats.finished_time = state.clock.now()
    if request.phase in (Phase.WAITING, Phase.FETCHING, Phase.READY):
        _forget(state, request)
        return True
    if reason in ("stop", "length"):
        if request.spec.role.kv_export:
            offer_prompt(state, request)
        elif request.spec.role.source is not None:
            remember_sequence(state, request)
    if request.phase is Phase.RUNNING:
        state.running.remove(request)
        state.ending.put(request)
    request.set_phase(Phase.FINISHING)
    if request.num_in_flight == 0:
        release_or_save(state, request)
    return True


def _forget(state: SchedulerState, request: Request) -> None:
    match request.phase:
        case Phase.WAITING:
            if not state.parallel_sampling.is_deferred(request):
                state.waiting.remove(request)
            decline_sources(request)
        case Phase.FETCHING:
            cancel_fetch(state, request)
        case Phase.READY:
            del state.transfers.ready[request]
    state.drop(request)


def release_or_save(state: SchedulerState, request: Request) -> None:
    """No step names a request that is ending: save its last state if that is worth it, or let it go."""
    sequence = request.sequence
    assert sequence is not None
    if request in state.pending_saves:
        return
    placement = state.cache.policy.placement
    if request.phase is Phase.PREEMPTING:
        state.requeue(request)
        return
    position = request.num_computed
    state.cache.commit(sequence, min(position, request.num_tokens))
    wanted = (
        placement is not None
        and placement.keeps_answer_end
        and not state.config.exact
        and request.outcome.finish_reason in ("stop", "length")
        and max(sequence.hit, request.prefill_until) < position <= request.num_tokens
        and not request.stats.saved_answer_end
    )
    if wanted and state.cache.reserve_checkpoint(sequence, CheckpointPoint(position, Kind.ANSWER_END)) is not None:
        request.stats.saved_answer_end = True
        state.pending_saves[request] = position
        return
    state.drop(request)
