"""The end of a request: its slot and pages go when no step names it any more, and its last state may be saved first."""

from cairn.cache.checkpoint import Kind
from cairn.cache.placement import Wanted
from cairn.scheduler.books import Books
from cairn.scheduler.content import remember
from cairn.scheduler.fetch import abandon, let_source_go
from cairn.scheduler.hand_over import offer
from cairn.scheduler.request import Finish, Phase, Request


def finish(books: Books, request: Request, reason: Finish) -> bool:
    """End a request now. False if it has ended already."""
    if request.phase in (Phase.FINISHING, Phase.FINISHED):
        return False
    request.outcome.finish_reason = reason
    request.stats.finished_time = books.clock.now()
    if request.phase in (Phase.WAITING, Phase.FETCHING, Phase.READY):
        _forget(books, request)
        return True
    if reason in ("stop", "length"):
        if request.spec.hand_over:
            offer(books, request)
        elif request.spec.source is not None:
            remember(books, request)
    if request.phase is Phase.RUNNING:
        books.running.remove(request)
        books.ending.put(request)
    request.to(Phase.FINISHING)
    if request.in_flight == 0:
        settle(books, request)
    return True


def _forget(books: Books, request: Request) -> None:
    match request.phase:
        case Phase.WAITING:
            if not books.parallel_sampling.is_deferred(request):
                books.waiting.remove(request)
            if request.transfer.source is not None:
                let_source_go(books, request, request.transfer.source)
        case Phase.FETCHING:
            abandon(books, request)
        case Phase.READY:
            del books.transfers.ready[request]
    books.drop(request)


def settle(books: Books, request: Request) -> None:
    """No step names a request that is ending: save its last state if that is worth it, or let it go."""
    sequence = request.sequence
    assert sequence is not None
    if request in books.pending_saves:
        return
    placement = books.cache.policy.placement
    if request.phase is Phase.PREEMPTING:
        books.back_to_queue(request)
        return
    position = request.num_computed
    books.cache.commit(sequence, min(position, request.num_known))
    wanted = (
        placement is not None
        and placement.keeps_answer_end
        and not books.config.exact
        and request.outcome.finish_reason in ("stop", "length")
        and max(sequence.hit, request.prefill_until) < position <= request.num_known
        and not request.stats.saved_answer_end
    )
    if wanted and books.cache.reserve_checkpoint(sequence, Wanted(position, Kind.ANSWER_END)) is not None:
        request.stats.saved_answer_end = True
        books.pending_saves[request] = position
        return
    books.drop(request)
