"""The request log: for each request what became of it, and all that a replay needs to go through the same once more.

    {"name", "unit", "source": "cairn", "version", "layout", "forward_sizes", "budget_bytes", "policy", ...}
    {"n", "id", "t", "in", "out", "finish", "timings", "cached_tokens", ..., "shares", "h", "b", "ops"}
    ...

The first line says what was served and by which rules: bytes are those of one rank, `forward_sizes` are the whole
model's. Then comes one line a request when it ends (`LogLines`). The scheduler's thread only takes down calls and hands
an `Entry` over; hashing, writing and all else is done by the thread of `LogFile`. `ops` lists what has happened at the
cache's door, to any request, since the line before:

    ["l", n, tokens, resumed, passed_by]   lookup of the first tokens    ["a", n, resumed]    admitted after it
    ["x", n, tokens, done]       extend                                  ["h", n]             hold_breakpoints
    ["p", step, [[n, end, kind], ...]]   a plan: rows that end there (kind 1 prefill, 2 decode, 3 no row but a save,
                                 0 neither); of decode rows only those that may touch the cache
    ["c", n, tokens, kept]       commit, of checkpoints, too             ["s", step]          step_applied
    ["w", n, position, kind, done]       want outside a plan             ["r", n, loss]       release
    ["f", n, position, done]     want_always                             ["v", n, tokens, wanted, position]   received
    ["k", n]                     hold of the state at its prompt's end   ["g", n]             let_go of it
    ["b", new, from, n]          branch of a lease at the state of n     ["m", pages]         make_room
    ["t", seconds]               the time of what follows

`n` numbers requests as they arrived; what else has a lease has a number below 0. Where checkpoints are placed and what
is evicted is not in it: that is for the replay to decide anew.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from cairn.cache.lease import Namespace
from cairn.engine.contract import CacheReport
from cairn.engine.core_report import cache_report
from cairn.scheduler.draft import Draft, Part
from cairn.scheduler.request import Request
from cairn.step import GRID
from cairn.types import Boundary, Clock, Keys

__all__ = ["Entry", "EntrySink", "Op", "RequestJournal", "reported"]

MAX_OPS = 1 << 18
"""Calls kept while no line takes them along; beyond it they are forgotten, and the next line says so."""

Op = tuple[object, ...]

_NO_ROW, _PREFILL, _DECODE, _SAVE = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One request that has ended, and the calls since the entry before. Times in seconds.

    `gap`: calls are missing before these. `dropped`: entries so far that nobody took.
    """

    number: int
    request_id: str
    namespace: Namespace
    prompt: Keys
    output: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    arrived: float
    finish: str
    timings: dict[str, float]
    report: CacheReport | None
    ops: tuple[Op, ...]
    gap: bool
    dropped: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class EntrySink(Protocol):
    """Takes entries away: `cairn.engine.request_log_file.LogFile`."""

    @property
    def dropped(self) -> int:
        """Entries that were not written."""
        ...

    def put(self, entry: Entry) -> bool:
        """False, at once, when there is no room for it."""
        ...

    def close(self) -> None: ...


class RequestJournal:
    """Takes down what scheduler and cache do (`RequestObserver`, `DoorNotes`). One thread only; O(1) a call."""

    def __init__(self, sink: EntrySink, clock: Clock, block_size: int) -> None:
        self._sink = sink
        self._clock = clock
        self._start = self._noted = clock.now()
        self._block_size = block_size
        self._numbers: dict[str, int] = {}
        self._others = 0
        self._planned: set[int] = set()
        self._ops: list[Op] = []
        self._gap = False

    @property
    def dropped(self) -> int:
        """Requests that have no line."""
        return self._sink.dropped

    def close(self) -> None:
        self._sink.close()

    # -- what the scheduler tells --------------------------------------------------------------------------------

    def submitted(self, request: Request) -> None:
        self._numbers[request.id] = request.arrival

    def planned(self, draft: Draft) -> None:
        parts = [self._part(part, draft) for part in draft.parts if self._matters(part, draft)]
        if parts:
            self._planned.add(draft.step)
            self._add(("p", draft.step, parts))

    def ended(self, request: Request) -> None:
        entry = Entry(
            number=self._numbers.pop(request.id, request.arrival),
            request_id=request.id,
            namespace=request.spec.namespace,
            prompt=request.spec.prompt,
            output=tuple(request.output),
            boundaries=request.spec.boundaries,
            arrived=request.times.arrived - self._start,
            finish=request.finish or "error",
            timings=_timings(request),
            report=cache_report(request, None),
            ops=tuple(self._ops),
            gap=self._gap,
            dropped=self._sink.dropped,
        )
        # what was not taken stays for the next line: without it a replay would miss steps of other requests
        if self._sink.put(entry):
            self._ops, self._gap = [], False

    def _matters(self, part: Part, draft: Draft) -> bool:
        """Whether a row can change the cache before its request ends: most decode rows cannot."""
        row = None if part.row is None else draft.rows[part.row]
        if row is None or not row.decode or part.kept:
            return True
        lease = part.request.lease
        return bool(lease is not None and lease.transient) or 0 in (part.end % GRID, part.end % self._block_size)

    def _part(self, part: Part, draft: Draft) -> tuple[int, int, int]:
        if part.row is None:
            kind = _SAVE if part.kept else _NO_ROW
        else:
            kind = _DECODE if draft.rows[part.row].decode else _PREFILL
        return part.request.arrival, part.end, kind

    # -- what the cache tells ------------------------------------------------------------------------------------

    def named(self, name: str) -> int:
        if name not in self._numbers:
            self._others += 1
            self._numbers[name] = -self._others
        return self._numbers[name]

    def note(self, code: str, who: str | int, *more: int | str | None) -> None:
        number = self._numbers.get(who) if isinstance(who, str) else who
        if number is None:
            return  # another server's question
        op = (code, number, *more)
        if code == "r" and number < 0:
            self._numbers = {name: other for name, other in self._numbers.items() if other != number}
        # who waits for room is looked up in each step, and nothing has happened since the last time
        last = self._ops[-1:]
        if code == "r" and last and last[0][:2] == ("l", number) and self._ops[-3:] == [*last, op, *last]:
            self._ops.pop()
            return
        self._add(op)

    def room(self, num_pages: int) -> None:
        self._add(("m", num_pages))

    def applied(self, step: int) -> None:
        if step in self._planned:
            self._planned.remove(step)
            self._add(("s", step))

    def tick(self) -> None:
        now = self._clock.now()
        if now > self._noted:
            self._noted = now
            self._add(("t", now - self._start))

    def _add(self, op: Op) -> None:
        if len(self._ops) >= MAX_OPS:
            self._ops, self._gap = [], True
        self._ops.append(op)


def _timings(request: Request) -> dict[str, float]:
    """Seconds: what there is of `queue`, `prefill`, `decode`, `ttft` and `e2e`."""
    times, told = request.times, {}
    if times.scheduled is not None:
        told["queue"] = times.scheduled - times.arrived
    if times.first_token is not None:
        told["ttft"] = times.first_token - times.arrived
        if times.scheduled is not None:
            told["prefill"] = times.first_token - times.scheduled
    if times.finished is not None:
        told["e2e"] = times.finished - times.arrived
        if times.first_token is not None:
            told["decode"] = times.finished - times.first_token
    return {name: round(seconds, 6) for name, seconds in told.items()}


def reported(report: CacheReport | None) -> dict[str, object]:
    """The response's `cairn.cache`, field by field; a request that never ran has none."""
    if report is None:
        return {}
    fields = msgspec.to_builtins(report)
    assert isinstance(fields, dict)
    return {name: value for name, value in fields.items() if name != "prompt_tokens" and value is not None}
