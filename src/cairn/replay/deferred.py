"""Requests of a log that found less room than the server had: each is computed by itself, all at once, when another
has ended."""

from collections import deque
from collections.abc import Iterable

from cairn.cache.checkpoint import Kind
from cairn.cache.lease import Lease
from cairn.cache.placement import Wanted
from cairn.replay.going import DECODE, PREFILL, Going
from cairn.replay.log_requests import LogRequests
from cairn.replay.log_steps import LogSteps
from cairn.replay.request_log import LoggedRequest
from cairn.replay.timed_cache import TimedCache
from cairn.step import GRID

__all__ = ["Deferred"]


class Deferred:
    """`numbers`: of those that were put off on their way; what the log still calls for them is not made again."""

    def __init__(self, timed: TimedCache, requests: LogRequests, steps: LogSteps) -> None:
        self._timed, self._cache = timed, timed.cache
        self._requests, self._steps = requests, steps
        self._late: deque[LoggedRequest] = deque()
        self._num_steps = 0
        self.numbers: set[int] = set()

    def add(self, requests: Iterable[LoggedRequest]) -> None:
        """These have no calls in the log: they are computed as soon as there is room."""
        self._late += requests
        self.catch_up()

    def put_off(self, going: Going) -> None:
        """There is less room than the server had: the request waits until another has ended."""
        self._requests.release(going, None)
        self._late.append(going.request)
        self.numbers.add(going.request.number)
        self.catch_up()

    def catch_up(self) -> None:
        """Compute requests that have been put off, as long as there is room."""
        while self._late and self._whole(self._late[0], alone=not self._cache.leases):
            self._late.popleft()

    def _whole(self, request: LoggedRequest, alone: bool) -> bool:
        """Compute a request from start to end. False if it has to go on waiting, for leases or holds to end."""
        if not self._timed.holds(request.num_prompt_tokens):
            self._requests.refuse(request)
            return True
        cache, requests = self._cache, self._requests
        going = Going(request.number, request, request.keys())
        lease = requests.lookup(going, request.num_prompt_tokens)
        if cache.extend(lease, lease.num_tokens) is None:
            requests.release(going, None)
            if not alone:
                return False
            # its own hit stands in its way, or what steps that are out still name
            self._steps.apply_all()
            cache.clear()
            lease = requests.lookup(going, request.num_prompt_tokens)
            if cache.extend(lease, lease.num_tokens) is None:
                requests.release(going, None)
                return False  # states are held for branches to come
        going.has_pages = True
        cache.admitted(lease)
        requests.start(going, lease)
        self._compute(going, lease)
        requests.release(going, None)
        return True

    def _compute(self, going: Going, lease: Lease) -> None:
        request = going.request
        while going.position < request.num_prompt_tokens:
            self._one_step(going, lease, self._timed.chunk_end(going.position, request.num_prompt_tokens), PREFILL)
        last = max(request.num_prompt_tokens, request.num_tokens - 1)  # the last token of an answer is not computed
        for end in range((going.position // GRID + 1) * GRID, last + GRID, GRID):
            self._requests.extend(going, lease, min(end, last), done=True)
            self._one_step(going, lease, min(end, last), DECODE)
        self._steps.commit(going, lease, last)
        if going.ended_well:
            self._steps.want(going, lease, Wanted(min(last, going.limit), Kind.ANSWER_END), done=False)

    def _one_step(self, going: Going, lease: Lease, end: int, kind: int) -> None:
        self._num_steps += 1
        step = -self._num_steps  # the log's own count up from 1
        self._steps.plan(step, [(going, end, kind)])
        if kind == PREFILL:
            self._steps.commit(going, lease, end)
        self._steps.applied(step)
