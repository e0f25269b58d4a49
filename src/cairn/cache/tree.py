"""The radix tree over key tokens: nodes, the walk along a prompt, and the split.

A node covers tokens [start, end) of every path through it and lists, per attention group, the pages that hold them:

    group pages   start // t  ...  ceil(end / t) - 1        (t = tokens per page)

A node that starts inside a page lists that page, too: its own copy, which holds the last tokens of its parent as
well, or the parent's page itself where the same request wrote on. Along a path the page of the deepest node wins.

A node whose pages are gone is a *ghost*: it still says what was once seen, and has no resident children.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cairn.cache.checkpoint import Checkpoint
from cairn.cache.layout import AttentionGroup
from cairn.cache.reasons import Reason
from cairn.cache.reuse import Reuse
from cairn.types import Pages

__all__ = ["KEY_BYTES", "Node", "Walk", "common_prefix", "path_pages", "split", "walk"]

KEY_BYTES = 8


class Node:
    """One run of key tokens. `raw` is their bytes (int64), so that comparing a run is one memcmp.

    `decode_by` names the request whose decode steps built the keys and values, None if prefill built them.
    `locks` counts the leases whose path goes through here. `loss` is why the checkpoint at `end` is gone. `reuse` is
    the record of the checkpoint that is or was there. `prompt_end`: where the prompt ended that this run came with.
    """

    __slots__ = (
        "checkpoint",
        "children",
        "decode_by",
        "end",
        "locks",
        "loss",
        "pages",
        "parent",
        "prompt_end",
        "raw",
        "resident_children",
        "reuse",
        "start",
    )

    def __init__(self, parent: "Node | None", raw: bytes, start: int) -> None:
        self.parent = parent
        self.raw = raw
        self.start = start
        self.end = start + len(raw) // KEY_BYTES
        self.children: dict[int, Node] = {}
        self.resident_children = 0
        self.pages: tuple[Pages, ...] | None = None
        self.checkpoint: Checkpoint | None = None
        self.decode_by: str | None = None
        self.locks = 0
        self.loss: Reason | None = None
        self.reuse: Reuse | None = None
        self.prompt_end = 0

    @property
    def resident(self) -> bool:
        return self.pages is not None or self.parent is None

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def key(self) -> int:
        """The first key token, under which the parent lists this node."""
        return int.from_bytes(self.raw[:KEY_BYTES], sys.byteorder, signed=True)


@dataclass(slots=True)
class Walk:
    """How far a prompt is known. `path`: resident nodes in order, the last one perhaps matched in part.

    `matched` tokens have usable keys and values; `seen` >= `matched` tokens were seen at some time. `beyond`: the
    nodes that only `seen` counts.
    """

    path: list[Node] = field(default_factory=list)
    beyond: list[Node] = field(default_factory=list)
    matched: int = 0
    seen: int = 0

    def ways_on(self) -> int:
        """How many ways on are known from where the prompt leaves what was seen."""
        last = self.beyond[-1] if self.beyond else self.path[-1] if self.path else None
        if last is None:
            return 0
        return 1 if self.seen < last.end else len(last.children)

    def left_before_end(self) -> int:
        """How far before its end the prompt that was here first was left inside a run, where nobody left it before; 0
        if it was not."""
        last = self.beyond[-1] if self.beyond else self.path[-1] if self.path else None
        if last is None or self.seen >= last.end:
            return 0
        return max(0, last.prompt_end - self.seen)


def common_prefix(child: Node, raw: bytes | memoryview, position: int, length: int) -> int:
    """How many of the node's tokens equal those of the `length` tokens of `raw` from token `position` on."""
    count = min(child.num_tokens, length - position)
    ours = np.frombuffer(raw, np.int64, count, position * KEY_BYTES)
    differs = ours != np.frombuffer(child.raw, np.int64, count)
    return int(differs.argmax()) if differs.any() else count


def walk(root: Node, raw: bytes | memoryview, usable: Callable[[Node], int] | None = None) -> Walk:
    """Follow the key tokens of `raw` (int64, contiguous) down from `root`. `usable(node)` says up to which position its
    keys and values may be used; None: all of them."""
    octets = memoryview(raw).cast("B")
    tokens, length = octets.cast("q"), len(octets) // KEY_BYTES
    path: list[Node] = []
    beyond: list[Node] = []
    node, position, matched = root, 0, 0
    while position < length:
        child = node.children.get(tokens[position])
        if child is None:
            break
        end = child.end
        # nearly every node is matched whole, and these lines are most of what a lookup costs
        whole = end <= length and child.raw.startswith(octets[position * KEY_BYTES : end * KEY_BYTES])
        if whole and usable is None and matched == position and child.pages is not None:
            path.append(child)
            node, position, matched = child, end, end
            continue
        if not whole:
            end = position + common_prefix(child, raw, position, length)
        if matched == position and child.pages is not None:
            readable = end if usable is None else min(end, usable(child))
            if readable > position:
                path.append(child)
                matched = readable
        if matched < end:
            beyond.append(child)
        position = end
        if not whole:
            break
        node = child
    return Walk(path, beyond, matched, position)


def path_pages(path: list[Node], index: int, group: AttentionGroup, num_tokens: int) -> Pages:
    """The page list of group `index` for the first `num_tokens` tokens of a path from the root, shape [pages].

    parent   | p0 | p1 |            a node that starts inside p1's tokens lists that page, too:
    child         | q1 | q2 |   ->  p0, q1, q2
    """
    tokens_per_page = group.tokens_per_page
    parts = [node.pages[index] for node in path if node.pages is not None]
    assert len(parts) == len(path), "a run on the path has no pages"
    for place in [place for place, node in enumerate(path) if node.start % tokens_per_page]:
        parts[place - 1] = parts[place - 1][:-1]
    return np.concatenate(parts)[: group.pages_for(num_tokens)] if parts else np.empty(0, np.int32)


def split(node: Node, at: int, groups: tuple[AttentionGroup, ...]) -> tuple[Node, list[Pages]]:
    """Cut `node` at token `at`; it keeps its end, its checkpoint and its identity. Returns the new upper node and
    the pages that both now list (a cut inside a page), which the caller has to count once more.

        before   parent -- [start ............ end)
        after    parent -- [start .. at) -- [at .. end)
    """
    assert node.parent is not None and node.start < at < node.end
    cut = (at - node.start) * KEY_BYTES
    upper = Node(node.parent, node.raw[:cut], node.start)
    upper.locks, upper.decode_by, upper.prompt_end = node.locks, node.decode_by, node.prompt_end
    node.parent.children[upper.key()] = upper
    shared: list[Pages] = []
    if node.pages is not None:
        above, below = [], []
        for group, pages in zip(groups, node.pages, strict=True):
            first = node.start // group.tokens_per_page
            high = pages[: group.pages_for(at) - first]
            low = pages[at // group.tokens_per_page - first :]
            if at % group.tokens_per_page:
                shared.append(low[:1])
            above.append(high)
            below.append(low)
        upper.pages, node.pages = tuple(above), tuple(below)
        upper.resident_children = 1
    node.raw, node.start, node.parent = node.raw[cut:], at, upper
    upper.children[node.key()] = node
    return upper, shared
