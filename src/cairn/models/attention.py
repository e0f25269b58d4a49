"""Softmax attention: its sizes, how it is sharded, and how it is built. No torch before it is built.

Kv heads are assigned to ranks in order, query heads with theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.layers.memory import AttentionSpec
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import HeadShard, shard_heads

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.layers.attention import Attention
    from cairn.layers.linear import Projection
    from cairn.models.decoder_builder import DecoderBuilder


@dataclass(frozen=True, slots=True)
class AttentionSizes(LayerSizes):
    """`gated`: with a gate on every output channel; `bias`: of all four projections."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool = False
    bias: bool = False

    @property
    def score_numbers(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def active_weights(self) -> int:
        heads = (3 if self.gated else 2) * self.num_heads + 2 * self.num_kv_heads
        return self.hidden_size * heads * self.head_dim

    def shard(self, rank: int, size: int) -> HeadShard:
        """The rank's kv heads. Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        per_kv_head = self.num_heads // self.num_kv_heads
        return shard_heads("num_key_value_heads", self.num_kv_heads, "query heads", per_kv_head, rank, size)

    def attention_spec(self, num_layers: int, rank: int, size: int) -> AttentionSpec:
        """See `LayerSizes`."""
        return AttentionSpec(num_layers, self.shard(rank, size).count, self.head_dim)

    def build(
        self,
        b: "DecoderBuilder",
        name: str,
        *,
        head_norms: tuple[str, str] | None = None,
        centred: bool = False,
        out: str = "o_proj",
        factors: Mapping[str, float] | None = None,
    ) -> "Attention":
        """The rank's heads of the layer `name`.

        `head_norms`: the names of the norms over one head of queries and of keys, `centred` as for
        `DecoderBuilder.norm`; `out`: the name of the output projection; `factors`: constant multipliers of a
        projection's results, by its name. A gate is stored behind each head's query.
        """
        import torch

        from cairn.layers.attention import Attention
        from cairn.layers.linear import ScaledLinear

        weights, shard, dim, hidden = b.weights, self.shard(b.rank, b.size), self.head_dim, self.hidden_size
        first, last = shard.output_slice(self.num_heads // self.num_kv_heads)
        wide, kv_shape, kv_rows = (2 if self.gated else 1) * dim, (self.num_kv_heads * dim, hidden), shard.slice_of(dim)
        projection: Projection = weights.fused(
            [
                (f"{name}.q_proj", (wide * self.num_heads, hidden), ((first * wide, last * wide),)),
                (f"{name}.k_proj", kv_shape, (kv_rows,)),
                (f"{name}.v_proj", kv_shape, (kv_rows,)),
            ],
            self.bias,
            (lambda rows: _gates_last(rows, last - first, dim)) if self.gated else None,
        )
        if factors:
            rows = {"q_proj": (last - first) * dim, "k_proj": shard.count * dim, "v_proj": shard.count * dim}
            by_row = [torch.full((count,), factors.get(part, 1.0)) for part, count in rows.items()]
            projection = ScaledLinear(projection, torch.cat(by_row).to(weights.device))
        inputs = (first * dim, last * dim)
        o_proj = weights.row_parallel(f"{name}.{out}", (hidden, self.num_heads * dim), inputs, self.bias)
        q_norm, k_norm = (None, None)
        if head_norms is not None:
            q_norm, k_norm = (b.norm(f"{name}.{norm}", dim, centred) for norm in head_norms)
        return Attention(
            kernels=weights.kernels,
            projection=projection,
            o_proj=o_proj,
            num_heads=last - first,
            num_kv_heads=shard.count,
            head_dim=dim,
            layer=next(b.attention_layers),
            q_norm=q_norm,
            k_norm=k_norm,
            gated=self.gated,
        )


def _gates_last(rows: "Tensor", heads: int, dim: int) -> "Tensor":
    """Rows of each head's query and then its gate, with keys and values behind them all -> queries | keys | values |
    gates."""
    import torch

    interleaved, others = rows[: 2 * heads * dim], rows[2 * heads * dim :]
    queries, gates = interleaved.reshape(heads, 2, dim, *rows.shape[1:]).unbind(1)
    return torch.cat([queries.flatten(0, 1), others, gates.flatten(0, 1)])
