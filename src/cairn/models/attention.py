"""Softmax attention: its sizes, how it is sharded, and its tensors. Without torch.

Kv heads are assigned to ranks in order, query heads with theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.layers.memory import AttentionSpec
from cairn.models.layer_sizes import LayerSizes
from cairn.models.rotary import RotarySpec, TemperatureSpec
from cairn.models.sharding import HeadShard, Slice, shard_heads
from cairn.models.weight_specs import MixerSpec, ProductSpec, StoredTensor, WeightSpec, fused, row_parallel


@dataclass(frozen=True, slots=True)
class AttentionSizes(LayerSizes):
    """`gated`: with a gate on every output channel; `gated_heads`: with one on every head; `bias`: of all
    projections. `kv_projections`: of keys and values; 1: of keys, which values are made of as well; 0: neither, as
    those of an earlier layer are read. `kv_heads_field`: what config.json calls `num_kv_heads`."""

    check_order: ClassVar[int] = 0

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool = False
    bias: bool = False
    gated_heads: bool = False
    kv_projections: int = 2
    kv_heads_field: str = "num_key_value_heads"

    @property
    def gate_width(self) -> int:
        """Gates of a head."""
        return self.head_dim if self.gated else int(self.gated_heads)

    @property
    def score_numbers(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def active_weights(self) -> int:
        heads = 2 * self.num_heads + self.kv_projections * self.num_kv_heads
        return self.hidden_size * (heads * self.head_dim + self.num_heads * self.gate_width)

    def shard(self, rank: int, size: int) -> HeadShard:
        """The rank's kv heads. Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        per_kv_head = self.num_heads // self.num_kv_heads
        return shard_heads(self.kv_heads_field, self.num_kv_heads, "query heads", per_kv_head, rank, size)

    def check_size(self, size: int) -> None:
        self.shard(0, size)

    def rank_heads(self, rank: int, size: int) -> tuple[int, int]:
        """The rank's query heads [first, last)."""
        return self.shard(rank, size).output_slice(self.num_heads // self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class AttentionLayer(MixerSpec):
    """The attention called `name`.

    `head_norms`: the names of the norms over one head of queries and of keys, or none; `centred`: their weights are
    stored less 1; `norms_all_heads`: they are over all heads together; `unit_norms`: heads of queries and keys are
    normed without weights, after they are turned; `out`: the name of the output projection; `factors`: constant
    multipliers of a projection's results, by its name; `rotary`: its positions, where they are not the model's. Gates
    on channels are stored after each head's query, those on heads as `g_proj`. `norms_values`: each head of values is
    normed, without weights. `keys_of`: the attention before it whose keys and values it reads, where it has none.
    `rule`: what it sees, and its scores; `sinks`: the name of the logits [query heads] of attention sinks, or none.
    """

    sizes: AttentionSizes
    name: str
    head_norms: tuple[str, ...] = ()
    centred: bool = False
    norms_all_heads: bool = False
    out: str = "o_proj"
    factors: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    unit_norms: bool = False
    rotary: RotarySpec | TemperatureSpec | None = None
    rule: AttentionRule = FULL
    sinks: str | None = None
    norms_values: bool = False
    keys_of: str | None = None

    def attention_spec(self, rank: int, size: int) -> AttentionSpec | None:
        if self.keys_of is not None:
            return None
        kv_heads = self.sizes.shard(rank, size).count
        return AttentionSpec(1, kv_heads, self.sizes.head_dim, self.rule.reach, self.rule.chunk is not None)

    def keys_and_values(self, rank: int, size: int) -> ProductSpec:
        """Keys and values by themselves, which `weights` has in one product with the queries."""
        sizes = self.sizes
        shape, rows = (sizes.num_kv_heads * sizes.head_dim, sizes.hidden_size), sizes.shard(rank, size)
        names = f"{self.name}.k_proj", f"{self.name}.v_proj"
        return fused(tuple((name, shape, (rows.slice_of(sizes.head_dim),)) for name in names), sizes.bias)

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        sizes, name = self.sizes, self.name
        dim, hidden, shard = sizes.head_dim, sizes.hidden_size, sizes.shard(rank, size)
        first, last = sizes.rank_heads(rank, size)
        wide, kv_shape, kv_rows = (
            (2 if sizes.gated else 1) * dim,
            (sizes.num_kv_heads * dim, hidden),
            shard.slice_of(dim),
        )
        return {
            "q_k_v": fused(
                (
                    (f"{name}.q_proj", (wide * sizes.num_heads, hidden), ((first * wide, last * wide),)),
                    *((f"{name}.{part}_proj", kv_shape, (kv_rows,)) for part in "kv"[: sizes.kv_projections]),
                    *([(f"{name}.g_proj", (sizes.num_heads, hidden), ((first, last),))] if sizes.gated_heads else []),
                ),
                sizes.bias,
                last - first if sizes.gated else 0,
            ),
            "out": row_parallel(
                f"{name}.{self.out}", (hidden, sizes.num_heads * dim), (first * dim, last * dim), rank, sizes.bias
            ),
            **self._norms((first * dim, last * dim), kv_rows),
            **self._sinks((first, last)),
        }

    def _norms(self, queries: Slice, keys: Slice) -> dict[str, WeightSpec]:
        """`queries`, `keys`: the rank's channels."""
        dim, norms = self.sizes.head_dim, dict[str, WeightSpec]()
        parts = ("q_norm", self.sizes.num_heads, queries), ("k_norm", self.sizes.num_kv_heads, keys)
        for (key, heads, channels), norm in zip(parts, self.head_norms, strict=False):
            shape, slices = ((heads * dim,), (channels,)) if self.norms_all_heads else ((dim,), ())
            norms[key] = StoredTensor(f"{self.name}.{norm}.weight", shape, slices)
        return norms

    def _sinks(self, heads: Slice) -> dict[str, WeightSpec]:
        """`heads`: the rank's query heads."""
        if self.sinks is None:
            return {}
        return {"sinks": StoredTensor(f"{self.name}.{self.sinks}", (self.sizes.num_heads,), (heads,))}
