"""The pages, key tokens and state pages of one running request.

    tokens   0 ........... c ............ m ............... num_tokens
             cached          keys and       computed and
             (hit)           values shared  written here

Pages of tokens below m belong to the tree and are only read; the lock on their nodes keeps them, so that a long hit
need not count each. Those from m on are this sequence's alone. Where m falls inside a page, that page is copied before
the first write.

Of a group of limited reach it has the pages of the last tokens before c alone. They are trimmed from nodes whoever has
locked these, so a sequence refers to each itself, and releases those that lie behind its reach as it goes on. Where a
layout has such a group m is c, for what lies between them may be gone.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cairn.cache.checkpoint import Kind, Lineage
from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import AttentionGroup
from cairn.cache.reasons import Reason, first_reason
from cairn.cache.tree import Checkpoint, Node, Walk
from cairn.keys import KeyBuffer
from cairn.types import Keys, Pages

__all__ = [
    "MissSpan",
    "Namespace",
    "PagePin",
    "PageTable",
    "PageTables",
    "PendingState",
    "PrefixMatch",
    "SequenceBlocks",
]

MissSpan = tuple[int, Reason]
"""The end of a span of prompt tokens, which begins where the one before it ends, and why its tokens were not hit."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Which root a prompt belongs to. Prompts of different namespaces never share anything."""

    adapter: str = ""
    cache_salt: str | None = None


class PageTable:
    """The page list of one attention group of one sequence; grows at the end, in amortised O(1).

    The first `num_shared` pages are those of nodes that the sequence has locked, which keeps them; to the others the
    sequence refers itself. `num_sent`: entries that plans have told the runner, and that have not changed since.
    `length`: entries. Those of pages before the one with token `first_token` are not the sequence's: what lies there is
    behind the reach.
    """

    __slots__ = ("_pages", "first_token", "group", "length", "num_sent", "num_shared")

    def __init__(self, group: AttentionGroup, pages: Pages, num_shared: int = 0, first_token: int = 0) -> None:
        """`pages` [n]: from the one that holds token `first_token` on."""
        self.group = group
        self.first_token = first_token
        # entries before the first one are never read
        self._pages = (
            np.concatenate([np.zeros(first_page, np.int32), pages]) if (first_page := self.first_page) else pages
        )
        self.length = len(self._pages)
        self.num_shared = num_shared
        self.num_sent = 0

    @classmethod
    def shared(cls, part: GroupPages) -> "PageTable":
        """The table of a hit: pages of the tree, kept by the lock on its nodes unless their group has a limited
        reach."""
        num_shared = len(part.pages) if part.group.reach is None else 0
        return cls(part.group, part.pages, num_shared, part.first_token if part.group.reach is not None else 0)

    @property
    def first_page(self) -> int:
        """The first entry that counts."""
        return self.first_token // self.group.tokens_per_page

    @property
    def pages(self) -> Pages:
        """A view, shape [length - first_page]; later growth does not change it."""
        return self._pages[self.first_page : self.length]

    @property
    def owned_pages(self) -> Pages:
        """The pages that the sequence itself refers to."""
        return self._pages[max(self.first_page, self.num_shared) : self.length]

    def upto(self, num_tokens: int) -> GroupPages:
        """The pages of the first `num_tokens` tokens, as far as they are here: a view."""
        first_page = self.first_page
        end = max(first_page, min(self.length, self.group.pages_for(num_tokens)))
        return GroupPages(self.group, self.first_token, self._pages[first_page:end])

    def span(self, start: int, end: int) -> GroupPages:
        """The pages that tokens [start, end) touch, as far as they are here: a copy."""
        size, start = self.group.tokens_per_page, max(start, self.first_token)
        if start >= end:
            return GroupPages(self.group, end, np.empty(0, np.int32))
        return GroupPages(self.group, start, self._pages[start // size : min(self.length, -(-end // size))].copy())

    def whole_pages(self, part: GroupPages) -> GroupPages:
        """The same pages of this table, from the first token on that is the sequence's in the first of them."""
        if not len(part.pages):
            return part
        first_token = max(self.first_token, part.first_page * self.group.tokens_per_page)
        return GroupPages(self.group, first_token, part.pages)

    def drop_before(self, token: int) -> Pages:
        """Give up the pages before the one that holds `token`, which comes next where the table does not reach as far.
        They become the caller's: shape [n]."""
        first_page, length = self.first_page, self.length
        self.first_token = max(self.first_token, token)
        dropped = self._pages[first_page : min(self.first_page, length)]
        if self.first_page > length:
            self.append(np.zeros(self.first_page - length, np.int32))
        return dropped

    def append(self, pages: Pages) -> None:
        """Add pages at the end."""
        end = self.length + len(pages)
        if end > len(self._pages):
            grown = np.empty(max(end, 2 * len(self._pages), 8), np.int32)
            grown[: self.length] = self._pages[: self.length]
            self._pages = grown
        self._pages[self.length : end] = pages
        self.length = end

    def replace_last(self, page: int) -> None:
        """Put another page in the last place, leaving arrays that were handed out as they are."""
        self._pages = self._pages.copy()
        self._pages[self.length - 1] = page
        self.num_shared = min(self.num_shared, self.length - 1)
        self.num_sent = min(self.num_sent, self.length - 1)

    def drain_updates(self) -> tuple[int, Pages]:
        """The entries that the runner does not know yet: the index of the first one, and all from there on. They count
        as sent from now on."""
        first, self.num_sent = self.num_sent, self.length
        return first, self._pages[first : self.length]


@dataclass(slots=True)
class PendingState:
    """The pages of a checkpoint that a plan has named and no commit has attached yet. `retain_seconds`: how long the
    client asks to retain it. `forced`: it was asked for whatever the policy says."""

    pages: Pages
    kind: Kind
    retain_seconds: int = 0
    forced: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PagePin:
    """Pages that are kept whatever becomes of tree and sequences: another server reads them, or a link may still write
    to them. `for_requests`: requests of this server are going to start from them instead."""

    pages: Pages
    for_requests: bool = False


class PageTables:
    """The page tables of one sequence, one for each attention group. `copied`: the page that tokens from `matched` on
    are written into is the sequence's own."""

    __slots__ = ("copied", "tables")

    def __init__(self, tables: tuple[PageTable, ...]) -> None:
        self.tables = tables
        self.copied = False

    def upto(self, num_tokens: int) -> tuple[GroupPages, ...]:
        """Per group the pages of the first `num_tokens` tokens: views."""
        return tuple(table.upto(num_tokens) for table in self.tables)

    def span(self, start: int, end: int) -> tuple[GroupPages, ...]:
        """Per group the pages that tokens [start, end) touch: copies, and none where there are no such tokens."""
        return tuple(table.span(start, end) for table in self.tables) if start < end else ()

    def needed_at(self, position: int) -> tuple[GroupPages, ...]:
        """Per group the pages that going on at token `position` needs, as far as they are here: copies."""
        return tuple(table.span(table.group.needed_at(position), position) for table in self.tables)

    def span_to_fill(self, start: int, end: int) -> tuple[GroupPages, ...]:
        """As `span`, each part from the first token on that its pages may hold: whoever fills them fills them whole."""
        parts = self.span(start, end)
        return tuple(table.whole_pages(part) for table, part in zip(self.tables, parts, strict=False))

    @property
    def capacity(self) -> int:
        """Tokens for which there are pages in all groups; without groups as many as one likes."""
        capacity = sys.maxsize
        for table in self.tables:
            capacity = min(capacity, table.group.tokens_per_page * table.length)
        return capacity

    def missing_pages(self, num_tokens: int, step_end: int | None = None) -> int:
        """How many pages `num_tokens` tokens need beyond those held. `step_end`: the tokens that count for groups of
        limited reach, if these are others."""
        num_pages = 0
        for table in self.tables:
            end = num_tokens if step_end is None or table.group.reach is None else step_end
            missing = table.group.pages_for(end) - table.length
            if missing > 0:
                num_pages += missing
        return num_pages

    @property
    def num_pages(self) -> int:
        """All pages held, with those of the tree."""
        return sum(table.length - table.first_page for table in self.tables)


@dataclass(slots=True)
class PrefixMatch:
    """What a lookup found of a prompt, in tokens: `hit` <= `matched` are c and m above, `ever_matched` >= `matched` the
    longest prefix that was ever cached.

    `checkpoint`: that of the hit; `restore`: its pages; `received`: tokens of `hit` that came from another server.
    `last_checkpoint_node`: the node of the deepest checkpoint that is or was on the path. `left`: the lineage of the
    path that goes on where this prompt leaves it as the first one. `lineage`: of the checkpoints that this request
    takes, once it runs.
    `miss_spans`: why the tokens after the hit were not hit, ascending from the hit on; tokens after the last span
    have `miss_reason`, which also speaks for the whole prompt. `walk`: of a probe, until it is explained.
    """

    hit: int
    matched: int
    ever_matched: int
    checkpoint: Checkpoint | None = None
    restore: Pages | None = None
    received: int = 0
    last_checkpoint_node: Node | None = None
    left: Lineage | None = None
    lineage: Lineage = field(default_factory=Lineage)
    miss_reason: Reason = Reason.NONE
    miss_spans: tuple[MissSpan, ...] = ()
    walk: Walk | None = None


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """The pages, tokens and pending states of one running request, from its lookup on.

    `tokens`: the prompt, of `num_prompt_tokens` key tokens, and the tokens appended to it. `node`: the deepest node
    that it has locked. `committed`: tokens that are in the tree. `decode_from`: tokens from here on were, or will be,
    computed by decode steps. `pending_states`: by position, until they are committed. `transient`: pages that
    only the next step needs. `retained_breakpoints`: positions of checkpoints that are retained at its client's
    request.
    """

    request_id: str
    namespace: Namespace
    num_prompt_tokens: int
    match: PrefixMatch
    blocks: PageTables
    tokens: KeyBuffer
    node: Node | None
    decode_from: int
    committed: int = 0
    pending_states: dict[int, PendingState] = field(default_factory=dict)
    transient: list[Pages] = field(default_factory=list)
    retained_breakpoints: set[int] = field(default_factory=set)
    closed: bool = False

    # -- the match -----------------------------------------------------------------------------------------------

    @property
    def hit(self) -> int:
        """Tokens that need not be computed."""
        return self.match.hit

    @property
    def matched(self) -> int:
        """Tokens whose keys and values are shared with the tree."""
        return self.match.matched

    @property
    def ever_matched(self) -> int:
        """Tokens that were cached at some time."""
        return self.match.ever_matched

    @property
    def kv_write_from(self) -> int:
        """The first token whose keys and values are written."""
        return self.match.matched

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint of the hit."""
        return self.match.checkpoint

    @property
    def restore(self) -> Pages | None:
        """The state pages to go on from."""
        return self.match.restore

    @property
    def received(self) -> int:
        """Tokens of the hit that came from another server."""
        return self.match.received

    def state_pages(self, position: int) -> Pages | None:
        """The pages of the state at `position`: the restored ones, or those that this request has reserved."""
        if self.match.hit == position and self.match.restore is not None:
            return self.match.restore
        pending = self.pending_states.get(position)
        return None if pending is None else pending.pages

    def receive(self, num_tokens: int, hit: int, restore: Pages | None) -> None:
        """Another server has brought the first `num_tokens` tokens. `hit` of them need not be computed; the pages
        `restore` has the state there, None where none is needed."""
        match = self.match
        match.restore, match.checkpoint = restore, None
        match.received, match.hit = hit - match.hit, hit
        match.matched, match.ever_matched = max(match.matched, num_tokens), max(match.ever_matched, num_tokens)
        if match.hit == self.num_tokens or match.miss_spans:
            self.explain(match.miss_spans)

    @property
    def reason(self) -> Reason:
        """The reason that speaks for all tokens that were not hit."""
        return self.match.miss_reason

    def explain(self, spans: tuple[MissSpan, ...]) -> None:
        """Set the miss spans, and the reason to the first of `Reason` that has cost tokens of the prompt."""
        self.match.miss_spans = spans
        self.match.miss_reason = first_reason({reason for end, reason in spans if end > self.hit})

    def set_miss_reason(self, reason: Reason) -> None:
        """Give one reason for all tokens that were not hit."""
        self.match.miss_spans, self.match.miss_reason = (), reason

    def set_first_miss(self, end: int, reason: Reason) -> None:
        """Give another reason for the tokens that were not hit up to `end`, exclusive."""
        if end > self.hit:
            self.explain(((end, reason), *(span for span in self.match.miss_spans if span[0] > end)))

    def iter_misses(self) -> Iterator[tuple[int, int, Reason]]:
        """Start, end and reason of the spans of prompt tokens that were not hit: with `hit` they are the prompt."""
        position = self.hit
        for end, reason in (*self.match.miss_spans, (self.num_prompt_tokens, self.match.miss_reason)):
            if end > position:
                yield position, end, reason
                position = end

    @property
    def lost(self) -> dict[Reason, int]:
        """Prompt tokens that were not hit, by reason."""
        lost: dict[Reason, int] = {}
        for start, end, reason in self.iter_misses():
            lost[reason] = lost.get(reason, 0) + end - start
        return lost

    # -- tokens and pages ----------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and what was appended to it."""
        return self.tokens.num_tokens

    @property
    def keys(self) -> Keys:
        """The prompt and what was appended to it, shape [num_tokens]."""
        return self.tokens.keys

    def append(self, token: int) -> None:
        """One more key token, sampled or replayed."""
        self.tokens.append(token)

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """The page table of each attention group."""
        return self.blocks.tables

    # -- copies --------------------------------------------------------------------------------------------------

    def branch(self, state: Pages, request_id: str) -> "SequenceBlocks":
        """A sequence like this one that ends with the prompt, where it goes on from the pages `state`. Nothing is
        counted for it yet."""
        length = self.num_prompt_tokens
        return SequenceBlocks(
            request_id=request_id,
            namespace=self.namespace,
            num_prompt_tokens=length,
            match=PrefixMatch(length, length, length, restore=state, lineage=self.match.lineage),
            blocks=PageTables(
                tuple(PageTable(part.group, part.pages, 0, part.first_token) for part in self.blocks.upto(length))
            ),
            tokens=KeyBuffer(self.keys[:length]),
            node=self.node,
            decode_from=length,
            committed=min(self.committed, length),
        )
