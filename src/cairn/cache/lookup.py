"""What a lookup may use, and why it could not use more."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from cairn.cache.checkpoint import Origin
from cairn.cache.layout import CacheLayout
from cairn.cache.lease import Lease, Namespace, PageTable, Stretch
from cairn.cache.placement import Placement
from cairn.cache.reasons import Reason
from cairn.cache.reuse import Reuse
from cairn.cache.tree import Checkpoint, Node, TokenKey, Walk, path_pages, walk
from cairn.keys import common_tokens
from cairn.types import Keys

_MAX_COMPARED = 1 << 19
"""Most tokens of running requests that one lookup compares."""

_MAX_KEPT = 64
"""Most lookups that are kept."""


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
            if checkpoint is not None and node.end <= found.matched:
                if self._accepts(checkpoint.origin, node.end, checkpoint.maker):
                    return checkpoint
        return None

    def deepest_known(self, found: Walk) -> Reuse | None:
        """The record of the deepest checkpoint on the path that may be restored, or might if it were still there."""
        for node in chain(reversed(found.beyond), reversed(found.path)):
            if node.reuse is not None and node.end <= found.seen and self._accepts(node.reuse.origin, node.end, None):
                return node.reuse
        return None

    def _accepts(self, origin: Origin, position: int, maker: str | None) -> bool:
        if not self.exact:
            return True
        match origin:
            case Origin.GRID:
                return position <= self.num_prompt_tokens
            case Origin.TAIL:
                return position == self.num_prompt_tokens
            case Origin.DECODE:
                return self.resumed and maker == self.request_id


class Finder:
    """Goes down a tree along prompts. `exact`: as `Acceptance` has it.

    What was found is kept for as long as the trees stay as they are: a request that waits for room asks in every step.
    """

    def __init__(self, layout: CacheLayout, exact: bool) -> None:
        self._layout = layout
        self._exact = exact
        self._kept: dict[tuple[Namespace, str, int | None], Lease] = {}
        self._version = 0

    def find(
        self,
        version: int,
        root: Node | None,
        namespace: Namespace,
        keys: Keys,
        request_id: str,
        resumed_from: int | None,
    ) -> Lease:
        """The lease of what is usable of `keys` below `root` (None: nothing), which refers to nothing yet. `version`
        is another one when anything in the trees is. The others as in `PrefixCache.lookup`."""
        if version != self._version or len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
            self._version = version
        name = (namespace, request_id, resumed_from)
        kept = self._kept.get(name)
        if kept is None or not np.array_equal(kept.keys, keys):
            kept = self._kept[name] = self._find(root, namespace, keys, request_id, resumed_from)
        return kept.copy()

    def _find(
        self, root: Node | None, namespace: Namespace, keys: Keys, request_id: str, resumed_from: int | None
    ) -> Lease:
        length = len(keys)
        num_prompt_tokens = length if resumed_from is None else resumed_from
        may = Acceptance(self._exact, request_id, num_prompt_tokens, resumed_from is not None)
        found = walk(root, TokenKey(keys), may.run_end()) if root is not None else Walk()
        checkpoint = may.deepest(found)
        hit = checkpoint.position if checkpoint is not None else 0
        if self._layout.state_bytes == 0 and hit < min(found.matched, length - 1):
            # nothing to restore: keys and values alone resume anywhere, and the last token gives the logits
            hit, checkpoint = min(found.matched, length - 1), None
        return Lease(
            purpose=f"running {request_id}" if resumed_from is None else f"resuming {request_id}",
            request_id=request_id,
            namespace=namespace,
            num_prompt_tokens=num_prompt_tokens,
            hit=hit,
            matched=found.matched,
            seen=found.seen,
            reason=Reason.DISABLED,
            checkpoint=checkpoint,
            groups=self._layout.groups,
            tables=tuple(
                PageTable(shared := path_pages(found.path, index, group, found.matched), len(shared))
                for index, group in enumerate(self._layout.groups)
            ),
            node=found.path[-1] if found.path else None,
            decode_from=num_prompt_tokens if self._exact else length,
            _keys=keys,
            num_tokens=length,
            committed=found.matched,
            restore=checkpoint.pages if checkpoint is not None else None,
            walk=found,
            known=may.deepest_known(found),
            left=found.left_before_end(),
            ways=found.ways_on(),
        )


def missed(
    placement: Placement,
    lease: Lease,
    found: Walk,
    running: Iterable[Lease],
    roots: Mapping[Namespace, Node],
) -> tuple[Stretch, ...]:
    """Why each prompt token behind `lease.hit` was not hit: stretches that follow one another from the hit to the
    prompt's end, ascending. O(nodes behind the hit).

    hit ........... matched ........ seen ............ computed now ....... n
        no checkpoint       dropped        in progress          never seen

    A checkpoint that is gone says why, and would have saved what is above it, down to the next one that is gone.
    """
    length, position = lease.num_prompt_tokens, lease.hit
    if position >= length:
        return ()
    stretches = _known(placement, lease, found)
    seen = max(position, min(found.seen, length))
    computed = min(_being_computed(lease, max(seen, position + 1), running), length)
    unkept = Reason.IN_PROGRESS if computed else Reason.NO_CHECKPOINT
    ends = [(end, unkept if reason is None else reason) for end, reason in stretches]
    if computed > seen:
        ends.append((computed, Reason.IN_PROGRESS))
    position = max(seen, computed)
    # only the unsalted namespace is ever compared: to name another salt's prompts would tell its secrets
    plain = Namespace(lease.namespace.adapter)
    root = roots.get(plain) if lease.namespace != plain and position < length else None
    if root is not None and (elsewhere := walk(root, TokenKey(lease.keys[:length])).seen) > position:
        ends.append((elsewhere, Reason.NAMESPACE))
        position = elsewhere
    if position < length:
        ends.append((length, Reason.NEVER_SEEN))
    # where two neighbours have one reason, the later end speaks for both
    return tuple(end for end, after in zip(ends, [*ends[1:], None], strict=True) if after is None or end[1] != after[1])


def _known(placement: Placement, lease: Lease, found: Walk) -> list[tuple[int, Reason | None]]:
    """The stretches up to where the prompt was ever seen; None: the keys and values are there, and no checkpoint is or
    was."""
    length = lease.num_prompt_tokens
    if found.seen <= lease.hit:
        return []
    short = lease.num_tokens < placement.min_cacheable or found.seen < placement.min_shared
    stretches: list[tuple[int, Reason | None]] = []
    gone: Reason | None = None
    # a node that may be read in part stands in both lists, which makes two stretches with one end and one reason
    for node in chain(reversed(found.beyond), reversed(found.path)):
        if node.end <= lease.hit:
            break
        if node.loss is not None and node.end <= found.seen:
            gone = node.loss
        reason = gone
        if short and gone is not Reason.PREEMPTED:
            reason = Reason.TOO_SHORT
        elif gone is None and not node.resident:
            reason = Reason.EVICTED
        if node.start < length:
            stretches.append((min(node.end, found.seen, length), reason))
    return stretches[::-1]


def _being_computed(lease: Lease, least: int, running: Iterable[Lease]) -> int:
    """The longest prefix, of at least `least` tokens, that this prompt shares with one that is still in prefill; 0 if
    there is none. Compares no more than `_MAX_COMPARED` tokens."""
    longest, compared, keys = 0, 0, lease.keys
    for other in running:
        if other is lease or other.committed >= other.num_prompt_tokens:
            continue
        # it has to go on where the longest so far ends, which one look tells of nearly all that do not
        last = max(longest, least - 1)
        if last >= len(keys) or compared >= _MAX_COMPARED:
            break
        if other.num_tokens <= last or other.keys[last] != keys[last] or other.namespace != lease.namespace:
            continue
        shared = common_tokens(keys, other.keys, _MAX_COMPARED - compared)
        compared += shared + 1
        if shared >= least:
            longest = max(longest, shared)
    return longest
