"""Pages from elsewhere: asked for while a request waits, and used as if they had been computed here.

WAITING -> FETCHING   look up; share what is there, pages for the rest and for the state; a source begins
FETCHING -> READY     it has come: into the tree, and on as after a hit of its own
FETCHING -> WAITING   it failed: compute (or end with an error, as --kv-transfer-config says); with other sources left,
                      after a failure or where less has come than was asked for, one of them may follow

prompt   0 ........ hit .. matched ............ prompt end
         here already              fetched (from the page that holds `matched`)
"""

import logging

from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.scheduler.page_source import FetchPlan, FetchRequest, PageSource, open_target
from cairn.scheduler.request import Phase, Request
from cairn.scheduler.state import SchedulerState
from cairn.scheduler.tier_lookup import finish_read
from cairn.scheduler.transfers import Fetch, FetchKey, content_name
from cairn.transfer.contract import PagesFree, PullEnded, Volume

MAX_BYPASSED = 64
"""Requests that may come in before one that finds no pages for its fetch: then it is computed here, in its turn."""

SLOW_SECONDS = 0.25
"""A fetch that takes longer gives way to requests that lack its pages."""

MAX_FETCHES = 2
"""Sources that one request is fetched from, one after the other."""

OVERDUE_FACTOR = 4.0
"""Where several sources are asked, a fetch is given up after so many times what it, or computing, was to take."""

logger = logging.getLogger(__name__)


def find_sources(state: SchedulerState, request: Request) -> None:
    """Note who may have pages of a request that has been submitted."""
    if state.transfers.sources:
        wanted = _fetch_request(request)
        request.transfer.sources = tuple(source for source in state.transfers.sources if source.may_have(wanted))


def _fetch_request(request: Request) -> FetchRequest:
    return FetchRequest(request.id, content_name(request), request.spec.prompt, request.spec.role.source)


def start_fetches(state: SchedulerState) -> bool:
    """Ask for what requests can get elsewhere, in the order of their turns, as long as there is room for it. Returns
    whether anything was asked for, or given up.

    What the requests before it in the queue are going to need is not there for a fetch, so that pages set aside for it
    never keep them waiting.
    """
    transfers, changed = state.transfers, False
    while (request := state.waiting.fetches.head) is not None:
        if len(transfers.fetching) + len(transfers.ready) >= state.config.max_num_seqs:
            request.transfer.num_bypassed = 0
            break
        if not all(source.is_ready(_fetch_request(request)) for source in request.transfer.sources):
            # soon it is, and those behind it after it
            break
        if not _start(state, request):
            if request.transfer.num_bypassed < MAX_BYPASSED and not _nothing_else_can_free_pages(state, request):
                break
            _compute_here(state, request)
        changed = True
    return changed


def _nothing_else_can_free_pages(state: SchedulerState, request: Request) -> bool:
    """Whether nothing is going to make room for its fetch: cached pages cannot give way to it, and have to be computed
    in smaller shares."""
    if state.running or state.ending or state.cache.pinned.steps or state.transfers.is_open:
        return False
    return next(state.waiting.plain.before(request), None) is None


def _compute_here(state: SchedulerState, request: Request) -> None:
    sources = request.transfer.sources
    state.waiting.compute(request)
    _decline(request, sources)


def decline_sources(request: Request) -> None:
    """Nothing more is wanted for it from elsewhere."""
    sources, request.transfer.sources = request.transfer.sources, ()
    _decline(request, sources)


def _decline(request: Request, sources: tuple[PageSource, ...]) -> None:
    for source in sources:
        source.decline(_fetch_request(request))


def count_bypassed(state: SchedulerState, request: Request) -> None:
    """`request` comes in from the queue, perhaps before one that waits for pages for its fetch."""
    first = state.waiting.fetches.head
    if first is not None and first.sort_key < request.sort_key:
        first.transfer.num_bypassed += 1


def _start(state: SchedulerState, request: Request) -> bool:
    """False if there is no room now. Otherwise the request is being fetched, or has nothing to fetch any more."""
    cache, length = state.cache, request.num_prompt_tokens
    if request.spec.prompt_logprobs is not None:
        # all of it has to be computed here
        _compute_here(state, request)
        return True
    sequence = cache.lookup(request.spec.namespace, request.keys(), request.id, probe=True)
    choice = _best_plan(state, request, sequence)
    if choice is None:
        cache.discard(sequence)
        _compute_here(state, request)
        return True
    source, plan = choice
    opened = open_target(cache, sequence, plan, length, _pages_before(state, request))
    if opened is None:
        cache.discard(sequence)
        return False
    target, copies = opened
    state.waiting.remove(request)
    request.sequence = sequence
    request.transfer.sources = tuple(other for other in request.transfer.sources if other is not source)
    request.transfer.num_fetches += 1
    if request.transfer.num_fetches == MAX_FETCHES:
        decline_sources(request)
    request.set_phase(Phase.FETCHING)
    began, deadline = state.clock.now(), None
    if len(state.transfers.sources) > 1:
        deadline = began + OVERDUE_FACTOR * max(plan.seconds, _compute_seconds(state, plan, sequence))
    number = source.start(_fetch_request(request), target)
    state.transfers.fetching[source, number] = Fetch(request, plan, target, copies, began, deadline)
    return True


def _best_plan(
    state: SchedulerState, request: Request, sequence: SequenceBlocks
) -> tuple[PageSource, FetchPlan] | None:
    """The plan that saves most time, and whose it is; None if there is none, or computing takes less, which is noted
    where it is a tier's. A plan of other servers' is taken as it stands where this server has no other source."""
    if sequence.hit == request.num_prompt_tokens:
        return None
    wanted, plans = _fetch_request(request), []
    for source in request.transfer.sources:
        if (plan := source.plan(wanted, sequence)) is not None:
            saved = _compute_seconds(state, plan, sequence) - plan.seconds
            plans.append((saved, source, plan))
    if not plans:
        return None
    saved, source, plan = max(plans, key=lambda choice: choice[0])
    if saved > 0 or (not plan.is_local and len(state.transfers.sources) == 1):
        return source, plan
    if plan.is_local:
        request.transfer.tier_miss = plan.position, Reason.TIER_SLOW
    return None


def _compute_seconds(state: SchedulerState, plan: FetchPlan, sequence: SequenceBlocks) -> float:
    return (plan.position - sequence.hit) * state.transfers.prefill_speed.seconds_per_token


def _pages_before(state: SchedulerState, request: Request) -> int:
    """Pages that the plain requests before it are going to need, at most; no more are counted than there are."""
    layout, num_in_flight, num_pages = state.cache.layout, state.config.most_in_flight, 0
    for other in state.waiting.plain.before(request):
        num_pages += (
            layout.running_pages_for(other.num_tokens, num_in_flight)
            + layout.pages_per_checkpoint * other.spec.role.kv_export
        )
        if num_pages > state.cache.pool.num_pages:
            break
    return num_pages


def take_fetch_events(state: SchedulerState) -> tuple[bool, list[Request]]:
    """Take in what sources say. Returns whether they have said anything, and the requests that have ended because of a
    failure."""
    heard, failed = False, []
    for source in state.transfers.sources:
        for event in source.events():
            heard, key = True, (source, event.pull)
            if isinstance(event, PagesFree):
                pin = state.transfers.quarantine.pop(key, None)
                if pin is not None:
                    state.cache.unpin(pin)
            elif (request := _finish(state, key, event)) is not None:
                failed.append(request)
    return heard, failed


def _finish(state: SchedulerState, key: FetchKey, ended: PullEnded) -> Request | None:
    """Go on with what has come, or without it. Returns the request if it has ended because of a failure."""
    fetch = state.transfers.fetching.pop(key, None)
    if fetch is None:
        finish_read(state, key, ended)
        return None
    request, sequence = fetch.request, fetch.request.sequence
    assert sequence is not None
    if ended.failure is not None:
        state.quarantine(key, fetch.target)
        return _failed(state, fetch, ended.failure)
    length = request.num_prompt_tokens
    position = ended.resume_position(length, state.cache.layout.resumes_anywhere)
    if position <= sequence.hit:
        # another source, if there is one
        state.requeue(request)
        return None
    num_queried = length - sequence.hit
    copies = fetch.copies if ended.position <= sequence.matched else []
    state.cache.receive(sequence, ended.position, length, position)
    request.transfer.from_tier = fetch.plan.is_local
    if not fetch.plan.is_local:
        state.counters.external_queries += num_queried
        state.counters.external_hits += sequence.received
        request.transfer.fetched = (request.transfer.fetched or Volume()) + (ended.volume or Volume())
        request.transfer.fetch_seconds += state.clock.now() - fetch.began
    if state.cache.enabled and _best_plan(state, request, sequence) is not None:
        # for the rest; what has come is found by a lookup
        state.requeue(request)
        return None
    decline_sources(request)
    request.set_phase(Phase.READY)
    state.transfers.ready[request] = copies
    return None


def _failed(state: SchedulerState, fetch: Fetch, failure: str) -> Request | None:
    request = fetch.request
    if not fetch.plan.promised:
        _note_failure(fetch)
        state.requeue(request)
        return None
    state.counters.failed_pulls += 1
    logger.warning("%s: its prompt could not be fetched from %s: %s", request.id, fetch.plan.origin, failure)
    state.counters.external_queries += request.num_prompt_tokens - (request.sequence.hit if request.sequence else 0)
    if state.config.on_load_failure == "recompute":
        request.transfer.remote_failed = True
        state.requeue(request)
        return None
    decline_sources(request)
    request.outcome.failure = f"the prompt could not be fetched from {fetch.plan.origin}: {failure}"
    request.outcome.finish_reason = "error"
    request.stats.finished_time = state.clock.now()
    state.drop(request)
    return request


def _note_failure(fetch: Fetch) -> None:
    if fetch.plan.is_local:
        fetch.request.transfer.tier_miss = fetch.plan.position, Reason.TIER_FAILED


def cancel_fetch(state: SchedulerState, request: Request) -> None:
    """Nobody waits for the pages of this request any more: it has been aborted, or is going to be computed here."""
    fetching = state.transfers.fetching
    source, number = key = next(key for key, fetch in fetching.items() if fetch.request is request)
    fetch = fetching.pop(key)
    _note_failure(fetch)
    state.quarantine(key, fetch.target)
    source.abort(number)
    decline_sources(request)


def cancel_slow_fetch(state: SchedulerState) -> None:
    """Others lack pages: the youngest request of those whose fetch takes long is going to be computed here. Its pages
    come free when no byte can reach them any more."""
    slow = slow_fetches(state)
    if slow:
        youngest = max(slow, key=lambda request: request.sort_key)
        cancel_fetch(state, youngest)
        state.requeue(youngest)


def cancel_overdue_fetches(state: SchedulerState) -> bool:
    """Compute what sources have not brought in time, though another one, or computing, was to be faster. False if there
    is none."""
    now, fetches = state.clock.now(), state.transfers.fetching.values()
    overdue = [fetch.request for fetch in fetches if fetch.deadline is not None and now >= fetch.deadline]
    for request in overdue:
        cancel_fetch(state, request)
        state.requeue(request)
    return bool(overdue)


def slow_fetches(state: SchedulerState) -> list[Request]:
    """Requests whose pages have been under way for longer than others wait for them."""
    now = state.clock.now()
    return [fetch.request for fetch in state.transfers.fetching.values() if now - fetch.began >= SLOW_SECONDS]


def requeue_youngest_fetched(state: SchedulerState, before: Request | None = None) -> bool:
    """Send the youngest request that holds pages and does not run back to the queue, of those whose turn comes after
    that of `before`: what it has fetched stays cached, and may be dropped. False if there is none."""
    ready = (request for request in state.transfers.ready if before is None or request.sort_key > before.sort_key)
    youngest = max(ready, key=lambda request: request.sort_key, default=None)
    if youngest is None:
        return False
    del state.transfers.ready[youngest]
    state.requeue(youngest)
    return True


def set_fetch_reason(request: Request, sequence: SequenceBlocks) -> None:
    """Say so in the reason when a hit is shorter because another server, or a tier of this one, did not deliver."""
    transfer = request.transfer
    if transfer.remote_failed and sequence.hit < request.num_prompt_tokens:
        sequence.set_miss_reason(Reason.REMOTE_FAILED)
    elif transfer.tier_miss is not None:
        sequence.set_first_miss(*transfer.tier_miss)
