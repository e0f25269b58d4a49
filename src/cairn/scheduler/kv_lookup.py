"""What a sequence that was decoded here left behind, for the server that is going to prefill its next turn.

Nothing is pinned for it: `remember_sequence` notes which tokens were there, and `answer_lookup` offers what is still
cached when somebody who knows their digests asks.
"""

from cairn.cache.sequence_blocks import Namespace
from cairn.scheduler.kv_export import pages_to_lease
from cairn.scheduler.request import Request
from cairn.scheduler.state import SchedulerState
from cairn.scheduler.transfers import OpenLease, content_name
from cairn.step import GRID
from cairn.transfer.contract import ContentName, LeaseDemand, LookupRequest, Offer, OfferedCheckpoint
from cairn.types import Keys


def remember_sequence(state: SchedulerState, request: Request) -> None:
    """The request, whose prompt came from another server, has ended well."""
    sequences, sequence = state.transfers.sequences, request.sequence
    if sequences is not None and sequence is not None:
        keys = sequence.keys[: request.num_computed].copy()
        sequences.remember(content_name(request), keys)


def answer_lookup(state: SchedulerState, request: LookupRequest) -> None:
    """Offer the deepest cached checkpoint of the claimed content and the pages up to it; for a model without states the
    pages alone."""
    transfers = state.transfers
    assert transfers.side is not None
    match = transfers.sequences.find_longest(request.marks, request.end) if transfers.sequences is not None else None
    if match is None or match[0].adapter != request.adapter:
        transfers.side.answer_lookup(request.lookup, None)
        return
    _offer(state, request, *match)


def _offer(state: SchedulerState, request: LookupRequest, name: ContentName, keys: Keys) -> None:
    cache, side = state.cache, state.transfers.side
    assert side is not None
    purpose = f"lookup {request.lookup}"
    sequence = cache.lookup(Namespace(name.adapter, name.salt), keys, purpose, probe=True)
    position = len(keys) if sequence.matched == len(keys) else sequence.matched // GRID * GRID
    checkpoint = sequence.restore if sequence.hit <= position else None
    # without a state keys and values are worth nothing to anybody, unless the model has none
    of_use = position > request.start and (checkpoint is not None or cache.layout.resumes_anywhere)
    checkpoints = () if checkpoint is None else (OfferedCheckpoint(sequence.hit, checkpoint),)
    offer = Offer(purpose, name, keys[:position], sequence.blocks.span(0, position), checkpoints)
    can_lease = state.num_leases < state.transfers.quota.max_leases
    if not of_use or not can_lease or not side.fits(LeaseDemand(offer.all_pages), pages_to_lease(state)):
        side.answer_lookup(request.lookup, None)
    else:
        reference = side.answer_lookup(request.lookup, offer)
        if reference is not None:
            pin = cache.pin(f"leased after {purpose}", offer.all_pages)
            state.transfers.offers[reference] = OpenLease(pin)
    cache.discard(sequence)
