"""Which replica gets a request: the one that is expected to have its first token soonest, at the least cost to others.

    cost of a replica, in tokens of prefill that somebody has to wait for
      = what it has to prefill already              the wait
      + what of this prompt it has not cached       the request's own prefill
      + what it would keep a second time            room that a copy takes from other prompts
      + what it would compute beyond its share      so that work is spread also where nobody waits

The lowest cost wins. Near-ties go to the less loaded, now and lately, ties of those to a replica that the prompt's
first block (or its session) always prefers: rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to
increase hit rates", 1998), the same in every router and after a restart. A hot prefix is copied once the wait at its
replicas costs more than the copy, and a session moves only when that is cheaper than to stay. A replica with far more
open requests than the others (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018) is a
bottleneck: what it has cached may be kept a second time at no extra price, for the copy serves all that come after.

What each term gains in a simulated fleet: docs/measurements/routing.md. The price of keeping a token a second time is
what matters most: with 0 prompts move, are computed again, make others wait, and those move; on chats with 8 replicas
the fleet has 90.8 % of one large cache's hits then, and 98 % with 8.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from cairn.routing.index import PrefixIndex, count_masks, places_below

Floats = NDArray[np.float64]

_MASK_64 = (1 << 64) - 1
_MOST_HALF_LIVES = 32
_PARTS_OF_PROMPT = 64
"""How exactly it is asked where a long prompt's cached part ends."""
_COMPARED = 64
"""Loads that are compared at a time."""


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """`running_tokens`: how much a running request slows a prefill, in tokens of prefill.

    `below_cost`: what a token costs that lies in a replica's memory or disk below its pool, where one that is computed
    costs 1.
    `duplicate_cost`: what a token costs, beyond itself, that is computed though another replica has it cached: others
    wait for it, and it takes their room; nothing where the replica has free pages.
    `session_cost`: what it costs to move a session, beyond the tokens that are computed again.
    `crowd_slack`, `crowd_factor`: a replica with more requests open than the first and the second times the mean is
    crowded; what only such replicas have is copied without that price.
    `balance_cost`: what each token costs that a replica would have computed, with this prompt and what waits there,
    beyond `balance_slack` times the mean; what is computed counts with a half-life of `balance_seconds`.
    `near_tie_tokens`, `near_tie_share`: costs that differ by no more than so many tokens, or than this share of what
    the best replica would compute, are the same; of those the one with the shortest wait is taken, and then the one
    that has computed least, in steps of `balance_step` times the mean.
    `max_sessions`: how many are remembered.
    `prefill_seconds`: a prefill whose end nobody has reported is over by then.
    """

    running_tokens: float = 64.0
    below_cost: float = 0.25
    duplicate_cost: float = 8.0
    session_cost: float = 256.0
    crowd_slack: float = 16.0
    crowd_factor: float = 1.5
    balance_cost: float = 2.0
    balance_slack: float = 1.05
    balance_seconds: float = 60.0
    near_tie_tokens: float = 64.0
    near_tie_share: float = 0.05
    balance_step: float = 0.25
    max_sessions: int = 1 << 16
    prefill_seconds: float = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRequest:
    """What the rule knows of a request. `block_hashes`: those of its full blocks, chained, with the salt in them.

    `block_ends`: the tokens up to the end of each block, or the tokens of one block. `session`: requests with the same
    one belong together, whatever their prompts say.
    """

    block_hashes: Sequence[int] = ()
    block_ends: Sequence[int] | int = 16
    num_tokens: int = 0
    session: str | None = None

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens of the first `num_blocks` blocks."""
        if num_blocks == 0:
            return 0
        ends = self.block_ends
        return min(self.num_tokens, num_blocks * ends if isinstance(ends, int) else ends[num_blocks - 1])


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of a replica, as it was last reported.

    `pending_tokens`: of prompts, running or waiting, that it still has to prefill. `free_share`: of its pages, those
    that hold nothing. `as_of`: when it was reported, on the rule's clock: prefills that the rule has routed there later
    count on top. None: nothing is reported, the rule's own count is all there is.
    """

    num_running: int = 0
    num_waiting: int = 0
    pending_tokens: int = 0
    free_share: float = 0.0
    as_of: float | None = None


class _Replica:
    """What the rule itself has sent to a replica.

    `computed_tokens`: scaled (see `RoutingRule._scale`). `prefills`: when, and how many tokens, the oldest first.
    """

    __slots__ = ("computed_tokens", "pending_tokens", "prefills", "seed")

    def __init__(self, name: str) -> None:
        self.seed = _seed(name)
        self.pending_tokens = 0
        self.computed_tokens = 0.0
        self.prefills: OrderedDict[RoutedRequest, tuple[float, int]] = OrderedDict()

    def settle(self, request: RoutedRequest) -> None:
        """This prefill is over, or was counted by the replica itself."""
        _, num_tokens = self.prefills.pop(request, (0.0, 0))
        self.pending_tokens -= num_tokens

    def settle_until(self, time: float) -> None:
        """So are those that were routed here until then."""
        while self.prefills and (first := next(iter(self.prefills.items())))[1][0] <= time:
            self.settle(first[0])


class RoutingRule:
    """Ranks replicas for requests, and remembers what was routed where. Single-threaded.

    `index`: what replicas have cached; one of its own unless given. All times are seconds of one clock, the caller's,
    which never goes back.
    """

    def __init__(self, options: RoutingOptions | None = None, index: PrefixIndex | None = None) -> None:
        self.options = options or RoutingOptions()
        self.index = index or PrefixIndex()
        self._replicas: dict[str, _Replica] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._num_ranked = 0
        self._scaled_since = 0.0
        self._rows = _Rows()

    def rank(
        self, request: RoutedRequest, replicas: Mapping[str, ReplicaLoad], now: float, limit: int | None = None
    ) -> list[str]:
        """The replicas, the best first; no more than `limit`: with 1 it need not put the others in order.

        Fast when a replica's load is the same object as the last time, unless it has changed.
        """
        if not replicas:
            return []
        self._num_ranked += 1
        self._update_rows(replicas)
        options, rows = self.options, self._rows
        matched = rows.matched_tokens(request, self.index, options.near_tie_tokens / 2, options.below_cost)
        wait = rows.reported + rows.pending
        # what waits is of the next minute, and may be more than was expected when it was routed
        computed = rows.computed / self._scale(now) + wait
        lacking = request.num_tokens - matched
        mean = computed.mean()
        excess = np.maximum(computed + lacking - options.balance_slack * mean, 0.0) * options.balance_cost
        crowded = rows.num_open > options.crowd_slack + options.crowd_factor * rows.num_open.mean()
        elsewhere = np.where(crowded, 0.0, matched).max()
        cost = wait + excess + lacking + rows.copy_cost * np.maximum(elsewhere - matched, 0.0)
        stays = rows.number_of.get(self._sessions.get(request.session or "", ""))
        if stays is not None:
            cost[stays] -= options.session_cost
        best = int(cost.argmin())
        near_tie = max(options.near_tie_tokens, options.near_tie_share * lacking[best])
        ties = np.flatnonzero(cost <= cost[best] + near_tie)
        if len(ties) > 1:
            load = np.floor((wait + excess)[ties] / near_tie)
            work = np.floor(computed[ties] / max(options.near_tie_tokens, options.balance_step * mean))
            ties = ties[np.lexsort((_rendezvous(rows.seeds[ties], self._request_seed(request)), work, load))]
        order = ties
        if limit is None or limit > len(ties):
            cost[ties] = -np.inf
            order = np.concatenate((ties, np.argsort(cost)[len(ties) :]))
        ranked: list[str] = rows.name_array[order[:limit]].tolist()
        return ranked

    def record_routed(self, request: RoutedRequest, replica: str, now: float) -> int:
        """The request was sent to this replica; returns how many tokens of it are expected to be cached there."""
        state = self._replica(replica)
        cached = request.tokens_in(
            max(self.index.matched_by(place, request.block_hashes) for place in (replica, *places_below(replica)))
        )
        lacking = request.num_tokens - cached
        self.index.add_routed(replica, request.block_hashes, now)
        state.settle_until(now - self.options.prefill_seconds)
        state.settle(request)
        state.prefills[request] = (now, lacking)
        state.pending_tokens += lacking
        state.computed_tokens += lacking * self._scale(now)
        self._rows.update(replica, state)
        if request.session:
            self._sessions[request.session] = replica
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > self.options.max_sessions:
                self._sessions.popitem(last=False)
        return cached

    def pending_tokens(self, replica: str) -> int:
        """Of the prompts that the rule itself has sent there, the tokens that are still to be prefilled."""
        return self._replicas[replica].pending_tokens if replica in self._replicas else 0

    def record_prefilled(self, request: RoutedRequest, replica: str) -> None:
        """Its prompt is computed: its first token has come."""
        if replica in self._replicas:
            state = self._replicas[replica]
            state.settle(request)
            self._rows.update(replica, state)

    def record_finished(self, request: RoutedRequest, replica: str) -> None:
        """It has ended, in whatever way."""
        self.record_prefilled(request, replica)

    def remove(self, replica: str) -> None:
        """The replica is gone, and its cache with it."""
        self.index.remove(replica)
        self._replicas.pop(replica, None)
        self._rows = _Rows()

    def _replica(self, name: str) -> _Replica:
        if name not in self._replicas:
            self._replicas[name] = _Replica(name)
        return self._replicas[name]

    def _update_rows(self, replicas: Mapping[str, ReplicaLoad]) -> None:
        names, loads = tuple(replicas), list(replicas.values())
        if names != self._rows.names:
            self._rows = _Rows(names)
            for name in names:
                self._rows.update(name, self._replica(name))
        for row in _unequal(loads, self._rows.loads):
            load, state = loads[row], self._replicas[names[row]]
            if load.as_of is not None:
                state.settle_until(load.as_of)
                self._rows.update(names[row], state)
            self._rows.reported[row] = load.pending_tokens + self.options.running_tokens * load.num_running
            self._rows.num_open[row] = load.num_running + load.num_waiting
            self._rows.copy_cost[row] = self.options.duplicate_cost * (1 - load.free_share)
        self._rows.loads = loads

    def _scale(self, now: float) -> float:
        """What a token computed now counts: instead of letting all older ones decay, the newer count more."""
        half_lives = (now - self._scaled_since) / self.options.balance_seconds
        if half_lives > _MOST_HALF_LIVES:
            for name, state in self._replicas.items():
                state.computed_tokens *= 0.5**half_lives
                self._rows.update(name, state)
            self._scaled_since, half_lives = now, 0.0
        return float(2.0**half_lives)

    def _request_seed(self, request: RoutedRequest) -> int:
        if request.session:
            return _seed(request.session)
        return request.block_hashes[0] if request.block_hashes else self._num_ranked


class _Rows:
    """The replicas of the last call as arrays, a row each."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = names
        self.name_array = np.array(names, object)
        self.number_of = {name: row for row, name in enumerate(names)}
        self.loads: Sequence[ReplicaLoad | None] = [None] * len(names)
        self.reported, self.copy_cost, self.pending, self.computed, self.num_open = np.zeros((5, len(names)))
        self.seeds = np.zeros(len(names), np.uint64)
        self._numbers = np.zeros((0, 3), np.intp)
        self._num_changes = -1

    def update(self, name: str, state: _Replica) -> None:
        row = self.number_of.get(name)
        if row is not None:
            self.pending[row], self.computed[row] = state.pending_tokens, state.computed_tokens
            self.seeds[row] = state.seed

    def matched_tokens(self, request: RoutedRequest, index: PrefixIndex, precision: float, below_cost: float) -> Floats:
        """Tokens that each replica need not compute of the prompt, or fewer by less than `precision` or a part of the
        prompt (`_PARTS_OF_PROMPT`), shape [rows]. A token that it has below its pool alone counts less by
        `below_cost`."""
        if self._num_changes != index.num_changes:
            known = [[index.number(place) for place in (name, *places_below(name))] for name in self.names]
            nobody = index.num_numbers
            numbers = [[nobody if number is None else number for number in places] for places in known]
            # the columns without any tier are most fleets', and are left out
            used = [column for column in range(3) if column == 0 or any(row[column] != nobody for row in numbers)]
            self._numbers = np.array(numbers, np.intp).reshape(len(numbers), 3)[:, used]
            self._num_changes = index.num_changes
        block_size = request.block_ends
        resolution = max(1, len(request.block_hashes) // _PARTS_OF_PROMPT)
        if isinstance(block_size, int):
            resolution = max(resolution, int(precision // block_size))
        matches = index.matched_masks(request.block_hashes, resolution)
        # who has more blocks has the fewer, too, so it is enough to know in how many masks a replica is
        num_matches = count_masks([mask for _, mask in matches], index.num_numbers + 1)
        num_tokens = np.array([0.0, *(request.tokens_in(num_blocks) for num_blocks, _ in matches)])
        tokens = num_tokens[num_matches[self._numbers]]
        matched: Floats = tokens[:, 0]
        if tokens.shape[1] > 1:
            matched = matched + (1 - below_cost) * (tokens.max(axis=1) - matched)
        return matched


def _unequal(new: Sequence[object], old: Sequence[object]) -> Iterator[int]:
    """Where two lists of one length differ: quickly where the same objects stand in both."""
    for start in range(0, len(new), _COMPARED):
        part, old_part = new[start : start + _COMPARED], old[start : start + _COMPARED]
        if part != old_part:
            yield from (
                start + row for row, (item, old_item) in enumerate(zip(part, old_part, strict=True)) if item != old_item
            )


def _seed(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest())


def _rendezvous(seeds: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """A number for each replica and this key, the lowest is preferred: the finalizer of splitmix64."""
    mixed = (seeds ^ np.uint64(key & _MASK_64)) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
