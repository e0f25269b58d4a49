"""What is claimed for a want, of a lease or of content that somebody hinted at, and whether a grant follows from it."""

from dataclasses import dataclass

from cairn.step import GRID
from cairn.transfer.contract import ContentWant, Peer, PullId, ReadOrder, Want, num_range_pages
from cairn.transfer.digest import DIGEST_BYTES, ContentDigest, content_digest
from cairn.transfer.wire import MAX_MARK_BYTES, Claim, Granted, unpack_pages


@dataclass(frozen=True, slots=True)
class ClaimPolicy:
    """One transfer's side of the bargain. `claim` is its own name; `layout` is `digest.layout_hash`, `block_size` the
    own one.

    A lease is claimed for all of the wanted tokens; without one, whatever the other side holds beyond `start` is, up to
    any of the marks that it is told, or to the end.
    """

    want: Want | ContentWant
    claim: bytes
    layout: bytes
    block_size: int

    @property
    def position(self) -> int:
        """Tokens that may be used after a success, as far as it is known before a grant."""
        return len(self.want.keys) if isinstance(self.want, Want) else 0

    @property
    def lease(self) -> tuple[str, bytes]:
        """Request id and nonce of the lease before anything is granted."""
        return self.want.request_id, self.want.nonce if isinstance(self.want, Want) else self.claim

    def record(self) -> Claim | None:
        """What to send; None when there is nothing that could be asked for."""
        want, wants_state, end = self.want, self.want.checkpoint is not None, self._end
        digest = None if end is None else content_digest(self.layout, want.name, want.keys[:end])
        if isinstance(want, Want):
            lease = (want.request_id, want.nonce)
            return Claim(self.claim, want.name.adapter, None, want.start, wants_state, digest, self.position, *lease)
        marks = ContentDigest(self.layout, want.name)
        marks.append(want.keys[: MAX_MARK_BYTES // DIGEST_BYTES * GRID])
        if not marks.marks:
            return None
        return Claim(self.claim, want.name.adapter, marks.marks, want.start, wants_state, digest)

    def order(self, pull: PullId, peer: Peer, granted: Granted) -> ReadOrder | None:
        """What to read by a grant, or None when it does not follow from the claim, or contradicts itself."""
        want, end = self.want, granted.position
        pages, file = unpack_pages(granted.pages), unpack_pages(granted.checkpoint)
        if pages is None or file is None or not self._may_end(granted):
            return None
        has_state = granted.checkpoint_position is not None
        if has_state != bool(len(file)):
            return None
        if granted.checkpoint_position is not None and not 0 < granted.checkpoint_position <= end:
            return None
        start, remote, checkpoint = want.start, pages, file if has_state else None
        if isinstance(want, Want):
            if has_state != (want.checkpoint is not None):
                return None
        elif has_state and want.checkpoint is None:
            return None
        elif not len(want.pages):
            # Where no page is lacking, the other side's are of no use; a model without attention has none.
            start, remote = end, pages[:0]
        if len(remote) != num_range_pages(start, end, peer.geometry.block_size):
            return None
        own = want.pages[: num_range_pages(start, end, self.block_size)]
        return ReadOrder(pull, peer, start, end, remote, own, checkpoint, want.checkpoint if has_state else None)

    @property
    def _end(self) -> int | None:
        """Of how many tokens there is a digest besides the marks. A hint's word came by way of a client: None when it
        is no position of these tokens."""
        if isinstance(self.want, Want):
            return len(self.want.keys)
        end = self.want.end
        return end if end is not None and 0 < end <= len(self.want.keys) else None

    def _may_end(self, granted: Granted) -> bool:
        """Whether the lease and the position are what was claimed."""
        end = granted.position
        if isinstance(self.want, Want):
            return end == self.position and (granted.request_id, granted.nonce) == self.lease
        num_marks = min(len(self.want.keys) // GRID, MAX_MARK_BYTES // DIGEST_BYTES)
        return end > self.want.start and (end == self._end or (end % GRID == 0 and end <= num_marks * GRID))
