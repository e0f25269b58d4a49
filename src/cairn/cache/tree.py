"""The radix tree over key tokens: nodes, the walk along a prompt, and the split.

A node covers tokens [start, end) of every path through it and lists, per attention group, the pages that hold them:

    group pages   start // t  ...  ceil(end / t) - 1        (t = tokens per page)

A node that starts inside a page lists that page, too: its own copy, which holds the last tokens of its parent as
well, or the parent's page itself where the same request wrote on. Along a path the page of the deepest node wins.
Of a group of limited reach a node lists the pages of its last tokens, perhaps of none: those from `first_token` on.

A node whose pages are gone is a *ghost*: it still says what was once seen, and has no resident children. A checkpoint
hangs at a node's end.

Key tokens take four bytes each where that is enough (vocabulary ids and the numbers of images), else eight. A node has
one width for all its tokens, so that comparing it with a prompt of the same width is one memcmp.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.cache.checkpoint import Kind, Lineage, Origin
from cairn.cache.group_pages import GroupPages, join
from cairn.cache.layout import AttentionGroup
from cairn.cache.reasons import Reason
from cairn.keys import Tokens, common_tokens
from cairn.types import Keys, Pages

NARROW, WIDE = 4, 8
_MIN_NARROW, _MAX_NARROW = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def _fit_narrow(keys: NDArray[np.integer[Any]]) -> bool:
    if not len(keys):
        return True
    # one pass tells it of nearly all: a bit that any of them has shows
    if 0 <= np.bitwise_or.reduce(keys) <= _MAX_NARROW:
        return True
    return int(keys.min()) >= _MIN_NARROW and int(keys.max()) <= _MAX_NARROW


def to_int64(raw: bytes, num_tokens: int, first: int = 0, end: int | None = None) -> Keys:
    """Tokens [first, end) of the `num_tokens` tokens in `raw`, shape [n]."""
    return _tokens(raw, num_tokens)[first:end].astype(np.int64)


class TokenKey:
    """Key tokens that are looked up or added. `raw`: their bytes, `width` (4 or 8) a token. `tokens`: the same as an
    array, shape [n]. Made in O(n)."""

    __slots__ = ("raw", "tokens", "width")

    def __init__(self, keys: NDArray[np.integer[Any]]) -> None:
        narrow = _fit_narrow(keys)
        self.width = NARROW if narrow else WIDE
        self.raw = bytearray(self.width * len(keys))
        self.tokens = np.frombuffer(self.raw, np.int32) if narrow else np.frombuffer(self.raw, np.int64)
        # into the place where they are needed, for a prompt has up to a million bytes
        np.copyto(self.tokens, keys, casting="unsafe")

    def __len__(self) -> int:
        return len(self.tokens)

    def slice_raw(self, start: int, end: int) -> bytes:
        """The bytes of tokens [start, end), as a node keeps them."""
        return self.tokens[start:end].tobytes()


def narrow(keys: Keys) -> Tokens:
    """The same key tokens, shape [n], four bytes each where that is enough."""
    return keys.astype(np.int32) if _fit_narrow(keys) else keys


def common_prefix(raw: bytes, num_tokens: int, tokens: Tokens, position: int) -> int:
    """How many of the `num_tokens` tokens in `raw` equal those of `tokens`, shape [n], from `position` on."""
    return common_tokens(_tokens(raw, num_tokens), tokens[position:])


def _tokens(raw: bytes, num_tokens: int) -> NDArray[np.int32] | NDArray[np.int64]:
    return np.frombuffer(raw, np.int32) if len(raw) == num_tokens * NARROW else np.frombuffer(raw, np.int64)


class Node:
    """Key tokens [start, end) of every path through here. `raw`: their bytes, four or eight a token.

    `decode_by` names the request whose decode steps built the keys and values, None if prefill built them.
    `locks` counts the sequences of which this is the deepest node. `loss` is why the checkpoint at `end` is gone.
    `lineage`: of the request that added this node.
    """

    __slots__ = (
        "_below",
        "checkpoint",
        "decode_by",
        "end",
        "lineage",
        "locks",
        "loss",
        "pages",
        "parent",
        "raw",
        "resident_children",
        "start",
    )

    def __init__(self, parent: "Node | None", raw: bytes, start: int, end: int) -> None:
        self.parent = parent
        self.raw = raw
        self.start = start
        self.end = end
        # nearly all nodes have one child or none, and a dict takes more than all else of a node
        self._below: Node | dict[int, Node] | None = None
        self.resident_children = 0
        self.pages: tuple[GroupPages, ...] | None = None
        self.checkpoint: Checkpoint | None = None
        self.decode_by: str | None = None
        self.locks = 0
        self.loss: Reason | None = None
        self.lineage: Lineage | None = None

    @property
    def resident(self) -> bool:
        return self.pages is not None or self.parent is None

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def key(self) -> int:
        """The first key token, under which the parent lists this node."""
        width = len(self.raw) // (self.end - self.start)
        return int.from_bytes(self.raw[:width], sys.byteorder, signed=True)

    def keys(self, first: int = 0, end: int | None = None) -> Keys:
        """Its key tokens [first, end), counted from its own start, as a slice: shape [n], int64."""
        return to_int64(self.raw, self.end - self.start, first, end)

    def covers(self, keys: Keys) -> bool:
        """Whether its key tokens are these, shape [num_tokens]."""
        return np.array_equal(_tokens(self.raw, self.num_tokens), keys)

    @property
    def children(self) -> "Collection[Node]":
        """The nodes that continue from its end."""
        below = self._below
        if below is None:
            return ()
        return below.values() if isinstance(below, dict) else (below,)

    def child(self, key: int) -> "Node | None":
        """The child that begins with this key token, or None."""
        below = self._below
        if isinstance(below, dict):
            return below.get(key)
        return below if below is not None and below.key() == key else None

    def adopt(self, node: "Node") -> None:
        """Add `node` to the children, in the place of the one that begins with the same key token."""
        below = self._below
        if below is None:
            self._below = node
        elif isinstance(below, dict):
            below[node.key()] = node
        elif (first := below.key()) == (key := node.key()):
            self._below = node
        else:
            self._below = {first: below, key: node}

    def disown(self, node: "Node") -> None:
        """Remove `node` from the children."""
        below = self._below
        if not isinstance(below, dict):
            assert below is node
            self._below = None
            return
        del below[node.key()]
        if len(below) == 1:
            (self._below,) = below.values()


class Checkpoint:
    """The pages with the state at the end of `node`, from which prompts resume. `maker`: the request that
    computed it.

    `version` is that of its newest entry in the eviction queue. `hits` and `last_used` (a tick) are for eviction.
    `retained_until`: a clock reading in seconds while a client retains it, else None; each hit retains it for
    `retain_seconds` from then on.
    """

    __slots__ = (
        "hits",
        "kind",
        "last_used",
        "maker",
        "node",
        "origin",
        "pages",
        "retain_seconds",
        "retained_until",
        "version",
    )

    def __init__(self, node: "Node", pages: Pages, kind: Kind, origin: Origin, maker: str) -> None:
        self.node = node
        self.pages = pages
        self.kind = kind
        self.origin = origin
        self.maker = maker
        self.hits = 0
        self.last_used = 0
        self.version = 0
        self.retained_until: float | None = None
        self.retain_seconds = 0

    @property
    def position(self) -> int:
        return self.node.end


@dataclass(slots=True)
class Walk:
    """How far a prompt is known. `path`: resident nodes in order, the last one perhaps matched in part.

    `matched` tokens have usable keys and values; `ever_matched` >= `matched` tokens were seen at some time.
    `evicted_tail`: the nodes that only `ever_matched` counts.
    """

    path: list[Node] = field(default_factory=list)
    evicted_tail: list[Node] = field(default_factory=list)
    matched: int = 0
    ever_matched: int = 0

    @property
    def last(self) -> Node | None:
        """The deepest node that the prompt has reached."""
        return self.evicted_tail[-1] if self.evicted_tail else self.path[-1] if self.path else None

    def left(self) -> Lineage | None:
        """The lineage of the path that goes on where this prompt leaves it as nobody did before; None if it does
        not."""
        last = self.last
        if last is None or self.ever_matched < last.end:
            return last.lineage if last is not None else None
        (below, *others) = last.children or (None,)
        return last.lineage if below is not None and not others and below.lineage is last.lineage else None

    def unused_answer(self) -> int:
        """Tokens of an earlier request's path, up to the end of its answer, that come after what this prompt shares
        with it, if that ends after the last message: within the answer or the tokens that open it. Otherwise 0."""
        node = self.last
        if node is not None and self.ever_matched == node.end:
            node = _next_of_lineage(node)
        lineage = node.lineage if node is not None else None
        if node is None or lineage is None or self.ever_matched < lineage.message_end:
            return 0
        while (below := _next_of_lineage(node)) is not None:
            node = below
        return node.end - self.ever_matched if node.end > lineage.end else 0


def walk(root: Node, key: TokenKey, usable: Callable[[Node], int] | None = None) -> Walk:
    """Follow `key` down from `root`. `usable(node)` says up to which position its keys and values may be used; None:
    all of them."""
    raw_key, width, length = key.raw, key.width, len(key)
    path: list[Node] = []
    evicted_tail: list[Node] = []
    node, at, below, num_bytes = root, 0, root._below, len(raw_key)
    # nearly every node is resident and matched whole, and these lines are most of what a lookup costs; `at` is in bytes
    while usable is None and below is not None and at < num_bytes:
        child = below if isinstance(below, Node) else below.get(int(key.tokens[at // width]))
        if child is None or child.pages is None or not raw_key.startswith(raw := child.raw, at):
            break
        if (after := at + len(raw)) != child.end * width:
            break
        path.append(child)
        node, at, below = child, after, child._below
    position = matched = node.end
    while position < length and (next_node := node.child(int(key.tokens[position]))) is not None:
        child, end = next_node, next_node.end
        whole = raw_key.startswith(child.raw, at := position * width) and len(child.raw) == end * width - at
        if not whole:
            end = position + common_prefix(child.raw, child.num_tokens, key.tokens, position)
            whole = end == child.end
        if matched == position and child.pages is not None:
            readable = end if usable is None else min(end, usable(child))
            if readable > position:
                path.append(child)
                matched = readable
        if matched < end:
            evicted_tail.append(child)
        position = end
        if not whole:
            break
        node = child
    return Walk(path, evicted_tail, matched, position)


def path_pages(
    path: Sequence[Node], end: int, index: int, group: AttentionGroup, before: GroupPages | None = None
) -> GroupPages:
    """The pages of group `index` that going on at token `end` of a path from the root needs: those of all tokens before
    it, or of as many as are within reach. `before`: those of the nodes above `path`, which begins further down."""
    start = group.needed_at(end)
    parts: list[GroupPages] = []
    for node in reversed(path) if start < end else ():
        if node.start < end:
            assert node.pages is not None, "a node on the path has no pages"
            part = node.pages[index]
            parts.append(part if node.end <= end else part.upto(end))
            if node.start <= start:
                break
    if before is not None:
        parts.append(before)
    if not parts:
        return GroupPages(group, end, np.empty(0, np.int32))
    return join(parts[::-1]).drop_before(start)


def resumable_ends(path: Sequence[Node], limit: int, groups: Sequence[AttentionGroup]) -> list[int]:
    """How far into each node of a path from the root a prompt can go on that is known up to token `limit`, as far as
    keys and values within reach are concerned: to the node's end, or to the limit where that comes first. 0 where some
    are gone: at an earlier token of the node they are gone as well. O(nodes)."""
    limited = [(index, group) for index, group in enumerate(groups) if group.reach is not None]
    gaps = [0] * len(limited)  # up to here something is missing
    ends: list[int] = []
    for node in path:
        assert node.pages is not None, "a node on the path has no pages"
        end = min(node.end, limit)
        complete = node.start < end
        for place, (index, group) in enumerate(limited):
            first = node.pages[index].first_token
            if first > node.start:
                gaps[place] = first
            complete = complete and gaps[place] <= group.needed_at(end)
        ends.append(end if complete else 0)
    return ends


def last_keys(node: Node, num_tokens: int) -> bytes:
    """The last `num_tokens` key tokens, or all there are, of the path from the root to the end of `node`, as int64."""
    parts: list[bytes] = []
    step, missing = node, num_tokens
    while missing > 0 and step.parent is not None:
        parts.append(step.keys(-missing).tobytes())
        missing -= step.num_tokens
        step = step.parent
    return b"".join(reversed(parts))


def split(node: Node, at: int) -> tuple[Node, list[Pages]]:
    """Cut `node` at token `at`; it keeps its end, its checkpoint and its identity. Returns the new upper node and
    the pages that both now list (a cut inside a page), which the caller has to count once more.

        before   parent -- [start ............ end)
        after    parent -- [start .. at) -- [at .. end)
    """
    assert node.parent is not None and node.start < at < node.end
    cut = (at - node.start) * (len(node.raw) // node.num_tokens)
    upper = Node(node.parent, node.raw[:cut], node.start, at)
    upper.decode_by, upper.lineage = node.decode_by, node.lineage
    node.parent.adopt(upper)
    shared: list[Pages] = []
    if node.pages is not None:
        above, below = [], []
        for part in node.pages:
            high, low = part.split(at)
            if at % part.group.tokens_per_page and len(high.pages):
                shared.append(low.pages[:1])
            above.append(high)
            below.append(low)
        upper.pages, node.pages = tuple(above), tuple(below)
        upper.resident_children = 1
    node.raw, node.start, node.parent = node.raw[cut:], at, upper
    upper.adopt(node)
    return upper, shared


def next_above(node: Node) -> Checkpoint | None:
    """The next shallower checkpoint on the path to `node`."""
    above = node.parent
    while above is not None and above.checkpoint is None:
        above = above.parent
    return above.checkpoint if above is not None else None


def next_below(node: Node) -> float:
    """Where the next deeper checkpoint lies on the path that `node` was added with; infinite if there is none."""
    step = _next_of_lineage(node)
    while step is not None and step.checkpoint is None:
        step = _next_of_lineage(step)
    return inf if step is None else step.end


def _next_of_lineage(node: Node) -> Node | None:
    """Where the path goes on that `node` was added with."""
    # asked some thirty times a request, mostly of nodes with one child
    below, lineage = node._below, node.lineage
    if isinstance(below, dict):
        return next((child for child in below.values() if child.lineage is lineage), None)
    return below if below is not None and below.lineage is lineage else None
