"""The next tokens of the requests that run already: a decode row, or a prefill chunk."""

from cairn.scheduler.books import Books
from cairn.scheduler.budget import chunk_end
from cairn.scheduler.plan_builder import PlanBuilder, ScheduledSequence
from cairn.scheduler.preempt import make_room
from cairn.scheduler.request import Phase, Request
from cairn.scheduler.sampling import add_sample, score_of
from cairn.step import PageCopy


def advance(books: Books, builder: PlanBuilder) -> bool:
    """Add a row for each running request that can go on, first come first served.

    A prefill chunk leaves one token of the budget to every request behind it, so that no answer stalls. False if
    pages ran short: then what was freed belongs to those that run, and nobody new may come in.
    """
    preemptions, enough, num_before = books.counters.preemptions, True, 0
    for request in list(books.running):
        if request.phase is not Phase.RUNNING:
            continue  # preempted by one that came before it
        behind = len(books.running) - num_before - 1
        num_before += 1
        if request.num_scheduled < request.prefill_until:
            end, decode = next_prefill_end(books, request, builder.budget - behind), False
        else:
            end, decode = request.num_scheduled + (builder.budget > 0 and _decode_ready(request)), True
        if end == request.num_scheduled:
            continue
        copies = make_room(books, request, end)
        if copies is None:
            enough = False
            num_before -= request.phase is not Phase.RUNNING  # it has given way itself
        elif decode:
            _add_decode(builder, request, copies)
        else:
            add_prefill(builder, request, end, copies)
    return enough and preemptions == books.counters.preemptions


def next_prefill_end(books: Books, request: Request, budget: int) -> int:
    """Where the next chunk ends if it may have `budget` tokens."""
    placement = books.cache.policy.placement
    if placement is not None and placement.step_tokens is not None:
        budget = min(budget, placement.step_tokens)
    return chunk_end(request.num_scheduled, request.prefill_until, budget)


def add_prefill(builder: PlanBuilder, request: Request, end: int, copies: list[PageCopy]) -> None:
    """A prefill row [num_scheduled, end), which samples if it reaches the last known token."""
    scheduled = builder.add_prefill(request, end, score_of(request, request.num_scheduled, end))
    _added_row(builder, scheduled, copies, samples=end >= request.num_known)


def _decode_ready(request: Request) -> bool:
    if request.num_scheduled < request.num_known:
        return True
    # fed by a token that a step still out samples; not if that token is the last one allowed
    last = request.num_prompt_tokens + request.spec.max_tokens - 1
    return request.sampling_step is not None and request.num_scheduled < last


def _add_decode(builder: PlanBuilder, request: Request, copies: list[PageCopy]) -> None:
    _added_row(builder, builder.add_decode(request), copies, samples=request.num_scheduled + 1 >= request.num_known)


def _added_row(builder: PlanBuilder, scheduled: ScheduledSequence, copies: list[PageCopy], *, samples: bool) -> None:
    request = scheduled.request
    builder.copies += copies
    request.num_scheduled = scheduled.end
    request.in_flight += 1
    if samples:
        scheduled.samples = True
        add_sample(builder, request, scheduled.end)
        request.sampling_step = builder.step
