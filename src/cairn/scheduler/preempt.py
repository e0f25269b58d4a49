"""Making room by sending the youngest running request back to the queue."""

from cairn.cache.checkpoint import Kind
from cairn.cache.placement import CheckpointPoint
from cairn.cache.reasons import Reason
from cairn.scheduler.fetch import cancel_slow_fetch, requeue_youngest_fetched
from cairn.scheduler.request import Phase, Request
from cairn.scheduler.state import SchedulerState
from cairn.step import PageCopy


def make_room(state: SchedulerState, request: Request, num_tokens: int) -> list[PageCopy] | None:
    """Pages for `num_tokens` tokens of a running request, preempting younger ones if need be.

    Requests that hold fetched pages and do not run yet give way first, then prompts pinned for further answers. A
    request preempts each other one at most once; after that it waits for it, without giving up its pages. The youngest
    of all gives way itself. So the oldest always goes on, or waits for one that does, or for what other servers read;
    fetches that take long are given up for it. Left alone without room, it goes back once for each time it has come
    further, to share what it holds twice. None: the request does not run in this step.
    """
    assert request.sequence is not None
    if state.cache.layout.is_limited:
        # a checkpoint may yet be taken within what is to be folded
        num_pending = state.drafting.pending_folds.get(request, 0)
        state.cache.release_behind(request.sequence, request.num_computed - num_pending)
    while (copies := state.cache.extend(request.sequence, num_tokens)) is None:
        if requeue_youngest_fetched(state) or state.parallel_sampling.release_last():
            continue
        younger = state.running.all_after(request)
        is_oldest = state.running.head is request
        victims = [
            other for other in younger if other.num_in_flight == 0 and request.id not in other.stats.preempted_by
        ]
        if victims:
            preempt(state, victims[-1], request, request.sequence.blocks.missing_pages(num_tokens))
        elif younger or state.ending or request.num_in_flight:
            return None
        elif state.transfers.is_open:
            cancel_slow_fetch(state)
            return None
        elif not is_oldest or request.sequence.num_tokens > request.stats.sent_back_at:
            if is_oldest:
                # even alone it may hold pages of tokens that the tree has as well: looked up again, it shares those
                request.stats.sent_back_at = request.sequence.num_tokens
            preempt(state, request, request, 0)
            return None
        else:
            raise AssertionError(f"{request.id} does not fit an empty pool: submit should have refused it")
    return copies


def preempt(state: SchedulerState, victim: Request, preemptor: Request, needed_pages: int) -> None:
    """Send `victim` back to the queue; what it computed becomes ordinary cached pages.

    Its state is saved first if the pages can be had beyond the `needed_pages` of the preemptor, and is smaller than
    the victim's own pages (otherwise computing again is cheaper than what it would push out).
    """
    sequence, cache = victim.sequence, state.cache
    assert sequence is not None and victim.num_in_flight == 0
    state.counters.preemptions += 1
    victim.plain_until = 0
    victim.stats.preempted_by.add(preemptor.id)
    victim.stats.num_preemptions += 1
    cache.commit(sequence, victim.num_computed)
    size = cache.layout.pages_per_checkpoint
    num_pages = sequence.blocks.num_pages - cache.layout.unlimited_pages_for(sequence.matched)
    position = victim.num_computed
    worth_it = position > sequence.hit and size < num_pages and position not in sequence.pending_states
    if worth_it and cache.make_room(needed_pages + size):
        if cache.reserve_checkpoint(sequence, CheckpointPoint(position, Kind.PREEMPTION)) is not None:
            state.pending_saves[victim] = position
            victim.set_phase(Phase.PREEMPTING)
            state.running.remove(victim)
            state.ending.put(victim)
            return
    state.requeue(victim, Reason.PREEMPTED)
