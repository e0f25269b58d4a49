"""One rank's share of a Mamba2 layer, drawn by the names that its tensors have below the layer's own."""

import torch

from cairn.layers.linear import Projection, ScaledLinear
from cairn.layers.mamba2 import Mamba2, Mamba2Shape, Mamba2Weights
from cairn.layers.norms import GatedNorm, GatedRMSNorm, PlainGate, SpreadGatedRMSNorm
from cairn.models.mamba2_share import Mamba2Sizes, StateShare
from cairn.models.rank_weights import RankWeights


def build_mamba2(
    weights: RankWeights, name: str, sizes: Mamba2Sizes, layer: int, factors: tuple[float, ...] = ()
) -> Mamba2:
    """`layer` counts the model's recurrent layers; `factors`: what gate, x, B, C and dt are multiplied with. Raises
    ConfigError as `Mamba2Sizes.share` does, and whatever the weights raise."""
    share = sizes.share(weights.communicator.rank, weights.communicator.size)
    in_proj: Projection = weights.column_parallel(
        f"{name}.in_proj", (sizes.projected, sizes.hidden_size), *share.projection_runs(), bias=sizes.proj_bias
    )
    if factors:
        in_proj = ScaledLinear(in_proj, _row_factors(sizes, share, factors).to(weights.device))
    return Mamba2(
        kernels=weights.kernels,
        shape=Mamba2Shape(
            num_heads=share.num_heads,
            head_dim=sizes.head_dim,
            num_groups=1 if share.shared_bc else share.units.count,
            state_size=sizes.state_size,
            dt_limit=sizes.dt_limit,
        ),
        weights=_vectors(weights, name, sizes, share),
        in_proj=in_proj,
        norm=_norm(weights, f"{name}.norm.weight", sizes, share),
        out_proj=weights.row_parallel(
            f"{name}.out_proj", (sizes.hidden_size, sizes.inner), share.units.own(share.unit_channels), sizes.out_bias
        ),
        layer=layer,
    )


def _row_factors(sizes: Mamba2Sizes, share: StateShare, factors: tuple[float, ...]) -> torch.Tensor:
    """One number for each of the rank's rows of in_proj: gate | x | B | C | dt."""
    bc = sizes.groups * sizes.state_size
    widths = (sizes.inner, sizes.inner, bc, bc, sizes.num_heads)
    whole = torch.cat([torch.full((width,), by) for width, by in zip(widths, factors, strict=True)])
    return torch.cat([whole[begin:end] for begin, end in share.projection_runs()])


def _vectors(weights: RankWeights, name: str, sizes: Mamba2Sizes, share: StateShare) -> Mamba2Weights:
    runs, heads = share.conv_runs(), share.units.held(share.unit_heads)
    conv, bias = weights.taps(f"{name}.conv1d", (sizes.conv_dim, 1, sizes.conv_kernel), *runs, bias=sizes.conv_bias)
    dt_bias, a_log, d = (
        weights.tensor(f"{name}.{vector}", (sizes.num_heads,), heads).float() for vector in ("dt_bias", "A_log", "D")
    )
    return Mamba2Weights(conv, bias, -a_log.exp(), d, dt_bias)


def _norm(weights: RankWeights, name: str, sizes: Mamba2Sizes, share: StateShare) -> GatedNorm:
    """Groups are whole on the ranks that hold them; a single one is spread over all ranks."""
    if not sizes.normed:
        return PlainGate(weights.kernels, share.own)
    if share.shared_bc and weights.communicator.size > 1:
        weight = weights.tensor(name, (sizes.inner,), share.units.own(share.unit_channels))
        return SpreadGatedRMSNorm(weights.kernels, weight, sizes.inner, sizes.eps, weights.communicator, share.own)
    weight = weights.tensor(name, (sizes.inner,), share.units.held(share.unit_channels))
    groups = 1 if share.shared_bc else share.units.count
    return GatedRMSNorm(weights.kernels, weight, groups, sizes.eps, share.own)
