"""Pages from another server: asked for while a request waits, and used as if they had been computed here.

WAITING -> FETCHING   look up; share what is there, pages for the rest and a file for the state; pull
FETCHING -> READY     confirmed: into the tree, and on as after a hit of its own
FETCHING -> WAITING   it failed: compute (or end with an error, as --kv-transfer-config says)

prompt   0 ........ hit .. matched ............ prompt end
         here already              pulled (from the page that holds `matched`)
"""

import logging

import numpy as np

from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.scheduler.books import Books
from cairn.scheduler.request import Phase, Request, Source
from cairn.scheduler.transfers import Fetch, content_name
from cairn.transfer.contract import ContentWant, PagesFree, PullEnded, PullId, Want
from cairn.types import Pages

MAX_OVERTAKEN = 64
"""Requests that may come in before one that finds no pages for its fetch: then it is computed here, in its turn."""

SLOW_SECONDS = 0.25
"""A fetch that takes longer gives way to requests that lack its pages."""

logger = logging.getLogger(__name__)


def start_pulls(books: Books) -> bool:
    """Ask for what requests can get elsewhere, in the order of their turns, as long as there is room for it. Returns
    whether anything was asked for, or given up.

    What the requests before it in the queue are going to need is not there for a fetch, so that pages set aside for it
    never keep them waiting.
    """
    transfers, changed = books.transfers, False
    while (request := books.waiting.fetches.head) is not None and (source := request.transfer.source) is not None:
        if len(transfers.fetching) + len(transfers.ready) >= books.config.max_num_seqs:
            request.transfer.num_overtaken = 0
            break
        if not _start(books, request, source):
            if request.transfer.num_overtaken < MAX_OVERTAKEN and not _is_alone(books, request):
                break
            _compute_here(books, request, source)
        changed = True
    return changed


def _is_alone(books: Books, request: Request) -> bool:
    """Whether nothing is going to make room for its fetch: cached pages cannot give way to it, and have to be computed
    in smaller shares."""
    if books.running or books.ending or books.cache.step_pins or books.transfers.is_open:
        return False
    return next(books.waiting.plain.before(request), None) is None


def _compute_here(books: Books, request: Request, source: Source) -> None:
    books.waiting.compute(request)
    let_source_go(books, request, source)


def note_overtaking(books: Books, request: Request) -> None:
    """`request` comes in from the queue, perhaps before one that waits for pages for its fetch."""
    first = books.waiting.fetches.head
    if first is not None and first.turn < request.turn:
        first.transfer.num_overtaken += 1


def _start(books: Books, request: Request, source: Source) -> bool:
    """False if there is no room now. Otherwise the request is being fetched, or has nothing to fetch any more."""
    cache, length = books.cache, request.num_prompt_tokens
    if books.config.exact:
        source = source.exact(length)
    if request.spec.prompt_logprobs is not None:
        # all of it has to be computed here
        _compute_here(books, request, source)
        return True
    sequence = cache.lookup(request.spec.namespace, request.keys(), request.id, probe=True)
    if sequence.hit == length or (source.nonce is None and source.reach(length) <= sequence.matched):
        cache.discard(sequence)
        _compute_here(books, request, source)
        return True
    if not cache.could_extend(sequence, length, num_files=1, besides=_pages_before(books, request)):
        cache.discard(sequence)
        return False
    cache.explain(sequence)
    copies = cache.extend(sequence, length)
    file = cache.force_checkpoint(sequence, length) if copies is not None else None
    if copies is None or file is None:
        cache.discard(sequence)
        return False
    books.waiting.remove(request)
    request.transfer.source, request.sequence = None, sequence
    request.to(Phase.FETCHING)
    assert books.transfers.side is not None
    pull = books.transfers.side.pull(_want(request, source, sequence, file))
    books.transfers.fetching[pull] = Fetch(request, source, copies, books.clock.now())
    return True


def _pages_before(books: Books, request: Request) -> int:
    """Pages that the plain requests before it are going to need, at most; no more are counted than there are."""
    layout, num_pages = books.cache.layout, 0
    for other in books.waiting.plain.before(request):
        num_pages += layout.pages_for(other.num_known) + layout.pages_per_checkpoint * other.spec.hand_over
        if num_pages > books.cache.pool.num_pages:
            break
    return num_pages


def _want(request: Request, source: Source, sequence: SequenceBlocks, file: Pages) -> Want | ContentWant:
    length, start = request.num_prompt_tokens, _first_token(sequence)
    pages = (
        sequence.blocks.span(start, length)[0] if sequence.blocks.groups and start < length else np.zeros(0, np.int32)
    )
    if source.nonce is not None:
        return _promised(request, source, source.nonce, start, pages, file)
    return ContentWant(
        request_id=request.id,
        engine_id=source.engine_id,
        host=source.host,
        port=source.port,
        name=content_name(request),
        keys=request.spec.prompt,
        start=start,
        pages=pages,
        checkpoint=file,
        end=source.end,
    )


def _first_token(sequence: SequenceBlocks) -> int:
    """Where reading begins: at the page that holds the first token that is not here."""
    if sequence.matched >= sequence.num_tokens or not sequence.blocks.groups:
        return sequence.num_tokens
    tokens_per_page = sequence.blocks.groups[0].tokens_per_page
    return sequence.matched // tokens_per_page * tokens_per_page


def let_source_go(books: Books, request: Request, source: Source) -> None:
    """Nothing is wanted: the other server need not keep it."""
    if source.nonce is None:
        return
    assert books.transfers.side is not None
    nothing = np.zeros(0, np.int32)
    books.transfers.side.pull(_promised(request, source, source.nonce, request.num_prompt_tokens, nothing, None))


def _promised(request: Request, source: Source, nonce: bytes, start: int, pages: Pages, file: Pages | None) -> Want:
    """From a lease there; without a `file` nothing but its release."""
    return Want(
        request_id=source.request_id,
        nonce=nonce,
        engine_id=source.engine_id,
        host=source.host,
        port=source.port,
        name=content_name(request),
        keys=request.spec.prompt,
        start=start,
        pages=pages,
        checkpoint=file,
        release_only=file is None,
    )


def pull_ended(books: Books, ended: PullEnded) -> Request | None:
    """Go on with what has come, or without it. Returns the request if it has ended because of a failure."""
    fetch = books.transfers.fetching.pop(ended.pull, None)
    if fetch is None:
        return None
    request, sequence = fetch.request, fetch.request.sequence
    assert sequence is not None
    if ended.failure is not None:
        _quarantine(books, ended.pull, request)
        return _failed(books, fetch, ended.failure)
    length, position = request.num_prompt_tokens, ended.checkpoint_position or 0
    if books.cache.layout.state_bytes == 0:
        # keys and values alone are enough anywhere but at the prompt's end
        position = max(position, min(ended.position, length - 1))
    if position <= sequence.hit:
        books.back_to_queue(request)
        return None
    asked = length - sequence.hit
    copies = fetch.copies if ended.position <= sequence.matched else []
    books.cache.received(sequence, ended.position, length, position)
    books.counters.external_queries += asked
    books.counters.external_hits += sequence.received
    request.transfer.pulled, request.transfer.pull_seconds = ended, books.clock.now() - fetch.began
    request.to(Phase.READY)
    books.transfers.ready[request] = copies
    return None


def _failed(books: Books, fetch: Fetch, failure: str) -> Request | None:
    request = fetch.request
    if fetch.source.nonce is None:
        # nothing had been promised
        books.back_to_queue(request)
        return None
    books.counters.failed_pulls += 1
    where = f"{fetch.source.host}:{fetch.source.port}"
    logger.warning("%s: its prompt could not be fetched from %s: %s", request.id, where, failure)
    books.counters.external_queries += request.num_prompt_tokens - (request.sequence.hit if request.sequence else 0)
    if books.config.on_load_failure == "recompute":
        request.transfer.remote_failed = True
        books.back_to_queue(request)
        return None
    request.outcome.failure = f"the prompt could not be fetched from {where}: {failure}"
    request.outcome.finish_reason = "error"
    request.stats.finished_time = books.clock.now()
    books.drop(request)
    return request


def _quarantine(books: Books, pull: PullId, request: Request) -> None:
    """The link may still write to what the pull was to fill: nobody gets these pages before it says that it is over."""
    sequence = request.sequence
    assert sequence is not None
    start, length = _first_token(sequence), request.num_prompt_tokens
    pages = [sequence.files[length].pages]
    if sequence.blocks.groups and start < length:
        pages += sequence.blocks.span(start, length)
    books.transfers.quarantine[pull] = books.cache.pin(f"quarantined after {request.id}", np.concatenate(pages))


def abandon(books: Books, request: Request) -> None:
    """The request that is being fetched has been aborted."""
    transfers = books.transfers
    pull = next(pull for pull, fetch in transfers.fetching.items() if fetch.request is request)
    del transfers.fetching[pull]
    _quarantine(books, pull, request)
    assert transfers.side is not None
    transfers.side.abort(pull)


def pages_free(books: Books, free: PagesFree) -> None:
    hold = books.transfers.quarantine.pop(free.pull, None)
    if hold is not None:
        books.cache.unpin(hold)


def cancel_slow_fetch(books: Books) -> None:
    """Others lack pages: the youngest request of those whose fetch takes long is going to be computed here. Its pages
    come free when no byte can reach them any more."""
    slow = slow_fetches(books)
    if slow:
        youngest = max(slow, key=lambda request: request.turn)
        abandon(books, youngest)
        books.back_to_queue(youngest)


def slow_fetches(books: Books) -> list[Request]:
    """Requests whose pages have been under way for longer than others wait for them."""
    now = books.clock.now()
    return [fetch.request for fetch in books.transfers.fetching.values() if now - fetch.began >= SLOW_SECONDS]


def give_way(books: Books, before: Request | None = None) -> bool:
    """Send the youngest request that holds pages and does not run back to the queue, of those whose turn comes after
    that of `before`: what it has fetched stays cached, and may be dropped. False if there is none."""
    ready = (request for request in books.transfers.ready if before is None or request.turn > before.turn)
    youngest = max(ready, key=lambda request: request.turn, default=None)
    if youngest is None:
        return False
    del books.transfers.ready[youngest]
    books.back_to_queue(youngest)
    return True


def note_failure(request: Request, sequence: SequenceBlocks) -> None:
    """Say so in the reason when a hit is shorter because another server did not deliver."""
    if request.transfer.remote_failed and sequence.hit < request.num_prompt_tokens:
        sequence.blame(Reason.REMOTE_FAILED)
