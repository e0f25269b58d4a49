"""A lease: what one running request holds of the pool and the tree.

    tokens   0 ........... c ............ m ............... num_tokens
             cached          keys and       computed and
             (hit)           values shared  written here

Pages of tokens below m belong to the tree as well and are only read; those from m on are this lease's alone. Where m
falls inside a page, that page is copied before the first write.
"""

from dataclasses import dataclass, field

import numpy as np

from cairn.cache.checkpoint import Checkpoint, Kind
from cairn.cache.layout import AttentionGroup
from cairn.cache.reasons import Reason
from cairn.cache.tree import Node
from cairn.types import Keys, Pages

__all__ = ["Hold", "Lease", "Namespace", "PageTable", "PendingFile"]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Which root a prompt belongs to. Prompts of different namespaces never share anything."""

    adapter: str = ""
    cache_salt: str | None = None


class PageTable:
    """The page list of one attention group of one lease; grows at the end, in amortised O(1)."""

    __slots__ = ("_pages", "length")

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.length = len(pages)

    @property
    def pages(self) -> Pages:
        """A view, shape [length]; later growth does not change it."""
        return self._pages[: self.length]

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


@dataclass(slots=True)
class PendingFile:
    """A checkpoint file that a plan has named and no commit has attached yet."""

    pages: Pages
    kind: Kind
    hold_seconds: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Pages that somebody outside keeps, whatever becomes of tree and leases: another server reads them, or a link may
    still write to them."""

    purpose: str
    pages: Pages


@dataclass(slots=True, eq=False)
class Lease:
    """What a lookup gives. `purpose` says in words who holds it and why.

    `hit` <= `matched` are c and m above, `seen` the longest prefix that was ever known, `reason` why `hit` is not
    more. `checkpoint` is that of the hit, `restore` the file to go on from, `received` how much of `hit` came from
    another server. `kv_write_from` is m. `committed`: tokens that are in the tree. `decode_from`: tokens from here on
    were, or will be, computed by decode steps. `held`: positions of checkpoints that are held because this request
    asked for it.
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

    @property
    def keys(self) -> Keys:
        """The prompt and what was appended to it, shape [num_tokens]."""
        return self._keys[: self.num_tokens]

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
        return sum(
            max(0, group.pages_for(num_tokens) - table.length)
            for group, table in zip(self.groups, self.tables, strict=True)
        )
