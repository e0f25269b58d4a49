"""A softmax attention layer's part of a model: sizes, tensors by name, what a rank has and remembers of it.

Kv heads are dealt to ranks in order, query heads with theirs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cairn.layers.memory import AttentionSpec
from cairn.models.cut import Run, Share, deal

__all__ = ["AttentionShare", "AttentionSizes"]


@dataclass(frozen=True, slots=True)
class AttentionShare:
    """One rank's kv heads, and its query heads [begin, end)."""

    kv_heads: Share
    query_heads: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """The whole model's sizes of one layer. `bias`: of all four projections; `head_norms`: what the norms over one
    head of queries and of keys are called, () for none; `out`: what the output projection is called."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    head_norms: tuple[str, ...] = ()
    out: str = "o_proj"

    @property
    def queries(self) -> int:
        """Elements of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def widths(self) -> dict[str, int]:
        """Outputs of the three projections from hidden states, by name."""
        key_values = self.num_kv_heads * self.head_dim
        return {"q_proj": self.queries, "k_proj": key_values, "v_proj": key_values}

    def tensors(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor of the layer called `name`, with its shape."""
        shapes = {part: (width, self.hidden_size) for part, width in self.widths.items()}
        shapes[self.out] = (self.hidden_size, self.queries)
        for part, shape in shapes.items():
            yield f"{name}.{part}.weight", shape
            if self.bias:
                yield f"{name}.{part}.bias", shape[:1]
        yield from ((f"{name}.{norm}.weight", (self.head_dim,)) for norm in self.head_norms)

    def share(self, rank: int, size: int) -> AttentionShare:
        """Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        per_kv = self.num_heads // self.num_kv_heads
        kv_heads = deal("num_key_value_heads", self.num_kv_heads, "query heads", per_kv, rank, size)
        return AttentionShare(kv_heads, kv_heads.own(per_kv))

    def remembered(self, layers: int, share: AttentionShare) -> AttentionSpec:
        """What a rank remembers of `layers` such layers."""
        return AttentionSpec(layers, share.kv_heads.count, self.head_dim)
