"""LFM2's short convolution: its sizes, how it is sharded, and its tensors. Without torch."""

from dataclasses import dataclass
from typing import ClassVar

from cairn.layers.memory import ConvPart, RecurrentSpec
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import HeadShard, shard_even
from cairn.models.weight_specs import MixerSpec, WeightSpec, column_parallel, row_parallel, taps


@dataclass(frozen=True, slots=True)
class ShortConvSizes(LayerSizes):
    """`num_units`: the most shards that its channels are cut into, which config.json calls `units_field`; `taps`: how
    many inputs it sees; `bias`: of convolution and projections."""

    check_order: ClassVar[int] = 0

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
        units = self.shard(rank, size).count
        parts = (ConvPart(units * self.unit_channels),)
        return RecurrentSpec(num_layers, self.taps - 1, parts, state=(units, 0), units=units)


@dataclass(frozen=True, slots=True)
class ShortConvLayer(MixerSpec):
    """The convolution called `name`, and its projections to B | C | x and back."""

    sizes: ShortConvSizes
    name: str

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        sizes, name, hidden, shard = self.sizes, self.name, self.sizes.hidden_size, self.sizes.shard(rank, size)
        channels = shard.slice_of(sizes.unit_channels)
        thirds = (shard.slice_of(sizes.unit_channels, part * hidden) for part in range(3))
        return {
            **taps(f"{name}.conv", (hidden, 1, sizes.taps), channels, bias=sizes.bias),
            "in": column_parallel(f"{name}.in_proj", (3 * hidden, hidden), *thirds, bias=sizes.bias),
            "out": row_parallel(f"{name}.out_proj", (hidden, hidden), channels, rank, sizes.bias),
        }
