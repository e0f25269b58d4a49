"""New keys and values into their pages: moved, not computed, thus bound by memory."""

import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cuda.device import kernel, power_of_2
from cairn.kernels.cuda.metadata import CudaMetadata

ELEMENTS = 1024
"""Of a tile: 16 bytes of bfloat16 a thread."""

NUM_WARPS = 4


@kernel
def _write_kv_kernel(
    k, v, keys, values, table, row_seqs, cu_seqlens, slots, seq_starts, kv_write_from,
    k_row, k_head, v_row, v_head, key_page, key_head, key_token, value_page, value_head, value_token, table_row,
    num_rows,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = rows < num_rows
    seqs = tl.load(row_seqs + rows, mask=there, other=0)
    positions = tl.load(seq_starts + seqs) + rows - tl.load(cu_seqlens + seqs)
    is_written = there & (positions >= tl.load(kv_write_from + seqs))
    table_rows = table + tl.load(slots + seqs).to(tl.int64) * table_row
    pages = tl.load(table_rows + positions // PAGE_SIZE, mask=is_written, other=0).to(tl.int64)
    tokens = (positions % PAGE_SIZE).to(tl.int64)
    dims = tl.arange(0, DIM_BLOCK)
    mask = is_written[:, None]
    if DIM_BLOCK != DIM:
        mask = mask & (dims < DIM)[None, :]

    wide = rows.to(tl.int64)
    x = tl.load(k + (wide * k_row + head * k_head)[:, None] + dims[None, :], mask=mask, other=0.0)
    places = pages * key_page + head.to(tl.int64) * key_head + tokens * key_token
    tl.store(keys + places[:, None] + dims[None, :], x, mask=mask)
    x = tl.load(v + (wide * v_row + head * v_head)[:, None] + dims[None, :], mask=mask, other=0.0)
    places = pages * value_page + head.to(tl.int64) * value_head + tokens * value_token
    tl.store(values + places[:, None] + dims[None, :], x, mask=mask)


def _constants(dim: int, page_size: int) -> dict[str, int]:
    width = power_of_2(dim)
    return {"DIM": dim, "DIM_BLOCK": width, "PAGE_SIZE": page_size, "BLOCK": max(1, ELEMENTS // width)}


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, group: int, batch: Batch) -> None:
    """See `Kernels.write_kv`."""
    metadata: CudaMetadata = batch.metadata  # type: ignore[assignment]
    num_rows, kv_heads, dim = k.shape
    if not num_rows:
        return
    constants = _constants(dim, keys.shape[2])
    table = batch.block_tables[group]
    _write_kv_kernel[(triton.cdiv(num_rows, constants["BLOCK"]), kv_heads)](
        *(k, v, keys, values, table),
        *(metadata.row_seqs, batch.cu_seqlens, batch.slots, batch.seq_starts, batch.kv_write_from),
        *(*k.stride()[:2], *v.stride()[:2], *keys.stride()[:3], *values.stride()[:3], table.stride(0)),
        num_rows,
        **constants,
        num_warps=NUM_WARPS,
    )
