"""A lease: what one running request holds of the pool and the tree.

    tokens   0 ........... c ............ m ............... num_tokens
             cached          keys and       computed and
             (hit)           values shared  written here

Pages of tokens below m belong to the tree and are only read; the lock on their nodes keeps them, so that a long hit
need not count each. Those from m on are this lease's alone. Where m falls inside a page, that page is copied before the
first write.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from cairn.cache.checkpoint import Kind
from cairn.cache.layout import AttentionGroup
from cairn.cache.reasons import Reason, first_reason
from cairn.cache.reuse import NO_LINEAGE, Lineage, Reuse
from cairn.cache.tree import Checkpoint, Node, Walk
from cairn.types import Keys, Pages

__all__ = ["Hold", "Lease", "Namespace", "PageTable", "PendingFile", "Stretch"]

Stretch = tuple[int, Reason]
"""Tokens up to this position, from where the stretch before it ends, and why they were not hit."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Which root a prompt belongs to. Prompts of different namespaces never share anything."""

    adapter: str = ""
    cache_salt: str | None = None


class PageTable:
    """The page list of one attention group of one lease; grows at the end, in amortised O(1).

    The first `num_shared` pages are those of nodes that the lease has locked, which keeps them; to the others the lease
    refers itself. `num_sent`: entries that plans have told the runner, and that have not changed since.
    """

    __slots__ = ("_pages", "length", "num_sent", "num_shared")

    def __init__(self, pages: Pages, num_shared: int = 0) -> None:
        self._pages = pages
        self.length = len(pages)
        self.num_shared = num_shared
        self.num_sent = 0

    @property
    def pages(self) -> Pages:
        """A view, shape [length]; later growth does not change it."""
        return self._pages[: self.length]

    @property
    def own(self) -> Pages:
        """The pages that the lease itself refers to."""
        return self._pages[self.num_shared : self.length]

    def append(self, pages: Pages) -> None:
        end = self.length + len(pages)
        if end > len(self._pages):
            grown = np.empty(max(end, 2 * len(self._pages), 8), np.int32)
            grown[: self.length] = self.pages
            self._pages = grown
        self._pages[self.length : end] = pages
        self.length = end

    def replace_last(self, page: int) -> None:
        """Put another page in the last place, leaving arrays that were handed out as they are."""
        self._pages = self._pages.copy()
        self._pages[self.length - 1] = page
        self.num_shared = min(self.num_shared, self.length - 1)
        self.num_sent = min(self.num_sent, self.length - 1)

    def take_changes(self) -> tuple[int, Pages]:
        """What a plan has to tell the runner: the index of the first entry that it does not know, and all entries from
        there on."""
        first, self.num_sent = self.num_sent, self.length
        return first, self._pages[first : self.length]


@dataclass(slots=True)
class PendingFile:
    """A checkpoint file that a plan has named and no commit has attached yet."""

    pages: Pages
    kind: Kind
    hold_seconds: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Pages that are kept whatever becomes of tree and leases: another server reads them, or a link may still write to
    them. `for_requests`: requests of this server are going to start from them instead."""

    purpose: str
    pages: Pages
    for_requests: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """What a lookup gives. `purpose` says in words who holds it and why.

    `hit` <= `matched` are c and m above, `seen` the longest prefix that was ever known, `reason` why `hit` is not
    more. `checkpoint` is that of the hit, `restore` the file to go on from, `received` how much of `hit` came from
    another server. `kv_write_from` is m. `committed`: tokens that are in the tree. `decode_from`: tokens from here on
    were, or will be, computed by decode steps. `held`: positions of checkpoints that are held because this request
    asked for it. `missed`: why the prompt's tokens behind the hit were not hit, in stretches; what they do not reach is
    the reason's. `walk`: what a probe has found, until it is explained. `known`: the record of the deepest checkpoint
    that is or was on the path; `left`: how far before its end the prompt that was here first was left by this one, 0 if
    it was not; `ways`: how many ways on were known from there; `lineage`: what all that says of this request.
    `kept`: positions that were given files; `refused`: those that were not worth one, until they are committed.
    """

    purpose: str
    request_id: str
    namespace: Namespace
    num_prompt_tokens: int
    hit: int
    matched: int
    seen: int
    reason: Reason
    checkpoint: Checkpoint | None
    groups: tuple[AttentionGroup, ...]
    tables: tuple[PageTable, ...]
    node: Node | None
    decode_from: int
    _keys: Keys
    num_tokens: int
    committed: int = 0
    restore: Pages | None = None
    received: int = 0
    files: dict[int, PendingFile] = field(default_factory=dict)
    transient: list[Pages] = field(default_factory=list)
    copied: bool = False
    closed: bool = False
    held: set[int] = field(default_factory=set)
    missed: tuple[Stretch, ...] = ()
    walk: Walk | None = None
    known: Reuse | None = None
    left: int = 0
    ways: int = 0
    lineage: Lineage = NO_LINEAGE
    kept: list[int] = field(default_factory=list)
    refused: dict[int, Kind] = field(default_factory=dict)

    @property
    def lost(self) -> dict[Reason, int]:
        """Prompt tokens that were not hit, by why: each counts once, and together with `hit` they are the prompt."""
        lost: dict[Reason, int] = {}
        position = self.hit
        for end, reason in (*self.missed, (self.num_prompt_tokens, self.reason)):
            if end > position:
                lost[reason] = lost.get(reason, 0) + end - position
                position = end
        return lost

    def explain(self, missed: tuple[Stretch, ...]) -> None:
        """Set `missed`, and `reason` to the first of `Reason` that has cost tokens of the prompt."""
        self.missed = missed
        self.reason = first_reason({reason for end, reason in missed if end > self.hit})

    def blame(self, reason: Reason) -> None:
        """All that was not hit has this one reason."""
        self.missed, self.reason = (), reason

    @property
    def keys(self) -> Keys:
        """The prompt and what was appended to it, shape [num_tokens]."""
        return self._keys[: self.num_tokens]

    def token_at(self, position: int) -> int:
        """The key token at `position`, below `num_tokens`."""
        return int(self._keys[position])

    @property
    def kv_write_from(self) -> int:
        return self.matched

    @property
    def pages(self) -> tuple[Pages, ...]:
        """Per group the pages of the tokens so far."""
        return tuple(table.pages for table in self.tables)

    def pages_upto(self, num_tokens: int) -> tuple[Pages, ...]:
        """Per group the pages of the first `num_tokens` tokens."""
        return tuple(
            table.pages[: group.pages_for(num_tokens)] for group, table in zip(self.groups, self.tables, strict=True)
        )

    def copy(self) -> "Lease":
        """The same again, of a lease that has only been found."""
        tables = tuple(PageTable(table.pages, table.length) for table in self.tables)
        return replace(self, tables=tables, files={}, transient=[], held=set(), kept=[], refused={})

    def branch(self, state: Pages, request_id: str) -> "Lease":
        """A lease like this one that ends with the prompt, where it goes on from the file `state`. Nothing is counted
        for it yet."""
        length = self.num_prompt_tokens
        return Lease(
            purpose=f"branch {request_id}",
            request_id=request_id,
            namespace=self.namespace,
            num_prompt_tokens=length,
            hit=length,
            matched=length,
            seen=length,
            reason=Reason.NONE,
            checkpoint=None,
            groups=self.groups,
            tables=tuple(PageTable(pages) for pages in self.pages_upto(length)),
            node=self.node,
            decode_from=length,
            _keys=self.keys[:length],
            num_tokens=length,
            committed=min(self.committed, length),
            restore=state,
        )

    def give(self, position: int, file: PendingFile) -> None:
        """A file for the state at `position`, which is not refused any more: a commit would take an unfilled file for
        what was refused."""
        self.files[position] = file
        self.refused.pop(position, None)

    def receive(self, num_tokens: int, hit: int, restore: Pages | None) -> None:
        """Another server has brought the first `num_tokens` tokens. `hit` of them need not be computed; the file
        `restore` has the state there, None where none is needed."""
        self.restore, self.checkpoint = restore, None
        self.received, self.hit = hit - self.hit, hit
        self.matched, self.seen = max(self.matched, num_tokens), max(self.seen, num_tokens)
        if self.hit == self.num_tokens or self.missed:
            self.explain(self.missed)

    def append(self, token: int) -> None:
        """One more key token, sampled or replayed."""
        if self.num_tokens == len(self._keys):
            grown = np.empty(len(self._keys) * 5 // 4 + 64, np.int64)
            grown[: self.num_tokens] = self._keys
            self._keys = grown
        self._keys[self.num_tokens] = token
        self.num_tokens += 1

    def span(self, start: int, end: int) -> tuple[Pages, ...]:
        """Per group the pages that tokens [start, end) touch, copies."""
        return tuple(
            table.pages[start // group.tokens_per_page : group.pages_for(end)].copy()
            for group, table in zip(self.groups, self.tables, strict=True)
        )

    def missing_pages(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens need beyond those held."""
        num_pages = 0
        for group, table in zip(self.groups, self.tables, strict=True):
            num_pages += max(0, group.pages_for(num_tokens) - table.length)
        return num_pages
