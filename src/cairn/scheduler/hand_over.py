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

__all__ = [
    "has_room",
    "hold_state",
    "lease_ended",
    "needs_file",
    "offer",
    "promised_pages",
    "set_aside",
]


def has_room(books: Books, request: Request) -> bool:
    """Whether what other servers keep here, and those that run will, leaves room for this prompt as well. A prompt
    that is larger than the share itself goes alone, and nobody overtakes one that waits for the share with its pages
    fetched."""
    side = books.transfers.side
    assert side is not None
    ready = books.transfers.ready
    if any(other.spec.hand_over and other.turn < request.turn for other in ready):
        return False
    promised = promised_pages(books)
    if not promised and not books.transfers.offers:
        return True
    return side.has_room(promised + _num_pages(books, request))


def promised_pages(books: Books) -> int:
    """Pages that those that run are going to keep for other servers: spoken for, though nothing is leased yet."""
    return sum(_num_pages(books, request) for request in books.running if request.spec.hand_over)


def _num_pages(books: Books, request: Request) -> int:
    layout = books.cache.layout
    return layout.pages_for(request.num_prompt_tokens) + layout.pages_per_checkpoint


def needs_file(request: Request, lease: Lease) -> bool:
    """Whether a file for the state at the prompt's end has to be set aside."""
    return request.spec.hand_over and lease.hit < request.num_prompt_tokens


def set_aside(books: Books, request: Request, lease: Lease) -> bool:
    """A file for the state at the prompt's end where one is needed; False if there is no room for it."""
    return not needs_file(request, lease) or books.cache.want_always(lease, request.num_prompt_tokens) is not None


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
