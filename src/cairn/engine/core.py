"""The engine's inside: requests in, the three lines of a step, text out.

plan = scheduler.plan()      result = runner.run(plan)      scheduler.apply(result)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from cairn.cache.audit import audit
from cairn.cache.lease import Namespace
from cairn.engine.contents import ImageKeys
from cairn.engine.contract import (
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    TextStream,
    TextTokenizer,
)
from cairn.engine.core_report import cache_report, engine_stats, timings, with_images
from cairn.engine.kv_transfer import KvTransfer, Terms, report, terms_of
from cairn.engine.stop_strings import StopStrings
from cairn.engine.wire import check_request, key_tokens, transfer_params
from cairn.errors import AuditError, InvalidRequest
from cairn.scheduler.request import Request, Spec
from cairn.scheduler.scheduler import Progress, Scheduler
from cairn.step import Image, StepPlan, StepResult
from cairn.types import RequestId, SamplingParams

if TYPE_CHECKING:
    from cairn.runner.content import ImageCounts

__all__ = ["Core", "StepRunner"]


_BAD_GATEWAY = 502
"""The status of an answer that failed because another server did."""


class StepRunner(Protocol):
    """What carries plans out: `cairn.runner.runner.Runner`, or `cairn.runner.simulated.SimulatedRunner`."""

    forward_passes: int
    steps: int

    def run(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None:
        """The end: whatever else carries plans out ends, too."""
        ...


class StepEvents(Protocol):
    """Who wants to know of steps: `cairn.engine.event_publisher.EventPublisher`."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _Answer:
    """One request's text as it grows."""

    def __init__(self, request: GenerateRequest, stream: TextStream, terms: Terms) -> None:
        self.stream = stream
        self.terms = terms
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
    `transfer`: the way to other servers. `events`: told when a step has been applied, and at the end. `image_keys`:
    None for a model that reads no images; `image_counts`: what its vision model has done.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: StepRunner,
        tokenizer: TextTokenizer,
        eos_token_ids: tuple[int, ...],
        seed: int,
        transfer: KvTransfer | None = None,
        events: StepEvents | None = None,
        image_keys: ImageKeys | None = None,
        image_counts: "ImageCounts | None" = None,
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._seeds = np.random.default_rng(seed)
        self._answers: dict[RequestId, _Answer] = {}
        self._audits = 0
        self._transfer = transfer
        self._events = events
        self._image_keys = image_keys
        self._image_counts = image_counts

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
        terms = terms_of(transfer_params(request), self._transfer)
        self._scheduler.submit(self._spec(request, terms))
        self._answers[RequestId(request.request_id)] = _Answer(request, self._tokenizer.stream(), terms)

    def _spec(self, request: GenerateRequest, terms: Terms) -> Spec:
        keys = key_tokens(request)
        wrong = np.flatnonzero((keys < 0) | (keys >= self._info.vocab_size))
        if wrong.size:
            place = int(wrong[0])
            raise InvalidRequest(
                f"prompt[{place}] is {keys[place]}; token ids go from 0 to {self._info.vocab_size - 1}", "prompt"
            )
        images: tuple[Image, ...] = ()
        if request.images:
            if self._image_keys is None:
                raise InvalidRequest("images: this model, or this server, reads no images", "images")
            keys, images = self._image_keys.put_in(keys, request.images)
        if any(not 1 <= boundary.position <= len(keys) for boundary in request.boundaries):
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
            images=images,
            source=terms.source,
            hand_over=terms.hand_over,
        )

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing more is put out for it."""
        self._answers.pop(RequestId(request_id), None)
        self._scheduler.abort(RequestId(request_id))

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> list[GenerateOutput]:
        """One plan, run, apply; the outputs of the requests that moved."""
        result = self._runner.run(self._scheduler.plan())
        outputs = self._outputs(self._scheduler.apply(result))
        if self._events is not None:
            self._events.flush()
        return outputs

    def poll(self) -> list[GenerateOutput]:
        """Look what other servers have sent; the outputs of the requests that this has ended."""
        if self._transfer is None:
            return []
        self._transfer.check()
        return self._outputs(self._scheduler.poll())

    def start(self, wake: Callable[[], None]) -> None:
        """From now on other servers are answered. `wake` has the core's thread come back to `poll`."""
        if self._transfer is not None:
            self._transfer.start(wake)

    def close(self) -> None:
        """The end: what other threads do for this core ends, too."""
        if self._transfer is not None:
            self._transfer.close()
        if self._events is not None:
            self._events.close()
        self._runner.close()

    def _outputs(self, news: list[Progress]) -> list[GenerateOutput]:
        outputs = [self._output(progress) for progress in news]
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
        output = GenerateOutput(
            request_id=request.id,
            token_ids=list(progress.tokens),
            text=text,
            finish_reason=finish,
            stop_reason=stop_reason,
        )
        return output if finish is None else self._last(output, request, answer.terms)

    def _last(self, output: GenerateOutput, request: Request, terms: Terms) -> GenerateOutput:
        well = output.finish_reason in ("stop", "length")
        return msgspec.structs.replace(
            output,
            cache=cache_report(request, terms.prefill_cached_tokens),
            timings=timings(request),
            error=request.failure,
            status=_BAD_GATEWAY,
            kv_transfer_params=self._transfer.answer(request) if well and self._transfer is not None else None,
            transfer=report(request),
        )

    # -- the books -----------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Recount the accounting; with nothing to do, nothing may be held. Raises AuditError."""
        books = self._scheduler.books
        cache, transfers = books.cache, books.transfers
        audit(cache)
        if not books.requests and (cache.leases or cache.held):
            raise AuditError(f"{len(cache.leases)} leases are open with no request running")
        outside = len(transfers.offers) + len(transfers.quarantine)
        if not books.requests and len(cache.holds) != outside:
            raise AuditError(f"{len(cache.holds)} holds with {outside} transfers open and no request running")
        self._audits += 1

    def stats(self) -> EngineStats:
        """Counters since the start, and gauges of this moment."""
        stats = engine_stats(self._scheduler.books, self._transfer, self._runner.forward_passes, self._audits)
        return stats if self._image_counts is None else with_images(stats, self._image_counts)
