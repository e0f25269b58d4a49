"""The CPU backend at sizes that random batches do not have: contexts cut in parts, prompts of several tiles, models'
heads; and with weights in torch's own layout."""

import ctypes
from dataclasses import replace
from itertools import count, pairwise

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from cairn.kernels import cpu
from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import HostBatch
from cairn.kernels.cpu import onednn, panels, products
from cairn.kernels.cpu.metadata import (
    ALL_KEYS,
    BLOCK,
    MERGE_COLUMNS,
    SPLIT_TOKENS,
    TILE_COLUMNS,
    TILE_ROWS,
    WRITE_COLUMNS,
    Table,
    build_metadata,
    reach_of,
)
from cairn.kernels.staging import Staging
from kernels.comparison import check_against_reference
from kernels.fixed_calls import paged_call
from kernels.kernel_calls import Call
from kernels.random_batches import RandomBatch, SequenceRows
from tiers import more

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


LIMITED = (
    AttentionRule(window=128, softcap=5.0),
    *map(more, (AttentionRule(window=1), AttentionRule(window=SPLIT_TOKENS + 40), AttentionRule(chunk=200, scale=0.2))),
)
"""Less than a part, more than one, and not a multiple of anything."""


@DTYPES
@pytest.mark.parametrize("rule", [FULL, *LIMITED], ids=str)
@pytest.mark.parametrize(
    "heads", [(8, 2, 128), (3, 3, 80), *map(more, [(4, 2, 64), (16, 1, 256), (5, 1, 24)])], ids=str
)
def test_attention_over_contexts_in_parts_and_prompts_in_tiles(
    heads: tuple[int, int, int], rule: AttentionRule, dtype: torch.dtype
) -> None:
    decodes = (SPLIT_TOKENS - 1, SPLIT_TOKENS, 2 * SPLIT_TOKENS, 2 * SPLIT_TOKENS + 77)
    prefills = ((0, 3 * TILE_ROWS + 5), (700, TILE_ROWS), (1000, 1), (63, 2))
    batch = RandomBatch(
        tuple(SequenceRows(slot, start, 1) for slot, start in enumerate(decodes)),
        tuple(SequenceRows(4 + index, *rows) for index, rows in enumerate(prefills)),
    )
    call = paged_call("attention", batch, heads, 16, dtype, rule=rule, sinks=rule != FULL)
    check_against_reference(cpu, call, dtype)


def test_scores_that_grow_from_block_to_block_bring_down_what_was_summed_up_before() -> None:
    batch = RandomBatch((SequenceRows(0, 999, 1),), (SequenceRows(1, 0, 200),))
    call = paged_call("attention", batch, (4, 2, 32), 16, torch.float32)
    keys = call.operands["keys"]
    table, dim = call.block_tables[0], keys.shape[-1]
    # Keys of every page are the same up to a factor that rises: the last ones have nearly all of the weight.
    for slot, length in ((0, 1000), (1, 200)):
        for page in range(-(-length // 16)):
            keys[table[slot, page]] *= 1 + page / 10
    assert call.operands["q"].shape[-1] == dim
    check_against_reference(cpu, call, torch.float32)


def rows_of(table: Table, columns: int) -> list[list[int]]:
    """What compiled loops read."""
    numbers = list((ctypes.c_int32 * (table.num_rows * columns)).from_address(table.address))
    return [numbers[begin : begin + columns] for begin in range(0, len(numbers), columns)]


def test_every_key_of_a_row_is_in_one_part_and_every_row_in_one_tile() -> None:
    batch = RandomBatch(
        (SequenceRows(0, 3 * SPLIT_TOKENS, 1), SequenceRows(1, 5, 1)),
        (SequenceRows(2, 100, 2 * TILE_ROWS + 1), SequenceRows(3, 4 * SPLIT_TOKENS, 1)),
    )
    work = build_metadata(batch.host(), Staging()).work_for(ALL_KEYS)
    seen: dict[int, list[tuple[int, int]]] = {}
    for first, rows, slot, position, key, end, partial, _ in rows_of(work.tiles, TILE_COLUMNS):
        sequence = batch.sequences[slot]
        assert first - batch.rows_of(slot).start == position - sequence.start
        assert end == position + rows or partial >= 0
        for row in range(first, first + rows):
            seen.setdefault(row, []).append((key, end))
    num_parts = {row: count for row, _, count in rows_of(work.merges, MERGE_COLUMNS)}
    assert sorted(seen) == list(range(batch.num_tokens))
    for row, parts in seen.items():
        parts.sort()
        assert parts[0][0] == 0 and all(before[1] == after[0] for before, after in pairwise(parts))
        assert len(parts) == num_parts.get(row, 1)
    assert work.num_partials == 4 + 5


def test_rows_that_are_read_only_are_not_written() -> None:
    batch = RandomBatch((SequenceRows(0, 40, 1, kv_write_from=41),), (SequenceRows(1, 10, 30, kv_write_from=25),))
    writes = rows_of(build_metadata(batch.host(), Staging()).writes, WRITE_COLUMNS)
    assert writes == [[row, 1, 10 + row - 1] for row in range(16, 31)]


def tables_of(host: HostBatch, rule: AttentionRule) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Writes, tiles and merges of a batch, one row after the other."""
    writes, tiles, merges, num_partials = list[list[int]](), list[list[int]](), list[list[int]](), 0
    firsts, slots, starts = host.cu_seqlens.tolist(), host.slots.tolist(), host.seq_starts.tolist()
    for index, (slot, start, write_from) in enumerate(zip(slots, starts, host.kv_write_from.tolist(), strict=True)):
        first, num_rows = firsts[index], firsts[index + 1] - firsts[index]
        writes += [[first + row, slot, start + row] for row in range(num_rows) if start + row >= write_from]
        if num_rows == 1 or host.num_decodes <= index < host.first_prefill:
            # rows whose keys are cut into the same parts share their tiles
            positions = range(start, start + num_rows)
            cuts = [(rule.first_key(each) // SPLIT_TOKENS, each // SPLIT_TOKENS + 1) for each in positions]
            in_parts = True
        else:
            cuts, in_parts = [(0, 1)] * num_rows, False
        end_row = num_rows
        while end_row:
            if in_parts:
                row = max(end_row - TILE_ROWS, cuts.index(cuts[end_row - 1]))
            else:
                row = (end_row - 1) // TILE_ROWS * TILE_ROWS
            rows, parts, end = end_row - row, range(*cuts[end_row - 1]), start + end_row
            num_parts, lowest = len(parts), rule.first_key(start + row) // BLOCK * BLOCK
            if num_parts == 1:
                tiles.append([first + row, rows, slot, start + row, lowest, end, -1, 1])
            else:
                merges += [[first + row + each, num_partials + each * num_parts, num_parts] for each in range(rows)]
                for place, part in enumerate(parts):
                    key = max(lowest, part * SPLIT_TOKENS)
                    most, partial = min((part + 1) * SPLIT_TOKENS, end), num_partials + place
                    tiles.append([first + row, rows, slot, start + row, key, most, partial, num_parts])
                num_partials += rows * num_parts
            end_row = row
    return writes, tiles, merges


EDGES = st.sampled_from([0, 1, 5, SPLIT_TOKENS - 2, SPLIT_TOKENS - 1, SPLIT_TOKENS, 2 * SPLIT_TOKENS - 1, 4_000])
REACHES = st.sampled_from([1, 3, 100, SPLIT_TOKENS, 600, 9_000])
COUNTS = st.sampled_from([1, 2, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS, 200])


@hypothesis.given(
    decodes=st.lists(st.tuples(EDGES, st.just(1), st.integers(-2, 2)), max_size=6),
    verifies=st.lists(st.tuples(EDGES, st.integers(1, 9), st.integers(-2, 9)), max_size=4),
    prefills=st.lists(st.tuples(EDGES, COUNTS, st.integers(-2, 210)), max_size=4),
    rule=st.sampled_from(
        [
            FULL,
            *(AttentionRule(**{kind: reach}) for kind in ("window", "chunk") for reach in (1, 3, 100, 512, 600, 9000)),
        ]
    ),
)
def test_tables_have_every_row_in_its_order(
    decodes: list[tuple[int, int, int]],
    verifies: list[tuple[int, int, int]],
    prefills: list[tuple[int, int, int]],
    rule: AttentionRule,
) -> None:
    slots = count()

    def rows_for(kind: list[tuple[int, int, int]]) -> tuple[SequenceRows, ...]:
        return tuple(
            SequenceRows(next(slots), start, num_tokens, kv_write_from=max(0, start + before))
            for start, num_tokens, before in kind
        )

    batch = RandomBatch(rows_for(decodes), (), verifies=rows_for(verifies))
    host = replace(batch, prefills=rows_for(prefills)).host()
    metadata = build_metadata(host, Staging())
    found = metadata.work_for(reach_of(rule))
    writes, tiles, merges = tables_of(host, rule)
    assert (
        rows_of(metadata.writes, WRITE_COLUMNS),
        rows_of(found.tiles, TILE_COLUMNS),
        rows_of(found.merges, MERGE_COLUMNS),
    ) == (writes, tiles, merges)
    assert found.num_partials == sum(num_parts for _, _, num_parts in merges)
    assert found.max_rows == max((rows for _, rows, *_ in tiles), default=0)
    assert found.num_pairs == sum(rows * (end - key) for _, rows, _, _, key, end, *_ in tiles)


@pytest.mark.parametrize("num_tokens", [1, 5, 512], ids=["decode", "verify", "prefill"])
def test_work_grows_with_the_reach_and_not_with_the_context(num_tokens: int) -> None:
    def pairs(start: int, rule: AttentionRule) -> int:
        rows = (SequenceRows(0, start, num_tokens),)
        kinds = {"verifies": rows} if num_tokens == 5 else {"prefills": rows}
        host = replace(RandomBatch((), ()), **kinds).host()
        return build_metadata(host, Staging()).work_for(reach_of(rule)).num_pairs

    for rule in (AttentionRule(window=128), AttentionRule(chunk=128)):
        assert pairs(32_768, rule) == pairs(1024, rule) <= num_tokens * (128 + 2 * BLOCK)
    assert pairs(32_768, FULL) > 8 * pairs(1024, FULL)


# -- products --------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("layout", ["panels", "onednn", "float32", "plain"])
def test_products_in_all_layouts(dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if layout == "panels" and not (dtype == torch.bfloat16 and panels.has_panels(dtype)):
        pytest.skip("done by oneDNN, or by nothing")
    if layout == "onednn" and not onednn.can_reorder(dtype):
        pytest.skip("needs bfloat16 products of oneDNN, which want AVX512")
    monkeypatch.setattr(products, "_layout_for", lambda _: layout)
    for rows in (1, 5, 17, 64, 130):
        batch = RandomBatch((), (SequenceRows(0, 0, rows),))
        x = batch.numbers(rows, 96).to(dtype)
        weight = batch.numbers(160, 96, salt=1).mul(0.1).to(dtype)
        bias = batch.numbers(160, salt=2).to(dtype)
        for given in (bias, None):
            call = Call("linear", batch, {"x": x, "weight": weight, "bias": given})
            check_against_reference(cpu, call, dtype)
        assert cpu.pack(weight).layout == layout


def test_products_have_few_heights() -> None:
    heights = {rows: onednn.height_of(rows) for rows in range(1, 16_385)}
    assert len(set(heights.values())) <= 160
    assert all(height >= rows for rows, height in heights.items())
    assert all(height == onednn.height_of(height) for height in heights.values())
    assert all(height - rows < 8 for rows, height in heights.items() if rows <= 64)
    assert all(height <= rows * 17 / 16 for rows, height in heights.items() if rows > 64)


def test_weights_stay_as_they_are_where_onednn_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(matrix: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(onednn, "has_products", lambda dtype: True)
    monkeypatch.setattr(onednn, "reorder", fails)
    assert onednn.can_reorder.__wrapped__(torch.bfloat16) is False
    assert "no such operation" in caplog.text


def test_weights_stay_as_they_are_where_onednn_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "has_products", lambda dtype: True)
    monkeypatch.setattr(onednn, "reordered_product", lambda x, matrix, bias: torch.zeros(3, 48, dtype=x.dtype))
    assert onednn.can_reorder.__wrapped__(torch.bfloat16) is False
    assert onednn.can_reorder.__wrapped__(torch.float32) is False


# -- routers ---------------------------------------------------------------------------------------------------------


def test_experts_of_a_token_are_different_ones_whatever_their_scores() -> None:
    logits = torch.zeros(4, 8)
    logits[1], logits[2], logits[3, ::2] = torch.nan, -torch.inf, torch.inf
    for choice in (
        cpu.softmax_router(logits, 4, True)[0],
        cpu.sigmoid_router(logits, torch.zeros(8), 4, 4, 2, True, 1.0)[0],
    ):
        assert all(len(set(row)) == 4 and set(row) <= set(range(8)) for row in choice.tolist())
    assert cpu.softmax_router(logits, 4, True)[0][0].tolist() == [0, 1, 2, 3]
