"""Pages from another server: asked for while a request waits, and used as if they had been computed here.

WAITING -> FETCHING   look up; share what is there, pages for the rest and for the state; pull
FETCHING -> READY     confirmed: into the tree, and on as after a hit of its own
FETCHING -> WAITING   it failed: compute (or end with an error, as --kv-transfer-config says)

prompt   0 ........ hit .. matched ............ prompt end
         here already              pulled (from the page that holds `matched`)
"""

import logging

import numpy as np

from cairn.addresses import join_host_port
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.scheduler.request import Phase, Request
from cairn.scheduler.state import SchedulerState
from cairn.scheduler.transfers import Fetch, content_name
from cairn.transfer.contract import ContentName, KvSource, PagesFree, PullEnded, PullId, PullSpec
from cairn.types import Pages

MAX_BYPASSED = 64
"""Requests that may come in before one that finds no pages for its fetch: then it is computed here, in its turn."""

MAX_RELEASES = 256
"""Releases that are under way at a time; what is not released runs out by itself."""

SLOW_SECONDS = 0.25
"""A fetch that takes longer gives way to requests that lack its pages."""

logger = logging.getLogger(__name__)


def start_pulls(state: SchedulerState) -> bool:
    """Ask for what requests can get elsewhere, in the order of their turns, as long as there is room for it. Returns
    whether anything was asked for, or given up.

    What the requests before it in the queue are going to need is not there for a fetch, so that pages set aside for it
    never keep them waiting.
    """
    transfers, changed = state.transfers, False
    while (request := state.waiting.fetches.head) is not None and (source := request.transfer.source) is not None:
        if len(transfers.fetching) + len(transfers.ready) >= state.config.max_num_seqs:
            request.transfer.num_bypassed = 0
            break
        if not _start(state, request, source):
            if request.transfer.num_bypassed < MAX_BYPASSED and not _nothing_else_can_free_pages(state, request):
                break
            _compute_here(state, request, source)
        changed = True
    return changed


def _nothing_else_can_free_pages(state: SchedulerState, request: Request) -> bool:
    """Whether nothing is going to make room for its fetch: cached pages cannot give way to it, and have to be computed
    in smaller shares."""
    if state.running or state.ending or state.cache.pinned.steps or state.transfers.is_open:
        return False
    return next(state.waiting.plain.before(request), None) is None


def _compute_here(state: SchedulerState, request: Request, source: KvSource) -> None:
    state.waiting.compute(request)
    release_source(state, source)


def count_bypassed(state: SchedulerState, request: Request) -> None:
    """`request` comes in from the queue, perhaps before one that waits for pages for its fetch."""
    first = state.waiting.fetches.head
    if first is not None and first.sort_key < request.sort_key:
        first.transfer.num_bypassed += 1


def _start(state: SchedulerState, request: Request, source: KvSource) -> bool:
    """False if there is no room now. Otherwise the request is being fetched, or has nothing to fetch any more."""
    cache, length = state.cache, request.num_prompt_tokens
    if state.config.exact:
        source = source.exact(length)
    if request.spec.prompt_logprobs is not None:
        # all of it has to be computed here
        _compute_here(state, request, source)
        return True
    sequence = cache.lookup(request.spec.namespace, request.keys(), request.id, probe=True)
    if sequence.hit == length or (source.nonce is None and source.reach(length) <= sequence.matched):
        cache.discard(sequence)
        _compute_here(state, request, source)
        return True
    if not cache.could_extend(sequence, length, num_states=1, reserved_pages=_pages_before(state, request)):
        cache.discard(sequence)
        return False
    cache.explain(sequence)
    copies = cache.extend(sequence, length)
    state_pages = cache.force_checkpoint(sequence, length) if copies is not None else None
    if copies is None or state_pages is None:
        cache.discard(sequence)
        return False
    state.waiting.remove(request)
    request.transfer.source, request.sequence = None, sequence
    request.set_phase(Phase.FETCHING)
    assert state.transfers.side is not None
    pull = state.transfers.side.pull(_pull_spec(request, source, sequence, state_pages))
    state.transfers.fetching[pull] = Fetch(request, source, copies, state.clock.now())
    return True


def _pages_before(state: SchedulerState, request: Request) -> int:
    """Pages that the plain requests before it are going to need, at most; no more are counted than there are."""
    layout, num_pages = state.cache.layout, 0
    for other in state.waiting.plain.before(request):
        num_pages += layout.pages_for(other.num_tokens) + layout.pages_per_checkpoint * other.spec.role.kv_export
        if num_pages > state.cache.pool.num_pages:
            break
    return num_pages


def _pull_spec(request: Request, source: KvSource, sequence: SequenceBlocks, state_pages: Pages) -> PullSpec:
    length, start = request.num_prompt_tokens, _fetch_start(sequence)
    pages = (
        sequence.blocks.span(start, length)[0] if sequence.blocks.groups and start < length else np.zeros(0, np.int32)
    )
    return PullSpec(request.id, source, content_name(request), request.spec.prompt, start, pages, state_pages)


def _fetch_start(sequence: SequenceBlocks) -> int:
    """Where reading begins: at the page that holds the first token that is not here."""
    if sequence.matched >= sequence.num_tokens or not sequence.blocks.groups:
        return sequence.num_tokens
    tokens_per_page = sequence.blocks.groups[0].tokens_per_page
    return sequence.matched // tokens_per_page * tokens_per_page


def release_source(state: SchedulerState, source: KvSource) -> None:
    """Tell another server, once, that nothing is wanted of what it has promised: it need not keep it, unless somebody
    else has claimed it."""
    side, releases = state.transfers.side, state.transfers.releases
    if source.nonce is None or side is None or len(releases) >= MAX_RELEASES:
        return
    purpose, keys, nothing = f"release of {source.request_id}", np.zeros(0, np.int64), np.zeros(0, np.int32)
    releases.add(side.pull(PullSpec(purpose, source, ContentName(), keys, 0, nothing, None, release_only=True)))


def finish_pull(state: SchedulerState, ended: PullEnded) -> Request | None:
    """Go on with what has come, or without it. Returns the request if it has ended because of a failure."""
    state.transfers.releases.discard(ended.pull)
    fetch = state.transfers.fetching.pop(ended.pull, None)
    if fetch is None:
        return None
    request, sequence = fetch.request, fetch.request.sequence
    assert sequence is not None
    if ended.failure is not None:
        _quarantine(state, ended.pull, request)
        return _failed(state, fetch, ended.failure)
    length, position = request.num_prompt_tokens, ended.checkpoint_position or 0
    if state.cache.layout.resumes_anywhere:
        # keys and values alone are enough anywhere but at the prompt's end
        position = max(position, min(ended.position, length - 1))
    if position <= sequence.hit:
        state.requeue(request)
        return None
    num_queried = length - sequence.hit
    copies = fetch.copies if ended.position <= sequence.matched else []
    state.cache.receive(sequence, ended.position, length, position)
    state.counters.external_queries += num_queried
    state.counters.external_hits += sequence.received
    request.transfer.pulled, request.transfer.pull_seconds = ended, state.clock.now() - fetch.began
    request.set_phase(Phase.READY)
    state.transfers.ready[request] = copies
    return None


def _failed(state: SchedulerState, fetch: Fetch, failure: str) -> Request | None:
    request = fetch.request
    if fetch.source.nonce is None:
        # nothing had been promised
        state.requeue(request)
        return None
    state.counters.failed_pulls += 1
    where = join_host_port(fetch.source.host, fetch.source.port)
    logger.warning("%s: its prompt could not be fetched from %s: %s", request.id, where, failure)
    state.counters.external_queries += request.num_prompt_tokens - (request.sequence.hit if request.sequence else 0)
    if state.config.on_load_failure == "recompute":
        request.transfer.remote_failed = True
        state.requeue(request)
        return None
    request.outcome.failure = f"the prompt could not be fetched from {where}: {failure}"
    request.outcome.finish_reason = "error"
    request.stats.finished_time = state.clock.now()
    state.drop(request)
    return request


def _quarantine(state: SchedulerState, pull: PullId, request: Request) -> None:
    """The link may still write to what the pull was to fill: nobody gets these pages before it says that it is over."""
    sequence = request.sequence
    assert sequence is not None
    start, length = _fetch_start(sequence), request.num_prompt_tokens
    pages = [sequence.pending_states[length].pages]
    if sequence.blocks.groups and start < length:
        pages += sequence.blocks.span(start, length)
    state.transfers.quarantine[pull] = state.cache.pin(f"quarantined after {request.id}", np.concatenate(pages))


def cancel_fetch(state: SchedulerState, request: Request) -> None:
    """The request that is being fetched has been aborted."""
    transfers = state.transfers
    pull = next(pull for pull, fetch in transfers.fetching.items() if fetch.request is request)
    source = transfers.fetching.pop(pull).source
    _quarantine(state, pull, request)
    assert transfers.side is not None
    transfers.side.abort(pull)
    # a pull that has claimed the lease gives it back itself; one that had not come so far knows no peer yet
    release_source(state, source)


def release_quarantine(state: SchedulerState, free: PagesFree) -> None:
    pin = state.transfers.quarantine.pop(free.pull, None)
    if pin is not None:
        state.cache.unpin(pin)


def cancel_slow_fetch(state: SchedulerState) -> None:
    """Others lack pages: the youngest request of those whose fetch takes long is going to be computed here. Its pages
    come free when no byte can reach them any more."""
    slow = slow_fetches(state)
    if slow:
        youngest = max(slow, key=lambda request: request.sort_key)
        cancel_fetch(state, youngest)
        state.requeue(youngest)


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


def set_failed_pull_reason(request: Request, sequence: SequenceBlocks) -> None:
    """Say so in the reason when a hit is shorter because another server did not deliver."""
    if request.transfer.remote_failed and sequence.hit < request.num_prompt_tokens:
        sequence.set_miss_reason(Reason.REMOTE_FAILED)
