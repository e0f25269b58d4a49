"""What a sequence that was decoded here left behind, for the server that is going to prefill its next turn.

Nothing is pinned for it: `remember_sequence` notes which tokens were there, and `answer_lookup` offers what is still
cached when somebody who knows their digests asks.
"""

from cairn.cache.sequence_blocks import Namespace, SequenceBlocks
from cairn.scheduler.kv_export import pages_to_lease
from cairn.scheduler.request import Request
from cairn.scheduler.state import SchedulerState
from cairn.scheduler.tier_lookup import advance_lookups, ask_tiers
from cairn.scheduler.transfers import OpenLease, content_name
from cairn.step import GRID
from cairn.transfer.contract import ContentName, LeaseDemand, LookupRequest, Offer, OfferedCheckpoint
from cairn.types import Keys

_MAX_LOOKUPS = 4
"""Marks that are looked up for one claim."""


def remember_sequence(state: SchedulerState, request: Request) -> None:
    """The request, whose prompt came from another server, has ended well."""
    sequences, sequence = state.transfers.sequences, request.sequence
    if sequences is not None and sequence is not None:
        keys = sequence.keys[: request.num_computed].copy()
        sequences.remember(content_name(request), keys)


def answer_lookup(state: SchedulerState, request: LookupRequest) -> None:
    """Offer the deepest cached checkpoint of the claimed content and the pages up to it; for a model without states the
    pages alone. What lies in tiers is read up first: see `answer_read_up`."""
    transfers = state.transfers
    assert transfers.side is not None
    match = transfers.sequences.find_longest(request.marks, request.end) if transfers.sequences is not None else None
    if match is None or match[0].adapter != request.adapter:
        transfers.side.answer_lookup(request.lookup, None)
        return
    name, keys = match
    sequence, position = _look_up(state, name, keys, f"lookup {request.lookup}")
    is_whole = sequence.hit == position == len(keys)
    state.cache.discard(sequence)
    if is_whole or not ask_tiers(state, request, name, keys):
        _offer(state, request, name, keys)


def answer_read_up(state: SchedulerState) -> bool:
    """Answer lookups for which tiers have been asked, if that is over. Whether there was any."""
    ended = advance_lookups(state)
    for lookup in ended:
        _offer(state, lookup.request, lookup.wanted.name, lookup.wanted.keys)
    return bool(ended)


def _offer(state: SchedulerState, request: LookupRequest, name: ContentName, keys: Keys) -> None:
    cache, side = state.cache, state.transfers.side
    assert side is not None
    purpose = f"lookup {request.lookup}"
    sequence, position = _look_up(state, name, keys, purpose)
    checkpoint = sequence.restore if sequence.hit <= position else None
    # without a state keys and values are worth nothing to anybody, unless the model has none
    of_use = position > request.start and (checkpoint is not None or cache.layout.resumes_anywhere)
    checkpoints = () if checkpoint is None else (OfferedCheckpoint(sequence.hit, checkpoint),)
    offer = Offer(purpose, name, keys[:position], sequence.blocks.needed_at(position), checkpoints)
    can_lease = state.num_leases < state.transfers.quota.max_leases
    if not of_use or not can_lease or not side.fits(LeaseDemand(offer.all_pages), pages_to_lease(state)):
        side.answer_lookup(request.lookup, None)
    else:
        reference = side.answer_lookup(request.lookup, offer)
        if reference is not None:
            state.transfers.offers[reference] = OpenLease(cache.pin(offer.all_pages))
    cache.discard(sequence)


def _look_up(state: SchedulerState, name: ContentName, keys: Keys, purpose: str) -> tuple[SequenceBlocks, int]:
    """A probe of the longest prefix of `keys` that can be named and is cached, and its tokens. Of groups of limited
    reach a probe has what going on at its hit needs and no more, so a mark before that is looked up by itself."""
    cache, end = state.cache, len(keys)
    for _ in range(_MAX_LOOKUPS):
        # without recurrent layers the last token of what is looked up is never hit
        length = min(len(keys), end + cache.layout.resumes_anywhere)
        sequence = cache.lookup(Namespace(name.adapter, name.salt), keys[:length], purpose, probe=True)
        position = end if sequence.matched == end else min(sequence.matched, end - 1) // GRID * GRID
        if position in (0, sequence.matched) or not cache.layout.is_limited:
            return sequence, position
        cache.discard(sequence)
        end = position
    return cache.lookup(Namespace(name.adapter, name.salt), keys, purpose, bypass=True, probe=True), 0
