"""What a claim says, and what follows from it: made by the consumer, matched by the producer, checked by the consumer.

A claim names content by digests of its prefixes. Under a lease it names one: all of the prompt, which the lease has to
deliver. Without a lease it names every 64th token, and the end of the other server's sequence where that is known.
"""

import hmac
from dataclasses import replace

from cairn.cache.group_pages import GroupPages
from cairn.step import GRID
from cairn.transfer.contract import (
    NO_PAGES,
    Offer,
    OfferedCheckpoint,
    Peer,
    PullId,
    PullSpec,
    ReadOrder,
    num_range_pages,
)
from cairn.transfer.digest import DIGEST_BYTES, ContentDigest
from cairn.transfer.wire import MAX_MARK_BYTES, Claim, Granted


def make_claim(spec: PullSpec, layout: bytes) -> Claim | None:
    """The claim for a pull; None when there is no prefix to name. `layout` is `digest.layout_hash`."""
    source, end = spec.source, spec.source.named_end(len(spec.keys))
    marks = ContentDigest(layout, spec.name)
    if source.nonce is None:
        marks.append(spec.keys[: MAX_MARK_BYTES // DIGEST_BYTES * GRID])
        if not marks.marks:
            return None
    digest = ContentDigest(layout, spec.name).of(spec.keys[:end]) if end or source.nonce is not None else None
    wants_state = spec.checkpoint is not None
    lease = (source.request_id, source.nonce)
    return Claim(spec.name.adapter, marks.marks, spec.start, wants_state, digest, end, *lease)


def match_claim(claim: Claim, offer: Offer, layout: bytes) -> int | None:
    """Number of tokens of the longest prefix that the offer has and the claim can name: its end, or else its last mark
    within the offer. None if the claim names other content there."""
    position, expected = claim.position, claim.end
    if not 0 < position <= len(offer.keys):
        position = len(offer.keys) // GRID * GRID
        at = position // GRID * DIGEST_BYTES
        expected = claim.marks[at - DIGEST_BYTES : at] if at else None
    if not expected or claim.adapter != offer.name.adapter:
        return None
    digest = ContentDigest(layout, offer.name).of(offer.keys[:position])
    return position if hmac.compare_digest(digest, expected) else None


def find_pages(offer: Offer, start: int, position: int) -> tuple[GroupPages, ...] | None:
    """Per attention group the pages of the offer that going on at `position` needs, of the tokens from `start` on; none
    where there are no such tokens. None if some are not in the offer: what is needed at an earlier position than its
    own may be behind the reach."""
    if start >= position:
        return ()
    parts = []
    for part in offer.pages:
        first = max(start, part.group.needed_at(position))
        if part.first_token > first:
            return None
        parts.append(part.span(first, position))
    return tuple(parts)


def make_grant(claim: Claim, offer: Offer, position: int) -> Granted | None:
    """What a claim of the first `position` tokens is answered with, and the deepest checkpoint among them if one is
    claimed and there is one. None if the offer has not all that is needed of the tokens, or the claim begins behind
    them."""
    parts = find_pages(offer, claim.start, position) if 0 < position <= len(offer.keys) else None
    if parts is None or claim.start > position:
        return None
    usable = [checkpoint for checkpoint in offer.checkpoints if checkpoint.position <= position and claim.checkpoint]
    deepest = max(usable, key=lambda checkpoint: checkpoint.position, default=OfferedCheckpoint(0, NO_PAGES))
    first_tokens, pages = tuple(part.first_token for part in parts), tuple(part.pages for part in parts)
    return Granted(position, first_tokens, pages, deepest.position or None, deepest.pages)


def plan_read(spec: PullSpec, pull: PullId, peer: Peer, granted: Granted) -> ReadOrder | None:
    """What to read by a grant; None when the grant does not follow from the claim or contradicts itself."""
    end, at, parts = granted.position, granted.checkpoint_position, _match_pages(spec, peer, granted)
    if parts is None or (at is not None) != bool(len(granted.checkpoint)):
        return None
    if at is not None and (spec.checkpoint is None or not 0 < at <= end):
        return None
    if spec.source.nonce is not None:
        # all of the lease
        follows = end == len(spec.keys) and (at is None) == (spec.checkpoint is None)
    else:
        is_mark = end % GRID == 0 and end <= min(len(spec.keys), MAX_MARK_BYTES // DIGEST_BYTES * GRID)
        follows = end > spec.start and (is_mark or end == spec.source.named_end(len(spec.keys)))
    if any(part.group.reach is not None for part in spec.pages) and at != end and (at or end == len(spec.keys)):
        # what is within reach at `end` is not all that is within reach at an earlier token
        return None
    states = (None, None) if at is None else (granted.checkpoint, spec.checkpoint)
    return ReadOrder(pull, peer, end, *parts, *states) if follows else None


def _match_pages(
    spec: PullSpec, peer: Peer, granted: Granted
) -> tuple[tuple[GroupPages, ...], tuple[GroupPages, ...]] | None:
    """Per attention group the peer's pages and those that they go to, no group where there are none; None if the peer
    grants others than were claimed."""
    end, groups = granted.position, peer.geometry.groups
    if not spec.pages and spec.source.nonce is None:
        # No page is needed here, or the model has no attention: what the peer grants beyond the state is ignored.
        return (), ()
    if not len(granted.pages) == len(granted.first_tokens) == (len(spec.pages) if spec.start < end else 0):
        return None
    if granted.pages and len(groups) != len(spec.pages):
        return None
    remote, local = list[GroupPages](), list[GroupPages]()
    for first_token, pages, part, theirs in zip(granted.first_tokens, granted.pages, spec.pages, groups, strict=False):
        group = replace(part.group, tokens_per_page=theirs.tokens_per_page)
        first = min(end, max(spec.start, group.needed_at(end)))
        if (theirs.reach, theirs.chunked) != (group.reach, group.chunked):
            return None
        if first_token != first or len(pages) != num_range_pages(first, end, group.tokens_per_page):
            return None
        remote.append(GroupPages(group, first, pages).span(part.first_token, end))
        local.append(part.span(first, end))
    return (tuple(remote), tuple(local)) if any(len(part.pages) for part in remote) else ((), ())
