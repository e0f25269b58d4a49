"""The next tokens of the requests that run already: a decode row, or a prefill chunk."""

from cairn.scheduler.books import Books
from cairn.scheduler.budget import chunk_end
from cairn.scheduler.draft import Draft
from cairn.scheduler.preempt import make_room
from cairn.scheduler.request import Request
from cairn.scheduler.sampling import sample_at, score_of, waits_for_its_token
from cairn.step import FromStep, PageCopy, Row
from cairn.types import Keys


def advance(books: Books, draft: Draft) -> bool:
    """Add a row for each running request that can go on, first come first served.

    A prefill chunk leaves one token of the budget to every request behind it, so that no answer stalls. False if
    pages ran short: then what was freed belongs to those that run, and nobody new may come in.
    """
    preemptions, enough = books.counters.preemptions, True
    for request in list(books.running):
        if request not in books.running:
            continue  # preempted by one that came before it
        behind = len(books.running) - books.running.index(request) - 1
        if request.num_scheduled < request.prefill_until:
            end, decode = next_prefill_end(books, request, draft.budget - behind), False
        else:
            end, decode = request.num_scheduled + (draft.budget > 0 and _decode_ready(request)), True
        if end == request.num_scheduled:
            continue
        copies = make_room(books, request, end)
        if copies is None:
            enough = False
        elif decode:
            _add_decode(draft, request, copies)
        else:
            add_prefill(draft, request, end, copies)
    return enough and preemptions == books.counters.preemptions


def next_prefill_end(books: Books, request: Request, budget: int) -> int:
    """Where the next chunk ends if it may have `budget` tokens."""
    placement = books.cache.policy.placement
    if placement is not None and placement.step_tokens is not None:
        budget = min(budget, placement.step_tokens)
    return chunk_end(request.num_scheduled, request.prefill_until, budget)


def add_prefill(draft: Draft, request: Request, end: int, copies: list[PageCopy]) -> None:
    """A prefill row [num_scheduled, end), which samples if it reaches the last known token."""
    assert request.lease is not None
    tokens = request.lease.keys[request.num_scheduled : end]
    _add_row(draft, request, end, copies, tokens, decode=False)


def _decode_ready(request: Request) -> bool:
    if request.num_scheduled < request.num_known:
        return True
    if waits_for_its_token(request):
        return False
    # fed by a token that a step still out samples; not if that token is the last one allowed
    last = request.num_prompt_tokens + request.spec.max_tokens - 1
    return request.sampling_step is not None and request.num_scheduled < last


def _add_decode(draft: Draft, request: Request, copies: list[PageCopy]) -> None:
    start = request.num_scheduled
    tokens: Keys | FromStep
    if start < request.num_known:
        assert request.lease is not None
        tokens = request.lease.keys[start : start + 1]
    else:
        assert request.sampling_step is not None
        tokens = FromStep(request.sampling_step)
    _add_row(draft, request, start + 1, copies, tokens, decode=True)


def _add_row(
    draft: Draft, request: Request, end: int, copies: list[PageCopy], tokens: Keys | FromStep, *, decode: bool
) -> None:
    lease = request.lease
    assert lease is not None
    fed_ahead = isinstance(tokens, FromStep)
    sample = sample_at(request, end) if end >= request.num_known + fed_ahead else None
    row = Row(
        slot=request.slot,
        start=request.num_scheduled,
        end=end,
        tokens=tokens,
        pages=lease.pages_upto(end),
        kv_write_from=lease.kv_write_from,
        decode=decode,
        sample=sample,
        images=request.spec.images,
        score=None if decode else score_of(request, request.num_scheduled, end),
    )
    draft.copies += copies
    draft.add_row(request, row)
    request.num_scheduled = end
    request.in_flight += 1
    if sample is not None:
        request.sampling_step = draft.step
