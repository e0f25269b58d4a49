"""One simulated server with a queue: the shipped scheduler and cache on a virtual clock, before clients that wait.

A step takes `StepTimes.seconds`. Requests come in the order of the trace, so many of them waiting all the time. A
session asks one thing after the other: a request that the trace has before the answer to the last one is complete comes
when it is.
"""

import argparse
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.reporting import check_positive

from cairn.cache.eviction import eviction_for
from cairn.cache.layout import CacheLayout
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.sequence_blocks import Namespace
from cairn.replay.replay import result_of
from cairn.replay.trace import Trace, TraceRequest, key_tokens
from cairn.scheduler.plan_builder import PlanBuilder
from cairn.scheduler.request import Request, Spec
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.state import RequestObserver, SchedulerConfig
from cairn.types import ManualClock, RequestId, SamplingParams

__all__ = [
    "Outcome",
    "QueuedServer",
    "Session",
    "StepTimes",
    "add_server_flags",
    "check_server_flags",
    "sessions_of",
    "shipped_policies",
]

UNBOUNDED = 1 << 60
TOKENS_A_STEP = 8192


def add_server_flags(parser: argparse.ArgumentParser, footprint_of: str) -> None:
    parser.add_argument("--budget-fraction", type=float, default=0.05, help=f"of {footprint_of} footprint")
    parser.add_argument("--running", type=int, default=16, help="sequences at a time")
    parser.add_argument("--layout", default="nemotron-3-nano")


def check_server_flags(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with exit code 2 and the flag's name where one of them is out of range."""
    check_positive(parser, arguments, "running")
    if not 0 < arguments.budget_fraction <= 1:
        parser.error("--budget-fraction must be above 0 and at most 1")


def shipped_policies(
    layout: CacheLayout, running: int, policy: Literal["fcfs", "session"] = "fcfs"
) -> tuple[CachePolicy, SchedulerConfig]:
    """Those of `cairn serve`, for `running` sequences at a time, before a queue without an end."""
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=max(TOKENS_A_STEP, running + 64),
        max_waiting=UNBOUNDED,
        max_model_len=UNBOUNDED,
        policy=policy,
    )
    return CachePolicy(placement_for("auto", layout.block_size, exact=False), eviction_for("value")), config


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step: `step`, and for each prompt token and each decoding sequence in it. The defaults are near what
    Nemotron-3-Nano took on an H100 (docs/gpu.md)."""

    step: float = 3.4e-3
    prompt_token: float = 20e-6
    sequence: float = 0.17e-3

    def seconds(self, num_prompt_tokens: int, num_decodes: int) -> float:
        return self.step + num_prompt_tokens * self.prompt_token + num_decodes * self.sequence


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Requests that come one after the other. `client`: who sends them."""

    name: str
    unit: int
    requests: Sequence[TraceRequest]
    client: str = ""


@dataclass(slots=True)
class Outcome:
    """By request in the order in which they were answered: `prompt` and `computed` tokens, `ttft` in seconds, and how
    many others have gone before it. `seconds`: of the whole run."""

    prompt: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    bypassed: list[int] = field(default_factory=list)
    seconds: float = 0.0


def sessions_of(trace: Trace) -> list[Session]:
    """The sessions of a trace in the order in which they begin, each request a session where the trace knows none.
    Prompts without a full unit never meet the cache, and are left out."""
    by_session: dict[int, list[TraceRequest]] = {}
    for number, request in enumerate(trace.requests):
        if len(request.path):
            by_session.setdefault(-1 - number if request.session is None else request.session, []).append(request)
    return [Session(f"{trace.name}/{number}", trace.unit, requests) for number, requests in by_session.items()]


class QueuedServer(RequestObserver):
    """Serves the sessions of a trace, once."""

    def __init__(
        self,
        layout: CacheLayout,
        budget_bytes: int,
        policy: CachePolicy,
        config: SchedulerConfig,
        times: StepTimes,
        know_waiting: bool = True,
    ) -> None:
        """`config`: of the scheduler. `know_waiting` False: the cache is not told who waits, so requests go as they
        came and what they would hit is worth what is learned of it."""
        self._clock = ManualClock()
        self.cache = PrefixCache(layout, budget_bytes // layout.page_bytes, policy, clock=self._clock)
        if not know_waiting:
            self.cache.await_hits = lambda prompts: None  # type: ignore[method-assign]
        self.scheduler = Scheduler(config, self.cache, self._clock, observer=self)
        self._times = times
        self._answers: dict[RequestId, list[int]] = {}
        self._sessions: list[Session] = []
        self._next_turn: dict[int, int] = {}
        self._out: deque[PlanBuilder] = deque()
        self._of_request: dict[RequestId, tuple[int, float]] = {}
        self.outcome = Outcome()

    @property
    def now(self) -> float:
        """Seconds since the server began."""
        return self._clock.now()

    def run(
        self, sessions: Sequence[Session], num_waiting: int, progress: Callable[[int], None] | None = None
    ) -> Outcome:
        """Serve all requests in the order of the trace, so many of them waiting all the time. One whose session has not
        the answer to the one before yet comes when it has."""
        self._sessions = list(sessions)
        order = sorted(
            (request.arrived, number, turn)
            for number, session in enumerate(sessions)
            for turn, request in enumerate(session.requests)
        )
        self._next_turn = dict.fromkeys(range(len(sessions)), 0)
        coming, held = deque(order), deque[tuple[float, int, int]]()
        while True:
            while self.scheduler.state.num_waiting < num_waiting:
                due = next((each for each in held if self._next_turn[each[1]] == each[2]), None)
                if due is not None:
                    held.remove(due)
                elif coming:
                    due = coming.popleft()
                    if self._next_turn[due[1]] != due[2]:
                        held.append(due)
                        continue
                else:
                    break
                self._submit(due[1])
            if not self.scheduler.has_work:
                break
            self._step()
            if progress is not None:
                progress(len(self.outcome.prompt))
        self.outcome.seconds = self._clock.now()
        return self.outcome

    def _submit(self, number: int) -> None:
        session, turn = self._sessions[number], self._next_turn[number]
        request = session.requests[turn]
        prompt = key_tokens(request.path, session.unit)
        answer = [*key_tokens(request.answer, session.unit).tolist(), 0]
        spec = Spec(
            request_id=RequestId(f"{number}/{turn}"),
            prompt=prompt,
            sampling=SamplingParams(),
            max_tokens=min(len(answer), max(1, self.scheduler.max_tokens_for(len(prompt)))),
            namespace=Namespace(adapter=session.name.partition("/")[0]),
            session=session.name,
            client=session.client,
            boundaries=request.boundaries,
        )
        self._answers[spec.request_id] = answer
        self._of_request[spec.request_id] = number, self._clock.now()
        self.scheduler.submit(spec)

    def _step(self, until: float = math.inf) -> None:
        """One step, or several in which everybody decodes and nobody comes or goes, up to `until` on the clock."""
        seconds = self._times.seconds(0, len(self.scheduler.state.running))
        left = (until - self._clock.now()) / seconds
        limit = max(1, math.ceil(left)) if math.isfinite(left) else UNBOUNDED
        if skipped := self.scheduler.skip_plain_steps(limit, self._next_tokens):
            self._clock.advance(skipped * seconds)
            return
        self.scheduler.plan()
        builder = self._out.popleft()
        num_prompt_tokens = sum(part.end - part.start for part in builder.scheduled if not part.is_decode)
        self._clock.advance(self._times.seconds(num_prompt_tokens, builder.num_decodes))
        for progress in self.scheduler.apply(result_of(builder, lambda request: self._answers[request.id])):
            if progress.finish is not None:
                self._finish(progress.request)

    def _next_tokens(self, request: Request, num_tokens: int) -> list[int]:
        start = len(request.output)
        return self._answers[request.id][start : start + num_tokens]

    def _finish(self, request: Request) -> None:
        """The answer is complete: the session may ask again."""
        number, arrived = self._of_request.pop(request.id)
        turn = self._next_turn[number]
        trace_request, stats, outcome = self._sessions[number].requests[turn], request.stats, self.outcome
        del self._answers[request.id]
        assert stats.first_token_time is not None
        outcome.prompt.append(trace_request.num_prompt_tokens)
        # the tokens after the path are computed every time
        outcome.computed.append(stats.num_prompt_computed + trace_request.num_prompt_tokens - request.num_prompt_tokens)
        outcome.ttft.append(stats.first_token_time - arrived)
        outcome.bypassed.append(request.place.num_bypassed)
        self._next_turn[number] = turn + 1

    # -- what the scheduler tells ---------------------------------------------------------------------------------

    def planned(self, builder: PlanBuilder) -> None:
        self._out.append(builder)
