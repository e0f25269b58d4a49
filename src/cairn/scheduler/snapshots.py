"""Which states a step writes to the pool: of requests that are ending, and within its rows."""

from collections.abc import Iterable

from cairn.cache.placement import CheckpointPoint, PlacementPolicy
from cairn.scheduler.plan_builder import PlanBuilder, ScheduledSequence
from cairn.scheduler.state import SchedulerState
from cairn.step import Save, Snapshot
from cairn.types import Pages


def add_saves(state: SchedulerState, builder: PlanBuilder) -> None:
    """The last states of requests that are ending, once no step names them any more."""
    for request in state.ending:
        position = state.pending_saves.get(request)
        if position is None or request.num_in_flight:
            continue
        assert request.sequence is not None
        builder.saves.append(Save(request.slot, request.sequence.pending_states[position].pages))
        builder.scheduled.append(ScheduledSequence(request, position, position, checkpoint_positions=[position]))
        del state.pending_saves[request]
        request.num_in_flight += 1


def add_snapshots(state: SchedulerState, builder: PlanBuilder) -> None:
    """Files for checkpoints, once all rows have their pages. Those within a verify row are its fold's."""
    placement = state.cache.policy.placement
    for scheduled in builder.scheduled:
        if not scheduled.has_row or scheduled.is_verify:
            continue
        if not scheduled.is_decode:
            _add_for_others(state, builder, scheduled)
        if placement is None:
            continue
        sequence = scheduled.request.sequence
        assert sequence is not None
        for wanted in _wanted(state, placement, scheduled):
            if (pages := state.cache.reserve_checkpoint(sequence, wanted)) is not None:
                _add(builder, scheduled, wanted.position, pages)


def _add_for_others(state: SchedulerState, builder: PlanBuilder, scheduled: ScheduledSequence) -> None:
    """States that other servers, other answers or other requests are going to start from."""
    request = scheduled.request
    assert request.sequence is not None
    pending, end = request.sequence.pending_states, request.num_prompt_tokens
    is_exported = request.spec.role.kv_export and request.transfer.pinned_checkpoint is None
    is_needed = is_exported or (state.parallel_sampling.needs_checkpoint(request) and end in pending)
    if is_needed and scheduled.start < end <= scheduled.end:
        _add(builder, scheduled, end, pending[end].pages)
    for position in state.in_flight.positions_to_save(request, scheduled.start, scheduled.end):
        if position not in scheduled.checkpoint_positions:
            _add(builder, scheduled, position, pending[position].pages)


def _wanted(
    state: SchedulerState, placement: PlacementPolicy, scheduled: ScheduledSequence
) -> Iterable[CheckpointPoint]:
    facts = scheduled.request.facts
    assert facts is not None
    if not scheduled.is_decode:
        return placement.in_prefill(facts, scheduled.start, scheduled.end)
    wanted = None if state.config.exact else placement.in_decode(facts, scheduled.end)
    return () if wanted is None else (wanted,)


def _add(builder: PlanBuilder, scheduled: ScheduledSequence, position: int, pages: Pages) -> None:
    builder.snapshots.append(Snapshot(builder.row_of(scheduled), position, pages))
    scheduled.checkpoint_positions.append(position)
