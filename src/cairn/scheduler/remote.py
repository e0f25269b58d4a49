"""What other servers have done since the last look, in one place."""

from cairn.scheduler.books import Books
from cairn.scheduler.content import answer
from cairn.scheduler.fetch import pages_free, pull_ended, slow_fetches, start_pulls
from cairn.scheduler.hand_over import lease_ended
from cairn.scheduler.lease_wait import refuse_overdue
from cairn.scheduler.request import Request
from cairn.transfer.contract import ContentAsked, LeaseEnded, PagesFree, PullEnded


def take_events(books: Books) -> tuple[bool, list[Request]]:
    """Whether anything has changed, and the requests that ended because their pages did not come, or because what is
    held for other servers has left no room for theirs."""
    side = books.transfers.side
    if side is None:
        return False, []
    events, failed = side.events(), []
    for event in events:
        match event:
            case PullEnded():
                if (request := pull_ended(books, event)) is not None:
                    failed.append(request)
            case PagesFree():
                pages_free(books, event)
            case LeaseEnded():
                lease_ended(books, event)
            case ContentAsked():
                answer(books, event)
    refused = refuse_overdue(books)
    changed = start_pulls(books) or bool(events or refused)
    if books.running or books.waiting.plain:
        changed = changed or bool(slow_fetches(books))  # which somebody may lack the pages of
    return changed, failed + refused
