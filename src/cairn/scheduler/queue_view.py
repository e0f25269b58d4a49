"""Who waits, for `GET /cache`: what each request is going to hit, what is kept for it, and who went before it."""

from itertools import islice

from cairn.cache.view import MAX_WAITING_SHOWN, QueueView, WaitingView
from cairn.scheduler.request import Request
from cairn.scheduler.state import SchedulerState
from cairn.scheduler.turns import endangered_hits


def queue_view(state: SchedulerState) -> QueueView:
    """The queue as it is, its first requests one by one."""
    head = list(islice(state.waiting, MAX_WAITING_SHOWN))
    hits, now = state.cache.awaited_hits(), state.clock.now()
    endangered = endangered_hits(state, head) if hits else {}
    return QueueView(
        policy=state.config.policy,
        waiting=state.num_waiting,
        bypasses=state.counters.bypasses,
        requests=[
            WaitingView(
                age=now - request.stats.arrival_time,
                prompt=request.num_prompt_tokens,
                hit=hits.get(request.id, (0, 0))[0],
                kept_bytes=hits.get(request.id, (0, 0))[1],
                endangered=request.id in endangered,
                bypassed=request.place.num_bypassed,
                priority=request.spec.priority,
                session=state.waiting.sessions.class_of(request),
                waits_for=_waits_for(state, request),
            )
            for request in head
        ],
    )


def _waits_for(state: SchedulerState, request: Request) -> str:
    if request.transfer.no_lease_room_since is not None:
        return "lease"
    if request.transfer.sources:
        return "pages"
    return "prefix" if state.in_flight.is_waiting(request) else "turn"
