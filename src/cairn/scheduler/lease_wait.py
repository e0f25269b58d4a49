"""Hand-overs that wait, beside the queue, until the leases leave room for their prompts: in order of turns, and not for
ever.

A prompt that was fetched waits for the same among `Transfers.ready`, in the same order.
"""

from itertools import chain

from cairn.scheduler.books import Books
from cairn.scheduler.ending import finish
from cairn.scheduler.hand_over import has_room, num_pages
from cairn.scheduler.request import Phase, Request


def await_lease_room(books: Books, request: Request) -> None:
    """The leases leave no room for `request`, or are first to have room for one before it."""
    if request.transfer.no_lease_room_since is None:
        _set_since(books, request, books.clock.now())


def refuse_overdue(books: Books) -> list[Request]:
    """End the hand-overs that have waited for lease room for too long. Returns them."""
    ready = (request for request in books.transfers.ready if request.transfer.no_lease_room_since is not None)
    waiting = list(chain(books.waiting.hand_overs, ready))
    limit = books.transfers.quota.wait_seconds
    overdue = [
        request for request in waiting if books.clock.now() - (request.transfer.no_lease_room_since or 0.0) >= limit
    ]
    if not overdue:
        return []
    besides = 0
    for request in sorted(waiting, key=lambda request: request.turn):
        if not has_room(books, request, besides):
            break
        # slots or pages are what it waits for by now, as all others do
        _set_since(books, request, None)
        besides += num_pages(books, request)
    overdue = [request for request in overdue if request.transfer.no_lease_room_since is not None]
    for request in overdue:
        request.outcome.failure = (
            f"what is held for other servers has left no room for this prompt for {limit:g} s: try again later"
        )
        request.outcome.refused = True
        books.counters.refused_hand_overs["timeout"] += 1
        finish(books, request, "error")
    return overdue


def _set_since(books: Books, request: Request, since: float | None) -> None:
    if request.phase is Phase.WAITING:
        books.waiting.set_no_lease_room(request, since)
    else:
        request.transfer.no_lease_room_since = since
