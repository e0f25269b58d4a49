"""Which states a step writes to checkpoint files: of requests that are ending, and within its rows."""

from collections.abc import Iterable

from cairn.cache.placement import Wanted
from cairn.scheduler.books import Books
from cairn.scheduler.draft import Draft, Part
from cairn.step import Keep, Save


def add_saves(books: Books, draft: Draft) -> None:
    """The last states of requests that are ending, once no step names them any more."""
    for request in books.ending:
        if request.save_at is None or request.in_flight:
            continue
        assert request.lease is not None
        draft.saves.append(Save(request.slot, request.lease.files[request.save_at].pages))
        draft.parts.append(Part(request, request.save_at, False, kept=[request.save_at]))
        request.save_at = None
        request.in_flight += 1


def add_keeps(books: Books, draft: Draft) -> None:
    """Files for checkpoints, once all rows have their pages."""
    placement = books.cache.policy.placement
    for part in draft.parts:
        if part.row is None:
            continue
        row, request = draft.rows[part.row], part.request
        assert request.lease is not None and request.facts is not None
        end = request.num_prompt_tokens
        handed_over = request.spec.hand_over and request.handed is None
        asked = handed_over or (books.branches.wants_state(request) and end in request.lease.files)
        if asked and row.start < end <= row.end:
            draft.keeps.append(Keep(part.row, end, request.lease.files[end].pages))
            part.kept.append(end)
        for position in books.in_flight.asked(request, row.start, row.end):
            if position not in part.kept:
                draft.keeps.append(Keep(part.row, position, request.lease.files[position].pages))
                part.kept.append(position)
        if placement is None:
            continue
        if not row.decode:
            wanted: Iterable[Wanted] = placement.in_prefill(request.facts, row.start, row.end)
        elif books.config.exact or (point := placement.in_decode(request.facts, row.end)) is None:
            continue
        else:
            wanted = [point]
        for want in wanted:
            if (pages := books.cache.want(request.lease, want)) is not None:
                draft.keeps.append(Keep(part.row, want.position, pages))
                part.kept.append(want.position)
