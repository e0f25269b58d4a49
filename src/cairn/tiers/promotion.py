"""Pages from below: a hit in a tier is fetched while its request waits its turn.

submitted   its prompt's chunks and states are named and looked for, beside the steps
plan        the deepest state whose keys and values are here or below, if fetching takes less than computing
start       read into the request's pages, beside the steps
events      all of it has come and is what was written, or nothing has
"""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import numpy as np

from cairn.cache.checkpoint import Origin
from cairn.cache.group_pages import GroupPages
from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.scheduler.page_source import FetchEvent, FetchPlan, FetchRequest, FetchTarget
from cairn.step import GRID
from cairn.tiers.context import ORIGINS, TierContext
from cairn.tiers.digests import PathNames
from cairn.tiers.lanes import busy_time, resting_at_most
from cairn.tiers.memory import CopyFailed
from cairn.tiers.store import EntryRead, PageBytes, TierStore
from cairn.transfer.contract import PagesFree, PullEnded, PullId, Volume
from cairn.types import Pages, RequestId

MAX_LOOKUPS = 1024
"""Requests whose prompts are looked for at a time; others are computed without."""

MAX_STATES = 64
"""States that are considered for one prompt: the deepest ones."""

LATENCY_SECONDS = 0.002
"""What a fetch takes besides its bytes."""

LEAST_PATIENCE = 0.5
"""Seconds that every fetch has; otherwise as many as computing would take."""

PIECE_BYTES = 32 << 20
"""Read between two looks at whether anybody still waits."""

PACED_SHARE = 0.05
"""Of what computing would take: so much longer a read may take to leave the cores to the steps of others."""

PACED_SECONDS = 1.0
"""Most that it takes longer, however long computing would be."""

_FIRST_RATES: Mapping[str, float] = MappingProxyType({"host": 0.5e-9, "disk": 2e-9})
"""Seconds a byte, without rests, before anything was fetched."""

_FORGIVENESS = 0.99


@dataclass(frozen=True, slots=True)
class StatePlace:
    """A state that could be resumed from: the number of its store, its kind and origin."""

    position: int
    key: bytes
    store: int
    kind: int
    origin: int


@dataclass(frozen=True, slots=True, eq=False)
class PathReach:
    """What tiers have of a prompt. `chunk_stores`: for each chunk the number of the store that has it, -1: none.
    `num_missing`: how many of the first k chunks none has. `states`: descending."""

    names: PathNames
    chunk_stores: list[int]
    num_missing: list[int]
    states: list[StatePlace]

    def has_chunks(self, first: int, end: int) -> bool:
        """Whether there are the chunks [first, end)."""
        return first >= end or self.num_missing[end] == self.num_missing[first]

    def whole_until(self, first: int) -> int:
        """Up to which chunk, exclusive, all are there from `first` on."""
        return bisect_left(self.num_missing, self.num_missing[first] + 1, lo=first) - 1


@dataclass(frozen=True, slots=True)
class _Choice:
    """What is going to be fetched: `chunks` and, if it is not None, `state`, for the first `position` tokens, of which
    `num_saved` would have to be computed otherwise. `tier`: the slowest that it comes from. `reads_pages`: not
    all keys and values are here. `rests`: see `cairn.tiers.lanes.resting_at_most`."""

    position: int
    num_saved: int
    reads_pages: bool
    chunks: range
    state: StatePlace | None
    tier: str
    compute_seconds: float
    rests: float
    plan: FetchPlan


@dataclass(slots=True, eq=False)
class _OpenFetch:
    """`future`: whether all has come, and how many seconds it took without rests. `cancelled`: nobody waits for it;
    `ended`: that has been said."""

    choice: _Choice
    future: "Future[float | None] | None" = None
    deadline: float = 0.0
    cancelled: bool = False
    ended: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing is written to its pages any more."""
        assert self.future is not None
        if not self.future.done():
            return False
        error = None if self.future.cancelled() else self.future.exception()
        return not isinstance(error, CopyFailed) or error.is_over


@dataclass(slots=True)
class _Known:
    """A request that waits. `choice`: of the last plan."""

    future: "Future[PathReach]"
    choice: _Choice | None = None


class TierSource:
    """A `PageSource` of this server's own tiers."""

    def __init__(self, context: TierContext) -> None:
        self._context = context
        self._known: dict[RequestId, _Known] = {}
        self._fetches: dict[PullId, _OpenFetch] = {}
        self._events: list[FetchEvent] = []
        self._number = 0
        self._rates = {store.name: _FIRST_RATES.get(store.name, 1e-9) for store in context.stores}

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return any(not known.future.done() for known in self._known.values())

    def may_have(self, request: FetchRequest) -> bool:
        context = self._context
        if len(request.keys) < GRID or len(self._known) >= MAX_LOOKUPS:
            return False
        if not any(store.counters.num_entries or not store.writable for store in context.stores):
            return False
        self._known[request.request_id] = _Known(context.lanes.names.submit(lambda: self._look(request)))
        return True

    def is_ready(self, request: FetchRequest) -> bool:
        known = self._known.get(request.request_id)
        return known is None or known.future.done()

    def decline(self, request: FetchRequest) -> None:
        self._known.pop(request.request_id, None)

    def _look(self, request: FetchRequest) -> PathReach:
        """What the stores have of a prompt. For the names' thread."""
        context = self._context
        names = context.names.path(request.name, request.keys)
        for store in context.stores:
            store.refresh()
        chunk_stores = _first_with(context.stores, names.chunks)
        if not context.pages_per_chunk:
            chunk_stores = [0] * len(names.chunks)
        missing = accumulate((place < 0 for place in chunk_stores), initial=0)
        return PathReach(names, chunk_stores, list(missing), self._find_states(names))

    def _find_states(self, names: PathNames) -> list[StatePlace]:
        stores, length, states = self._context.stores, len(names.keys), list[StatePlace]()
        marks = [names.mark(number) for number in range(len(names.chunks) + 1)]
        tails = list(zip(*(store.tails(marks) for store in stores), strict=True))
        for number in range(len(names.chunks), -1, -1):
            start = number * names.stride
            for tail in sorted({tail for here in tails[number] for tail in here}, reverse=True):
                position = start + tail
                if not 0 < position <= length or not self._may_resume(position, length):
                    continue
                key = names.state_of(number, tail)
                for place, store in enumerate(stores):
                    facts = store.facts(key)
                    if facts is not None and not (self._context.exact and facts.origin == ORIGINS[Origin.DECODE]):
                        states.append(StatePlace(position, key, place, facts.kind, facts.origin))
                        break
            if len(states) >= MAX_STATES:
                break
        return states

    def _may_resume(self, position: int, length: int) -> bool:
        return not self._context.exact or position % GRID == 0 or position == length

    # -- what is fetched -----------------------------------------------------------------------------------------

    def plan(self, request: FetchRequest, sequence: SequenceBlocks) -> FetchPlan | None:
        known = self._known.get(request.request_id)
        if known is None or not known.future.done() or known.future.exception() is not None:
            return None
        known.choice = self._choose(known.future.result(), sequence)
        return None if known.choice is None else known.choice.plan

    def _choose(self, reach: PathReach, sequence: SequenceBlocks) -> _Choice | None:
        layout, stride = self._context.layout, reach.names.stride
        first = min(sequence.matched // stride, len(reach.chunk_stores))
        best: tuple[int, StatePlace | None] = (sequence.hit, None)
        for state in reach.states:
            if state.position <= best[0]:
                break
            if reach.has_chunks(first, state.position // stride):
                best = state.position, state
                break
        if not layout.needs_checkpoints and layout.groups:
            whole = reach.whole_until(first) * stride
            # the last token of the prompt has to be computed, if there is no state at its end
            if min(whole, len(reach.names.keys) - 1) > best[0]:
                best = whole, None
        position, chosen = best
        if position <= sequence.hit:
            return None
        chunks = range(first, position // stride) if self._context.pages_per_chunk else range(0)
        known = min(position, sequence.matched)
        num_pages = layout.unlimited_pages_for(position) - layout.unlimited_pages_for(known)
        num_pages += layout.window_pages(known, position)
        num_bytes = (num_pages + layout.pages_per_checkpoint * (chosen is not None)) * layout.page_bytes
        used = {reach.chunk_stores[number] for number in chunks} | (set() if chosen is None else {chosen.store})
        tier = max((self._context.stores[place].name for place in used), key=lambda name: self._rates[name])
        busy_seconds = num_bytes * self._rates[tier]
        compute_seconds = (position - sequence.hit) * self._context.speed.seconds_per_token
        paced_seconds = min(PACED_SHARE * compute_seconds, PACED_SECONDS)
        rests = paced_seconds / max(busy_seconds, 1e-9)
        seconds = LATENCY_SECONDS + busy_seconds * (1 + min(rests, self._context.lanes.reads.rests))
        if seconds >= compute_seconds:
            # the scheduler computes it; that it was slow may have been an accident, and one day it is tried again
            self._rates[tier] *= _FORGIVENESS
        plan = FetchPlan(position, num_bytes, seconds, origin=f"the {tier} cache", is_local=True)
        reads_pages = position > sequence.matched
        return _Choice(
            position, position - sequence.hit, reads_pages, chunks, chosen, tier, compute_seconds, rests, plan
        )

    def start(self, request: FetchRequest, target: FetchTarget) -> PullId:
        known = self._known.pop(request.request_id)
        assert known.choice is not None, "start without a plan"
        self._number += 1
        fetch, choice = PullId(self._number), known.choice
        opened = self._fetches[fetch] = _OpenFetch(choice)
        opened.deadline = self._context.clock.now() + max(LEAST_PATIENCE, choice.compute_seconds)
        reach = known.future.result()
        opened.future = self._context.lanes.reads.submit(lambda: self._read(opened, self._order(reach, choice, target)))
        return fetch

    def _order(self, reach: PathReach, choice: _Choice, target: FetchTarget) -> "list[_Read]":
        """What to read, and into which pages, in the order of the path. For the readers' threads: there are many."""
        context, order = self._context, list[_Read]()
        stride, parts = context.names.stride, target.pages
        for number in choice.chunks:
            entry, at = (reach.chunk_stores[number], reach.names.chunks[number]), 0
            for part in parts:
                if part.group.reach is None:
                    size = stride // part.group.tokens_per_page
                    order += _reads_into(part, number * size, size, entry, at)
                    at += size
        state = choice.state
        if state is None:
            return order
        order.append(_Read(state.store, state.key, 0, target.state_pages))
        if choice.reads_pages:
            at = len(target.state_pages)
            for part, (first_page, count) in zip(parts, context.state_spans(state.position), strict=True):
                order += _reads_into(part, first_page, count, (state.store, state.key), at)
                at += count
        return order

    def _read(self, opened: _OpenFetch, order: "Sequence[_Read]") -> float | None:
        """The seconds that it took; None if not all of it has come. For the readers' threads."""
        began = busy_time()
        deadline = time.monotonic() + max(LEAST_PATIENCE, opened.choice.compute_seconds)
        with resting_at_most(opened.choice.rests):
            for piece in _pieces(order, PIECE_BYTES // self._context.layout.page_bytes):
                if opened.cancelled:
                    return None
                pages = np.concatenate([each.pages for each in piece])

                def fill(rows: Sequence[PageBytes], piece: "Sequence[_Read]" = piece) -> bool:
                    return self._fill(piece, rows, deadline)

                if not self._context.memory.copy_in(pages, fill):
                    return None
        return busy_time() - began

    def _fill(self, piece: "Sequence[_Read]", rows: Sequence[PageBytes], deadline: float) -> bool:
        by_store: dict[int, list[EntryRead]] = {}
        at = 0
        for each in piece:
            read_rows = rows[at : at + len(each.pages)]
            at += len(each.pages)
            by_store.setdefault(each.store, []).append(EntryRead(each.key, each.first, read_rows))
        return all(self._context.stores[place].read(reads, deadline) for place, reads in by_store.items())

    # -- what becomes of it --------------------------------------------------------------------------------------

    def abort(self, fetch: PullId) -> None:
        opened = self._fetches.get(fetch)
        if opened is not None:
            opened.cancelled = True

    def events(self) -> list[FetchEvent]:
        now = self._context.clock.now()
        for fetch, opened in list(self._fetches.items()):
            assert opened.future is not None
            if not opened.ended and opened.future.done():
                opened.ended = True
                self._events.append(self._end(fetch, opened))
            elif not opened.ended and now >= opened.deadline:
                opened.ended = opened.cancelled = True
                self._slow_down(opened.choice)
                self._events.append(PullEnded(fetch, "it takes longer than computing"))
            if opened.ended and opened.is_over:
                del self._fetches[fetch]
                self._events.append(PagesFree(fetch))
        events, self._events = self._events, []
        return events

    def _end(self, fetch: PullId, opened: _OpenFetch) -> PullEnded:
        future, choice, context = opened.future, opened.choice, self._context
        assert future is not None
        seconds = None if future.cancelled() or future.exception() is not None else future.result()
        if opened.cancelled or seconds is None:
            return PullEnded(fetch, "aborted" if opened.cancelled else "an entry was gone or damaged, or not copied")
        state, num_bytes = choice.state, choice.plan.num_bytes
        rate = max(0.0, seconds - LATENCY_SECONDS) / num_bytes
        self._rates[choice.tier] += (rate - self._rates[choice.tier]) / 4
        if state is not None:
            context.worth.earn(state.kind, choice.compute_seconds - seconds)
            context.stores[state.store].touch(state.key)
        for store in context.stores:
            if store.name == choice.tier:
                store.counters.hits += 1
                store.counters.hit_tokens += choice.num_saved
        position = None if state is None else choice.position
        return PullEnded(fetch, None, choice.position, position, Volume(num_bytes, 1))

    def _slow_down(self, choice: _Choice) -> None:
        rate = choice.compute_seconds / choice.plan.num_bytes
        self._rates[choice.tier] = max(self._rates[choice.tier], rate)


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Pages of an entry from its page `first` on, of store number `store`, and where they go."""

    store: int
    key: bytes
    first: int
    pages: Pages


def _reads_into(part: GroupPages, first_page: int, count: int, entry: tuple[int, bytes], at: int) -> list[_Read]:
    """The pages [first_page, first_page + count) of a sequence, as far as they are to be filled; an entry, of this
    store and name, has them from its page `at` on."""
    skipped = max(0, part.first_page - first_page)
    begin, end = first_page + skipped - part.first_page, first_page + count - part.first_page
    return [_Read(*entry, at + skipped, part.pages[begin:end])] if begin < end else []


def _pieces(order: Sequence[_Read], most: int) -> list[list[_Read]]:
    """In order, of so many pages each; a larger read is one of its own."""
    pieces, num_pages = list[list[_Read]](), most
    for each in order:
        if num_pages + len(each.pages) > most or not pieces:
            pieces.append([])
            num_pages = 0
        pieces[-1].append(each)
        num_pages += len(each.pages)
    return pieces


def _first_with(stores: Sequence[TierStore], keys: Sequence[bytes]) -> list[int]:
    """For each key the number of the first store that has it, -1: none."""
    places = [-1] * len(keys)
    for number in reversed(range(len(stores))):
        for at, here in enumerate(stores[number].contains(keys)):
            if here:
                places[at] = number
    return places
