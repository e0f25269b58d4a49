"""Where rows of a plan lie in the flattened batch, in plain numbers."""

import numpy as np
import torch

from cairn.kernels import reference
from cairn.runner.batch_builder import BatchPlaces, RowContent, build_batch
from cairn.step import FromStep, Keep, Row

NO_PAGES = np.zeros(0, np.int32)


def row(slot, start, end, decode=False, kv_write_from=0, tokens=None):
    """A row whose token at position p is p."""
    return Row(slot, start, end, np.arange(start, end) if tokens is None else tokens, (), kv_write_from, decode, None)


def built(rows, keeps=(), contents=None, last_tokens=()):
    places = BatchPlaces(rows, keeps)
    drawn = torch.tensor([*last_tokens, 0], dtype=torch.int64)
    return places, build_batch(places, contents or [None] * len(rows), (), drawn, reference)


def test_decode_rows_come_first_and_prefills_follow_one_another():
    rows = [row(0, 70, 100), row(1, 40, 41, decode=True), row(2, 0, 66), row(3, 9, 10, decode=True), row(4, 5, 6)]
    places, batch = built(rows)
    assert batch.host.num_decodes == 2 and batch.host.num_seqs == 5 and batch.host.num_rows == 99
    assert batch.tokens.tolist() == [40, 9, *range(70, 100), *range(66), 5]
    assert batch.positions.tolist() == [batch.tokens.tolist()] * 3
    assert places.first == [2, 0, 32, 1, 98]
    assert [places.row_of(2, position) for position in (0, 65)] == [32, 97]
    host = {name: getattr(batch.host, name).tolist() for name in ("cu_seqlens", "slots", "seq_starts", "seq_lens")}
    assert host == {
        "cu_seqlens": [0, 1, 2, 32, 98, 99],
        "slots": [1, 3, 0, 2, 4],
        "seq_starts": [40, 9, 70, 0, 5],
        "seq_lens": [41, 10, 100, 66, 6],
    }
    for name, wanted in host.items():
        found = getattr(batch, name)
        assert found.dtype == torch.int32 and found.tolist() == wanted


def test_keys_and_values_are_written_where_nobody_has_written_them():
    rows = [row(0, 60, 70, kv_write_from=66), row(1, 40, 41, decode=True), row(2, 8, 9, decode=True, kv_write_from=9)]
    _, batch = built(rows)
    assert batch.kv_write_from.tolist() == batch.host.kv_write_from.tolist() == [0, 9, 66]


def test_snapshots_come_in_the_batchs_order_and_rise_within_a_row():
    rows = [row(0, 60, 140), row(1, 40, 41, decode=True), row(2, 0, 10)]
    keeps = [Keep(0, 140, NO_PAGES), Keep(1, 41, NO_PAGES), Keep(0, 64, NO_PAGES), Keep(2, 1, NO_PAGES)]
    places, batch = built(rows, keeps)
    assert places.snapshots == [1, 2, 0, 3]
    assert batch.host.snapshot_rows.tolist() == [0, 1, 1, 2]
    assert batch.host.snapshot_offsets.tolist() == [1, 4, 80, 1]


def test_tokens_that_were_drawn_are_taken_from_their_slots():
    rows = [row(2, 3, 4, decode=True, tokens=FromStep(7)), row(0, 8, 10), row(1, 5, 6, decode=True, tokens=FromStep(7))]
    _, batch = built(rows, last_tokens=[70, 71, 72])
    assert batch.tokens.tolist() == [72, 71, 8, 9]


def test_images_have_vectors_and_positions_of_their_own():
    rows = [row(1, 0, 4, tokens=np.array([3, -5, -5, 4])), row(0, 20, 21, decode=True)]
    vectors = torch.arange(6.0).view(2, 3)
    positions = np.array([[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2, 3]])
    _, batch = built(rows, contents=[RowContent(positions, np.array([1, 2]), vectors), None])
    assert batch.tokens.tolist() == [20, 3, 0, 0, 4]
    assert batch.positions.tolist() == [[20, 0, 1, 1, 2], [20, 0, 1, 1, 2], [20, 0, 1, 2, 3]]
    assert batch.vectors.rows.tolist() == [2, 3] and torch.equal(batch.vectors.values, vectors)


def test_an_empty_share_of_images_is_none():
    nothing = RowContent(np.array([[0], [0], [0]]), np.zeros(0, np.int64), torch.zeros(0, 3))
    _, batch = built([row(1, 0, 1)], contents=[nothing])
    assert batch.vectors is None
