"""Mamba2's fields of config.json as Granite and Falcon-H1 call them (`mamba_*`)."""

from cairn.errors import ModelError
from cairn.models.config_fields import Fields
from cairn.models.mamba2_share import Mamba2Sizes
from cairn.models.text_sizes import TextSizes

__all__ = ["MAMBA2_FLOAT32", "read_mamba2"]

MAMBA2_FLOAT32 = ("A_log", "D", "dt_bias")
"""Last name parts of the tensors that stay float32 whatever the serving dtype: a few numbers per head that act through
an exponential."""

MAX_HEADS = 1 << 16


def read_mamba2(
    fields: Fields, text: TextSizes, *, inner: int | None = None, out_bias: bool | None = None, normed: bool = True
) -> Mamba2Sizes:
    """`inner`: channels of x, `mamba_expand` times the hidden size unless given; `out_bias`: as in_proj's unless given.
    Raises ModelError that names the field and the fix."""
    heads = fields.integer("mamba_n_heads", 1, MAX_HEADS, default=128)
    groups = fields.integer("mamba_n_groups", 1, MAX_HEADS, default=1)
    if heads % groups:
        raise ModelError(f"config.json: mamba_n_heads {heads} must be a multiple of mamba_n_groups {groups}")
    whole = inner or fields.integer("mamba_expand", 1, 64, default=2) * text.hidden_size
    if whole % heads:
        raise ModelError(f"config.json: mamba_n_heads {heads} must divide the {whole} channels of the Mamba2 layers")
    fields.only("mamba_d_head", whole // heads, "auto")
    bias = fields.boolean("mamba_proj_bias", default=False)
    return Mamba2Sizes(
        hidden_size=text.hidden_size,
        num_heads=heads,
        head_dim=whole // heads,
        state_size=fields.integer("mamba_d_state", 1, 1 << 12, default=256),
        groups=groups,
        conv_kernel=fields.integer("mamba_d_conv", 2, 64, default=4),
        conv_bias=fields.boolean("mamba_conv_bias", default=True),
        proj_bias=bias,
        out_bias=bias if out_bias is None else out_bias,
        eps=text.eps,
        dt_limit=fields.interval("time_step_limit", default=(0.0, float("inf"))),
        normed=normed,
    )
