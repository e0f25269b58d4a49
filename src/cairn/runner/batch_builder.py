"""Rows of a plan -> one flattened batch. Pure: plan in, tensors out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.cache.layout import AttentionGroup
from cairn.kernels.contract import ROW_TILE, TILE
from cairn.layers.batch import Batch, GroupBatch, Mark, Span, Vectors
from cairn.step import Image, Snapshot
from cairn.types import Keys, Pages

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of the forward pass: tokens [start, end), with all that the batch is made of.

    `tokens`: shape [end - start]; below 0 where one of `images` stands. `pages`: per attention group the pages that
    cover [0, end).
    """

    slot: int
    start: int
    end: int
    tokens: Keys
    pages: tuple[Pages, ...]
    kv_write_from: int
    decode: bool
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class RowContent:
    """What a plan row has besides text: `positions` int64 [3, tokens] of all its tokens, and at `offsets` int64 [k]
    from its first one `vectors` [k, hidden] instead of embeddings."""

    positions: Ints
    offsets: Ints
    vectors: Tensor


class BatchPlaces:
    """Where the rows of a plan lie in the flattened batch: decode rows first, then the prefill spans, in plan order.

    `decodes`, `prefills`: indices of plan rows. `first[i]`: the flattened row of plan row i's first token.
    """

    def __init__(self, rows: Sequence[Row], exact: bool) -> None:
        self.rows = rows
        self.decodes = [index for index, row in enumerate(rows) if row.decode]
        self.prefills = [index for index, row in enumerate(rows) if not row.decode]
        self.first = [0] * len(rows)
        for place, index in enumerate(self.decodes):
            self.first[index] = place
        self.decode_rows = len(self.decodes)
        if exact:
            self.decode_rows = -(-self.decode_rows // ROW_TILE) * ROW_TILE
        self.span_rows: list[slice] = []
        stop = self.decode_rows
        for index in self.prefills:
            row = rows[index]
            begin, front = stop, row.start % TILE
            stop = begin + -(-(front + row.end - row.start) // TILE) * TILE
            self.first[index] = begin + front
            self.span_rows.append(slice(begin, stop))
        self.num_rows = stop
        self.tiles: list[slice] | None = None
        if exact:
            self.tiles = [slice(i, i + ROW_TILE) for i in range(0, self.decode_rows, ROW_TILE)]
            self.tiles += [slice(i, i + TILE) for i in range(self.decode_rows, stop, TILE)]

    def row_of(self, index: int, position: int) -> int:
        """The flattened row of plan row `index`'s token at absolute position `position`."""
        return self.first[index] + position - self.rows[index].start


def build_batch(
    places: BatchPlaces,
    snapshots: Sequence[Snapshot],
    groups: Sequence[AttentionGroup],
    contents: Sequence[RowContent | None],
) -> Batch:
    """`contents`: what stands for tokens below 0 of each row, and where all of them stand; None for a row of text
    alone."""
    rows = places.rows
    flat = np.zeros(places.num_rows, dtype=np.int64)
    padding = np.ones((places.num_rows, 1), dtype=np.bool_)
    positions = np.zeros((3, places.num_rows), dtype=np.int64)
    for row, first, content in zip(rows, places.first, contents, strict=True):
        part = slice(first, first + len(row.tokens))
        flat[part] = np.maximum(row.tokens, 0)
        padding[part] = False
        positions[:, part] = np.arange(row.start, row.end) if content is None else content.positions
    decodes = [rows[index] for index in places.decodes]
    decode_row = {index: place for place, index in enumerate(places.decodes)}
    return Batch(
        tokens=torch.from_numpy(flat),
        padding=torch.from_numpy(padding),
        token_rows=torch.from_numpy(np.flatnonzero(~padding)),
        positions=torch.from_numpy(positions),
        decode_slots=[row.slot for row in decodes],
        decode_lengths=[row.end for row in decodes],
        decode_marks=[(decode_row[own.row], number) for number, own in enumerate(snapshots) if own.row in decode_row],
        spans=_spans(places, snapshots),
        groups=[_group(places, index, group) for index, group in enumerate(groups)],
        tiles=places.tiles,
        vectors=_vectors(places, contents),
    )


def _vectors(places: BatchPlaces, contents: Sequence[RowContent | None]) -> Vectors | None:
    found = [
        (content.offsets + first, content.vectors)
        for first, content in zip(places.first, contents, strict=True)
        if content is not None and len(content.offsets)
    ]
    if not found:
        return None
    rows = np.concatenate([offsets for offsets, _ in found])
    return Vectors(torch.from_numpy(rows), torch.cat([vectors for _, vectors in found]))


def _spans(places: BatchPlaces, snapshots: Sequence[Snapshot]) -> list[Span]:
    spans = []
    for index, span in zip(places.prefills, places.span_rows, strict=True):
        row = places.rows[index]
        marks = [Mark(own.position - row.start, number) for number, own in enumerate(snapshots) if own.row == index]
        spans.append(
            Span(
                slot=row.slot,
                first_row=span.start,
                num_rows=span.stop - span.start,
                front=row.start % TILE,
                start=row.start,
                length=row.end - row.start,
                marks=tuple(sorted(marks, key=lambda mark: mark.offset)),
            )
        )
    return spans


def _group(places: BatchPlaces, number: int, group: AttentionGroup) -> GroupBatch:
    where: list[Ints] = []
    for index, row in enumerate(places.rows):
        positions = np.arange(max(row.start, row.kv_write_from), row.end, dtype=np.int64)
        page, offset = np.divmod(positions, group.tokens_per_page)
        where.append(np.stack([positions - row.start + places.first[index], row.pages[number][page], offset]))
    write_rows, write_pages, write_offsets = torch.from_numpy(np.concatenate(where, axis=1).astype(np.int64))
    return GroupBatch(
        span_pages=[_tensor(places.rows[index].pages[number]) for index in places.prefills],
        decode_pages=[_tensor(places.rows[index].pages[number]) for index in places.decodes],
        write_rows=write_rows,
        write_pages=write_pages,
        write_offsets=write_offsets,
    )


def _tensor(pages: Pages) -> Tensor:
    return torch.from_numpy(pages.astype(np.int64))
