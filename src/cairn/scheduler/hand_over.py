"""A prompt that another server is going to decode: its pages and the state at its end are kept until it has read them.

The file for the state is set aside when the request is admitted, whatever the placement policy says and also with the
cache off, so a prompt that is computed can always be handed over.
"""

import numpy as np

from cairn.cache.lease import Lease
from cairn.scheduler.books import Books
from cairn.scheduler.request import Offered, Request
from cairn.scheduler.transfers import content_name
from cairn.transfer.contract import HeldCheckpoint, LeaseEnded, Offer

__all__ = ["has_room", "hold_state", "lease_ended", "offer", "set_aside"]


def has_room(books: Books, request: Request) -> bool:
    """Whether what other servers keep here, and those that run will, leaves room for this prompt as well. A prompt
    that is larger than the share itself goes alone."""
    side = books.transfers.side
    assert side is not None
    running = sum(_num_pages(books, other) for other in books.running if other.spec.hand_over)
    if not running and not books.transfers.offers:
        return True
    return side.has_room(running + _num_pages(books, request))


def _num_pages(books: Books, request: Request) -> int:
    layout = books.cache.layout
    return layout.pages_for(request.num_prompt_tokens) + layout.pages_per_checkpoint


def set_aside(books: Books, request: Request, lease: Lease) -> bool:
    """A file for the state at the prompt's end; False if there is no room for it."""
    if request.handed is not None or lease.hit >= request.num_prompt_tokens:
        return True
    return books.cache.want_always(lease, request.num_prompt_tokens) is not None


def hold_state(books: Books, request: Request) -> None:
    """The state at the prompt's end is there: restored, or kept by a step that has been applied."""
    lease, position = request.lease, request.num_prompt_tokens
    if request.handed is not None or lease is None:
        return
    if lease.hit == position:
        assert lease.restore is not None
        request.handed = books.cache.hold(f"state of {request.id}", lease.restore)
    elif position in lease.files:
        request.handed = books.cache.hold(f"state of {request.id}", lease.files[position].pages)


def offer(books: Books, request: Request) -> None:
    """The request has ended well: hold its prompt for whoever has the reference."""
    lease, side, state = request.lease, books.transfers.side, request.handed
    assert lease is not None and side is not None and state is not None
    length = request.num_prompt_tokens
    pages = np.concatenate([np.zeros(0, np.int32), *lease.pages_upto(length)])
    made = Offer(
        request_id=request.id,
        name=content_name(request),
        keys=request.spec.prompt,
        pages=pages,
        checkpoints=(HeldCheckpoint(length, state.pages),),
    )
    reference = side.offer(made)
    request.offered = Offered(made, reference)
    both = np.concatenate([pages, state.pages])
    books.transfers.offers[reference] = books.cache.hold(f"handed over by {request.id}", both)


def lease_ended(books: Books, ended: LeaseEnded) -> None:
    hold = books.transfers.offers.pop(ended.remote_request_id, None)
    if hold is not None:
        books.cache.let_go(hold)
        books.counters.expired_offers += ended.state == "expired"
