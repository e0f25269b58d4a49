"""Closed loops of users before simulated servers: one, or several of which the proxy's rule chooses.

Each user begins the next session when the last one has ended, and asks again a while after an answer. Several servers
have clocks of their own, and each steps while it is the last one.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from benchmarks.queued_server import QueuedServer, Session
from benchmarks.routing_baselines import SHIPPED, make_router

from cairn.cache.events import BlockEvents, BlockNames, Event, block_hash, root_digest
from cairn.cache.sequence_blocks import Namespace
from cairn.engine.core_report import pending_prefill_tokens
from cairn.replay.trace import key_tokens
from cairn.routing.rule import ReplicaLoad, RoutedRequest, RoutingOptions
from cairn.scheduler.request import Request

__all__ = ["ClosedLoops", "Loop", "LoopServer", "ProxiedLoops"]

RAMP_SECONDS = 200.0
"""In which users come one after the other."""

HORIZON_SECONDS = 0.1
"""So far a server may be ahead of the others, whose clients' requests come so much later at most."""

BLOCK_SIZE = 64
EVENT_SECONDS, LOAD_SECONDS = 0.1, 1.0
"""The proxy hears of blocks so much later, and of each server's load so often."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Sessions that so many users go through. `pauses`: seconds after each answer, by session."""

    sessions: list[Session]
    pauses: list[np.ndarray]
    users: int


class LoopServer(QueuedServer):
    """One of the servers of closed loops, which have their sessions in common."""

    def join(self, loops: "ClosedLoops") -> None:
        self._loops, self._sessions, self._next_turn = loops, loops.sessions, loops.next_turn

    def ask(self, number: int, when: float) -> None:
        """The next request of a session comes, while this step goes on or nobody is served."""
        if not self.scheduler.has_work and when > self.now:
            self._clock.advance(max(1e-6, when - self.now))
        self._submit(number)

    def step(self, until: float) -> None:
        self._step(until)

    def _finish(self, request: Request) -> None:
        number = self._of_request[request.id][0]
        super()._finish(request)
        self._loops.take_answer(number, self.outcome.ttft[-1], self.now)


class ClosedLoops:
    """Serves loops of users, once. `ttft` and `session_seconds`, from a session's first request to its last answer:
    by the number of the loop."""

    def __init__(self, servers: Sequence[LoopServer], loops: Sequence[Loop]) -> None:
        self.servers = servers
        self.sessions = [session for loop in loops for session in loop.sessions]
        self.next_turn = dict.fromkeys(range(len(self.sessions)), 0)
        self.ttft: list[list[float]] = [[] for _ in loops]
        self.session_seconds: list[list[float]] = [[] for _ in loops]
        self._loops = loops
        self._loop_of = [number for number, loop in enumerate(loops) for _ in loop.sessions]
        self._pauses = [pauses for loop in loops for pauses in loop.pauses]
        self._began: dict[int, float] = {}
        self._due: list[tuple[float, int]] = []
        self._to_begin: list[deque[int]] = []
        for server in servers:
            server.join(self)

    def choose(self, number: int, when: float) -> LoopServer:
        """Whose turn it is to serve the next request of a session."""
        return self.servers[0]

    def serve(self, rng: np.random.Generator, progress: Any = None) -> None:
        first = 0
        for loop in self._loops:
            self._to_begin.append(deque(range(first, first + len(loop.sessions))))
            first += len(loop.sessions)
            for at in rng.uniform(0, RAMP_SECONDS, loop.users):
                self._begin(len(self._to_begin) - 1, float(at))
        while True:
            busy = sorted((server for server in self.servers if server.scheduler.has_work), key=lambda each: each.now)
            due = self._due[0][0] if self._due else np.inf
            if self._due and (not busy or due <= busy[0].now):
                when, number = heapq.heappop(self._due)
                server = self.choose(number, when)
                server.ask(number, when)
                self._began.setdefault(number, server.now)
            elif busy:
                busy[0].step(min(due, busy[1].now + HORIZON_SECONDS) if len(busy) > 1 else due)
            else:
                return
            if progress is not None:
                progress(sum(map(len, self.ttft)))

    def take_answer(self, number: int, ttft: float, now: float) -> None:
        """A session has an answer, of which the first token came after `ttft` seconds."""
        loop, turn = self._loop_of[number], self.next_turn[number]
        self.ttft[loop].append(ttft)
        if turn < len(self.sessions[number].requests):
            heapq.heappush(self._due, (now + self._pauses[number][turn - 1], number))
        else:
            self.session_seconds[loop].append(now - self._began[number])
            self._begin(loop, now + self._pauses[number][-1])

    def _begin(self, loop: int, at: float) -> None:
        if self._to_begin[loop]:
            heapq.heappush(self._due, (at, self._to_begin[loop].popleft()))


class ProxiedLoops(ClosedLoops):
    """Loops before servers behind a proxy."""

    def __init__(self, servers: Sequence[LoopServer], loops: Sequence[Loop], seed: int) -> None:
        super().__init__(servers, loops)
        self._router = make_router(SHIPPED, seed, RoutingOptions())
        self._names, self._roots = BlockNames(BLOCK_SIZE), dict[str, bytes]()
        self._by_name = {f"server-{number}": server for number, server in enumerate(servers)}
        self._loads: dict[str, ReplicaLoad] = {}
        self._loads_as_of = -LOAD_SECONDS
        self._routed: dict[int, tuple[RoutedRequest, str]] = {}
        # what the proxy is going to hear: when, a number for those of one time, and the call
        self._news: list[tuple[float, int, Callable[[], None]]] = []
        self._num_news = 0
        for name, server in self._by_name.items():
            server.cache.observe(BlockEvents(BLOCK_SIZE, partial(self._publish, name, server)))

    def choose(self, number: int, when: float) -> LoopServer:
        while self._news and self._news[0][0] <= when:
            heapq.heappop(self._news)[2]()
        if when >= self._loads_as_of + LOAD_SECONDS:
            self._loads_as_of = when // LOAD_SECONDS * LOAD_SECONDS
            self._loads = {name: load_of(server, self._loads_as_of) for name, server in self._by_name.items()}
        session = self.sessions[number]
        keys = key_tokens(session.requests[self.next_turn[number]].path, session.unit)
        root = root_digest(Namespace(adapter=session.name.partition("/")[0]))
        hashes = [block_hash(digest) for digest in self._names.chain(root, keys.tobytes())]
        request = RoutedRequest(hashes, BLOCK_SIZE, len(keys), session.name)
        name = self._router.choose(request, self._loads, when)
        self._router.record_routed(request, name, when)
        self._routed[number] = request, name
        return self._by_name[name]

    def take_answer(self, number: int, ttft: float, now: float) -> None:
        self._hear(now, partial(self._router.record_finished, *self._routed.pop(number)))
        super().take_answer(number, ttft, now)

    def _publish(self, name: str, server: LoopServer, event: Event) -> None:
        self._hear(server.now + EVENT_SECONDS, partial(self._router.apply, name, event))

    def _hear(self, when: float, call: Callable[[], None]) -> None:
        self._num_news += 1
        heapq.heappush(self._news, (when, self._num_news, call))


def load_of(server: LoopServer, now: float) -> ReplicaLoad:
    """As the server reports it."""
    state, pool = server.scheduler.state, server.cache.pool
    return ReplicaLoad(
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        pending_tokens=pending_prefill_tokens(state),
        free_share=pool.num_free / pool.num_pages,
        as_of=now,
    )
