"""What a lookup may use, and why it could not use more."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cairn.cache.checkpoint import Checkpoint, Origin
from cairn.cache.lease import Lease, Namespace
from cairn.cache.placement import Placement
from cairn.cache.reasons import Reason
from cairn.cache.tree import Node, Walk, common_prefix, walk

__all__ = ["Acceptance", "miss_reason"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Which runs and checkpoints a request may use. Only exact mode is choosy (DESIGN section 6).

    `num_prompt_tokens`: what it computes by prefill; a request that was preempted (`resumed`) goes on behind it with
    what its own decode steps have built, and nobody else's.
    """

    exact: bool
    request_id: str
    num_prompt_tokens: int
    resumed: bool

    def run_end(self) -> Callable[[Node], int] | None:
        """Up to which token a node's keys and values may be read; None: all of them."""
        return self._run_end if self.exact else None

    def _run_end(self, node: Node) -> int:
        if node.decode_by is None:
            return min(node.end, self.num_prompt_tokens)
        return node.end if self.resumed and node.decode_by == self.request_id else node.start

    def deepest(self, found: Walk) -> Checkpoint | None:
        """The deepest checkpoint on the matched path that may be restored."""
        for node in reversed(found.path):
            checkpoint = node.checkpoint
            if checkpoint is not None and node.end <= found.matched and self._accepts(checkpoint):
                return checkpoint
        return None

    def _accepts(self, checkpoint: Checkpoint) -> bool:
        if not self.exact:
            return True
        match checkpoint.origin:
            case Origin.GRID:
                return checkpoint.position <= self.num_prompt_tokens
            case Origin.TAIL:
                return checkpoint.position == self.num_prompt_tokens
            case Origin.DECODE:
                return self.resumed and checkpoint.maker == self.request_id


def miss_reason(
    placement: Placement,
    lease: Lease,
    raw: bytes,
    found: Walk,
    running: Iterable[Lease],
    roots: Mapping[Namespace, Node],
) -> Reason:
    """Why `lease.hit` is not more: the first reason of `Reason` that holds. `raw`: the bytes of the lease's keys."""
    if lease.hit == lease.num_tokens:
        return Reason.NONE
    if lease.num_tokens < placement.min_cacheable:
        return Reason.TOO_SHORT
    if lease.hit < found.seen:
        known = found.path + found.beyond
        losses = [node.loss for node in known if node.loss is not None and lease.hit < node.end <= found.seen]
        if Reason.PREEMPTED in losses:
            return Reason.PREEMPTED
        if found.seen < placement.min_shared:
            return Reason.TOO_SHORT
        if losses or any(not node.resident for node in found.beyond):
            return Reason.EVICTED
    if _being_computed(lease, raw, running) >= max(found.seen, lease.hit + 1):
        return Reason.IN_PROGRESS
    if lease.hit < found.seen:
        return Reason.NO_CHECKPOINT
    # only the unsalted namespace is ever compared: to name another salt's prompts would tell its secrets
    plain = Namespace(lease.namespace.adapter)
    root = roots.get(plain) if lease.namespace != plain else None
    if root is not None and walk(root, raw).seen > lease.seen:
        return Reason.NAMESPACE
    return Reason.NEVER_SEEN


def _being_computed(lease: Lease, raw: bytes, running: Iterable[Lease]) -> int:
    """The longest prefix that this prompt shares with one that is still in prefill."""
    longest = 0
    for other in running:
        if other.namespace != lease.namespace or other.committed >= other.num_prompt_tokens:
            continue
        if other.num_tokens > lease.hit and other.keys[lease.hit] == lease.keys[lease.hit]:
            run = Node(None, other.keys.tobytes(), 0)
            longest = max(longest, common_prefix(run, raw, 0))
    return longest
