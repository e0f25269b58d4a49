"""Lookups: what is cached of a prompt, what of it may be used, and why it is not more."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from cairn.cache.checkpoint import Lineage, Origin
from cairn.cache.eviction import EvictionPolicy
from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import PlacementPolicy
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import (
    MissSpan,
    Namespace,
    PageTable,
    PageTables,
    PrefixMatch,
    SequenceBlocks,
)
from cairn.cache.tree import Checkpoint, Node, TokenKey, Walk, path_pages, resumable_ends, walk
from cairn.keys import KeyBuffer, common_tokens
from cairn.types import Keys

Parts = tuple[GroupPages, ...]

_MAX_COMPARED = 1 << 19
"""Most tokens of running requests that one lookup compares."""

_MAX_MEMOIZED = 64
"""Most lookups whose results are reused."""

_MAX_JOINED = 64
"""Most paths whose page lists are reused: they take four bytes a page."""


@dataclass(frozen=True, slots=True)
class OriginFilter:
    """The nodes and checkpoints that a request may use: all of them, in exact mode depending on their origin.

    `num_prompt_tokens`: computed by prefill. A request that was preempted (`resumed`) may also use what its own decode
    steps have built after the prompt, and nobody else's.
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

    def deepest(self, prompt_walk: Walk, ends: Sequence[int] | None) -> Checkpoint | None:
        """The deepest checkpoint on the matched path that may be restored. `ends`: of `resumable_ends`; None where
        attention has no limited reach."""
        for place in range(len(prompt_walk.path) - 1, -1, -1):
            node = prompt_walk.path[place]
            checkpoint = node.checkpoint
            if checkpoint is not None and node.end <= prompt_walk.matched and self.accepts(checkpoint):
                if ends is None or ends[place]:
                    return checkpoint
        return None

    def deepest_checkpoint_node(self, prompt_walk: Walk, eviction: EvictionPolicy) -> Node | None:
        """The node of the deepest checkpoint on the path that may be restored, or might if it were still there."""
        for node in chain(reversed(prompt_walk.evicted_tail), reversed(prompt_walk.path)):
            origin = eviction.recorded_origin(node)
            if origin is not None and node.end <= prompt_walk.ever_matched and self._accepts(origin, node.end, None):
                return node
        return None

    def accepts(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint on the prompt's path may be restored."""
        return self._accepts(checkpoint.origin, checkpoint.position, checkpoint.maker)

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


class _Known(NamedTuple):
    """What a lookup knows of a prompt of `keys`, in the words of `PrefixMatch` and `SequenceBlocks`. `shared`: the
    pages of the tokens before `matched`."""

    keys: Keys
    walk: Walk
    hit: int
    matched: int
    checkpoint: Checkpoint | None
    shared: Parts
    node: Node | None
    last_checkpoint_node: Node | None
    left: Lineage | None


class PrefixLookup:
    """Looks prompts up in the trees. `exact`: see `OriginFilter`; `eviction` has records of dropped checkpoints.

    Results are reused as long as the trees do not change: a request that waits for room is looked up in every step.
    """

    def __init__(self, layout: CacheLayout, exact: bool, eviction: EvictionPolicy) -> None:
        self._layout = layout
        self._exact = exact
        self._eviction = eviction
        self._memo: dict[tuple[Namespace, str, int | None], _Known] = {}
        self._joined: OrderedDict[Node, tuple[Parts | None, Parts]] = OrderedDict()
        self._version = 0

    def find(
        self,
        version: int,
        root: Node | None,
        namespace: Namespace,
        keys: Keys,
        request_id: str,
        resumed_from: int | None,
    ) -> SequenceBlocks:
        """The sequence of what is usable of `keys` below `root` (None: nothing), which refers to nothing yet. `version`
        is another one when anything in the trees is. The others as in `PrefixCache.lookup`."""
        if version != self._version or len(self._memo) >= _MAX_MEMOIZED:
            self._memo.clear()
            self._version = version
        name = (namespace, request_id, resumed_from)
        num_prompt_tokens = len(keys) if resumed_from is None else resumed_from
        known = self._memo.get(name)
        if known is None or not np.array_equal(known.keys, keys):
            may = OriginFilter(self._exact, request_id, num_prompt_tokens, resumed_from is not None)
            known = self._memo[name] = self._find(root, keys, may)
        return SequenceBlocks(
            request_id=request_id,
            namespace=namespace,
            num_prompt_tokens=num_prompt_tokens,
            match=PrefixMatch(
                hit=known.hit,
                matched=known.matched,
                ever_matched=known.walk.ever_matched,
                checkpoint=known.checkpoint,
                restore=known.checkpoint.pages if known.checkpoint is not None else None,
                last_checkpoint_node=known.last_checkpoint_node,
                left=known.left,
                miss_reason=Reason.DISABLED,
                walk=known.walk,
            ),
            blocks=PageTables(tuple(map(PageTable.shared, known.shared))),
            tokens=KeyBuffer(keys),
            node=known.node,
            decode_from=num_prompt_tokens if self._exact else len(keys),
            committed=known.matched,
        )

    def _find(self, root: Node | None, keys: Keys, may: OriginFilter) -> "_Known":
        length = len(keys)
        prompt_walk = walk(root, TokenKey(keys), may.run_end()) if root is not None else Walk()
        path, groups = prompt_walk.path, self._layout.groups
        ends = resumable_ends(path, prompt_walk.matched, groups) if self._layout.is_limited else None
        checkpoint = may.deepest(prompt_walk, ends)
        hit = checkpoint.position if checkpoint is not None else 0
        if self._layout.resumes_anywhere and hit < min(prompt_walk.matched, length - 1):
            # nothing to restore: keys and values alone resume anywhere, and the last token gives the logits
            anywhere = min(prompt_walk.matched, length - 1)
            if ends is not None:
                anywhere = max(resumable_ends(path, anywhere, groups), default=0)
            if hit < anywhere:
                hit, checkpoint = anywhere, None
        matched = hit if ends is not None else prompt_walk.matched
        return _Known(
            keys,
            prompt_walk,
            hit,
            matched,
            checkpoint,
            self._shared_pages(path, matched),
            next((node for node in reversed(path) if node.start < matched), None),
            may.deepest_checkpoint_node(prompt_walk, self._eviction),
            prompt_walk.left(),
        )

    def _shared_pages(self, path: Sequence[Node], matched: int) -> Parts:
        """`path_pages` of all groups. They begin with what an earlier lookup has joined: the next prompt of a session
        goes on a few nodes below the one before it, on paths of a hundred whose lists lie apart in memory."""
        groups = self._layout.groups
        if self._exact or self._layout.is_limited:  # where nodes may get other pages than those below them go on from
            return tuple(path_pages(path, matched, index, group) for index, group in enumerate(groups))
        # of a node that is matched in part the first page may take the place of one above it, and it may go before that
        whole = len(path) - bool(path and path[-1].end > matched)
        known = next((place for place in range(whole, 0, -1) if self._is_joined(path[place - 1])), 0)
        joined = self._joined[path[known - 1]][1] if known else None
        if whole > known:
            joined = _go_on(groups, path[known:whole], path[whole - 1].end, joined)
            self._joined[path[whole - 1]] = path[whole - 1].pages, joined
            if len(self._joined) > _MAX_JOINED:
                self._joined.popitem(last=False)
        if whole:
            self._joined.move_to_end(path[whole - 1])
        return _go_on(groups, path[whole:], matched, joined) if joined is None or whole < len(path) else joined

    def joined(self) -> Iterator[tuple[Node, Parts]]:
        """For the audit: nodes, and the pages up to their ends that the next lookups begin with."""
        return ((node, parts) for node, (_, parts) in self._joined.items() if self._is_joined(node))

    def _is_joined(self, node: Node) -> bool:
        """Whether there is a list up to the end of `node`, and since then that has kept its pages and with them those
        of all nodes above it."""
        return node in self._joined and self._joined[node][0] is node.pages


def _go_on(groups: Sequence[AttentionGroup], path: Sequence[Node], end: int, before: Parts | None) -> Parts:
    parts = repeat(None) if before is None else before
    return tuple(path_pages(path, end, index, *pair) for index, pair in enumerate(zip(groups, parts, strict=False)))


def miss_reasons(
    placement: PlacementPolicy,
    sequence: SequenceBlocks,
    prompt_walk: Walk,
    running: Iterable[SequenceBlocks],
    roots: Mapping[Namespace, Node],
) -> tuple[MissSpan, ...]:
    """Why each prompt token after `sequence.hit` was not hit: spans that follow one another from the hit to the
    prompt's end, ascending. O(nodes after the hit).

    hit ........... matched .... ever matched ........ computed now .......... n
        no checkpoint       dropped        in progress        rewritten, never seen

    A checkpoint that is gone says why, and would have saved what is above it, down to the next one that is gone.
    """
    length, position = sequence.num_prompt_tokens, sequence.hit
    if position >= length:
        return ()
    spans = _known(placement, sequence, prompt_walk)
    ever_matched = max(position, min(prompt_walk.ever_matched, length))
    computed = min(_being_computed(sequence, max(ever_matched, position + 1), running), length)
    unkept = Reason.IN_PROGRESS if computed else Reason.NO_CHECKPOINT
    ends = [(end, unkept if reason is None else reason) for end, reason in spans]
    if computed > ever_matched:
        ends.append((computed, Reason.IN_PROGRESS))
    position = max(ever_matched, computed)
    # only the unsalted namespace is ever compared: to name another salt's prompts would tell its secrets
    plain = Namespace(sequence.namespace.adapter)
    root = roots.get(plain) if sequence.namespace != plain and position < length else None
    if root is not None and (elsewhere := walk(root, TokenKey(sequence.keys[:length])).ever_matched) > position:
        ends.append((elsewhere, Reason.NAMESPACE))
        position = elsewhere
    if position < (answer_end := min(prompt_walk.ever_matched + prompt_walk.unused_answer(), length)):
        ends.append((answer_end, Reason.REWRITTEN))
        position = answer_end
    if position < length:
        ends.append((length, Reason.NEVER_SEEN))
    # where two neighbours have one reason, the later end speaks for both
    return tuple(end for end, after in zip(ends, [*ends[1:], None], strict=True) if after is None or end[1] != after[1])


def _known(placement: PlacementPolicy, sequence: SequenceBlocks, prompt_walk: Walk) -> list[tuple[int, Reason | None]]:
    """The spans up to where the prompt was ever seen; None: the keys and values are there, and no checkpoint is or
    was."""
    length = sequence.num_prompt_tokens
    if prompt_walk.ever_matched <= sequence.hit:
        return []
    short = sequence.num_tokens < placement.min_cacheable or prompt_walk.ever_matched < placement.min_shared
    spans: list[tuple[int, Reason | None]] = []
    gone: Reason | None = None
    # a node that may be read in part stands in both lists, which makes two spans with one end and one reason
    for node in chain(reversed(prompt_walk.evicted_tail), reversed(prompt_walk.path)):
        if node.end <= sequence.hit:
            break
        if node.loss is not None and node.end <= prompt_walk.ever_matched:
            gone = node.loss
        reason = gone
        if short and gone is not Reason.PREEMPTED:
            reason = Reason.TOO_SHORT
        elif gone is None and not node.resident:
            reason = Reason.EVICTED
        if node.start < length:
            spans.append((min(node.end, prompt_walk.ever_matched, length), reason))
    return spans[::-1]


def _being_computed(sequence: SequenceBlocks, least: int, running: Iterable[SequenceBlocks]) -> int:
    """The longest prefix, of at least `least` tokens, that this prompt shares with one that is still in prefill; 0 if
    there is none. Compares no more than `_MAX_COMPARED` tokens."""
    longest, compared, keys = 0, 0, sequence.keys
    for other in running:
        if other is sequence or other.committed >= other.num_prompt_tokens:
            continue
        # it has to go on where the longest so far ends, which one look tells of nearly all that do not
        last = max(longest, least - 1)
        if last >= len(keys) or compared >= _MAX_COMPARED:
            break
        if other.num_tokens <= last or other.keys[last] != keys[last] or other.namespace != sequence.namespace:
            continue
        shared = common_tokens(keys, other.keys, _MAX_COMPARED - compared)
        compared += shared + 1
        if shared >= least:
            longest = max(longest, shared)
    return longest
