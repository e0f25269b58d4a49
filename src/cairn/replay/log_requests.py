"""The requests of a log that are on their way: looked up, given room, begun, and let go of again."""

from collections.abc import Mapping

import numpy as np

from cairn.cache.checkpoint import Kind
from cairn.cache.lease import Lease, Namespace
from cairn.cache.placement import Wanted
from cairn.cache.reasons import Reason
from cairn.replay.going import Going
from cairn.replay.log_steps import LogSteps
from cairn.replay.paths import Paths
from cairn.replay.request_log import LoggedRequest
from cairn.replay.timed_cache import TimedCache

__all__ = ["LogRequests"]

_NONE = np.empty(0, np.int64)


class LogRequests:
    """`going`: by number. `hits`: cached tokens of those that have begun or were refused, by number. `ends_kept`: the
    server kept the state at answers' ends, so the log says when."""

    def __init__(self, timed: TimedCache, steps: LogSteps) -> None:
        self._timed, self._cache, self._steps = timed, timed.cache, steps
        self._paths = Paths()
        self.going: dict[int, Going] = {}
        self.hits: dict[int, int] = {}
        self.ends_kept = True

    def join(self, request: LoggedRequest, number: int) -> None:
        """`request` goes on its way under `number`: its own, or that of a branch without a line."""
        self.going[number] = Going(number, request, request.keys())

    def lookup(self, going: Going, length: int, resumed: bool = False, passed_by: bool = False) -> Lease:
        """A lease on the first `length` tokens, for one that has none. `resumed`: after a preemption."""
        request = going.request
        resumed_from = request.num_prompt_tokens if resumed else None
        namespace = Namespace(cache_salt=str(request.namespace) if request.namespace else None)
        lease = self._cache.lookup(namespace, going.keys[:length], str(request.number), resumed_from, passed_by)
        self.going[going.number] = going
        going.lease, going.facts, going.limit, going.has_pages = lease, None, request.num_tokens, False
        return lease

    def branch(self, going: Going, source: Going | None, holder: Going | None) -> bool:
        """A lease on what `source` has, at the state that is held of `holder`. False if either is missing."""
        if source is None or source.lease is None or holder is None or not holder.states:
            return False
        going.lease = self._cache.branch(source.lease, holder.states[-1].pages, str(going.request.number))
        going.facts, going.limit, going.has_pages = None, going.request.num_tokens, False
        return True

    def extend(self, going: Going, lease: Lease, num_tokens: int, done: bool) -> bool:
        """Pages for `num_tokens`, or as many as there are for one that runs. `done`: the server had them. False if
        there is less room than it had, so that the request cannot begin."""
        if self._cache.extend(lease, num_tokens) is not None:
            going.has_pages = True
        elif done and going.facts is None:
            return False
        elif done:
            going.limit = min(going.limit, going.room)
        return True

    def start(self, going: Going, lease: Lease) -> bool:
        """The request runs: from here on it is as the scheduler's `_take` leaves it. False if there is no room."""
        if lease.hit < lease.num_tokens and not going.has_pages and self._cache.extend(lease, lease.num_tokens) is None:
            return False  # the server had all of it, and needed no pages
        request, cache = going.request, self._cache
        cache.hold_breakpoints(lease, request.boundaries)
        going.position = lease.hit
        num_tokens = request.num_prompt_tokens if cache.policy.exact else lease.num_tokens
        going.facts = cache.facts(lease, num_tokens, request.boundaries)
        if request.number not in self.hits:
            self._count(going, lease.hit, lease.received, lease.lost)
        return True

    def refuse(self, request: LoggedRequest) -> None:
        """The budget cannot hold it."""
        length, outcome = request.num_prompt_tokens, self._timed.outcome
        outcome.refused += 1
        outcome.forward_passes += -(-length // self._timed.most_tokens)
        self._count(Going(request.number, request, request.keys()), 0, 0, {Reason.DISABLED: length})

    def _count(self, going: Going, hit: int, received: int, lost: Mapping[Reason, int]) -> None:
        """`hit` tokens of its prompt need not be computed, `received` of them thanks to another server. That of a
        branch was counted before."""
        request = going.request
        self.hits[request.number] = hit - received
        known = self._paths.shared(going.keys[: request.num_prompt_tokens])
        self._paths.add(going.keys, _NONE)
        if not request.branches:
            self._timed.outcome.lose(request.num_prompt_tokens, hit, known, lost)

    def receive(self, lease: Lease, num_tokens: int, wanted: int, position: int) -> None:
        """Another server's pages up to `num_tokens` have come, with a state at `position` in the file for `wanted`."""
        if wanted in lease.files and lease.hit < position <= num_tokens <= lease.num_tokens:
            self._cache.received(lease, num_tokens, wanted, position)

    def hold(self, going: Going, lease: Lease) -> None:
        """Keep the state at the prompt's end for those that branch there."""
        position = going.request.num_prompt_tokens
        pages = lease.restore if lease.hit == position else None
        if pages is None and position in lease.files:
            pages = lease.files[position].pages
        if pages is not None:
            going.states.append(self._cache.hold(f"state of {going.request.number}", pages))

    def let_go(self, going: Going) -> None:
        """The last state that was held is needed no more."""
        if going.states:
            self._cache.let_go(going.states.pop())
        self._forget(going)

    def release(self, going: Going, loss: Reason | None) -> None:
        lease, request = going.lease, going.request
        if lease is None:
            return
        whole = lease.committed > request.num_prompt_tokens and lease.committed >= request.num_tokens - 1
        if not self.ends_kept and whole and going.facts is not None and going.ended_well:
            self._steps.want(going, lease, Wanted(lease.committed, Kind.ANSWER_END), done=False)
        self._cache.release(lease, loss)
        going.lease = going.facts = None
        going.parts.clear()
        going.promised.clear()
        self._forget(going)

    def release_all(self) -> None:
        """The log ends: so do those that it does not see the end of."""
        for going in list(self.going.values()):
            self.release(going, None)
            for state in going.states:
                self._cache.let_go(state)

    def _forget(self, going: Going) -> None:
        if going.lease is None and not going.states:
            self.going.pop(going.number, None)
