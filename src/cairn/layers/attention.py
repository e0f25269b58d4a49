"""Grouped-query attention over paged keys and values, and the layer that has it without positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.contract import TILE, Kernels
from cairn.layers.batch import Batch
from cairn.layers.linear import Projection
from cairn.layers.memory import Memory


def attend(
    kernels: Kernels, qkv: tuple[Tensor, Tensor, Tensor], batch: Batch, memory: Memory, layer: int, group: int = 0
) -> Tensor:
    """Queries [rows, query heads, dim], keys and values [rows, kv heads, dim] -> [rows, query heads, dim]. `layer`
    counts the model's attention layers, `group` its reaches.

    Writes the batch's keys and values first, then reads all of them from the pages, so that tokens whose keys and
    values lie in shared pages need no case of their own.
    """
    q, k, v = qkv
    cache, own = memory.paged[layer], batch.groups[group]
    written = (k[own.write_rows], v[own.write_rows])
    kernels.write_kv(cache.keys, cache.values, written, own.write_pages, own.write_offsets)
    out = torch.zeros_like(q)
    if batch.num_decodes:
        out[: batch.num_decodes] = kernels.attend_decode(
            q[: batch.num_decodes], cache.keys, cache.values, own.decode_pages, batch.decode_lengths
        )
    for span, pages in zip(batch.spans, own.span_pages, strict=True):
        first = span.start // TILE * TILE
        out[span.rows] = kernels.attend_prefill(q[span.rows], cache.keys, cache.values, pages, first, span.end)
    return out


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention without positions, one rank's heads; `layer` and `group` as for `attend`."""

    kernels: Kernels
    q_proj: Projection
    k_proj: Projection
    v_proj: Projection
    o_proj: Projection
    head_dim: int
    layer: int
    group: int = 0

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        rows = hidden.shape[0]
        q, k, v = (
            projection(hidden, batch.tiles).view(rows, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attend(self.kernels, (q, k, v), batch, memory, self.layer, self.group)
        return self.o_proj(out.view(rows, -1), batch.tiles)
