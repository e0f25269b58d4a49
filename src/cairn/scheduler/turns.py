"""Whose turn it is: who may go before requests that came earlier, and how often.

Requests go in the order of their priority and arrival. In a full pool those before a request may take the pages of what
it is going to hit; so among those that would lose their hit so, the one with the longest goes first (longest prefix
first, as Zheng et al., "SGLang", NeurIPS 2024, section 3 has it, but only where something is lost otherwise, and
bounded: nobody starves).

With the policy `session` the session goes first that has been served least lately (see `cairn.scheduler.sessions`), of
those that are about equal the one that would lose the longest hit otherwise, then the one that came first. A name that
nobody knows yet brings no turn: with it a request may go before others of its own client alone. So a client that gives
each request a session of its own takes nobody's turn.
"""

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile

from cairn.cache.awaited import MAX_AWAITED, WaitingPrompt
from cairn.scheduler.request import Request
from cairn.scheduler.state import SchedulerState

MAX_BYPASSED = 16
"""So many requests that came later may go before one, at most."""

MAX_BYPASSED_BY_SESSION = 32
"""The same with the policy `session`."""


def await_hits(state: SchedulerState) -> None:
    """Tell the cache what those that wait are going to hit, if they are others than it knows."""
    waiting, marks = state.waiting, state.waiting.marks
    if marks.awaited == waiting.version:
        return
    if len(waiting) == 1 and state.slots.free and marks.seen != waiting.version:
        # it waits for nobody, and is looked up as it is admitted: here only if it is still there in the next step
        marks.seen = waiting.version
        state.cache.await_hits(())
        return
    marks.awaited = waiting.version
    looked_up = (
        request
        for request in waiting
        if request.spec.prompt_logprobs is None and not state.parallel_sampling.has_pinned_prompt(request)
    )
    state.cache.await_hits(
        WaitingPrompt(
            request.id,
            request.spec.namespace,
            request.spec.prompt if request.spec.role.kv_export else request.keys(),
            request.num_prompt_tokens if request.resumed else None,
        )
        for request in looked_up
    )


def endangered_hits(state: SchedulerState, requests: Sequence[Request]) -> Mapping[str, int]:
    """Which of these first requests of the queue would lose what they are going to hit to the last before them: to as
    many as run at a time, or may be bypassed for it. How many tokens that is, by request."""
    prompts = [(request.id, request.num_tokens) for request in requests]
    return state.cache.endangered_hits(prompts, max(state.config.max_num_seqs, _bound(state)))


def choose_turn(state: SchedulerState) -> None:
    """Let one of those that wait go before the head of the plain queue, where the bounds of all whom it would bypass
    allow it. To be called when the head could go."""
    plain, marks = state.waiting.plain, state.waiting.marks
    head = plain.head
    # one that has bypassed others stays first until it has room
    if head is None or head.place.before is not None or marks.chosen == state.waiting.version:
        return
    marks.chosen = state.waiting.version
    by_session = state.config.policy == "session"
    if by_session and head.resumed:
        return
    window = list(islice(takewhile(lambda other: other.spec.priority == head.spec.priority, plain), MAX_AWAITED))
    endangered = endangered_hits(state, window)
    bound = _bound(state)
    bounds = (place for place, request in enumerate(window) if request.place.num_bypassed >= bound)
    candidates = window[: next(bounds, len(window)) + 1]
    best = _least_served(state, candidates, endangered) if by_session else _most_endangered(candidates, endangered)
    if best is not head:
        _bypass(state, best, head)


def _bound(state: SchedulerState) -> int:
    return MAX_BYPASSED_BY_SESSION if state.config.policy == "session" else MAX_BYPASSED


def _most_endangered(candidates: Sequence[Request], endangered: Mapping[str, int]) -> Request:
    """The one that would lose the longest hit; the head of the queue where nobody would lose one."""
    best = max(candidates, key=lambda request: endangered.get(request.id, 0))
    return best if best.id in endangered else candidates[0]


def _least_served(state: SchedulerState, candidates: Sequence[Request], endangered: Mapping[str, int]) -> Request:
    """The one of the least level that may go before all those before it."""
    best, best_rank = candidates[0], (1 << 62, 0)
    clients = set[str]()
    for request in candidates:
        clients.add(request.spec.client)
        lost = endangered.get(request.id, 0)
        level = state.waiting.sessions.level(request, lost)
        may_bypass = len(clients) == 1 or state.waiting.sessions.knows(request.spec)
        if may_bypass and (level, -lost) < best_rank:
            best, best_rank = request, (level, -lost)
    return best


def _bypass(state: SchedulerState, request: Request, head: Request) -> None:
    plain = state.waiting.plain
    for other in plain.before(request):
        other.place.num_bypassed += 1
        state.counters.bypasses += 1
    plain.remove(request)
    request.place.before = head.stats.arrival
    plain.put(request)
    state.waiting.marks.chosen = state.waiting.version
