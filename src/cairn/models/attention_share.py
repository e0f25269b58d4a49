"""A softmax attention layer's part of a model: its sizes, what a rank has of it, and what is remembered of it.

Kv heads are dealt to ranks in order, query heads with theirs.
"""

from dataclasses import dataclass

from cairn.layers.memory import AttentionSpec
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import Run, Share, deal


@dataclass(frozen=True, slots=True)
class AttentionShare:
    """One rank's kv heads, and its query heads [begin, end)."""

    kv_heads: Share
    query_heads: Run


@dataclass(frozen=True, slots=True)
class AttentionSizes(LayerSizes):
    """`gated`: with a gate on every output channel."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool = False

    @property
    def score_numbers(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def active_weights(self) -> int:
        heads = (3 if self.gated else 2) * self.num_heads + 2 * self.num_kv_heads
        return self.hidden_size * heads * self.head_dim

    def share(self, rank: int, size: int) -> AttentionShare:
        """Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        per_kv = self.num_heads // self.num_kv_heads
        kv_heads = deal("num_key_value_heads", self.num_kv_heads, "query heads", per_kv, rank, size)
        return AttentionShare(kv_heads, kv_heads.own(per_kv))

    def attention_spec(self, num_layers: int, rank: int, size: int) -> AttentionSpec:
        """See `LayerSizes`."""
        return AttentionSpec(num_layers, self.share(rank, size).kv_heads.count, self.head_dim)
