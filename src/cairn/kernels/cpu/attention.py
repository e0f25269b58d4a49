"""Paged attention, one sequence at a time: gather its pages once, then SDPA with a kv head's query heads as rows.

The length of keys and values is a multiple of 64 that depends on the position alone, so a query's bits depend neither
on the batch nor on how the prompt was cut. Bytes behind the valid length are cleared: pages are recycled, and what
they held may read as NaN, which no mask would stop.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.contract import TILE


def write_kv(keys: Tensor, values: Tensor, kv: tuple[Tensor, Tensor], pages: Tensor, offsets: Tensor) -> None:
    """See `Kernels.write_kv`."""
    keys[pages, :, offsets] = kv[0]
    values[pages, :, offsets] = kv[1]


def _gather(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """cache [page, Hk, token, D] -> the first `length` tokens, zero-padded to a multiple of TILE: [Hk, padded, D]."""
    _, heads, tokens, dim = cache.shape
    used = -(-length // tokens)
    padded = -(-length // TILE) * TILE
    room = -(-max(used * tokens, padded) // TILE) * TILE  # whole tiles, so that every head begins aligned
    out = cache.new_empty(heads, room, dim)
    out[:, : used * tokens].view(heads, used, tokens, dim).copy_(cache[pages[:used]].transpose(0, 1))
    out[:, length:] = 0
    return out[:, :padded]


def attend_prefill(q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, first: int, end: int) -> Tensor:
    """See `Kernels.attend_prefill`. Keys and values are trimmed to the end of each tile of queries."""
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    per_kv = heads // kv_heads
    k, v = _gather(keys, pages, end)[None], _gather(values, pages, end)[None]
    past_masks = _causal(q, per_kv, first + rows)
    out = torch.empty_like(q)
    for begin in range(0, rows, TILE):
        tile = slice(begin, begin + TILE)
        visible = first + begin + TILE
        grouped = q[tile].view(TILE, kv_heads, per_kv, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        mask = past_masks[:, rows + first - visible :]
        result = F.scaled_dot_product_attention(grouped, k[:, :, :visible], v[:, :, :visible], attn_mask=mask)
        out[tile].view(TILE, kv_heads, per_kv, dim).copy_(result.view(kv_heads, per_kv, TILE, dim).permute(2, 0, 1, 3))
    return out


def _causal(q: Tensor, per_kv: int, length: int) -> Tensor:
    """Additive mask [per_kv * TILE, length] of the last tile; dropping columns in front gives an earlier tile's."""
    mask = q.new_zeros(per_kv, TILE, length)
    mask[:, :, -TILE:] = torch.full((TILE, TILE), -torch.inf, dtype=q.dtype, device=q.device).triu_(1)
    return mask.view(-1, length)


def attend_decode(q: Tensor, keys: Tensor, values: Tensor, pages: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """See `Kernels.attend_decode`."""
    _, heads, dim = q.shape
    kv_heads = keys.shape[1]
    out = torch.empty_like(q)
    for row, (own, length) in enumerate(zip(pages, lengths, strict=True)):
        k, v = _gather(keys, own, length)[None], _gather(values, own, length)[None]
        mask = q.new_zeros(1, k.shape[2])
        mask[:, length:] = -torch.inf
        # A copy, because where a row begins depends on its place in the batch, and BLAS may round accordingly.
        grouped = q[row].clone().view(1, kv_heads, heads // kv_heads, dim)
        result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask.expand(heads // kv_heads, -1))
        out[row] = result.view(heads, dim)
    return out
