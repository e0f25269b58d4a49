"""A prompt that another server is going to decode: its pages and the state at its end are kept until it has read them.

The pages for the state are set aside when the request is admitted, whatever the placement policy says and also with the
cache off, so a prompt that is computed can always be leased.
"""

from collections.abc import Callable

import numpy as np

from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.scheduler.request import PromptOffer, Request
from cairn.scheduler.state import SchedulerState
from cairn.scheduler.transfers import OpenLease, content_name
from cairn.transfer.contract import NO_DEMAND, LeaseDemand, LeaseEnded, Offer, OfferedCheckpoint
from cairn.types import RequestId


def fits_leases(state: SchedulerState, request: Request, reserved_pages: int = 0) -> bool:
    """Whether what other servers keep here, and those that run will, leaves room for this prompt and `reserved_pages`
    pages more. What of it is leased already needs none."""
    side = state.transfers.side
    assert side is not None
    promised = pages_to_lease(state) + LeaseDemand(num_new=reserved_pages)
    if side.fits(LeaseDemand(num_new=num_pages(state, request)), promised):
        return True
    sequence = request.sequence or state.cache.lookup(
        request.spec.namespace, request.spec.prompt, request.id, probe=True
    )
    demand = _pages_to_lease(state, request, sequence)
    if sequence is not request.sequence:
        state.cache.discard(sequence)
    return side.fits(demand, promised)


def pages_to_lease(state: SchedulerState) -> LeaseDemand:
    """Pages that those that run are going to keep for other servers, though nothing is leased yet."""
    demands = [
        _pages_to_lease(state, request, request.sequence)
        for request in state.running
        if request.spec.role.kv_export and request.sequence is not None
    ]
    pages = np.concatenate([NO_DEMAND.pages, *(demand.pages for demand in demands)])
    return LeaseDemand(pages, sum(demand.num_new for demand in demands))


def num_pages(state: SchedulerState, request: Request) -> int:
    """Pages that going on at the prompt's end and the state there take."""
    layout = state.cache.layout
    return layout.retained_pages(0, request.num_prompt_tokens) + layout.pages_per_checkpoint


def _pages_to_lease(state: SchedulerState, request: Request, sequence: SequenceBlocks) -> LeaseDemand:
    """Which of the pages of `sequence` are leased with the request's prompt, and how many others. A page that is
    shared in part is copied before anything is written after what it holds."""
    length, pages = request.num_prompt_tokens, [np.zeros(0, np.int32)]
    stays = sequence.blocks.copied or length + request.spec.max_tokens - 1 <= sequence.matched
    for part in sequence.blocks.needed_at(length):
        shared = min(sequence.matched, length) // part.group.tokens_per_page - part.first_page
        pages.append(part.pages if stays else part.pages[: max(0, shared)])
    if request.transfer.pinned_checkpoint is not None:
        pages.append(request.transfer.pinned_checkpoint.pages)
    elif (state_pages := sequence.state_pages(length)) is not None:
        pages.append(state_pages)
    exported = np.concatenate(pages)
    return LeaseDemand(exported, num_pages(state, request) - len(exported))


def needs_prompt_checkpoint(request: Request, sequence: SequenceBlocks) -> bool:
    """Whether pages for the state at the prompt's end have to be set aside."""
    return request.spec.role.kv_export and sequence.hit < request.num_prompt_tokens


def reserve_prompt_checkpoint(state: SchedulerState, request: Request, sequence: SequenceBlocks) -> bool:
    """Pages for the state at the prompt's end where they are needed; False if there is no room for it."""
    return (
        not needs_prompt_checkpoint(request, sequence)
        or state.cache.force_checkpoint(sequence, request.num_prompt_tokens) is not None
    )


def pin_prompt_checkpoint(state: SchedulerState, request: Request) -> None:
    """Pin the state at the prompt's end, which was restored, or saved by a step that has been applied."""
    sequence = request.sequence
    if request.transfer.pinned_checkpoint is None and sequence is not None:
        state_pages = sequence.state_pages(request.num_prompt_tokens)
        if state_pages is not None:
            request.transfer.pinned_checkpoint = state.cache.pin(state_pages)


def offer_prompt(state: SchedulerState, request: Request) -> None:
    """The request has ended well: hold its prompt for whoever has the reference."""
    sequence, side, checkpoint = request.sequence, state.transfers.side, request.transfer.pinned_checkpoint
    assert sequence is not None and side is not None and checkpoint is not None
    length = request.num_prompt_tokens
    made = Offer(
        request_id=request.id,
        name=content_name(request),
        keys=request.spec.prompt,
        pages=sequence.blocks.needed_at(length),
        checkpoints=(OfferedCheckpoint(length, checkpoint.pages),),
    )
    reference = side.offer(made)
    request.transfer.offered = PromptOffer(made, reference)
    pin = state.cache.pin(made.all_pages)
    state.transfers.offers[reference] = OpenLease(pin, request.spec.client, request.id)


def withdraw_offers(state: SchedulerState, matches: Callable[[RequestId], bool]) -> None:
    """Nobody waits for what these requests have left for other servers."""
    for reference, leased in state.transfers.offers.items():
        if leased.request_id is not None and matches(leased.request_id):
            withdraw(state, reference)


def withdraw(state: SchedulerState, reference: str) -> None:
    """Nobody is going to fetch what is held under this reference. Does nothing for unknown ones, and where another
    server has claimed it."""
    if reference in state.transfers.offers:
        assert state.transfers.side is not None
        state.transfers.side.withdraw(reference)


def release_offer(state: SchedulerState, ended: LeaseEnded) -> None:
    leased = state.transfers.offers.pop(ended.remote_request_id, None)
    if leased is not None:
        state.cache.unpin(leased.pin)
        state.counters.expired_offers += ended.state == "expired"
