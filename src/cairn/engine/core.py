"""The engine's inside: requests in, the three lines of a step, text out.

plan = scheduler.plan()      result = runner.run(plan)      scheduler.apply(result)
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from cairn.cache.audit import audit
from cairn.cache.lease import Namespace
from cairn.cache.reasons import Reason
from cairn.engine.contract import (
    CacheReport,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    TextStream,
    TextTokenizer,
    Timings,
)
from cairn.engine.stop_strings import StopStrings
from cairn.engine.wire import check_request, key_tokens
from cairn.errors import AuditError, InvalidRequest
from cairn.scheduler.request import Request, Spec
from cairn.scheduler.scheduler import Progress, Scheduler
from cairn.step import StepPlan, StepResult
from cairn.types import RequestId, SamplingParams

__all__ = ["Core", "StepRunner"]


class StepRunner(Protocol):
    """What carries plans out: `cairn.runner.runner.Runner`, or `cairn.runner.simulated.SimulatedRunner`."""

    forward_passes: int
    steps: int

    def run(self, plan: StepPlan) -> StepResult: ...


class _Answer:
    """One request's text as it grows."""

    def __init__(self, request: GenerateRequest, stream: TextStream) -> None:
        self.stream = stream
        self.stops = StopStrings(request.stop)
        self.stop_tokens = frozenset(request.stop_token_ids)

    def push(self, tokens: tuple[int, ...]) -> tuple[str, str | None]:
        """The text that may go out, and the stop string that was met."""
        return self.stops.push("".join(self.stream.push(token) for token in tokens))

    def finish(self) -> str:
        """What is left when the answer ends otherwise than at a stop string."""
        text, stop = self.stops.push(self.stream.finish())
        return text if stop is not None else text + self.stops.finish()


class Core:
    """Implements `EngineCore`: joins scheduler, runner and tokenizer, one thread only.

    `eos_token_ids` end every answer that does not ignore them. `seed` makes the seeds of requests that name none.
    `after_step` is called when a step has been applied.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: StepRunner,
        tokenizer: TextTokenizer,
        eos_token_ids: tuple[int, ...],
        seed: int,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._seeds = np.random.default_rng(seed)
        self._answers: dict[RequestId, _Answer] = {}
        self._audits = 0
        self._after_step = after_step

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest naming the field, or Overloaded; then nothing was taken."""
        check_request(request)
        self._scheduler.submit(self._spec(request))
        self._answers[RequestId(request.request_id)] = _Answer(request, self._tokenizer.stream())

    def _spec(self, request: GenerateRequest) -> Spec:
        keys = key_tokens(request)
        wrong = np.flatnonzero((keys < 0) | (keys >= self._info.vocab_size))
        if wrong.size:
            place = int(wrong[0])
            raise InvalidRequest(
                f"prompt[{place}] is {keys[place]}; token ids go from 0 to {self._info.vocab_size - 1}", "prompt"
            )
        if any(not 1 <= position <= len(keys) for position in request.boundaries):
            raise InvalidRequest(f"boundaries must lie between 1 and {len(keys)}", "boundaries")
        room = self._scheduler.max_tokens_for(len(keys))
        seed = int(self._seeds.integers(1 << 63)) if request.seed is None else request.seed
        stops = frozenset(request.stop_token_ids)
        return Spec(
            request_id=RequestId(request.request_id),
            prompt=keys,
            sampling=SamplingParams(request.temperature, request.top_k, request.top_p, seed),
            max_tokens=max(1, room) if request.max_tokens is None else request.max_tokens,
            stop_token_ids=stops if request.ignore_eos else stops | self._eos,
            namespace=Namespace(cache_salt=request.cache_salt),
            boundaries=tuple(request.boundaries),
        )

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing more is put out for it."""
        self._answers.pop(RequestId(request_id), None)
        self._scheduler.abort(RequestId(request_id))

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> list[GenerateOutput]:
        """One plan, run, apply; the outputs of the requests that moved."""
        result = self._runner.run(self._scheduler.plan())
        outputs = [self._output(progress) for progress in self._scheduler.apply(result)]
        if self._after_step is not None:
            self._after_step()
        return [output for output in outputs if output is not None]

    def _output(self, progress: Progress) -> GenerateOutput | None:
        request = progress.request
        answer = self._answers.get(request.id)
        if answer is None:
            return None
        text, stop = answer.push(progress.tokens)
        finish: FinishReason | None = progress.finish
        stop_reason: str | int | None = None
        if stop is not None:
            finish, stop_reason = "stop", stop
            self._scheduler.finish(request, "stop")
        elif finish is not None:
            text += answer.finish()
            if finish == "stop" and request.stop_token in answer.stop_tokens:
                stop_reason = request.stop_token
        if finish is not None:
            del self._answers[request.id]
        return GenerateOutput(
            request_id=request.id,
            token_ids=list(progress.tokens),
            text=text,
            finish_reason=finish,
            stop_reason=stop_reason,
            cache=_report(request) if finish is not None else None,
            timings=_timings(request) if finish is not None else None,
        )

    # -- the books -----------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Recount the accounting; with nothing to do, nothing may be held. Raises AuditError."""
        cache = self._scheduler.books.cache
        audit(cache)
        if not self.has_work and (cache.leases or cache.held):
            raise AuditError(f"{len(cache.leases)} leases are open with no request running")
        self._audits += 1

    def stats(self) -> EngineStats:
        """Counters since the start, and gauges of this moment."""
        books = self._scheduler.books
        cache, counters = books.cache, books.counters
        held = cache.num_held_pages()
        return EngineStats(
            num_running=len(books.running),
            num_waiting=len(books.waiting),
            num_pages=cache.pool.num_pages,
            free_pages=cache.pool.num_free,
            held_pages=held,
            cached_pages=cache.pool.num_pages - cache.pool.num_free - held,
            open_leases=len(cache.leases),
            prefix_cache_queries=cache.counters.queries,
            prefix_cache_hits=cache.counters.hits,
            prompt_tokens=counters.prompt_tokens,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            steps=counters.steps,
            forward_passes=self._runner.forward_passes,
            audits=self._audits,
            reasons={reason.value: cache.counters.reasons[reason] for reason in Reason},
            lost_tokens={reason.value: cache.counters.lost[reason] for reason in Reason},
            checkpoints_taken={kind.value: count for kind, count in cache.residents.taken.items()},
            checkpoints_hit={kind.value: count for kind, count in cache.counters.used.items()},
            checkpoints_evicted={kind.value: count for kind, count in cache.residents.evicted.items()},
        )


def _report(request: Request) -> CacheReport:
    first = request.first
    assert first is not None
    return CacheReport(
        prompt_tokens=request.num_prompt_tokens,
        matched_tokens=first.matched,
        cached_tokens=first.hit,
        computed_tokens=request.num_prompt_computed,
        reason=first.reason.value,
    )


def _timings(request: Request) -> Timings:
    times = request.times
    assert times.scheduled is not None and times.first_token is not None and times.finished is not None
    return Timings(
        queue=times.scheduled - times.arrived,
        prefill=times.first_token - times.scheduled,
        decode=times.finished - times.first_token,
    )
