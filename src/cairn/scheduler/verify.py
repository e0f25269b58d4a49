"""Drafts in plans: who verifies how many, what a step has found right of them, and the folds that follow.

    plan n      verify row [start, start + 1 + drafts)
    apply n     its first tokens were right: num_computed is after them, the slot's state still at `start`
    plan n + 1  fold: the state goes on to num_computed, before anything else looks at it

Drafts never cost another request anything: they take tokens of the budget and pages that nobody runs for.
"""

from collections.abc import Mapping, Sequence

from cairn.cache.placement import CheckpointPoint
from cairn.scheduler.plan_builder import PlanBuilder, ScheduledSequence
from cairn.scheduler.request import Constraint, Finish, Phase, Request
from cairn.scheduler.state import SchedulerState
from cairn.step import DRAFTED, Fold, FoldSnapshot, PageCopy, TokenMask, VerifiedTokens
from cairn.types import Keys

MAX_STEP_DRAFTS = 64
"""Draft tokens of one step: each has a row of logits."""


def propose_drafts(
    state: SchedulerState, builder: PlanBuilder, running: Sequence[Request], num_plain: int
) -> Mapping[int, Keys]:
    """Drafts for running requests that have nothing but their newest token to compute, by their place in `running`.
    `num_plain`: of them, whose decodes are plain; where these are too many nobody else is looked at."""
    drafting = state.drafting
    drafter = drafting.drafter
    if drafter is None or num_plain > drafter.max_decodes:
        return {}
    decoding = [index for index, request in enumerate(running) if request.num_scheduled >= request.prefill_until]
    if len(decoding) > drafter.max_decodes:
        return {}
    left = min(MAX_STEP_DRAFTS, builder.budget - len(running))
    drafts, without = dict[int, Keys](), list[Request]()
    for index in decoding:
        request = running[index]
        if request.num_in_flight or request.num_scheduled + 1 != request.num_tokens:
            continue
        # one token more is sampled than there are drafts
        most = min(left, request.num_prompt_tokens + request.spec.max_tokens - request.num_tokens - 1)
        if most < 1:
            continue
        tokens = drafter.propose(request, most, len(decoding))
        if len(tokens):
            drafts[index] = tokens
            left -= len(tokens)
        else:
            without.append(request)
    is_idle = without and len(without) == len(running)
    drafting.idle_steps = max(0, min(map(drafter.idle_tokens, without)) - 1) if is_idle else 0
    drafting.idle_version = state.running.version
    return drafts


def is_open(drafts: Keys) -> bool:
    """Whether it is left to the model's head which tokens these are."""
    return bool(len(drafts)) and int(drafts[0]) == DRAFTED


def keep_allowed(
    constraint: Constraint | None, output: Sequence[int], drafts: Keys
) -> tuple[Keys, list[TokenMask | None] | None]:
    """The drafts that may follow `output` one after the other, up to one after which nothing could; and what may be
    sampled after `output` and after each of these, None without a constraint."""
    if constraint is None:
        return drafts, None
    masks: list[TokenMask | None] = [constraint.allowed(output)]
    answer = list(output)
    for count, draft in enumerate(drafts.tolist()):
        mask = masks[-1]
        if mask is not None and not _allows(mask, draft):
            return drafts[:count], masks
        answer.append(draft)
        following = constraint.allowed(answer)
        if following is not None and not following.any():
            return drafts[:count], masks
        masks.append(following)
    return drafts, masks


def _allows(mask: TokenMask, token: int) -> bool:
    word, bit = divmod(token, 32)
    return 0 <= word < len(mask) and bool(int(mask[word]) >> bit & 1)


def add_verify(
    state: SchedulerState, builder: PlanBuilder, request: Request, drafts: Keys, copies: list[PageCopy], most: int
) -> bool:
    """Give the request a verify row of up to `most` drafts in place of its decode row, for which there are pages after
    `copies`. False if its constraint allows none of the drafts, or pages for them would be another request's: then
    nothing has changed."""
    sequence, start = request.sequence, request.num_scheduled
    assert sequence is not None
    drafts, masks = drafts[: max(0, most)], None
    if not is_open(drafts):
        drafts, masks = keep_allowed(request.spec.constraint, request.output, drafts)
    if not len(drafts):
        return False
    further = state.cache.extend(sequence, start + 1 + len(drafts))
    if further is None:
        return False
    builder.copies += [*copies, *further]
    builder.add_verify(request, drafts, masks)
    request.num_scheduled = start + 1 + len(drafts)
    request.num_in_flight += 1
    return True


def take_verified(
    state: SchedulerState, scheduled: ScheduledSequence, verified: VerifiedTokens
) -> tuple[tuple[int, ...], Finish | None]:
    """Take in what a verify row has brought: the tokens that are part of the answer, and how it ends with them, if it
    does. Their inputs are to be folded. Nothing if the request has ended meanwhile: its state is where it was."""
    request, num_drafts = scheduled.request, scheduled.end - scheduled.start - 1
    request.num_in_flight -= 1
    if request.phase is not Phase.RUNNING:
        request.num_scheduled = request.num_computed
        return (), None
    num_accepted = len(verified.tokens) - 1
    state.counters.spec_decode.add(num_drafts, num_accepted)
    request.stats.num_draft_tokens += num_drafts
    request.stats.num_accepted_draft_tokens += num_accepted
    if state.drafting.drafter is not None:
        state.drafting.drafter.record(request, num_drafts, num_accepted)
    tokens = verified.tokens
    finish: Finish | None = None
    for count, token in enumerate(tokens, start=1):
        finish = request.finish_with(token, len(request.output) + count)
        if finish is not None:
            tokens = tokens[:count]
            break
    request.output.extend(tokens)
    request.last_token = tokens[-1]
    request.num_computed = request.num_scheduled = scheduled.start + len(tokens)
    state.drafting.pending_folds[request] = len(tokens)
    return tokens, finish


def learn_step_time(state: SchedulerState, builder: PlanBuilder, seconds: float) -> None:
    """Tell the drafter how long a step has taken, if its rows are decodes and verify rows alone."""
    drafter = state.drafting.drafter
    if drafter is None:
        return
    if not builder.scheduled and not builder.folds:
        if builder.plain:
            drafter.record_step(len(builder.plain), 0, seconds)
        return
    rows = [scheduled for scheduled in builder.scheduled if scheduled.has_row]
    num_decodes = len(rows) + len(builder.plain)
    if num_decodes and all(row.is_decode or row.is_verify for row in rows):
        num_draft_tokens = sum(row.end - row.start - 1 for row in rows if row.is_verify)
        drafter.record_step(num_decodes, num_draft_tokens, seconds, bool(builder.folds))


def trim_answer(state: SchedulerState, request: Request, num_output_tokens: int) -> None:
    """The answer ends within what its last verify row has brought: what comes after its first `num_output_tokens`
    tokens is not part of it, nor of the state."""
    surplus = len(request.output) - num_output_tokens
    if surplus <= 0 or request not in state.drafting.pending_folds:
        return
    assert request.sequence is not None and surplus < state.drafting.pending_folds[request]
    state.drafting.pending_folds[request] -= surplus
    request.num_computed -= surplus
    request.num_scheduled -= surplus
    state.counters.generation_tokens -= surplus
    del request.output[num_output_tokens:]
    request.sequence.tokens.truncate()


def add_folds(state: SchedulerState, builder: PlanBuilder) -> None:
    """Folds of what the last step has verified, with the checkpoints that the policy wants within it. The last thing of
    a plan: whoever has ended or given up its state meanwhile has none."""
    for request, num_tokens in state.drafting.pending_folds.items():
        positions = _reserve_checkpoints(state, request, num_tokens)
        assert request.sequence is not None
        pending = request.sequence.pending_states
        snapshots = tuple(FoldSnapshot(position, pending[position].pages) for position in positions)
        builder.folds.append(Fold(request.slot, num_tokens, snapshots))
        if positions:
            builder.scheduled.append(
                ScheduledSequence(request, positions[-1], positions[-1], checkpoint_positions=positions)
            )
            request.num_in_flight += 1
    state.drafting.pending_folds.clear()


def _reserve_checkpoints(state: SchedulerState, request: Request, num_tokens: int) -> list[int]:
    """The positions within the last `num_tokens` computed tokens whose states get pages."""
    placement, sequence, facts = state.cache.policy.placement, request.sequence, request.facts
    if placement is None or not placement.decode_stride or state.config.exact:
        return []
    assert sequence is not None and facts is not None
    end, stride = request.num_computed, placement.decode_stride
    positions = list[int]()
    for position in range((end - num_tokens) // stride * stride + stride, end + 1, stride):
        wanted: CheckpointPoint | None = placement.in_decode(facts, position)
        if wanted is not None and state.cache.reserve_checkpoint(sequence, wanted) is not None:
            positions.append(position)
    return positions
