"""Where rows of a plan lie in the flattened batch, in plain numbers."""

from itertools import pairwise

import numpy as np
import pytest

from cairn.cache.layout import AttentionGroup
from cairn.kernels.contract import ROW_TILE, TILE
from cairn.layers.batch import Mark
from cairn.runner.batch_builder import BatchPlaces, Row, build_batch
from cairn.step import Snapshot

GROUPS = (AttentionGroup("full", 16), AttentionGroup("wide", 64))
NO_PAGES = np.zeros(0, np.int32)


def row(slot, start, end, decode=False, kv_write_from=0):
    """A row whose token at position p is p, and whose page number n is 100 (200) + n."""
    pages = tuple(
        np.arange(100 * (number + 1), 100 * (number + 1) + group.pages_for(end), dtype=np.int32)
        for number, group in enumerate(GROUPS)
    )
    return Row(slot, start, end, np.arange(start, end), pages, kv_write_from, decode)


def built(rows, snapshots=(), exact=False):
    places = BatchPlaces(rows, exact)
    return places, build_batch(places, snapshots, GROUPS, [None] * len(rows))


@pytest.mark.parametrize(
    ("start", "end", "front", "num_rows"),
    [
        (0, 1, 0, TILE),
        (0, TILE, 0, TILE),
        (0, TILE + 1, 0, 2 * TILE),
        (1, TILE, 1, TILE),
        (1, TILE + 1, 1, 2 * TILE),
        (TILE - 1, TILE, TILE - 1, TILE),
        (TILE - 1, TILE + 1, TILE - 1, 2 * TILE),
        (TILE, 2 * TILE, 0, TILE),
        (TILE + 6, 3 * TILE, 6, 2 * TILE),
    ],
)
def test_a_span_is_the_tiles_that_its_tokens_touch(start, end, front, num_rows):
    """The row of position p is p mod TILE in its tile, with padding before and behind."""
    places, batch = built([row(3, start, end)])
    (span,) = batch.spans
    assert (span.slot, span.first_row, span.front, span.start, span.length) == (3, 0, front, start, end - start)
    assert span.num_rows == places.num_rows == len(batch.tokens) == num_rows
    assert [places.row_of(0, position) for position in (start, end - 1)] == [front, front + end - start - 1]
    rows = list(range(front, front + end - start))
    assert batch.token_rows.tolist() == rows
    assert (~batch.padding[:, 0]).nonzero().flatten().tolist() == rows
    assert batch.tokens[rows].tolist() == list(range(start, end))
    assert batch.positions[:, rows].tolist() == [list(range(start, end))] * 3
    assert not batch.tokens[batch.padding[:, 0]].any() and not batch.positions[:, batch.padding[:, 0]].any()


@pytest.mark.parametrize("exact", [False, True])
def test_decode_rows_come_first_and_spans_follow_one_another(exact):
    rows = [row(0, 70, 100), row(1, 40, 41, decode=True), row(2, 0, TILE + 2), row(3, 9, 10, decode=True)]
    places, batch = built(rows, exact=exact)
    decode_rows = ROW_TILE if exact else 2
    assert (batch.decode_slots, batch.decode_lengths, batch.num_decodes) == ([1, 3], [41, 10], 2)
    assert [(span.slot, span.first_row, span.num_rows) for span in batch.spans] == [
        (0, decode_rows, TILE),
        (2, decode_rows + TILE, 2 * TILE),
    ]
    assert places.first == [decode_rows + 70 - TILE, 0, decode_rows + TILE, 1]
    assert batch.tokens[:2].tolist() == [40, 9] and places.num_rows == decode_rows + 3 * TILE
    if exact:
        ends = [0, ROW_TILE, *(ROW_TILE + TILE * number for number in (1, 2, 3))]
        assert batch.tiles == [slice(low, high) for low, high in pairwise(ends)]
    else:
        assert batch.tiles is None


def test_keys_and_values_are_written_where_nobody_has_written_them():
    rows = [row(0, 60, 70, kv_write_from=66), row(1, 40, 41, decode=True), row(2, 8, 9, decode=True, kv_write_from=9)]
    _, batch = built(rows)
    narrow, wide = batch.groups
    # positions 66..69 of the span, whose first row is 2, and 40 of the first decode row
    assert narrow.write_rows.tolist() == wide.write_rows.tolist() == [2 + 66, 2 + 67, 2 + 68, 2 + 69, 0]
    assert narrow.write_pages.tolist() == [104, 104, 104, 104, 102]
    assert narrow.write_offsets.tolist() == [2, 3, 4, 5, 8]
    assert wide.write_pages.tolist() == [201, 201, 201, 201, 200] and wide.write_offsets.tolist() == [2, 3, 4, 5, 40]
    assert [pages.tolist() for pages in narrow.span_pages] == [[100, 101, 102, 103, 104]]
    assert [pages.tolist() for pages in wide.decode_pages] == [[200], [200]]


def test_marks_count_from_the_start_of_their_row_and_ascend():
    rows = [row(0, 60, 140), row(1, 40, 41, decode=True), row(2, 0, 10)]
    places = ((0, 140), (1, 41), (0, 64), (2, 1))
    _, batch = built(rows, [Snapshot(row, position, NO_PAGES) for row, position in places])
    assert [span.marks for span in batch.spans] == [(Mark(4, 2), Mark(80, 0)), (Mark(1, 3),)]
    assert batch.decode_marks == [(0, 1)]
