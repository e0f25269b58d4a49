"""A server's own request log, gone through again call by call with a cache of the shipped kind.

What was served together shares tokens, and hits depend on who was looked up before whose tokens were committed. So the
log says which sequences share how many tokens, and in which order the cache was called; the sequences are made again
with the same sharing, and the calls are made again. What the cache finds, keeps and drops is its own: what the server
had found stands in the log, too, and is not looked at.

With the server's layout, budget and policy the cached tokens are the same, request by request. With others the order
stays that of the log as far as it can: a request that finds no room is computed when another has ended, all at once;
one that began in an earlier file comes first. Of transfers, what was received is gone through, and that pages are held
for other servers is left out.
"""

from collections.abc import Callable, Mapping

from cairn.cache.lease import Lease
from cairn.cache.placement import Wanted, placement_for
from cairn.replay.deferred import Deferred
from cairn.replay.going import Going
from cairn.replay.log_header import LoggedPolicy
from cairn.replay.log_requests import LogRequests
from cairn.replay.log_steps import LogSteps
from cairn.replay.outcome import Outcome
from cairn.replay.request_log import LoggedRequest, LoggedTrace, Op
from cairn.replay.timed_cache import TimedCache

__all__ = ["Reenactment"]


class Reenactment:
    """One log, one cache; good for one run. The cache is shown the log's own time."""

    def __init__(self, timed: TimedCache) -> None:
        self._timed = timed
        self.cache, self.outcome = timed.cache, timed.outcome
        self._steps = LogSteps(timed)
        self._requests = LogRequests(timed, self._steps)
        self._deferred = Deferred(timed, self._requests, self._steps)

    def run(self, trace: LoggedTrace, progress: Callable[[int], None] | None = None) -> Outcome:
        """Make all calls; `progress` is told how many requests are done. `outcome.hits` is in the order of
        `trace.logged`."""
        requests = self._requests
        requests.ends_kept = _keeps_answer_end(trace.policy, trace.layout.block_size)
        known = {request.number: request for request in trace.logged}
        begun = {op[1] for op in trace.ops if op[0] in ("l", "b")}
        self._deferred.add(request for request in trace.logged if request.number not in begun)
        for op in trace.ops:
            self._call(op, known)
            if progress is not None and op[0] == "r":
                progress(len(requests.hits))
        requests.release_all()
        self._steps.apply_all()
        met = {*requests.hits, *self._deferred.numbers}
        self._deferred.add(request for request in trace.logged if request.number not in met)
        return self._counted(trace)

    def _call(self, op: Op, known: Mapping[int, LoggedRequest]) -> None:
        code, going = op[0], self._requests.going
        if code == "t":
            self._timed.show(op[1])
            return
        if code in ("l", "b"):
            self._join(op, known)
        with self._timed.inside:
            match code:
                case "p":
                    self._steps.plan(op[1], [(going[number], *row) for number, *row in op[2] if number in going])
                case "s":
                    self._steps.applied(op[1])
                case "m":
                    self.cache.make_room(op[1])
                case _ if op[1] in going:
                    self._call_for(going[op[1]], op)

    def _join(self, op: Op, known: Mapping[int, LoggedRequest]) -> None:
        """The sequence of a request is made before its time is measured."""
        number, going = op[1], self._requests.going
        source = known.get(number) if number not in self._deferred.numbers else None
        if source is None and op[0] == "b" and op[2] in going:
            source = going[op[2]].request
        if number not in going and source is not None:
            self._requests.join(source, number)

    def _call_for(self, going: Going, op: Op) -> None:
        requests = self._requests
        match op[0]:
            case "l":
                self._lookup(going, op[2], bool(op[3]), bool(op[4]))
            case "b":
                if not requests.branch(going, requests.going.get(op[2]), requests.going.get(op[3])):
                    self._lookup(going, going.request.num_prompt_tokens)
            case "g":
                requests.let_go(going)
                self._deferred.catch_up()
            case _ if going.lease is not None:
                self._call_with_lease(going, going.lease, op)

    def _call_with_lease(self, going: Going, lease: Lease, op: Op) -> None:
        requests = self._requests
        match op[0]:
            case "a":
                self.cache.admitted(lease, bool(op[2]))
            case "h":
                if not requests.start(going, lease):
                    self._deferred.put_off(going)
            case "x":
                if not requests.extend(going, lease, op[2], bool(op[3])):
                    self._deferred.put_off(going)
            case "c":
                self._steps.commit(going, lease, op[2], bool(op[3]))
            case "w":
                self._steps.want(going, lease, Wanted(op[2], op[3]), bool(op[4]))
            case "f":
                if self.cache.want_always(lease, op[2]) is not None:
                    going.promised.add(op[2])
            case "v":
                requests.receive(lease, op[2], op[3], op[4])
            case "k":
                requests.hold(going, lease)
            case "r":
                requests.release(going, op[2])
                self._deferred.catch_up()

    def _lookup(self, going: Going, length: int, resumed: bool = False, passed_by: bool = False) -> None:
        if going.lease is not None:
            self._requests.release(going, None)  # calls are missing here
            self._deferred.catch_up()
        self._requests.lookup(going, length, resumed, passed_by)

    def _counted(self, trace: LoggedTrace) -> Outcome:
        outcome = self._timed.ended()
        outcome.hits = [self._requests.hits[request.number] for request in trace.logged]
        outcome.hit_tokens = sum(self._requests.hits[each.number] for each in trace.logged if not each.branches)
        outcome.prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests)
        return outcome


def _keeps_answer_end(policy: LoggedPolicy, block_size: int) -> bool:
    """Whether the server kept the state at answers' ends; nothing is known of a policy that has no name here."""
    try:
        return placement_for(policy.placement, block_size, policy.exact).keeps_answer_end and not policy.exact
    except ValueError:
        return False
