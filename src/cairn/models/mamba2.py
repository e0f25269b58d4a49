"""Mamba2: its sizes, how it is sharded, its tensors, and its fields in the config.json of two families. Without torch.

Groups of heads are assigned to ranks in order, with their B and C; with one group heads are, while all ranks have B
and C.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from cairn.errors import ModelError
from cairn.layers.memory import ConvPart, RecurrentSpec
from cairn.models.config_schema import Fields, boolean, custom, integer, interval
from cairn.models.decoder_config import MAX_HEADS, DecoderConfig
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import HeadShard, Slice, shard_heads
from cairn.models.weight_specs import MixerSpec, StoredTensor, WeightSpec, column_parallel, row_parallel, taps

MAMBA2_FLOAT32 = ("A_log", "D", "dt_bias")
"""Last name parts of the tensors that stay float32 whatever the serving dtype: a few numbers per head that act through
an exponential."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes(LayerSizes):
    """`proj_bias` and `out_bias`: of the two projections; `normed`: whether the gate is followed by a norm;
    `dt_limit`: bounds of softplus(dt + dt_bias). `heads_field` and `groups_field`: their names in config.json.

    A *unit* is what one rank has at least: a group, or a head where there is one group.
    """

    check_order: ClassVar[int] = 1

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
    def bc(self) -> int:
        """Channels of B, and of C."""
        return self.groups * self.state_size

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution, in the checkpoint's order x | B | C."""
        return self.inner + 2 * self.bc

    @property
    def projected(self) -> int:
        """Rows of in_proj: gate | x | B | C | dt."""
        return self.inner + self.conv_dim + self.num_heads

    @property
    def active_weights(self) -> int:
        return self.hidden_size * (self.projected + self.inner)

    @property
    def one_group(self) -> bool:
        return self.groups == 1

    @property
    def unit_heads(self) -> int:
        return 1 if self.one_group else self.num_heads // self.groups

    @property
    def unit_channels(self) -> int:
        """Channels of x, and of the gate, of a unit."""
        return self.unit_heads * self.head_dim

    def shard(self, rank: int, size: int) -> HeadShard:
        """The rank's units. Raises ConfigError naming --tensor-parallel-size and the field that does not divide."""
        field, total = (self.heads_field, self.num_heads) if self.one_group else (self.groups_field, self.groups)
        return shard_heads(field, total, "channels", self.unit_channels, rank, size)

    def recurrent_spec(self, num_layers: int, rank: int, size: int) -> RecurrentSpec:
        units = self.shard(rank, size).count
        bc = ConvPart(self.state_size * (1 if self.one_group else units), shared=self.one_group)
        return RecurrentSpec(
            num_layers=num_layers,
            columns=self.conv_kernel - 1,
            parts=(ConvPart(units * self.unit_channels), bc, bc),
            state=(units * self.unit_heads, self.head_dim, self.state_size),
            units=units,
        )

    def rank_rows(self, rank: int, size: int) -> tuple[Slice, ...]:
        """The rank's rows of in_proj: gate | x | B | C | dt."""
        shard = self.shard(rank, size)
        return (
            shard.slice_of(self.unit_channels),
            *self.rank_channels(shard, self.inner),
            shard.slice_of(self.unit_heads, self.inner + self.conv_dim),
        )

    def rank_channels(self, shard: HeadShard, offset: int = 0) -> tuple[Slice, ...]:
        """The rank's channels of x | B | C, which begin at `offset`."""
        x, b = shard.slice_of(self.unit_channels, offset), offset + self.inner
        if self.one_group:
            return x, (b, b + 2 * self.bc)
        return x, shard.slice_of(self.state_size, b), shard.slice_of(self.state_size, b + self.bc)


@dataclass(frozen=True, slots=True)
class Mamba2Layer(MixerSpec):
    """The Mamba2 called `name`. `factors`: constant multipliers of gate, x, B, C and dt."""

    sizes: Mamba2Sizes
    name: str
    factors: tuple[float, ...] = ()

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        """See `MixerSpec`. Groups of the norm are whole on the ranks that have them; a single one is sharded."""
        sizes, name, shard = self.sizes, self.name, self.sizes.shard(rank, size)
        heads, outputs = shard.slice_of(sizes.unit_heads), shard.output_slice(sizes.unit_channels)
        normed = outputs if sizes.one_group and size > 1 else shard.slice_of(sizes.unit_channels)
        in_shape, conv_shape = (sizes.projected, sizes.hidden_size), (sizes.conv_dim, 1, sizes.conv_kernel)
        return {
            "in": column_parallel(f"{name}.in_proj", in_shape, *sizes.rank_rows(rank, size), bias=sizes.proj_bias),
            **taps(f"{name}.conv1d", conv_shape, *sizes.rank_channels(shard), bias=sizes.conv_bias),
            **{key: StoredTensor(f"{name}.{key}", (sizes.num_heads,), (heads,)) for key in ("dt_bias", "A_log", "D")},
            **({"norm": StoredTensor(f"{name}.norm.weight", (sizes.inner,), (normed,))} if sizes.normed else {}),
            "out": row_parallel(f"{name}.out_proj", (sizes.hidden_size, sizes.inner), outputs, rank, sizes.out_bias),
        }


def expanded_inner(fields: Fields, name: str, config: Any) -> int:
    """A reader: the channels of x as a multiple of the hidden size."""
    return int(fields.integer("mamba_expand", 1, 64, default=2) * config.hidden_size)


def _head_dim(fields: Fields, name: str, config: Any) -> int:
    inner, heads = config.mamba_inner, config.mamba_n_heads
    if inner % heads:
        raise ModelError(f"config.json: mamba_n_heads {heads} must divide the {inner} channels of the Mamba2 layers")
    fields.only(name, inner // heads, "auto")
    return int(inner // heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """A family with Mamba2 layers whose fields are called as in Granite and Falcon-H1 (`mamba_*`). `mamba_inner`:
    channels of x and of the gate."""

    mamba_inner: int = custom(expanded_inner)
    mamba_n_heads: int = integer(1, MAX_HEADS, default=128)
    mamba_n_groups: int = integer(1, MAX_HEADS, default=1, divides="mamba_n_heads")
    mamba_d_head: int = custom(_head_dim)
    mamba_d_state: int = integer(1, 1 << 12, default=256)
    mamba_d_conv: int = integer(2, 64, default=4)
    mamba_conv_bias: bool = boolean(default=True)
    mamba_proj_bias: bool = boolean(default=False)
    time_step_limit: tuple[float, float] = interval(default=(0.0, float("inf")))

    @property
    def mamba2(self) -> Mamba2Sizes:
        """Of one Mamba2 layer."""
        return Mamba2Sizes(
            hidden_size=self.hidden_size,
            num_heads=self.mamba_n_heads,
            head_dim=self.mamba_d_head,
            state_size=self.mamba_d_state,
            groups=self.mamba_n_groups,
            conv_kernel=self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            proj_bias=self.mamba_proj_bias,
            out_bias=self.mamba_proj_bias,
            eps=self.eps,
            dt_limit=self.time_step_limit,
        )
