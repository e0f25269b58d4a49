"""Grouped-query attention over paged keys and values, in all forms that families have of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels
from cairn.layers.linear import Projection
from cairn.layers.memory import Memory
from cairn.layers.norms import RMSNorm, ShardedRMSNorm


@dataclass(frozen=True, slots=True)
class Attention:
    """One rank's heads. `projection` gives queries | keys | values and, if `gated`, after them the logits of a gate on
    every output channel. `q_norm`, `k_norm`: over one head, or with `norms_all_heads` over all heads together. Queries
    and keys are turned where the batch has a rotation.
    `layer` counts the model's attention layers, `group` the attention groups of the cache."""

    kernels: Kernels
    projection: Projection
    o_proj: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer: int
    group: int = 0
    q_norm: RMSNorm | ShardedRMSNorm | None = None
    k_norm: RMSNorm | ShardedRMSNorm | None = None
    norms_all_heads: bool = False
    gated: bool = False

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden].

        Keys and values are written first and then read from the pages with all others, so that those which lie in
        shared pages need no case of their own.
        """
        rows = hidden.shape[0]
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = [queries, keys, keys, *([queries] if self.gated else [])]
        q, k, v, *gate = torch.split(self.projection(hidden, batch), widths, dim=-1)
        if self.norms_all_heads:
            q, k = self._normed(q, k)
        q = q.view(rows, self.num_heads, self.head_dim)
        k, v = (part.view(rows, self.num_kv_heads, self.head_dim) for part in (k, v))
        if not self.norms_all_heads:
            q, k = self._normed(q, k)
        if batch.cos is not None and batch.sin is not None:
            q, k = (self.kernels.rope(part, batch.cos, batch.sin) for part in (q, k))
        cache = memory.paged[self.layer]
        self.kernels.write_kv(k, v, cache.keys, cache.values, self.group, batch)
        out = self.kernels.attention(q, cache.keys, cache.values, self.group, batch).flatten(1)
        if gate:
            out = self.kernels.sigmoid_mul(out, gate[0])
        return self.o_proj(out, batch)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k)
