"""Grouped-query attention over paged keys and values, in all forms that families have of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels
from cairn.layers.linear import Projection
from cairn.layers.memory import Memory
from cairn.layers.norms import RMSNorm


@dataclass(frozen=True, slots=True)
class Attention:
    """One rank's heads. `projection` gives queries | keys | values and, if `gated`, after them the logits of a gate on
    every output channel. `q_norm`, `k_norm`: over one head. Queries and keys are turned where the batch has a rotation.
    `layer` counts the model's attention layers, `group` the attention groups of the cache."""

    kernels: Kernels
    projection: Projection
    o_proj: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer: int
    group: int = 0
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    gated: bool = False

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden].

        Keys and values are written first and then read from the pages with all others, so that those which lie in
        shared pages need no case of their own.
        """
        q, gate = self._write(hidden, batch, memory)
        cache = memory.paged[self.layer]
        out = self.kernels.attention(q, cache.keys, cache.values, self.group, batch).flatten(1)
        if gate is not None:
            out = self.kernels.sigmoid_mul(out, gate)
        return self.o_proj(out, batch)

    def write_kv(self, hidden: Tensor, batch: Batch, memory: Memory) -> None:
        """Write the keys and values of [rows, hidden], and nothing else."""
        self._write(hidden, batch, memory)

    def _write(self, hidden: Tensor, batch: Batch, memory: Memory) -> tuple[Tensor, Tensor | None]:
        """Write keys and values. Returns queries [rows, heads, dim], and the gate [rows, heads * dim], if there is
        one."""
        rows = hidden.shape[0]
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = [queries, keys, keys, *([queries] if self.gated else [])]
        q, k, v, *gate = torch.split(self.projection(hidden, batch), widths, dim=-1)
        q = q.view(rows, self.num_heads, self.head_dim)
        k, v = (part.view(rows, self.num_kv_heads, self.head_dim) for part in (k, v))
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if batch.cos is not None and batch.sin is not None:
            q, k = (self.kernels.rope(part, batch.cos, batch.sin) for part in (q, k))
        cache = memory.paged[self.layer]
        self.kernels.write_kv(k, v, cache.keys, cache.values, self.group, batch)
        return q, gate[0] if gate else None
