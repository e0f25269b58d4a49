"""LFM2's short convolution: its sizes, how it is sharded, and how it is built. No torch before it is built."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.layers.memory import ConvPart, RecurrentSpec
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import HeadShard, shard_even

if TYPE_CHECKING:
    from cairn.layers.short_conv import ShortConv
    from cairn.models.decoder_builder import DecoderBuilder


@dataclass(frozen=True, slots=True)
class ShortConvSizes(LayerSizes):
    """`num_units`: the most shards that its channels are cut into, which config.json calls `units_field`; `taps`: how
    many inputs it sees; `bias`: of convolution and projections."""

    hidden_size: int
    num_units: int
    units_field: str
    taps: int
    bias: bool

    @property
    def unit_channels(self) -> int:
        return self.hidden_size // self.num_units

    @property
    def active_weights(self) -> int:
        return 4 * self.hidden_size**2

    def shard(self, rank: int, size: int) -> HeadShard:
        """The rank's units. Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        return HeadShard(*shard_even(self.units_field, self.num_units, rank, size))

    def recurrent_spec(self, num_layers: int, rank: int, size: int) -> RecurrentSpec:
        """See `LayerSizes`."""
        units = self.shard(rank, size).count
        parts = (ConvPart(units * self.unit_channels),)
        return RecurrentSpec(num_layers, self.taps - 1, parts, state=(units, 0), units=units)

    def build(self, b: "DecoderBuilder", name: str) -> "ShortConv":
        """The rank's channels of the layer `name`: the convolution, and its projections to B | C | x and back."""
        from cairn.layers.short_conv import ShortConv

        weights, shard, hidden = b.weights, self.shard(b.rank, b.size), self.hidden_size
        channels = shard.slice_of(self.unit_channels)
        conv, bias = weights.taps(f"{name}.conv", (hidden, 1, self.taps), channels, bias=self.bias)
        thirds = (shard.slice_of(self.unit_channels, part * hidden) for part in range(3))
        return ShortConv(
            kernels=weights.kernels,
            conv=conv,
            conv_bias=bias,
            in_proj=weights.column_parallel(f"{name}.in_proj", (3 * hidden, hidden), *thirds, bias=self.bias),
            out_proj=weights.row_parallel(f"{name}.out_proj", (hidden, hidden), channels, self.bias),
            layer=next(b.recurrent_layers),
        )
