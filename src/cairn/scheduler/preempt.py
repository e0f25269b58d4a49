"""Making room by sending the youngest running request back to the queue."""

from cairn.cache.checkpoint import Kind
from cairn.cache.placement import Wanted
from cairn.cache.reasons import Reason
from cairn.scheduler.books import Books
from cairn.scheduler.fetch import cancel_slow_fetch, give_way
from cairn.scheduler.request import Phase, Request
from cairn.step import PageCopy


def make_room(books: Books, request: Request, num_tokens: int) -> list[PageCopy] | None:
    """Pages for `num_tokens` tokens of a running request, preempting younger ones if need be.

    Requests that hold fetched pages and do not run yet give way first, then prompts pinned for further answers. A
    request preempts each other one at most once; after that it waits for it, without giving up its pages. The youngest
    of all gives way itself. So the oldest always goes on, or waits for one that does, or for what other servers read;
    fetches that take long are given up for it. Left alone without room, it goes back once for each time it has come
    further, to share what it holds twice. None: the request does not run in this step.
    """
    assert request.sequence is not None
    while (copies := books.cache.extend(request.sequence, num_tokens)) is None:
        if give_way(books) or books.parallel_sampling.release_last():
            continue
        younger = books.running.behind(request)
        is_oldest = books.running.head is request
        victims = [other for other in younger if other.in_flight == 0 and request.id not in other.stats.preempted_by]
        if victims:
            preempt(books, victims[-1], request, request.sequence.blocks.missing_pages(num_tokens))
        elif younger or books.ending or request.in_flight:
            return None
        elif books.transfers.is_open:
            cancel_slow_fetch(books)
            return None
        elif not is_oldest or request.sequence.num_tokens > request.stats.sent_back_at:
            if is_oldest:
                # even alone it may hold pages of tokens that the tree has as well: looked up again, it shares those
                request.stats.sent_back_at = request.sequence.num_tokens
            preempt(books, request, request, 0)
            return None
        else:
            raise AssertionError(f"{request.id} does not fit an empty pool: submit should have refused it")
    return copies


def preempt(books: Books, victim: Request, preemptor: Request, needed_pages: int) -> None:
    """Send `victim` back to the queue; what it computed becomes ordinary cached pages.

    Its state is saved first if the file can be had beyond the `needed_pages` of the preemptor, and is smaller than
    the victim's own pages (otherwise computing again is cheaper than what it would push out).
    """
    sequence, cache = victim.sequence, books.cache
    assert sequence is not None and victim.in_flight == 0
    books.counters.preemptions += 1
    victim.stats.preempted_by.add(preemptor.id)
    cache.commit(sequence, victim.num_computed)
    size = cache.layout.pages_per_checkpoint
    own = sum(len(pages) for pages in sequence.pages) - cache.layout.pages_for(sequence.matched)
    position = victim.num_computed
    worth_it = position > sequence.hit and size < own and position not in sequence.files
    if worth_it and cache.make_room(needed_pages + size):
        if cache.reserve_checkpoint(sequence, Wanted(position, Kind.PREEMPTION)) is not None:
            books.pending_saves[victim] = position
            victim.to(Phase.PREEMPTING)
            books.running.remove(victim)
            books.ending.put(victim)
            return
    books.back_to_queue(victim, Reason.PREEMPTED)
