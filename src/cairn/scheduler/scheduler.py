"""The scheduler: `plan` says what the next step computes, `apply` takes in what it gave. Pure: no torch, no clock of
its own, no thread."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from cairn.cache.layout import CacheLayout
from cairn.cache.prefix_cache import PrefixCache
from cairn.errors import InvalidRequest, QueueFull
from cairn.scheduler.admit import admit, admit_fully_fetched
from cairn.scheduler.advance import advance
from cairn.scheduler.fast_forward import NextTokens, skip_plain_steps
from cairn.scheduler.fetch import cancel_overdue_fetches, find_sources, slow_fetches, start_fetches, take_fetch_events
from cairn.scheduler.finish import finish, release_or_save
from cairn.scheduler.kv_export import pin_prompt_checkpoint, release_offer, withdraw, withdraw_offers
from cairn.scheduler.kv_lookup import answer_lookup, answer_read_up
from cairn.scheduler.lease_limits import check_quota, reject_overdue
from cairn.scheduler.plan_builder import PlainDecodes, PlanBuilder, ScheduledSequence
from cairn.scheduler.queue import WaitingQueue
from cairn.scheduler.request import Finish, Phase, Request, RequestStats, Spec
from cairn.scheduler.snapshots import add_saves, add_snapshots
from cairn.scheduler.speculation import Drafter
from cairn.scheduler.state import Drafting, RequestObserver, SchedulerConfig, SchedulerState
from cairn.scheduler.transfers import Transfers
from cairn.scheduler.turns import await_hits
from cairn.scheduler.verify import add_folds, keep_allowed, learn_step_time, take_verified, trim_answer
from cairn.step import Logprobs, StepPlan, StepResult, TokenMask, TokenMasks, VerifiedTokens
from cairn.transfer.contract import KvSource, LeaseEnded, LookupRequest, PagesFree, PullEnded
from cairn.types import Clock, Keys, RequestId

__all__ = ["Progress", "Scheduler"]


_NO_DRAFTS: Mapping[int, Keys] = MappingProxyType({})


class Progress(msgspec.Struct, frozen=True, gc=False):
    """News of one request: the tokens that a step brought, with their `logprobs` where they were asked for, and how it
    ended, if it did."""

    request: Request
    tokens: tuple[int, ...]
    finish: Finish | None
    logprobs: Logprobs | None = None


class Scheduler:
    """Continuous batching with a token budget, chunked prefill, first come first served, and preemption.

    At most `config.max_in_flight` plans are out at a time; results are applied in the order of their plans.
    `transfers`: the way to other servers, if there is one. `observer`: told of requests and plans. `drafter`: proposes
    what may come next in answers; None: each step brings each answer one token.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        clock: Clock,
        transfers: Transfers | None = None,
        observer: RequestObserver | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Raises ValueError for a drafter where several plans may be out: what it drafts from is the newest token."""
        if drafter is not None and config.max_in_flight > 1:
            raise ValueError("drafts want one plan out at a time")
        queue = WaitingQueue(config.max_waiting)
        self.state = SchedulerState(
            config,
            cache,
            clock,
            queue,
            transfers=transfers or Transfers(),
            observer=observer,
            drafting=Drafting(drafter),
        )
        self._capacity = capacity_tokens(cache.layout, cache.pool.num_pages, config.most_in_flight)
        self._plans: deque[PlanBuilder] = deque()
        self._step = 0
        self._arrivals = 0
        self._stalled = False
        self._sampled_only = False
        self._planned_at = 0.0

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, spec: Spec, branches: Sequence[Spec] = ()) -> None:
        """Queue a request. `branches`: further answers to the same prompt, which are requests of their own but for
        that. Raises InvalidRequest if it can never run, QueueFull if too many wait."""
        self.submit_together([(spec, *branches)])

    def submit_together(self, groups: Sequence[Sequence[Spec]]) -> None:
        """Queue requests, all of them or none: nothing is queued before everything has been looked at. A group is a
        request and its branches; raises as `submit` does."""
        ids: set[RequestId] = set()
        for group in groups:
            for spec in group:
                if spec.request_id in self.state.requests or spec.request_id in ids:
                    raise InvalidRequest(f"request id {spec.request_id!r} is in use", "request_id")
                ids.add(spec.request_id)
            self._check(group[0])
        self.check_queue_limit([len(group) for group in groups])
        check_quota(self.state, [group[0] for group in groups])
        for group in groups:
            leader, *others = [self._add_request(spec) for spec in group]
            find_sources(self.state, leader)
            if others:
                self.state.parallel_sampling.defer(leader, others)
            self.state.waiting.put(leader)
        self._stalled = False

    def _check(self, spec: Spec) -> None:
        """Raises InvalidRequest if it can never run."""
        length = len(spec.prompt)
        if length < 1:
            raise InvalidRequest("the prompt is empty: it needs at least one token", "prompt")
        limit = self.max_tokens_for(length)
        if limit < 1 or spec.max_tokens > limit:
            raise InvalidRequest(self._length_error(length, spec.max_tokens), "prompt" if limit < 1 else "max_tokens")
        if (spec.role.source is not None or spec.role.kv_export) and self.state.transfers.side is None:
            raise InvalidRequest("this server takes no part in transfers: start it with --kv-transfer-config", "source")
        if spec.role.kv_export and not self._can_export_kv(length + spec.max_tokens):
            raise InvalidRequest(
                f"{length} prompt tokens and the state at their end do not fit the cache together: raise "
                "--kv-cache-memory-bytes",
                "prompt",
            )

    def check_queue_limit(self, num_answers: Sequence[int]) -> None:
        """Whether so many answers to each of some prompts may come into the queue together. Raises InvalidRequest if
        they never may, QueueFull if they may not now."""
        state, most, total = self.state, max(num_answers), sum(num_answers)
        limit = state.config.max_waiting
        self.check_num_answers(most)
        if total > limit:
            fix = "send fewer prompts at a time" if most == 1 else "send fewer prompts at a time or lower n"
            raise InvalidRequest(f"{total} answers are more than may wait: {fix}", "prompt")
        if len(state.waiting) + state.parallel_sampling.num_deferred + total > limit:
            raise QueueFull(f"{state.num_waiting} requests are waiting already: try again later")

    def check_num_answers(self, n: int) -> None:
        """Raises InvalidRequest if so many answers to one prompt can never come into the queue."""
        if n > self.state.config.max_waiting:
            raise InvalidRequest(f"{n} answers are more than may wait: lower n", "n")

    def _add_request(self, spec: Spec) -> Request:
        state = self.state
        self._arrivals += 1
        request = Request(spec, RequestStats(state.clock.now(), self._arrivals))
        state.requests[request.id] = request
        if state.observer is not None:
            state.observer.submitted(request)
        return request

    def max_tokens_for(self, num_prompt_tokens: int) -> int:
        """How many tokens an answer to such a prompt can have at most; below 1 if it does not fit at all."""
        longest = self.state.config.max_model_len
        return min(longest, longest if self._capacity is None else self._capacity) - num_prompt_tokens

    def _can_export_kv(self, num_tokens: int) -> bool:
        layout, num_in_flight = self.state.cache.layout, self.state.config.most_in_flight
        need = layout.running_pages_for(num_tokens, num_in_flight) + layout.pages_per_checkpoint + len(layout.groups)
        return need <= self.state.cache.pool.num_pages

    def _length_error(self, length: int, max_tokens: int) -> str:
        capacity, longest = self._capacity, self.state.config.max_model_len
        sizes = f"{length} prompt tokens and {max_tokens} to generate"
        if capacity is not None and capacity < longest:
            return f"{sizes} do not fit the cache of {capacity} tokens: shorten them or raise --kv-cache-memory-bytes"
        return f"{sizes} exceed the longest sequence of {longest} tokens: shorten them or raise --max-model-len"

    def abort(self, request_id: RequestId) -> None:
        """End a request without an answer; what it computed stays cached. Unknown ids are ignored."""
        request = self.state.requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")

    def await_tools(self, request_id: RequestId) -> None:
        """The answer to a request, which has ended, was a call: its session comes back once its tools are done. Unknown
        ids, those of requests that ended long ago among them, are ignored."""
        if self.state.cache.await_tools(request_id) and self.state.observer is not None:
            self.state.observer.tools_awaited(request_id)

    def withdraw_offers(self, matches: Callable[[RequestId], bool]) -> None:
        """Let go of the prompts that these requests have left for other servers, unless those have claimed them."""
        withdraw_offers(self.state, matches)

    def withdraw(self, reference: str) -> None:
        """Let go of the prompt that another server would ask for by `reference`, unless it has. Whoever does not know
        all of it ends nothing."""
        withdraw(self.state, reference)

    def release_source(self, source: KvSource) -> None:
        """Tell another server that what it has promised is not going to be fetched."""
        if self.state.transfers.peers is not None:
            self.state.transfers.peers.release(source)

    def finish(self, request: Request, reason: Finish, num_output_tokens: int | None = None) -> None:
        """End a request now: at a stop string, by an abort. No matter if it has ended already. `num_output_tokens`: of
        its answer, where the step that was applied last has brought more."""
        if num_output_tokens is not None and request.phase is Phase.RUNNING:
            trim_answer(self.state, request, num_output_tokens)
        if finish(self.state, request, reason):
            self._stalled = False

    def poll(self) -> list[Progress]:
        """Take in what sources of pages have brought, and what other servers have taken, and ask for more. Returns the
        requests that this has ended. To be called between steps while `state.transfers` has a source or a sink."""
        state = self.state
        if not state.transfers.sources and state.transfers.sink is None:
            return []
        changed = self._take_side_events()
        changed |= state.transfers.sink is not None and state.transfers.sink.poll()
        heard, ended = take_fetch_events(state)
        ended += (refused := reject_overdue(state))
        changed |= heard | cancel_overdue_fetches(state) | bool(refused)
        changed |= answer_read_up(state) | start_fetches(state)
        if state.running or state.waiting.plain:
            changed = changed or bool(slow_fetches(state))  # whose pages a request may lack
        self._stalled = self._stalled and not changed
        return [Progress(request, (), request.outcome.finish_reason) for request in ended]

    def _take_side_events(self) -> bool:
        """Take in what has become of leases and pulls. Whether anything has."""
        state = self.state
        events = [] if state.transfers.side is None else state.transfers.side.events()
        for event in events:
            match event:
                case PullEnded() | PagesFree():
                    assert state.transfers.peers is not None
                    state.transfers.peers.receive(event)
                case LeaseEnded():
                    release_offer(state, event)
                case LookupRequest():
                    answer_lookup(state, event)
        return bool(events)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan or to apply now. False also while all of it waits for other servers."""
        return self._open or bool(self._plans)

    @property
    def can_plan(self) -> bool:
        """Whether another plan may go out before the oldest one is applied."""
        return len(self._plans) < self.state.config.max_in_flight and self._open

    @property
    def _open(self) -> bool:
        state = self.state
        return not self._stalled and bool(state.running or state.waiting or state.ending or state.transfers.ready)

    # -- the step ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step. It may be empty when all there is to do waits for steps that are out."""
        assert len(self._plans) < self.state.config.max_in_flight, f"{len(self._plans)} steps are out already"
        self._step += 1
        self._planned_at = self.state.clock.now()
        builder = PlanBuilder(self._step, self.state.config.max_num_batched_tokens)
        await_hits(self.state)
        # every second step at least is for those that run
        self._sampled_only = not self._sampled_only and admit_fully_fetched(self.state, builder)
        if not self._sampled_only and advance(self.state, builder):
            admit(self.state, builder)
        add_saves(self.state, builder)
        add_snapshots(self.state, builder)
        add_folds(self.state, builder)
        if self.state.observer is not None:
            self.state.observer.planned(builder)
        for scheduled in builder.scheduled:
            if scheduled.request.sequence is not None:
                self.state.cache.pin_until(builder.step, scheduled.request.sequence)
        self._stalled = (
            builder.is_empty and all(other.is_empty for other in self._plans) and self.state.transfers.is_open
        )
        self._plans.append(builder)
        return builder.plan()

    def masks(self, drafts: Mapping[int, Keys] = _NO_DRAFTS) -> TokenMasks | None:
        """Of the plan that went out last: the tokens that may be drawn. None where that is not known before
        the plans before it have been applied. `drafts`: by slot, what the model's head has made of those that the plan
        left to it."""
        scheduled_now = self._plans[-1].scheduled
        if not scheduled_now:
            return {}  # plain decodes have none
        drawing = [scheduled.request for scheduled in scheduled_now if scheduled.samples and not scheduled.is_verify]
        if len(self._plans) > 1 and any(
            request.spec.sampling.needs_history or request.spec.constraint is not None for request in drawing
        ):
            return None
        # the token of one that has ended meanwhile is not looked at
        masks: dict[int, TokenMask | Sequence[TokenMask | None]] = {
            scheduled.request.slot: scheduled.masks for scheduled in scheduled_now if scheduled.masks is not None
        }
        for scheduled in scheduled_now if drafts else ():
            request = scheduled.request
            if scheduled.is_verify and request.slot in drafts and request.spec.constraint is not None:
                _, allowed = keep_allowed(request.spec.constraint, request.output, drafts[request.slot])
                masks[request.slot] = allowed or ()
        for request in drawing:
            if request.spec.constraint is not None and request.phase is Phase.RUNNING:
                mask = request.spec.constraint.allowed(request.output)
                if mask is not None:
                    masks[request.slot] = mask
        return masks

    def apply(self, result: StepResult) -> list[Progress]:
        """Take in the result of the oldest plan that is out; returns what came of it, in plan order."""
        builder = self._plans.popleft()
        assert result.step == builder.step, f"step {result.step} applied, {builder.step} is next"
        state = self.state
        state.counters.steps += 1
        if state.drafting.learns and not result.is_first:
            learn_step_time(state, builder, state.clock.now() - self._planned_at)
        if result.scored:
            owners = {scheduled.request.slot: scheduled.request for scheduled in builder.scheduled}
            for scored in result.scored:
                owners[scored.slot].outcome.prompt_logprobs.append(scored.logprobs)
        state.slots.last_token[result.slots] = result.tokens
        # no plain one has another share of the plan, so their order does not matter
        progress = self._apply_plain(builder.plain, result)
        num_tokens = len(progress)
        verified = {each.slot: each for each in result.verified}
        for scheduled in builder.scheduled:
            if scheduled.is_verify:
                update = self._apply_verify(scheduled, verified[scheduled.request.slot])
            else:
                update = self._apply_sequence(scheduled, result)
            if update is not None:
                progress.append(update)
                num_tokens += len(update.tokens)
        state.counters.generation_tokens += num_tokens
        state.cache.release_step(builder.step)
        return progress

    def skip_plain_steps(self, limit: int, next_tokens: NextTokens) -> int:
        """Do at once what the next steps would do, `limit` of them at most, while each would only decode the token of
        every running request that `next_tokens` knows. Returns how many that were; 0: plan the next step."""
        return 0 if self._plans else skip_plain_steps(self.state, limit, next_tokens)

    def _apply_plain(self, plain: PlainDecodes, result: StepResult) -> list[Progress]:
        state = self.state
        progress: list[Progress] = []
        if not plain:
            return progress
        state.slots.num_in_flight[plain.slots] -= 1
        state.slots.num_computed[plain.slots] += result.advanced if plain.rows is None else result.advanced[plain.rows]
        for request, token in zip(plain.requests, state.slots.last_token[plain.slots].tolist(), strict=True):
            if request.phase is Phase.RUNNING:
                progress.append(self._take_token(request, token, result))
            elif request.num_in_flight == 0:
                release_or_save(state, request)
        return progress

    def _apply_sequence(self, scheduled: ScheduledSequence, result: StepResult) -> Progress | None:
        request, state = scheduled.request, self.state
        num_prompt, num_tokens = request.num_prompt_tokens, request.num_tokens
        assert request.sequence is not None
        request.num_in_flight -= 1
        # A step that was out when the request ended may have gone on with tokens that are not part of it. Behind a stop
        # token it has not: the slot's state is that before it.
        goes_on = not scheduled.is_decode or bool(result.advanced[scheduled.row])
        known = scheduled.end <= num_tokens and goes_on
        if scheduled.has_row and goes_on and scheduled.end > request.num_computed:
            if request.num_computed < num_prompt:
                num_prompt_computed = min(scheduled.end, num_prompt) - request.num_computed
                request.stats.num_prompt_computed += num_prompt_computed
                state.counters.computed_prompt_tokens += num_prompt_computed
            request.num_computed = scheduled.end
        if num_prompt in scheduled.checkpoint_positions:
            if request.spec.role.kv_export:
                pin_prompt_checkpoint(state, request)
            state.parallel_sampling.pin_checkpoint(request)
        if scheduled.end <= request.prefill_until or (scheduled.checkpoint_positions and known):
            state.cache.commit(request.sequence, scheduled.end, scheduled.checkpoint_positions)
        state.cache.release_behind(request.sequence, request.num_computed)
        if request.num_computed >= num_prompt and state.parallel_sampling.is_leader(request):
            state.parallel_sampling.queue_others(request)
        progress = None
        if request.phase is Phase.RUNNING and scheduled.samples:
            if request.stats.first_token_time is None:
                request.stats.first_token_time = state.clock.now()
            progress = self._take_token(request, request.last_token, result)
        if request.phase in (Phase.FINISHING, Phase.PREEMPTING) and request.num_in_flight == 0:
            release_or_save(state, request)
        return progress

    def _apply_verify(self, scheduled: ScheduledSequence, verified: VerifiedTokens) -> Progress | None:
        request = scheduled.request
        tokens, finish = take_verified(self.state, scheduled, verified)
        if not tokens:
            if request.num_in_flight == 0:
                release_or_save(self.state, request)
            return None
        if finish is not None:
            self.finish(request, finish)
        logprobs = None if verified.logprobs is None else verified.logprobs.first(len(tokens))
        return Progress(request, tokens, finish, logprobs)

    def _take_token(self, request: Request, token: int, result: StepResult) -> Progress:
        request.output.append(token)
        finish = request.finish_with(token, len(request.output))
        # its slot, which it loses as it ends
        logprobs = result.logprobs.get(request.slot) if result.logprobs else None
        if finish is not None:
            self.finish(request, finish)
        return Progress(request, (token,), finish, logprobs)


def capacity_tokens(layout: CacheLayout, num_pages: int, num_in_flight: int) -> int | None:
    """The longest sequence that fits a pool of `num_pages` all by itself while up to `num_in_flight` of its tokens are
    being computed, one page a group left for copy on write. None if nothing bounds it (no attention, or all of it of a
    limited reach that fits)."""
    longest = num_pages * max((group.tokens_per_page for group in layout.groups), default=0)
    if layout.running_pages_for(longest + 1, num_in_flight) <= num_pages - len(layout.groups):
        return None
    low, high = 0, longest
    room = num_pages - len(layout.groups)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layout.running_pages_for(middle, num_in_flight) <= room else (low, middle - 1)
    return low
