"""Attention without positions over paged keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.contract import TILE, Kernels
from cairn.layers.batch import Batch
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory

__all__ = ["PagedAttention"]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Grouped-query attention, one rank's heads. `layer` counts the model's attention layers, `group` its reaches."""

    kernels: Kernels
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    head_dim: int
    layer: int
    group: int = 0

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]. Writes the batch's keys and values first, then
        reads all of them from the pages, so that tokens whose keys and values lie in shared pages need no case of
        their own."""
        rows = hidden.shape[0]
        q, k, v = (
            projection(hidden, batch.tiles).view(rows, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cache, group = memory.paged[self.layer], batch.groups[self.group]
        written = (k[group.write_rows], v[group.write_rows])
        self.kernels.write_kv(cache.keys, cache.values, written, group.write_pages, group.write_offsets)
        out = torch.zeros_like(q)
        if batch.num_decodes:
            out[: batch.num_decodes] = self.kernels.attend_decode(
                q[: batch.num_decodes], cache.keys, cache.values, group.decode_pages, batch.decode_lengths
            )
        for span, pages in zip(batch.spans, group.span_pages, strict=True):
            first = span.start // TILE * TILE
            out[span.rows] = self.kernels.attend_prefill(q[span.rows], cache.keys, cache.values, pages, first, span.end)
        return self.o_proj(out.view(rows, -1), batch.tiles)
