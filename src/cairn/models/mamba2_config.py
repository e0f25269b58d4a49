"""Mamba2's fields of config.json as Granite and Falcon-H1 call them (`mamba_*`)."""

from dataclasses import dataclass
from typing import Any

from cairn.errors import ModelError
from cairn.models.config_schema import Fields, boolean, integer, interval, other
from cairn.models.decoder_config import MAX_HEADS, DecoderConfig
from cairn.models.mamba2_share import Mamba2Sizes

MAMBA2_FLOAT32 = ("A_log", "D", "dt_bias")
"""Last name parts of the tensors that stay float32 whatever the serving dtype: a few numbers per head that act through
an exponential."""


def expanded(given: Fields, name: str, found: Any) -> int:
    """The channels of x, unless config.json says how many they are."""
    return int(given.integer("mamba_expand", 1, 64, default=2) * found.hidden_size)


def _head_dim(given: Fields, name: str, found: Any) -> int:
    whole, heads = found.mamba_inner, found.mamba_n_heads
    if whole % heads:
        raise ModelError(f"config.json: mamba_n_heads {heads} must divide the {whole} channels of the Mamba2 layers")
    given.only(name, whole // heads, "auto")
    return int(whole // heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """A family with Mamba2 layers. `mamba_inner`: channels of x and of the gate."""

    mamba_inner: int = other(expanded)
    mamba_n_heads: int = integer(1, MAX_HEADS, default=128)
    mamba_n_groups: int = integer(1, MAX_HEADS, default=1, divides="mamba_n_heads")
    mamba_d_head: int = other(_head_dim)
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
