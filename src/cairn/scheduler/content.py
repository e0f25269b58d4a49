"""What a sequence that was decoded here left behind, for the server that is going to prefill its next turn.

Nothing is pinned for it: `remember` notes which tokens were there, and `answer` offers what is still cached when
somebody who knows their digests asks.
"""

import numpy as np

from cairn.cache.sequence_blocks import Namespace
from cairn.scheduler.books import Books
from cairn.scheduler.hand_over import promised_pages
from cairn.scheduler.lease_quota import num_leases
from cairn.scheduler.request import Request
from cairn.scheduler.transfers import Leased, content_name
from cairn.step import GRID
from cairn.transfer.contract import ContentAsked, ContentName, HeldCheckpoint, Offer
from cairn.types import Keys


def remember(books: Books, request: Request) -> None:
    """The request, whose prompt came from another server, has ended well."""
    sequences, sequence = books.transfers.sequences, request.sequence
    if sequences is not None and sequence is not None:
        keys = sequence.keys[: request.num_computed].copy()
        sequences.remember(content_name(request), keys)


def answer(books: Books, asked: ContentAsked) -> None:
    """Offer the deepest state that is left of what is asked for, and the pages up to it; of a model without states the
    pages."""
    transfers = books.transfers
    assert transfers.side is not None
    found = transfers.sequences.deepest(asked.marks, asked.end) if transfers.sequences is not None else None
    if found is None or found[0].adapter != asked.adapter:
        transfers.side.answer(asked.ask, None)
        return
    _offer(books, asked, *found)


def _offer(books: Books, asked: ContentAsked, name: ContentName, keys: Keys) -> None:
    cache, side = books.cache, books.transfers.side
    assert side is not None
    purpose = f"content ask {asked.ask}"
    sequence = cache.lookup(Namespace(name.adapter, name.salt), keys, purpose, probe=True)
    position = len(keys) if sequence.matched == len(keys) else sequence.matched // GRID * GRID
    state = sequence.restore if sequence.hit <= position else None
    # without a state keys and values are worth nothing to anybody, unless the model has none
    of_use = position > asked.start and (state is not None or cache.layout.state_bytes == 0)
    pages = np.concatenate([np.zeros(0, np.int32), *sequence.blocks.pages_upto(position)])
    offer = Offer(
        purpose, name, keys[:position], pages, () if state is None else (HeldCheckpoint(sequence.hit, state),)
    )
    promised, num_more = promised_pages(books)
    has_room = num_leases(books) < books.transfers.quota.max_leases
    if not of_use or not has_room or not side.has_room(np.concatenate([promised, offer.all_pages]), num_more):
        side.answer(asked.ask, None)
    else:
        reference = side.answer(asked.ask, offer)
        if reference is not None:
            hold = cache.pin(f"asked for by {purpose}", offer.all_pages)
            books.transfers.offers[reference] = Leased(hold, client=None)
    cache.discard(sequence)
