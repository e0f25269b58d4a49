"""The batch of one forward pass: rows of unrelated sequences, flattened.

    rows   [ decode region | tiles of the 1st prefill span | tiles of the 2nd | ... ]

Decode rows come first, one a sequence; in exact mode the region is padded to whole GEMM tiles. A prefill span is the
tiles that its tokens touch on the absolute token grid, so the row of position p is p mod TILE in its tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mark:
    """The state is wanted after the first `offset` tokens of a span (0 < offset <= length), as the step's keep
    number `keep`."""

    offset: int
    keep: int


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's tiles in the prefill region: rows [first_row, first_row + num_rows).

    `front` padding rows, then `length` tokens from absolute position `start` on, then padding. `marks` ascend.
    """

    slot: int
    first_row: int
    num_rows: int
    front: int
    start: int
    length: int
    marks: tuple[Mark, ...]

    @property
    def rows(self) -> slice:
        """All rows of the span, padding included."""
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def end(self) -> int:
        """Absolute position behind the last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """What the attention layers of one reach need to know.

    `span_pages`, `decode_pages`: page lists (int64), by span and by decode row. Keys and values of `write_rows` go to
    page `write_pages`, token `write_offsets`, all int64 of one length.
    """

    span_pages: Sequence[Tensor]
    decode_pages: Sequence[Tensor]
    write_rows: Tensor
    write_pages: Tensor
    write_offsets: Tensor


@dataclass(frozen=True, slots=True)
class Vectors:
    """Embeddings that come from elsewhere: rows int64 [k], values [k, hidden]."""

    rows: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. Decode row i runs slot `decode_slots[i]`, which has `decode_lengths[i]` tokens with this one.

    `tokens` [rows] int64, 0 at padding and where `vectors` has the row; `padding` [rows, 1] bool; `token_rows` [tokens]
    int64: the rows that are no padding. `positions` [3, rows] int64: where a token stands in time, height and width;
    all three the absolute position for text, 0 at padding. `vectors`: what stands for rows that are no text.
    `decode_marks`: (decode row, keep) pairs. `tiles`: the GEMMs' row slices, None for one GEMM over all rows.
    """

    tokens: Tensor
    padding: Tensor
    token_rows: Tensor
    positions: Tensor
    decode_slots: Sequence[int]
    decode_lengths: Sequence[int]
    decode_marks: Sequence[tuple[int, int]]
    spans: Sequence[Span]
    groups: Sequence[GroupBatch]
    tiles: Sequence[slice] | None
    vectors: Vectors | None = None

    def replace(self, hidden: Tensor) -> Tensor:
        """The embeddings [rows, hidden], with those of `vectors` in their places; in place."""
        if self.vectors is not None:
            hidden[self.vectors.rows] = self.vectors.values.to(hidden.dtype)
        return hidden

    @property
    def num_decodes(self) -> int:
        """Decode rows without padding."""
        return len(self.decode_slots)
