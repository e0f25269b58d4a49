"""The gated delta net: its sizes, how it is sharded, its tensors, and its fields in the config.json of two families.
Without torch.

Key heads are assigned to ranks in order, with their value heads.
"""

from dataclasses import dataclass
from typing import ClassVar

from cairn.layers.memory import ConvPart, RecurrentSpec
from cairn.models.config_schema import has_layers, integer
from cairn.models.decoder_config import MAX_HEADS, DecoderConfig
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import HeadShard, Slice, shard_heads
from cairn.models.weight_specs import (
    JoinedTensors,
    MixerSpec,
    ProductSpec,
    StoredTensor,
    WeightSpec,
    matrix,
    row_parallel,
    taps,
)

DELTA = "linear_attention"

HAS_DELTA = has_layers(DELTA)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSizes(LayerSizes):
    """`eps`: of the norm over one value head; `packed`: the projections are stored head by head in two tensors."""

    check_order: ClassVar[int] = 1

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    eps: float
    packed: bool

    @property
    def keys(self) -> int:
        """Channels of q, and of k."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of v, and of the gate."""
        return self.value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q | k | v."""
        return 2 * self.keys + self.values

    @property
    def active_weights(self) -> int:
        return self.hidden_size * (self.conv_dim + 2 * self.values + 2 * self.value_heads)

    @property
    def unit_heads(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def unit_values(self) -> int:
        """Channels of v of a key head."""
        return self.unit_heads * self.value_dim

    def shard(self, rank: int, size: int) -> HeadShard:
        """The rank's key heads. Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        return shard_heads("linear_num_key_heads", self.key_heads, "channels", self.unit_values, rank, size)

    def recurrent_spec(self, num_layers: int, rank: int, size: int) -> RecurrentSpec:
        heads = self.shard(rank, size).count
        keys = ConvPart(heads * self.key_dim)
        return RecurrentSpec(
            num_layers=num_layers,
            columns=self.conv_kernel - 1,
            parts=(keys, keys, ConvPart(heads * self.unit_values)),
            state=(heads * self.unit_heads, self.key_dim, self.value_dim),
            units=heads,
        )


@dataclass(frozen=True, slots=True)
class DeltaNetLayer(MixerSpec):
    """The gated delta net called `name`. `beta_scale`: see `Kernels.gdn`."""

    sizes: DeltaNetSizes
    name: str
    beta_scale: float = 1.0

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        """See `MixerSpec`. `in` is q | k | v | gate | beta | time step, whatever the checkpoint's form."""
        sizes, name, shard = self.sizes, self.name, self.sizes.shard(rank, size)
        heads, values = shard.slice_of(sizes.unit_heads), shard.slice_of(sizes.unit_values)
        q_k_v = (
            shard.slice_of(sizes.key_dim),
            shard.slice_of(sizes.key_dim, sizes.keys),
            shard.slice_of(sizes.unit_values, 2 * sizes.keys),
        )
        parts: dict[str, tuple[int, tuple[Slice, ...]]]
        if sizes.packed:
            widths = (sizes.key_dim, sizes.key_dim, sizes.unit_values, sizes.unit_values)
            parts = {
                "qkvz": (sizes.conv_dim + sizes.values, _by_part(shard, widths)),
                "ba": (2 * sizes.value_heads, _by_part(shard, (sizes.unit_heads, sizes.unit_heads))),
            }
        else:
            parts = {
                "qkv": (sizes.conv_dim, q_k_v),
                "z": (sizes.values, (values,)),
                "b": (sizes.value_heads, (heads,)),
                "a": (sizes.value_heads, (heads,)),
            }
        in_proj = (
            matrix(f"{name}.in_proj_{part}", (rows, sizes.hidden_size), *slices)
            for part, (rows, slices) in parts.items()
        )
        return {
            **{key: StoredTensor(f"{name}.{key}", (sizes.value_heads,), (heads,)) for key in ("dt_bias", "A_log")},
            **taps(f"{name}.conv1d", (sizes.conv_dim, 1, sizes.conv_kernel), *q_k_v),
            "in": ProductSpec(tuple(in_proj)),
            "norm": StoredTensor(f"{name}.norm.weight", (sizes.value_dim,)),
            "out": row_parallel(
                f"{name}.out_proj", (sizes.hidden_size, sizes.values), shard.output_slice(sizes.unit_values), rank
            ),
        }


@dataclass(frozen=True, slots=True)
class SeparateDeltaNetLayer(DeltaNetLayer):
    """One whose projections are a tensor for each of q, k, v, gate, beta and time step, and convolutions for each of
    q, k and v."""

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        """See `MixerSpec`. `in` is as for `DeltaNetLayer`."""
        sizes, name, shard = self.sizes, self.name, self.sizes.shard(rank, size)
        heads = sizes.value_heads, shard.slice_of(sizes.unit_heads)
        keys, values = (sizes.keys, shard.slice_of(sizes.key_dim)), (sizes.values, shard.slice_of(sizes.unit_values))
        projections = zip("qkvgba", (keys, keys, values, values, heads, heads), strict=True)
        in_proj = [
            matrix(f"{name}.{part}_proj", (rows, sizes.hidden_size), channels) for part, (rows, channels) in projections
        ]
        convs = [
            StoredTensor(f"{name}.{part}_conv1d.weight", (rows, 1, sizes.conv_kernel), (channels,))
            for part, (rows, channels) in zip("qkv", (keys, keys, values), strict=True)
        ]
        return {
            **{key: StoredTensor(f"{name}.{key}", (sizes.value_heads,), (heads[1],)) for key in ("dt_bias", "A_log")},
            "conv": JoinedTensors(tuple(convs)),
            "in": ProductSpec(tuple(in_proj)),
            "norm": StoredTensor(f"{name}.o_norm.weight", (sizes.value_dim,)),
            "out": row_parallel(
                f"{name}.o_proj", (sizes.hidden_size, sizes.values), shard.output_slice(sizes.unit_values), rank
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig(DecoderConfig):
    """A family with gated delta nets, which `layer_types` calls `linear_attention`; without any their sizes are 0.
    `packed`: see `DeltaNetSizes`; `delta_norm_eps`: of the norm in the delta net, None for that of all others."""

    packed: ClassVar[bool] = False
    delta_norm_eps: ClassVar[float | None] = None

    linear_num_key_heads: int = integer(1, MAX_HEADS, divides="linear_num_value_heads", when=HAS_DELTA)
    linear_num_value_heads: int = integer(1, MAX_HEADS, when=HAS_DELTA)
    linear_key_head_dim: int = integer(1, 1 << 12, when=HAS_DELTA)
    linear_value_head_dim: int = integer(1, 1 << 12, when=HAS_DELTA)
    linear_conv_kernel_dim: int = integer(2, 64, default=4, when=HAS_DELTA)

    @property
    def delta_net(self) -> DeltaNetSizes:
        """Of one gated delta net."""
        return DeltaNetSizes(
            hidden_size=self.hidden_size,
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_kernel=self.linear_conv_kernel_dim,
            eps=self.delta_norm_eps or self.eps,
            packed=self.packed,
        )


def _by_part(shard: HeadShard, widths: tuple[int, ...]) -> tuple[Slice, ...]:
    """The slices of rows that are stored head by head, parts of these widths in each: one part of all heads after the
    other."""
    starts = [sum(widths[:part]) for part in range(len(widths))]
    heads = range(shard.begin, shard.end)
    return tuple(
        (head * sum(widths) + start, head * sum(widths) + start + width)
        for start, width in zip(starts, widths, strict=True)
        for head in heads
    )
