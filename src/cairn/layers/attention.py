"""Grouped-query attention over paged keys and values, in all forms that families have of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels
from cairn.layers.linear import Projection
from cairn.layers.memory import Memory
from cairn.layers.norms import RMSNorm, ShardedRMSNorm


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Of `queries` and of `keys`: over one head, or with `over_all` over all heads together; `after_positions`: of what
    has been turned by them. Of `values`: over one head."""

    queries: RMSNorm | ShardedRMSNorm | None = None
    keys: RMSNorm | ShardedRMSNorm | None = None
    values: RMSNorm | None = None
    over_all: bool = False
    after_positions: bool = False


NO_NORMS = HeadNorms()


@dataclass(frozen=True, slots=True)
class Positions:
    """How they enter attention: `rotation` of the batch's turns queries and keys, or with `queries_alone` no keys.
    `interleaved`: pairs are neighbours; they are brought to where the kernels turn them, which changes no score."""

    rotation: int
    interleaved: bool = False
    queries_alone: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """One rank's heads. `projection` gives queries | keys | values and after them `gate_width` logits of gates a head:
    0 for none, 1 for one on the whole head, `head_dim` for one on every output channel; `kv_projection` keys | values
    alone, where these may be all that is wanted. `kv_parts`: 1 where values are what the keys' projection gives,
    before their norm and positions; 0 where there are neither, as an earlier layer has written what this one reads.
    `layer` counts the attention layers that have pages, `group` the attention groups of the cache. `rule` and `sinks`,
    float32 of the rank's query heads: see `Kernels.attention`."""

    kernels: Kernels
    projection: Projection
    o_proj: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer: int
    group: int = 0
    positions: Positions | None = None
    norms: HeadNorms = NO_NORMS
    gate_width: int = 0
    kv_projection: Projection | None = None
    kv_parts: int = 2
    rule: AttentionRule = FULL
    sinks: Tensor | None = None

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden].

        Keys and values are written first and then read from the pages with all others, so that those which lie in
        shared pages need no case of their own.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = [queries, *(keys,) * self.kv_parts, self.num_heads * self.gate_width]
        q, *entries, gates = torch.split(self.projection(hidden, batch), widths, dim=-1)
        q = self._placed(q, self.norms.queries, self.num_heads, batch)
        if entries:
            self._write(entries[0], entries[-1], batch, memory)
        cache = memory.paged[self.layer]
        out = self.kernels.attention(q, cache.keys, cache.values, self.group, batch, self.rule, self.sinks).flatten(1)
        if self.gate_width == 1:
            heads = out.view(-1, self.head_dim)
            out = self.kernels.sigmoid_mul(heads, gates.reshape(-1, 1)).view(out.shape)
        elif self.gate_width:
            out = self.kernels.sigmoid_mul(out, gates)
        return self.o_proj(out, batch)

    def write_kv(self, hidden: Tensor, batch: Batch, memory: Memory) -> None:
        """Write the keys and values of [rows, hidden], and nothing else."""
        assert self.kv_projection is not None
        k, v = self.kv_projection(hidden, batch).chunk(2, dim=-1)
        self._write(k, v, batch, memory)

    def _write(self, k: Tensor, v: Tensor, batch: Batch, memory: Memory) -> None:
        """[rows, heads * dim] each."""
        k = self._placed(k, self.norms.keys, self.num_kv_heads, batch, are_keys=True)
        cache = memory.paged[self.layer]
        v = v.view(len(v), self.num_kv_heads, self.head_dim)
        if self.norms.values is not None:
            v = self.norms.values(v)
        self.kernels.write_kv(k, v, cache.keys, cache.values, self.group, batch)

    def _placed(
        self, x: Tensor, norm: RMSNorm | ShardedRMSNorm | None, heads: int, batch: Batch, are_keys: bool = False
    ) -> Tensor:
        """[rows, heads * dim] -> [rows, heads, dim], normed and where their positions are."""
        if norm is None:
            return self._turn(x.view(len(x), heads, self.head_dim), batch, are_keys)
        if self.norms.over_all:
            return self._turn(norm(x).view(len(x), heads, self.head_dim), batch, are_keys)
        x = x.view(len(x), heads, self.head_dim)
        if self.norms.after_positions:
            return norm(self._turn(x, batch, are_keys))
        return self._turn(norm(x), batch, are_keys)

    def _turn(self, x: Tensor, batch: Batch, are_keys: bool) -> Tensor:
        places = self.positions
        if places is None or (are_keys and places.queries_alone):
            return x
        if places.interleaved:
            x = x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return self.kernels.rope(x, *batch.rotations[places.rotation])
