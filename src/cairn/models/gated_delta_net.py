"""The gated delta net: its sizes, how it is sharded, and how it is built. No torch before it is built.

Key heads are assigned to ranks in order, with their value heads.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.layers.memory import ConvPart, RecurrentSpec
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import HeadShard, Slice, shard_heads

if TYPE_CHECKING:
    from cairn.layers.gated_delta_net import GatedDeltaNet
    from cairn.models.decoder_builder import DecoderBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSizes(LayerSizes):
    """`eps`: of the norm over one value head; `packed`: the projections are stored head by head in two tensors."""

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
        """See `LayerSizes`."""
        heads = self.shard(rank, size).count
        keys = ConvPart(heads * self.key_dim)
        return RecurrentSpec(
            num_layers=num_layers,
            columns=self.conv_kernel - 1,
            parts=(keys, keys, ConvPart(heads * self.unit_values)),
            state=(heads * self.unit_heads, self.key_dim, self.value_dim),
            units=heads,
        )

    def build(self, b: "DecoderBuilder", name: str) -> "GatedDeltaNet":
        """The rank's heads of the layer `name`."""
        from cairn.layers.gated_delta_net import GatedDeltaNet
        from cairn.layers.norms import RMSNorm

        weights, shard = b.weights, self.shard(b.rank, b.size)
        heads, values = shard.slice_of(self.unit_heads), shard.slice_of(self.unit_values)
        q_k_v = (
            shard.slice_of(self.key_dim),
            shard.slice_of(self.key_dim, self.keys),
            shard.slice_of(self.unit_values, 2 * self.keys),
        )
        dt_bias, a_log = (
            weights.tensor(f"{name}.{vector}", (self.value_heads,), heads).float() for vector in ("dt_bias", "A_log")
        )
        conv, _ = weights.taps(f"{name}.conv1d", (self.conv_dim, 1, self.conv_kernel), *q_k_v)
        # q | k | v | gate | beta | time step, whatever the checkpoint's form.
        parts: dict[str, tuple[int, tuple[Slice, ...]]]
        if self.packed:
            widths = (self.key_dim, self.key_dim, self.unit_values, self.unit_values)
            parts = {
                "qkvz": (self.conv_dim + self.values, _by_part(shard, widths)),
                "ba": (2 * self.value_heads, _by_part(shard, (self.unit_heads, self.unit_heads))),
            }
        else:
            parts = {
                "qkv": (self.conv_dim, q_k_v),
                "z": (self.values, (values,)),
                "b": (self.value_heads, (heads,)),
                "a": (self.value_heads, (heads,)),
            }
        in_proj = [
            weights.matrix(f"{name}.in_proj_{part}.weight", (rows, self.hidden_size), *slices)
            for part, (rows, slices) in parts.items()
        ]
        return GatedDeltaNet(
            kernels=weights.kernels,
            num_key_heads=shard.count,
            key_dim=self.key_dim,
            num_value_heads=shard.count * self.unit_heads,
            value_dim=self.value_dim,
            in_proj=weights.linear(in_proj),
            conv=conv,
            a=-a_log.exp(),
            dt_bias=dt_bias,
            norm=RMSNorm(weights.kernels, weights.tensor(f"{name}.norm.weight", (self.value_dim,)).float(), self.eps),
            out_proj=weights.row_parallel(
                f"{name}.out_proj", (self.hidden_size, self.values), shard.output_slice(self.unit_values)
            ),
            layer=next(b.recurrent_layers),
            output_slice=shard.local_output(self.unit_values),
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
