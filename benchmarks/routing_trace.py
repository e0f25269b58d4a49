"""A trace repeated until it is enough for a fleet: what every copy shares with the others, and what it has for itself.

A copy is the trace with other people in it. Content that at least two sessions of the trace have (system prompts,
tools, popular documents) is content of the world: it stays the same in every copy. Content that one session alone has
(its messages and answers, a document that nobody else asks for) is its own: each copy has other content of the same
lengths in its place, so nothing of it is ever hit across copies. A trace whose sessions are not known cannot be
repeated so: it would not be told which later prompts continue an earlier one.

The sessions of a copy keep their gaps between requests. The copies' starts of sessions are turned against each other
by a random part of the time in which sessions start (those that would start behind its end start at its beginning), so
that no burst of the trace comes once a copy at the same moment. How much faster all of it comes is a factor of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.replay.bounds import Paths
from cairn.replay.trace import Ids, Trace, TraceRequest

__all__ = ["RepeatedTrace", "num_copies"]


def num_copies(trace: Trace, replicas: int, sessions: int, requests: int) -> int:
    """Copies that give each replica at least so many sessions and requests."""
    num_sessions = len({request.session for request in trace.requests})
    return max(1, -(-replicas * sessions // num_sessions), -(-replicas * requests // len(trace.requests)))


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request of a copy: `time` in seconds of the trace, not yet made faster. `session`: unlike in any other copy."""

    time: float
    session: str
    request: TraceRequest
    is_last: bool


class RepeatedTrace:
    """`copies` of a trace, their requests in order of arrival. Requests are made one at a time: all of them at once
    would not fit memory. Raises SystemExit for a trace without sessions."""

    def __init__(self, trace: Trace, copies: int, seed: int) -> None:
        if any(request.session is None for request in trace.requests):
            raise SystemExit(f"{trace.name} does not say which requests belong to a session: it cannot be repeated")
        self.trace, self.copies = trace, copies
        numbers = np.array([request.session for request in trace.requests])
        times = np.array([request.arrived for request in trace.requests])
        names, first, session = np.unique(numbers, return_index=True, return_inverse=True)
        starts = times[first]
        # sessions start over this time, the pause before the next one included
        self.horizon = float(np.ptp(starts) * len(names) / max(1, len(names) - 1)) or 1.0
        turns = np.random.default_rng(seed).uniform(0, self.horizon, copies)
        turns[0] = 0.0
        turned = (starts - starts.min() + turns[:, None]) % self.horizon
        arrivals = turned[:, session] + (times - starts[session])
        order = np.argsort(arrivals, axis=None, kind="stable")
        self.times: NDArray[np.float64] = arrivals.reshape(-1)[order]
        """When each request arrives, ascending, shape [copies * requests]."""
        self._copy, self._index = np.divmod(order, len(times))
        self.last_start = float(turned.max())
        self._last = np.zeros(len(times), bool)
        self._last[len(times) - 1 - np.unique(numbers[::-1], return_index=True)[1]] = True

    def __len__(self) -> int:
        return len(self.times)

    @property
    def num_sessions(self) -> int:
        return self.copies * len({request.session for request in self.trace.requests})

    def arrivals(self) -> Iterator[Arrival]:
        for time, copy, index in zip(self.times.tolist(), self._copy.tolist(), self._index.tolist(), strict=True):
            request = self.trace.requests[index]
            made = replace(
                request, arrived=time, path=self._of(copy, request.path), answer=self._of(copy, request.answer)
            )
            yield Arrival(time, f"{request.session}.{copy}", made, bool(self._last[index]))

    def footprint_bytes(self, layout: CacheLayout) -> int:
        """Keys and values of all distinct tokens of all copies, and a checkpoint for each request."""
        paths, shared = Paths(), Paths()
        for request in self.trace.requests:
            paths.add(request.path, request.answer)
            whole = np.concatenate([request.path, request.answer])
            own = np.flatnonzero(~self._is_shared(whole))
            shared.add(whole[: own[0]] if len(own) else whole, whole[:0])
        units = shared.num_units + self.copies * (paths.num_units - shared.num_units)
        return int(units * self.trace.unit * layout.bytes_per_token) + len(self) * layout.checkpoint_bytes

    # -- content -------------------------------------------------------------------------------------------------

    @cached_property
    def _shared_ids(self) -> NDArray[np.int64]:
        """Ids that at least two sessions have, ascending."""
        owner: dict[int, int] = {}
        shared: set[int] = set()
        for request in self.trace.requests:
            session = request.session
            assert session is not None
            for one in request.path.tolist():
                if owner.setdefault(one, session) != session:
                    shared.add(one)
        return np.array(sorted(shared), np.int64)

    @cached_property
    def _shared_mask(self) -> NDArray[np.bool_]:
        """For each id from 0 on whether it is shared."""
        mask = np.zeros(self._stride, bool)
        mask[self._shared_ids] = True
        return mask

    @cached_property
    def _stride(self) -> int:
        """More than any id of the trace, of either sign."""
        most = (int(np.abs(ids).max()) for one in self.trace.requests for ids in (one.path, one.answer) if len(ids))
        return max(most, default=0) + 1

    def _is_shared(self, ids: Ids) -> NDArray[np.bool_]:
        return self._shared_mask[np.maximum(ids, 0)] & (ids >= 0)

    def _of(self, copy: int, ids: Ids) -> Ids:
        """The ids of this copy, of content that an answer alone has (below 0) as of any other."""
        if copy == 0:
            return ids
        moved = ids + np.where(ids < 0, -copy, copy) * self._stride
        return np.where(self._is_shared(ids), ids, moved)
