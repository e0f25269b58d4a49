"""Pages of one attention group for a run of tokens: what a node keeps, a page table is cut into, and a fetch fills."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cairn.cache.layout import AttentionGroup
from cairn.types import Pages


@dataclass(slots=True, eq=False)
class GroupPages:
    """`pages` hold the tokens from `first_token` on, which need not be the first token of the first page:

    page     | . . F t | t t t t | t t . . |        F: first_token

    Never changed once it is made, which the type checker sees to: a frozen dataclass takes twice as long to make.
    """

    group: Final[AttentionGroup]
    first_token: Final[int]
    pages: Final[Pages]

    @property
    def first_page(self) -> int:
        """How many pages of the whole sequence are before these."""
        return self.first_token // self.group.tokens_per_page

    def upto(self, end: int) -> "GroupPages":
        """The pages from the first one here up to that of the last token before `end`: a view."""
        count = max(0, self.group.pages_for(end) - self.first_page)
        return GroupPages(self.group, self.first_token, self.pages[:count])

    def drop_before(self, start: int) -> "GroupPages":
        """The pages from the one on that holds token `start`: a view. All of them where they begin later."""
        if start <= self.first_token:
            return self
        return GroupPages(self.group, start, self.pages[start // self.group.tokens_per_page - self.first_page :])

    def span(self, start: int, end: int) -> "GroupPages":
        """The pages that tokens [start, end) touch, as far as they are here: a view."""
        # in one piece: tiers cut a path at each of its chunks
        group, first_token, pages = self.group, self.first_token, self.pages
        start = max(start, first_token)
        if start >= end:
            return GroupPages(group, end, pages[:0])
        size = group.tokens_per_page
        first_page = first_token // size
        return GroupPages(group, start, pages[start // size - first_page : -(-end // size) - first_page])

    def split(self, at: int) -> tuple["GroupPages", "GroupPages"]:
        """The pages of the tokens before `at`, and of those from there on; a page that holds some of each is in
        both. Of a group of limited reach all may be from there on."""
        # in one piece: a prompt's node is cut at each of its checkpoints
        group, first_token, pages = self.group, self.first_token, self.pages
        if first_token >= at:
            return GroupPages(group, at, pages[:0]), self
        size = group.tokens_per_page
        first_page = first_token // size
        above, below = pages[: -(-at // size) - first_page], pages[at // size - first_page :]
        return GroupPages(group, first_token, above), GroupPages(group, at, below)


def join(parts: Sequence[GroupPages]) -> GroupPages:
    """Pages of tokens that follow one another, one part at least. Where one begins inside a page, its own page counts:

    | p0 | p1 |
         | q1 | q2 |   ->  p0, q1, q2
    """
    tokens_per_page = parts[0].group.tokens_per_page
    pages = [part.pages for part in parts]
    for place in [place for place, part in enumerate(parts) if place and part.first_token % tokens_per_page]:
        pages[place - 1] = pages[place - 1][:-1]
    return GroupPages(parts[0].group, parts[0].first_token, np.concatenate(pages))


def page_numbers(parts: Iterable[GroupPages]) -> Pages:
    """All pages of all groups, shape [n]."""
    return np.concatenate([np.zeros(0, np.int32), *(part.pages for part in parts)])
