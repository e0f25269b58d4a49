"""Into a slot: from the queue by a lookup, or with what has been fetched; the restore, and the first chunk."""

from cairn.cache.lease import Lease
from cairn.cache.placement import PromptFacts
from cairn.scheduler.advance import add_prefill, next_prefill_end
from cairn.scheduler.books import Books
from cairn.scheduler.draft import Draft, Part
from cairn.scheduler.fetch import give_way, note_failure
from cairn.scheduler.hand_over import has_room, hold_state, needs_file, set_aside
from cairn.scheduler.request import Phase, Request
from cairn.step import PageCopy, Restore, Sample, SampleOnly

__all__ = ["admit"]


def admit(books: Books, draft: Draft) -> None:
    """Take requests in while there are slots, tokens and pages for all that is known of them: first those whose pages
    have been fetched, which hold them already, then from the head of the queue."""
    _admit_ready(books, draft)
    while books.free_slots and draft.budget > 0 and (request := books.waiting.head) is not None:
        if request.source is not None:
            return  # it is asked for elsewhere as soon as there is room
        if _try(books, draft, request):
            continue
        if books.running or books.ending or books.cache.held or books.transfers.is_open:
            return
        # alone, and its own hit stands in its way: the checkpoint file and the pages do not fit together
        books.cache.clear()
        if not _try(books, draft, request):
            raise AssertionError(f"{request.id} does not fit an empty pool: submit should have refused it")


def _admit_ready(books: Books, draft: Draft) -> None:
    for request in sorted(books.transfers.ready, key=lambda request: request.arrival):
        lease = request.lease
        assert lease is not None
        request.num_scheduled, request.prefill_until = lease.hit, request.num_prompt_tokens
        if not books.free_slots or draft.budget <= 0 or (request.spec.hand_over and not has_room(books, request)):
            return
        place = len(draft.copies)
        if not _first_step(books, draft, request, lease):
            if not books.running and not books.ending:
                give_way(books)
            return
        draft.copies[place:place] = books.transfers.ready.pop(request)


def _try(books: Books, draft: Draft, request: Request) -> bool:
    if request.spec.hand_over and not has_room(books, request):
        return False
    lease = _lookup(books, request)
    request.lease, request.num_scheduled = lease, lease.hit
    by_prompt = books.config.exact or request.spec.hand_over
    request.prefill_until = request.num_prompt_tokens if by_prompt else request.num_known
    if _first_step(books, draft, request, lease):
        return True
    request.lease = None
    books.cache.release(lease)
    return False


def _lookup(books: Books, request: Request) -> Lease:
    spec = request.spec
    resumed_from = request.num_prompt_tokens if request.resumed else None
    # what is handed over is the state at the prompt's end: a deeper one would pass it by
    keys = spec.prompt if spec.hand_over else request.keys()
    lease = books.cache.lookup(spec.namespace, keys, request.id, resumed_from)
    for token in request.output[len(keys) - request.num_prompt_tokens :]:
        lease.append(token)
    note_failure(request, lease)
    return lease


def _first_step(books: Books, draft: Draft, request: Request, lease: Lease) -> bool:
    """Plan the request's first share; False if it has to go on waiting."""
    if lease.hit == request.num_known:
        _take(books, draft, request, lease)
        draft.sample_only.append(SampleOnly(request.slot, Sample(request.spec.sampling, lease.hit)))
        draft.parts.append(Part(request, lease.hit, samples=True))
        request.in_flight += 1
        request.sampling_step = draft.step
        return True
    if lease.hit >= request.prefill_until:
        # resumed at a state of its own answer: it goes on decoding with the next step
        _take(books, draft, request, lease)
        draft.parts.append(Part(request, lease.hit, samples=False))
        request.in_flight += 1
        return True
    end = next_prefill_end(books, request, draft.budget)
    if end == lease.hit:
        return False
    if not books.cache.could_extend(lease, request.num_known, needs_file(request, lease)):
        return False
    # pages for all that is known, not for the first chunk alone: half a prompt that has to give way is computed twice
    copies: list[PageCopy] | None = books.cache.extend(lease, request.num_known)
    if copies is None or not set_aside(books, request, lease):
        return False
    _take(books, draft, request, lease)
    add_prefill(draft, request, end, copies)
    return True


def _take(books: Books, draft: Draft, request: Request, lease: Lease) -> None:
    if request.phase is Phase.WAITING:
        books.waiting.remove(request)
    books.cache.admitted(lease, resumed=request.resumed)
    if request.resumed:
        books.counters.recomputed_tokens += max(0, request.furthest - lease.hit)
        assert request.first is not None
        lease.held = request.first.held
    else:
        request.first = lease
        request.times.scheduled = books.clock.now()
        books.counters.prompt_tokens += request.num_prompt_tokens
    books.cache.hold_breakpoints(lease, request.spec.boundaries)
    request.num_computed = lease.hit
    request.facts = PromptFacts(
        num_tokens=request.prefill_until,
        hit=lease.hit,
        matched=lease.matched,
        seen=lease.seen,
        boundaries=request.spec.boundaries,
        exact=books.config.exact,
        idle_files=books.cache.idle_files(),
    )
    request.slot = books.free_slots.pop()
    request.to(Phase.RUNNING)
    books.running.append(request)
    books.running.sort(key=lambda other: other.arrival)
    if lease.restore is not None:
        draft.restores.append(Restore(request.slot, lease.restore))
    if request.spec.hand_over and lease.hit == request.num_prompt_tokens:
        hold_state(books, request)
