"""Many steps in one go, where each would do no more than decode a token of every running request. For a replay, which
knows what is sampled."""

from collections.abc import Callable, Sequence

from cairn.scheduler.advance import before_point
from cairn.scheduler.request import Request
from cairn.scheduler.state import SchedulerState
from cairn.scheduler.turns import await_hits

NextTokens = Callable[[Request, int], Sequence[int]]
"""The next so many tokens of a request's answer, none of them a stop token."""


def skip_plain_steps(state: SchedulerState, limit: int, next_tokens: NextTokens) -> int:
    """Do what the next steps would do, `limit` of them at most, while nobody comes in or ends, no checkpoint is due and
    no page is lacking. Returns how many steps that were. No step may be out.

    Pages for all of them are allocated at once, which evicts the same as one after the other.
    """
    if not state.running or state.ending or state.transfers.is_open or (len(state.waiting) and state.slots.free):
        return 0
    await_hits(state)
    num = min(limit, *(_num_plain(state, request) for request in state.running))
    if num <= 1:
        return 0
    need = 0
    for request in state.running:
        assert request.sequence is not None
        need += request.sequence.blocks.missing_pages(request.num_scheduled + num)
    assert request.sequence is not None
    if not state.cache.could_free(request.sequence, need):
        return 0
    for request in state.running:
        _go_on(state, request, next_tokens(request, num))
    state.counters.steps += num
    return num


def _num_plain(state: SchedulerState, request: Request) -> int:
    """How many decodes until the one that ends the answer or reaches a point of the placement."""
    if not request.plain_until or request.num_scheduled + 1 < request.num_tokens:
        return 0
    last = request.num_prompt_tokens + request.spec.max_tokens - 2
    return before_point(state, request.num_scheduled, last) - request.num_scheduled


def _go_on(state: SchedulerState, request: Request, tokens: Sequence[int]) -> None:
    sequence, end = request.sequence, request.num_scheduled + len(tokens)
    assert sequence is not None and not request.num_in_flight
    copies = state.cache.extend(sequence, end)
    assert copies == [], f"{request.id}: pages were there, and none is to be copied after the first decode"
    request.output.extend(tokens)
    request.last_token = tokens[-1]
    request.num_scheduled = request.num_computed = end
    state.cache.release_behind(sequence, end)
    # pages are there for more than `plain_until` knew: the next step looks again
    request.plain_until = 1
    state.counters.generation_tokens += len(tokens)
