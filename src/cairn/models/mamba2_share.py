"""A Mamba2 layer's part of a model: its sizes, what a rank has of it, and what is remembered of it.

Groups of heads are dealt to ranks in order, with their B and C; with one group heads are dealt, while B and C are
everybody's.
"""

from dataclasses import dataclass

from cairn.layers.memory import ConvPart, RecurrentSpec
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import Run, Share, deal


@dataclass(frozen=True, slots=True)
class StateShare:
    """One rank's share of the Mamba2 layers. `total`: state units of the model; a unit has `unit_heads` heads and
    `unit_channels` channels of x and of the gate; `bc`: its channels of B, and of C, or all of them if `shared_bc`."""

    units: Share
    total: int
    unit_heads: int
    unit_channels: int
    bc: int
    shared_bc: bool

    @property
    def num_heads(self) -> int:
        return self.units.count * self.unit_heads

    @property
    def channels(self) -> int:
        """Channels of x, and of the gate."""
        return self.units.count * self.unit_channels

    @property
    def held_bc(self) -> int:
        """Channels of B, and of C."""
        return self.bc if self.shared_bc else self.units.count * self.bc

    @property
    def own(self) -> slice | None:
        """The rank's own channels among those it holds; None for all of them."""
        if self.units.parts == 1:
            return None
        begin, end = self.units.own(self.unit_channels)
        first = self.units.begin * self.unit_channels
        return slice(begin - first, end - first)

    def conv_runs(self, offset: int = 0) -> tuple[Run, ...]:
        """The convolution's channels x | B | C, which begin at `offset`."""
        inner = self.total * self.unit_channels
        bc = self.bc if self.shared_bc else self.total * self.bc
        x = self.units.held(self.unit_channels, offset)
        if self.shared_bc:
            return x, (offset + inner, offset + inner + 2 * bc)
        return x, self.units.held(self.bc, offset + inner), self.units.held(self.bc, offset + inner + bc)

    def projection_runs(self) -> tuple[Run, ...]:
        """Rows of in_proj: gate | x | B | C | dt."""
        inner = self.total * self.unit_channels
        conv = inner + 2 * (self.bc if self.shared_bc else self.total * self.bc)
        steps = self.units.held(self.unit_heads, inner + conv)
        return self.units.held(self.unit_channels), *self.conv_runs(inner), steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes(LayerSizes):
    """`proj_bias` and `out_bias`: of the two projections; `normed`:
    whether the gate is followed by a norm; `dt_limit`: bounds of softplus(dt + dt_bias). `heads_field` and
    `groups_field`: what config.json calls them."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool
    out_bias: bool
    eps: float
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    normed: bool = True
    heads_field: str = "mamba_n_heads"
    groups_field: str = "mamba_n_groups"

    @property
    def inner(self) -> int:
        """Channels of x and of the gate: heads times head dim."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution, in the checkpoint's order x | B | C."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def projected(self) -> int:
        """Rows of in_proj: gate | x | B | C | dt."""
        return self.inner + self.conv_dim + self.num_heads

    @property
    def active_weights(self) -> int:
        return self.hidden_size * (self.projected + self.inner)

    def share(self, rank: int, size: int) -> StateShare:
        """Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        one_group = self.groups == 1
        field, total = (self.heads_field, self.num_heads) if one_group else (self.groups_field, self.groups)
        channels = self.inner // total
        return StateShare(
            units=deal(field, total, "channels", channels, rank, size),
            total=total,
            unit_heads=self.num_heads // total,
            unit_channels=channels,
            bc=self.state_size,
            shared_bc=one_group,
        )

    def recurrent_spec(self, num_layers: int, rank: int, size: int) -> RecurrentSpec:
        """See `LayerSizes`."""
        share = self.share(rank, size)
        bc = ConvPart(share.held_bc, shared=share.shared_bc)
        return RecurrentSpec(
            num_layers=num_layers,
            columns=self.conv_kernel - 1,
            parts=(ConvPart(share.channels), bc, bc),
            state=(share.num_heads, self.head_dim, self.state_size),
            units=share.units.count,
        )
