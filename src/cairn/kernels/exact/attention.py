"""Paged attention, one sequence at a time: gather its pages once, then SDPA with a key head's query heads as rows.

The length of keys and values is a multiple of 64 that depends on the position alone, so a query's bits depend neither
on the batch nor on how the prompt was cut. Bytes after the valid length are cleared: pages are recycled, and what
they held may read as NaN, which no mask would stop.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch
from cairn.kernels.exact.metadata import Prefill, metadata_of


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, group: int, batch: Batch) -> None:
    """See `Kernels.write_kv`."""
    metadata = metadata_of(batch)
    page_size = keys.shape[2]
    positions = metadata.write_positions
    pages = batch.block_tables[group][metadata.write_slots, positions // page_size].long()
    offsets = positions % page_size
    keys[pages, :, offsets] = k[metadata.write_rows]
    values[pages, :, offsets] = v[metadata.write_rows]


def attention(q: Tensor, keys: Tensor, values: Tensor, group: int, batch: Batch) -> Tensor:
    """See `Kernels.attention`."""
    metadata, table = metadata_of(batch), batch.block_tables[group]
    out = torch.empty(q.shape, dtype=q.dtype)
    for decode in metadata.decodes:
        for length, row in enumerate(decode.rows, start=decode.start + 1):
            out[row] = _decode(q[row], keys, values, table[decode.slot], length)
    for prefill in metadata.prefills:
        out[prefill.rows] = _prefill(q, keys, values, table[prefill.slot], prefill)
    return out


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """cache [page, Hk, token, D] -> the first `length` tokens, zeros up to a multiple of CHUNK: [1, Hk, padded, D].
    `table` [entries]: the sequence's pages."""
    _, heads, tokens, dim = cache.shape
    used = -(-length // tokens)
    padded = -(-length // CHUNK) * CHUNK
    room = -(-max(used * tokens, padded) // CHUNK) * CHUNK  # whole chunks, so that every head begins aligned
    out = cache.new_empty(1, heads, room, dim)
    pages = cache[table[:used].long()].transpose(0, 1)
    out[0, :, : used * tokens].view(heads, used, tokens, dim).copy_(pages)
    out[:, :, length:] = 0
    return out[:, :, :padded]


def _prefill(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, prefill: Prefill) -> Tensor:
    """All rows of one sequence, [length, Hq, D]. Keys and values are trimmed to the end of each chunk of queries."""
    chunks = prefill.lay_out(q)
    rows, heads, dim = chunks.shape
    kv_heads = keys.shape[1]
    per_key = heads // kv_heads
    first, end = prefill.start - prefill.front, prefill.start + prefill.length
    k, v = _gather(keys, table, end), _gather(values, table, end)
    past_masks = _causal(q, per_key, first + rows)
    for begin in range(0, rows, CHUNK):
        chunk = chunks[begin : begin + CHUNK].view(CHUNK, kv_heads, per_key, dim)
        visible = first + begin + CHUNK
        grouped = chunk.permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        mask = past_masks[:, rows + first - visible :]
        result = F.scaled_dot_product_attention(grouped, k[:, :, :visible], v[:, :, :visible], attn_mask=mask)
        chunk.copy_(result.view(kv_heads, per_key, CHUNK, dim).permute(2, 0, 1, 3))
    return chunks[prefill.on_grid]


def _causal(q: Tensor, per_key: int, length: int) -> Tensor:
    """Additive mask [per_key * CHUNK, length] of the last chunk; dropping columns in front gives an earlier one's."""
    mask = q.new_zeros(per_key, CHUNK, length)
    mask[:, :, -CHUNK:] = torch.full((CHUNK, CHUNK), -torch.inf, dtype=q.dtype).triu_(1)
    return mask.view(-1, length)


def _decode(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int) -> Tensor:
    """One query [Hq, D], which sees `length` tokens -> [Hq, D]."""
    heads, dim = q.shape
    kv_heads = keys.shape[1]
    k, v = _gather(keys, table, length), _gather(values, table, length)
    mask = q.new_zeros(1, k.shape[2])
    mask[:, length:] = -torch.inf
    # A copy, because where a row begins depends on its place in the batch, and BLAS may round accordingly.
    grouped = q.clone(memory_format=torch.contiguous_format).view(1, kv_heads, heads // kv_heads, dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask.expand(heads // kv_heads, -1)).view(heads, dim)
