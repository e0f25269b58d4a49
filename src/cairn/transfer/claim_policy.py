"""What is claimed for a want, and whether a grant follows from it: of a lease, or of content somebody hinted at."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from cairn.step import GRID
from cairn.transfer.contract import ContentWant, Peer, PullId, ReadOrder, Want, num_range_pages
from cairn.transfer.digest import DIGEST_BYTES, ContentDigest, content_digest
from cairn.transfer.wire import MAX_MARK_BYTES, Claim, ContentClaim, ContentGranted, Granted, unpack_pages
from cairn.types import Pages


@dataclass(frozen=True, slots=True)
class Grant:
    """What a producer has granted, checked. `request_id` and `nonce` name its lease from here on; tokens up to
    `order.end` may be used once it is confirmed."""

    request_id: str
    nonce: bytes
    generation: int
    checkpoint_position: int | None
    order: ReadOrder


class ClaimPolicy(Protocol):
    """One want's side of the bargain; `claim` is the transfer's own name everywhere."""

    @property
    def position(self) -> int:
        """Tokens that may be used after a success, as far as it is known before a grant."""
        ...

    def lease(self, claim: bytes) -> tuple[str, bytes]:
        """Request id and nonce of the lease before anything is granted."""
        ...

    def record(self, claim: bytes, block_size: int) -> Claim | ContentClaim | None:
        """What to send to a producer of this block size; None when there is nothing that it could be asked for."""
        ...

    def grant(self, pull: PullId, peer: Peer, reply: Granted | ContentGranted) -> Grant | None:
        """The grant, or None when it does not follow from the claim."""
        ...


def claim_policy_for(want: Want | ContentWant, layout: bytes, block_size: int) -> ClaimPolicy:
    """`layout` is `digest.layout_hash`, `block_size` the own one."""
    match want:
        case Want():
            return LeaseClaimPolicy(want, layout)
        case ContentWant():
            return ContentClaimPolicy(want, layout, block_size)


@dataclass(frozen=True)
class LeaseClaimPolicy:
    """All that a lease was offered for, or nothing."""

    want: Want
    layout: bytes

    @property
    def position(self) -> int:
        return len(self.want.keys)

    def lease(self, claim: bytes) -> tuple[str, bytes]:
        return self.want.request_id, self.want.nonce

    def record(self, claim: bytes, block_size: int) -> Claim:
        want, (first, last) = self.want, self._page_range(block_size)
        digest = content_digest(self.layout, want.name, want.keys)
        wants_state = want.checkpoint is not None
        return Claim(claim, want.request_id, want.nonce, digest, self.position, first, last, wants_state)

    def grant(self, pull: PullId, peer: Peer, reply: Granted | ContentGranted) -> Grant | None:
        want, found = self.want, _unpacked(reply) if isinstance(reply, Granted) else None
        if found is None or not isinstance(reply, Granted) or reply.position != self.position:
            return None
        first, last = self._page_range(peer.geometry.block_size)
        if len(found.pages) != last - first or (want.checkpoint is None) != (found.checkpoint is None):
            return None
        order = ReadOrder(
            pull, peer, want.start, self.position, found.pages, want.pages, found.checkpoint, want.checkpoint
        )
        return Grant(want.request_id, want.nonce, reply.generation, reply.checkpoint_position, order)

    def _page_range(self, block_size: int) -> tuple[int, int]:
        """Which of the producer's pages hold the wanted tokens."""
        last = -(-self.position // block_size)
        return (last if self.want.start >= self.position else self.want.start // block_size), last


@dataclass(frozen=True)
class ContentClaimPolicy:
    """Whatever the other side holds beyond `start`, up to any of the marks that it is told, or to the end."""

    want: ContentWant
    layout: bytes
    block_size: int

    @property
    def position(self) -> int:
        return 0

    @property
    def end(self) -> int | None:
        """As the hint has it, which came by way of a client: None when it is no position of these tokens."""
        end = self.want.end
        return end if end is not None and 0 < end <= len(self.want.keys) else None

    @cached_property
    def marks(self) -> bytes:
        digest = ContentDigest(self.layout, self.want.name)
        digest.append(self.want.keys[: MAX_MARK_BYTES // DIGEST_BYTES * GRID])
        return digest.marks

    def lease(self, claim: bytes) -> tuple[str, bytes]:
        return self.want.request_id, claim

    def record(self, claim: bytes, block_size: int) -> ContentClaim | None:
        want = self.want
        if not self.marks:
            return None
        end = None if self.end is None else content_digest(self.layout, want.name, want.keys[: self.end])
        return ContentClaim(claim, want.name.adapter, self.marks, want.start, want.checkpoint is not None, end)

    def grant(self, pull: PullId, peer: Peer, reply: Granted | ContentGranted) -> Grant | None:
        if not isinstance(reply, ContentGranted):
            return None
        want, found, end = self.want, _unpacked(reply.granted), reply.granted.position
        at_a_mark = end % GRID == 0 and end <= len(self.marks) // DIGEST_BYTES * GRID
        if end <= want.start or not (at_a_mark or end == self.end):
            return None
        if found is None or (want.checkpoint is None and found.checkpoint is not None):
            return None
        # Where no page is lacking, the other side's are of no use; a model without attention has none.
        start, pages = (want.start, found.pages) if len(want.pages) else (end, found.pages[:0])
        if len(pages) != num_range_pages(start, end, peer.geometry.block_size):
            return None
        own = want.pages[: num_range_pages(start, end, self.block_size)]
        checkpoint = None if found.checkpoint is None else want.checkpoint
        order = ReadOrder(pull, peer, start, end, pages, own, found.checkpoint, checkpoint)
        return Grant(reply.request_id, reply.nonce, reply.granted.generation, reply.granted.checkpoint_position, order)


@dataclass(frozen=True, slots=True)
class _Found:
    pages: Pages
    checkpoint: Pages | None


def _unpacked(granted: Granted) -> _Found | None:
    """The pages and the checkpoint of a grant, or None when it contradicts itself."""
    pages, checkpoint = unpack_pages(granted.pages), unpack_pages(granted.checkpoint)
    if pages is None or checkpoint is None:
        return None
    if granted.checkpoint_position is None:
        return None if len(checkpoint) else _Found(pages, None)
    if not len(checkpoint) or not 0 < granted.checkpoint_position <= granted.position:
        return None
    return _Found(pages, checkpoint)
