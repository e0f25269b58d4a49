"""A short convolution's part of a model: its sizes, what a rank has of it, and what is remembered of it."""

from dataclasses import dataclass

from cairn.layers.memory import ConvPart, RecurrentSpec
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import Share, even


@dataclass(frozen=True, slots=True)
class ShortConvSizes(LayerSizes):
    """`num_units`: the shares that its channels are cut into at most, which config.json calls `units_field`; `taps`:
    how many inputs it sees; `bias`: of convolution and projections."""

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

    def share(self, rank: int, size: int) -> Share:
        """The rank's units. Raises ConfigError."""
        return Share(*even(self.units_field, self.num_units, rank, size))

    def recurrent_spec(self, num_layers: int, rank: int, size: int) -> RecurrentSpec:
        """See `LayerSizes`."""
        units = self.share(rank, size).count
        parts = (ConvPart(units * self.unit_channels),)
        return RecurrentSpec(num_layers, self.taps - 1, parts, state=(units, 0), units=units)
