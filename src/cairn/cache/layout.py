"""What a model must remember, in bytes: the only thing the cache knows of a model.

A *page* holds `tokens_per_page` tokens of keys and values of all layers of one attention group; every page has the
same bytes, whatever the group. A *checkpoint* is the state in `pages_per_checkpoint` pages of the same pool:

    page        [unit][layer][k|v][token][dim]
    checkpoint  [header | unit 0 | unit 1 | ...]   header: what every tensor-parallel rank keeps whole
                                                   unit:   [layer][conv | ssm] [layer][scales] of one smallest share

A unit is the smallest share that tensor parallelism may cut: a kv head of a page; of a checkpoint one state head with
its own convolution channels or, where several heads share B and C, one such group of heads with its B and C. Scales
are there where a state is stored in a smaller form than it has while it runs.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from cairn.types import Positive, ShortText, first_in_reach

__all__ = ["AttentionGroup", "CacheLayout", "reach_name"]

_Size = Annotated[int, Meta(ge=0, le=1 << 40)]
_Units = Annotated[int, Meta(ge=0, le=1 << 20)]


def reach_name(reach: int | None, chunked: bool) -> str:
    """What an `AttentionGroup` of this reach is called."""
    return "full" if reach is None else f"{'chunk' if chunked else 'window'} of {reach}"


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Attention layers of one reach, as `first_in_reach` takes it."""

    name: ShortText
    tokens_per_page: Positive
    reach: Positive | None = None
    chunked: bool = False

    def needed_at(self, position: int) -> int:
        """The first token of which keys and values are needed to go on at `position`, which is computed next."""
        return first_in_reach(position, self.reach, self.chunked)

    def retained_pages(self, start: int, end: int) -> int:
        """How many pages of tokens [start, end) are needed to go on at `end`."""
        first = max(start, self.needed_at(end))
        return self.pages_for(end) - first // self.tokens_per_page if first < end else 0

    @property
    def most_window_pages(self) -> int:
        """How many pages going on needs at most of a limited reach, which may begin in the middle of one; else 0."""
        return 0 if self.reach is None else self.pages_for(self.reach + self.tokens_per_page - 1)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold the first `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_page)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of pages and checkpoints of one model on one of `tp_size` ranks. All sizes in bytes.

    `page_units` and `state_units` count the units of a page and of a checkpoint; the bytes of a page divide evenly
    among its units. `state_bytes`: 0 for a model without recurrent state.
    `state_dtype`: what the recurrent state is in while it runs, a name of `kernels.state_encoding.STATE_DTYPES`.
    `checkpoint_dtype`: how checkpoints have it: the same name for its own bytes, or for a float32 state one of
    `ENCODINGS`.
    `is_limited`: whether attention of any group has a limited reach, whose pages are of no use after a while.
    `pages_to_resume`: what a checkpoint keeps, about: its own pages, and of such groups half of those within reach,
    for its neighbours need them as well.
    """

    block_size: Positive
    page_bytes: _Size
    page_units: _Units
    groups: Annotated[tuple[AttentionGroup, ...], Meta(max_length=64)]
    header_bytes: _Size
    state_bytes: _Size
    state_units: _Units
    checkpoint_dtype: ShortText = "float32"
    state_dtype: ShortText = "float32"
    tp_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    pages_per_checkpoint: int = field(init=False, default=0)
    is_limited: bool = field(init=False, default=False)
    pages_to_resume: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.page_bytes < 1:
            raise ValueError(f"block_size and page_bytes must be positive: {self.block_size}, {self.page_bytes}")
        if self.page_units < 1 or self.page_bytes % self.page_units:
            raise ValueError(f"page_bytes {self.page_bytes} do not divide among {self.page_units} units")
        if self.header_bytes < 0 or self.state_bytes < 0:
            raise ValueError(f"sizes must not be negative: {self.header_bytes}, {self.state_bytes}")
        if self.state_bytes and (self.state_units < 1 or self.state_bytes % self.state_units):
            raise ValueError(f"state_bytes {self.state_bytes} do not divide among {self.state_units} units")
        object.__setattr__(self, "pages_per_checkpoint", max(1, -(-self.checkpoint_bytes // self.page_bytes)))
        within_reach = [group.pages_for(group.reach) for group in self.groups if group.reach is not None]
        object.__setattr__(self, "is_limited", bool(within_reach))
        object.__setattr__(self, "pages_to_resume", self.pages_per_checkpoint + sum(within_reach) // 2)

    def of_ranks(self, num_ranks: int) -> "CacheLayout":
        """That of so many ranks together: pages and checkpoints are those of all of them, one rank's behind another's,
        and there are as many of them."""
        return replace(
            self,
            page_bytes=num_ranks * self.page_bytes,
            page_units=num_ranks * self.page_units,
            header_bytes=num_ranks * self.header_bytes,
            state_bytes=num_ranks * self.state_bytes,
            state_units=num_ranks * self.state_units,
            tp_size=1,
        )

    @property
    def resumes_anywhere(self) -> bool:
        """Whether a sequence can go on from any token whose keys and values are there: without recurrent state it can,
        else only where a checkpoint is."""
        return self.state_bytes == 0

    @property
    def needs_checkpoints(self) -> bool:
        """Whether, when memory is full, a prompt resumes nowhere but at checkpoints."""
        return self.is_limited or not self.resumes_anywhere

    @property
    def has_unlimited_groups(self) -> bool:
        """Whether keys and values of all tokens are needed in some layers."""
        return any(group.reach is None for group in self.groups)

    @property
    def checkpoint_bytes(self) -> int:
        return self.header_bytes + self.state_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of keys and values of one token, over all groups."""
        return sum(self.page_bytes / group.tokens_per_page for group in self.groups)

    @property
    def lasting_bytes_per_token(self) -> float:
        """The same, over the groups of unlimited reach: what a token takes for good."""
        return sum(self.page_bytes / group.tokens_per_page for group in self.groups if group.reach is None)

    @property
    def window_bytes(self) -> int:
        """What going on anywhere needs of groups of limited reach, at most."""
        return self.page_bytes * sum(group.most_window_pages for group in self.groups)

    def running_pages_for(self, num_tokens: int, num_in_flight: int) -> int:
        """Pages that a sequence of `num_tokens` tokens holds at most, of which `num_in_flight` at a time are being
        computed: of groups of limited reach those within reach of these."""
        num_pages = 0
        for group in self.groups:
            pages = group.pages_for(num_tokens)
            if group.reach is not None:
                pages = min(pages, group.pages_for(group.reach + num_in_flight) + 1)
            num_pages += pages
        return num_pages

    def retained_pages(self, start: int, end: int) -> int:
        """How many pages of tokens [start, end) are needed to go on at `end`, over all groups."""
        num_pages = 0
        for group in self.groups:
            num_pages += group.retained_pages(start, end)
        return num_pages

    def window_pages(self, start: int, end: int) -> int:
        """As `retained_pages`, over the groups of limited reach."""
        num_pages = 0
        for group in self.groups:
            if group.reach is not None:
                num_pages += group.retained_pages(start, end)
        return num_pages

    def unlimited_pages_for(self, num_tokens: int) -> int:
        """As `pages_for`, over the groups of unlimited reach."""
        num_pages = 0
        for group in self.groups:
            if group.reach is None:
                num_pages += group.pages_for(num_tokens)
        return num_pages

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold the first `num_tokens` tokens, over all groups."""
        num_pages = 0
        for group in self.groups:
            num_pages += group.pages_for(num_tokens)
        return num_pages
