"""The engine's inside: requests in, steps, text out.

requests -> scheduler -> plan -> runner -> result -> scheduler -> answers
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from cairn.cache.audit import audit
from cairn.cache.view_builder import build_view
from cairn.engine.contract import (
    CacheView,
    EngineInfo,
    EngineStats,
    GenerateOutput,
    GenerateRequest,
    TextTokenizer,
)
from cairn.engine.core_report import StepSizes, engine_stats, num_step_tokens
from cairn.engine.event_publisher import EventPublisher
from cairn.engine.grammars.compiler import CheckedGrammar, Constraints, GrammarCompiler, GrammarKey, PendingGrammars
from cairn.engine.grammars.constraint import GrammarConstraint
from cairn.engine.multimodal_keys import ImageKeys
from cairn.engine.output_processor import OutputProcessor
from cairn.engine.request_log.log import RequestLog
from cairn.engine.specs import SpecBuilder, answer_id, as_prefill, check_request, transfer_params
from cairn.engine.step_pipeline import StepPipeline
from cairn.engine.thinking import ThinkingConstraint
from cairn.engine.tiers import EngineTiers
from cairn.engine.transfers.kv_transfer import KvTransfer, find_lease, find_release_key, parse_role
from cairn.errors import AuditError, InvalidRequest, RequestError
from cairn.runner.contract import EncoderCounters, StepRunner
from cairn.scheduler.queue_view import queue_view
from cairn.scheduler.request import Spec
from cairn.scheduler.scheduler import Scheduler
from cairn.transfer.contract import TransferRole

__all__ = ["Core"]


class Core:
    """Joins scheduler, runner and tokenizer. One thread only: `core_loop.run_core`'s.

    `eos_token_ids` end every answer that does not ignore them. `seed` makes the seeds of requests that name none.
    `transfer`: the way to other servers. `events`: told when a step has been applied, and at the end. `image_keys`:
    None for a model that reads no images; `encoder_counters`: what its vision model has done. `request_log`: closed at
    the end. `grammars`: None where no answer can be constrained. `tiers`: what is below the pool.
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
        events: EventPublisher | None = None,
        image_keys: ImageKeys | None = None,
        encoder_counters: EncoderCounters | None = None,
        request_log: RequestLog | None = None,
        grammars: GrammarCompiler | None = None,
        tiers: EngineTiers | None = None,
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._runner = runner
        self._steps = StepPipeline(scheduler, runner)
        self._specs = SpecBuilder(info.vocab_size, frozenset(eos_token_ids), seed, image_keys)
        self._tokenizer = tokenizer
        self._outputs = OutputProcessor(scheduler, tokenizer, transfer)
        self._audits = 0
        self._step_sizes = StepSizes()
        self._transfer = transfer
        self._events = events
        self._encoder_counters = encoder_counters
        self._request_log = request_log
        self._grammars = grammars
        self._pending = None if grammars is None else PendingGrammars(grammars)
        self._tiers = tiers

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def has_work(self) -> bool:
        """False when `step` would have nothing to do."""
        return self._scheduler.has_work

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, *requests: GenerateRequest) -> None:
        """Queue requests, all of them or none. Raises InvalidRequest naming the field, or Overloaded; then nothing was
        taken. Requests with a grammar may be refused later: see `poll_ready`."""
        for request in requests:
            check_request(request)
            if request.prefill_only:
                self._scheduler.check_num_answers(request.n)
        requests = tuple(as_prefill(request) if request.prefill_only else request for request in requests)
        if len({request.request_id for request in requests}) < len(requests):
            raise InvalidRequest("requests that come together need ids of their own", "request_id")
        if len(requests) > 1:
            self._scheduler.check_queue_limit([request.n for request in requests])
        constraints = self._compile_grammars(requests)
        if constraints is not None:
            self._schedule(requests, constraints)

    def _compile_grammars(self, requests: Sequence[GenerateRequest]) -> Constraints | None:
        """What constrains their answers; None: `poll_ready` will submit them."""
        # a prompt that is computed for another server is answered there
        grammars = {
            request.request_id: GrammarKey(request.structure, self._role(request).kv_export)
            for request in requests
            if request.structure is not None
        }
        if self._pending is not None:
            return self._pending.add(requests, grammars)
        if grammars:
            raise InvalidRequest("structured_outputs: this engine holds no answer to a form", "structured_outputs")
        return {}

    def _role(self, request: GenerateRequest) -> TransferRole:
        return parse_role(transfer_params(request.kv_transfer_params), self._transfer)

    def _schedule(self, requests: Sequence[GenerateRequest], constraints: Constraints) -> None:
        """All of them or none: nothing is queued before everything has been checked."""
        groups = []
        for request in requests:
            compiled = constraints.get(request.request_id)
            constraint = None if isinstance(compiled, CheckedGrammar) else compiled
            role = self._role(request)
            specs = self._specs.build(request, role, constraint, self._scheduler.max_tokens_for)
            groups.append(self._limit_thinking(request, specs))
        self._scheduler.submit_together(groups)
        for request, specs in zip(requests, groups, strict=True):
            self._outputs.add_request(request, specs)

    def _limit_thinking(self, request: GenerateRequest, specs: list[Spec]) -> list[Spec]:
        budget, tokenizer = request.stop_conditions.thinking, self._tokenizer
        if budget is None:
            return specs

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        def limit(spec: Spec) -> ThinkingConstraint:
            grammar = spec.constraint if isinstance(spec.constraint, GrammarConstraint) else None
            return ThinkingConstraint(budget, encode, tokenizer.token_bytes, self._info.vocab_size, grammar)

        return [replace(spec, constraint=limit(spec)) for spec in specs]

    def poll_ready(self) -> list[tuple[str, RequestError]]:
        """Called often: submit the requests whose grammars have been compiled. Returns those that are refused after
        all: the first id of the requests that were submitted together, and the error; then none of them was taken."""
        refused = []
        for requests, constraints in () if self._pending is None else self._pending.poll():
            try:
                if isinstance(constraints, RequestError):
                    raise constraints
                self._schedule(requests, constraints)
            except RequestError as error:
                refused.append((requests[0].request_id, error))
        return refused

    def abort(self, request_id: str) -> None:
        """Forget a request whose last output has not been taken: nothing more is put out for it, and what it has handed
        over is not going to be fetched. Unknown ids are ignored."""
        if self._pending is not None:
            self._pending.cancel(request_id)
        self._outputs.abort(request_id)
        self._scheduler.withdraw_offers(lambda offered: offered == request_id)

    def await_tools(self, request_id: str, index: int) -> None:
        """Answer `index` to a request, which has ended, was a call. Unknown ids are ignored."""
        self._scheduler.await_tools(answer_id(request_id, index))

    def release_kv_transfer(self, kv_transfer_params: bytes) -> None:
        """Let go of what was handed over with these parameters, here or by another server, if nobody has claimed it."""
        if self._transfer is None:
            return
        with suppress(InvalidRequest):
            params = transfer_params(kv_transfer_params)
            if (key := find_release_key(params)) is not None:
                self._scheduler.withdraw_offers(lambda request_id: request_id.endswith(f"-{key}"))
                return
            lease = find_lease(params, self._transfer)
            if isinstance(lease, str):
                self._scheduler.withdraw(lease)
            elif lease is not None:
                self._scheduler.release_source(lease)

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> list[GenerateOutput]:
        """Send out what may go, then take in the oldest step; the outputs of the requests that moved. `settle` comes
        after them."""
        self.settle()
        while self._steps.can_launch:
            self._step_sizes.add(num_step_tokens(self._steps.launch()))
        outputs = self._outputs.process_outputs(self._steps.collect())
        if self._events is not None:
            self._events.flush()
        return outputs

    def settle(self) -> None:
        """What the last step has left for when its outputs have been sent."""
        state = self._scheduler.state
        self._runner.settle(has_slots=bool(state.running or state.ending))

    def poll(self) -> list[GenerateOutput]:
        """Called often: look what other servers have sent, and what has come from tiers. The outputs of the requests
        that this has ended."""
        self.settle()
        if self._transfer is not None:
            self._transfer.check()
        elif self._tiers is None:
            return []
        if self._tiers is not None:
            self._tiers.set_pace(has_work=self.has_work)
        return self._outputs.process_outputs(self._scheduler.poll())

    def start(self, wake: Callable[[], None]) -> None:
        """Called once before anything else, by the thread that owns the core: from now on other servers are answered.
        `wake` has it come back to `poll`."""
        for part in (self._transfer, self._grammars, self._tiers):
            if part is not None:
                part.start(wake)

    def write_back(self) -> None:
        """Before the end: what the pool has and tiers have not yet is written, as far as that is soon done."""
        if self._tiers is not None:
            self._tiers.write_back()

    def close(self) -> None:
        """The end: what other threads do for this core ends, too."""
        for part in (self._transfer, self._grammars, self._tiers, self._events, self._request_log, self._runner):
            if part is not None:
                part.close()

    # -- reports and audits ---------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Recount the accounting; with nothing to do, nothing may be held. Raises AuditError."""
        state = self._scheduler.state
        cache, transfers = state.cache, state.transfers
        audit(cache)
        num_reads = sum(lookup.sequence is not None for lookup in transfers.lookups)
        if not state.requests and (len(cache.pinned.sequences) != num_reads or cache.pinned.steps):
            raise AuditError(f"{len(cache.pinned.sequences)} sequences are open with no request running")
        outside = len(transfers.offers) + len(transfers.quarantine) + transfers.num_sink_pins
        if not state.requests and len(cache.pinned.pins) != outside:
            raise AuditError(f"{len(cache.pinned.pins)} pins with {outside} transfers open and no request running")
        self._audits += 1

    def cache_view(self, max_paths: int) -> Iterator[CacheView | None]:
        """Look at the prefix cache, a slice at each turn between steps: None until the last item. At most `max_paths`
        paths of its tree are shown one by one, 1 to `MAX_SHOWN`."""
        state, tiers = self._scheduler.state, self._tiers
        for view in build_view(state.cache, max_paths):
            if view is not None:
                view = replace(view, queue=queue_view(state), tiers=[] if tiers is None else tiers.views())
            yield view

    def reset_cache(self) -> int:
        """Drop all that is cached, unless a request or another server holds pages: then nothing changes. How many
        pages are held."""
        cache = self._scheduler.state.cache
        if self._tiers is not None:
            self._tiers.end_copies()
        held = cache.pinned.num_pages()
        if not held:
            cache.clear()
            if self._events is not None:
                self._events.flush()
        return held

    def stats(self) -> EngineStats:
        """Counters since the start, and gauges of this moment."""
        return engine_stats(
            self._scheduler.state,
            self._transfer,
            self._encoder_counters,
            self._step_sizes,
            forward_passes=self._runner.forward_passes,
            audits=self._audits,
            request_log_dropped=0 if self._request_log is None else self._request_log.dropped,
            num_speculative_tokens=self._info.num_speculative_tokens,
            tiers=self._tiers,
        )
