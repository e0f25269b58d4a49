"""The next tokens of the requests that run already: a decode row, or a prefill chunk."""

from collections.abc import Mapping

import numpy as np

from cairn.scheduler.plan_builder import PlanBuilder, ScheduledSequence
from cairn.scheduler.preempt import make_room
from cairn.scheduler.request import Phase, Request
from cairn.scheduler.state import SchedulerState
from cairn.scheduler.verify import add_verify, propose_drafts
from cairn.step import GRID, PageCopy, Score
from cairn.types import Keys


def advance(state: SchedulerState, builder: PlanBuilder) -> bool:
    """Add a row for each running request that can go on, first come first served.

    A prefill chunk leaves one token of the budget to every request after it, so that no answer stalls. False if
    pages ran short: then what was freed belongs to those that run, and nobody new may come in.

    Drafts are verified in place of a decode where there is room for them.

    Plain decodes, and those that only lacked a page, come last and all at once: what they need is the token of the
    budget that is left to each. Whoever lacks pages preempts requests after it alone, so it does not matter that those
    before it have no rows yet.
    """
    running, slots = list(state.running), state.running.slots
    if not running:
        return True
    preemptions, enough, table = state.counters.preemptions, True, state.slots
    plain = table.num_scheduled[slots] < table.plain_until[slots]
    drafts: Mapping[int, Keys] = {}
    if state.drafting.asks(state.running.version):
        drafts = propose_drafts(state, builder, running, int(np.count_nonzero(plain)))
    if drafts:
        plain[list(drafts)] = False
    num_before = 0  # of those that are not plain
    for index in (~plain).nonzero()[0].tolist():
        request = running[index]
        if request.phase is not Phase.RUNNING:
            continue  # preempted by one that came before it
        others = len(state.running) - num_before - 1
        num_before += 1
        start = request.num_scheduled
        decode = start >= request.prefill_until
        if decode:
            end = start + _can_decode(request, start)
        else:
            end = next_prefill_end(state, request, builder.budget - others)
        if end == start:
            continue
        copies = make_room(state, request, end)
        if copies is None:
            enough = False
            num_before -= request.phase is not Phase.RUNNING  # it has given way itself
        elif not decode:
            add_prefill(builder, request, end, copies)
        elif index in drafts and add_verify(
            state, builder, request, drafts[index], copies, builder.budget - others - 1
        ):
            continue
        elif _becomes_plain(state, request, start) and not copies:
            plain[index] = True
            num_before -= 1
            builder.update_tables(request)
        else:
            _record_row(builder, builder.add_decode(request, index), copies, samples=end >= request.num_tokens)
    if preemptions != state.counters.preemptions:
        enough = False
        plain &= [request.phase is Phase.RUNNING for request in running]
    builder.add_decodes(table, running, slots, plain)
    return enough


def next_prefill_end(state: SchedulerState, request: Request, budget: int) -> int:
    """Where the next chunk ends if it may have `budget` tokens."""
    placement = state.cache.policy.placement
    if placement is not None and placement.step_tokens is not None:
        budget = min(budget, placement.step_tokens)
    return chunk_end(request.num_scheduled, request.prefill_until, budget)


def chunk_end(start: int, limit: int, budget: int) -> int:
    """Where a prefill chunk from `start` ends: at `limit` if the budget (tokens) reaches it, else on the 64-token
    grid. Equal to `start` if the budget reaches neither."""
    end = min(limit, start + budget)
    if end < limit:
        end = end // GRID * GRID
    return max(start, end)


def add_prefill(builder: PlanBuilder, request: Request, end: int, copies: list[PageCopy]) -> None:
    """A prefill row [num_scheduled, end), which samples if it reaches the last known token."""
    spec, score = request.spec, None
    if spec.prompt_logprobs is not None:
        targets = spec.prompt[request.num_scheduled + 1 : end + 1]
        score = Score(targets, spec.prompt_logprobs) if len(targets) else None
    _record_row(builder, builder.add_prefill(request, end, score), copies, samples=end >= request.num_tokens)


def _becomes_plain(state: SchedulerState, request: Request, start: int) -> bool:
    """Whether the decode of the token at `start` is plain, now that its page is there; sets `plain_until`."""
    num_tokens = request.num_tokens
    if start + 1 < num_tokens:
        request.plain_until = 0
        return False
    request.plain_until = until = _plain_until(state, request, start)
    # a step that is out and samples nothing, with a known token after it, is no plain one's
    return start < until and (start < num_tokens) == (request.num_in_flight == 0)


def _plain_until(state: SchedulerState, request: Request, start: int) -> int:
    """Decodes of tokens from `start` up to this one are plain (see `PlainDecodes`): the tokens after the last one are
    sampled, pages are there, and no point of the placement is reached."""
    spec, sequence = request.spec, request.sequence
    assert sequence is not None
    if spec.constraint is not None or spec.sampling.needs_history:
        return 0
    return before_point(state, start, min(sequence.blocks.capacity, len(spec.prompt) + spec.max_tokens - 1))


def before_point(state: SchedulerState, start: int, end: int) -> int:
    """`end`, or where the decode stands, of those from token `start` on, that reaches the placement's next point, if
    that comes sooner."""
    placement = state.cache.policy.placement
    stride = 0 if placement is None else placement.decode_stride
    return min(end, (start // stride + 1) * stride - 1) if stride else end


def _can_decode(request: Request, start: int) -> bool:
    if start < request.num_tokens:
        return True
    # async decode: the input is the token that the in-flight step will sample, unless max_tokens ends there
    return start < request.num_prompt_tokens + request.spec.max_tokens - 1


def _record_row(builder: PlanBuilder, scheduled: ScheduledSequence, copies: list[PageCopy], *, samples: bool) -> None:
    request = scheduled.request
    builder.copies += copies
    request.num_scheduled = scheduled.end
    request.num_in_flight += 1
    scheduled.samples = samples
    if samples and not scheduled.is_decode:
        builder.add_sample(request, scheduled.end)
