"""One rank's share of a Mamba2 layer, drawn by the names that its tensors have below the layer's own."""

from cairn.layers.mamba2 import Mamba2, Mamba2Shape, Mamba2Weights
from cairn.layers.norms import GatedNorm, GatedRMSNorm, SpreadGatedRMSNorm
from cairn.layers.plain_gate import PlainGate
from cairn.models.mamba2_share import Mamba2Sizes, StateShare
from cairn.models.rank_weights import RankWeights

__all__ = ["build_mamba2"]


def build_mamba2(
    weights: RankWeights, name: str, sizes: Mamba2Sizes, share: StateShare, layer: int, prefill_dt_min: float = 0.0
) -> Mamba2:
    """`layer` counts the model's recurrent layers; `prefill_dt_min` as in `Mamba2Shape`. Raises whatever the weights
    raise."""
    in_proj = weights.column_parallel(
        f"{name}.in_proj", (sizes.projected, sizes.hidden_size), *share.projection_runs(), bias=sizes.proj_bias
    )
    vectors, norm = _vectors(weights, name, sizes, share), _norm(weights, f"{name}.norm.weight", sizes, share)
    return Mamba2(
        kernels=weights.kernels,
        shape=Mamba2Shape(
            num_heads=share.num_heads,
            head_dim=sizes.head_dim,
            num_groups=1 if share.shared_bc else share.units.count,
            state_size=sizes.state_size,
            dt_limit=sizes.dt_limit,
            prefill_dt_min=prefill_dt_min,
        ),
        weights=vectors,
        in_proj=in_proj,
        norm=norm,
        out_proj=weights.row_parallel(
            f"{name}.out_proj", (sizes.hidden_size, sizes.inner), share.units.own(share.unit_channels), sizes.out_bias
        ),
        layer=layer,
    )


def _vectors(weights: RankWeights, name: str, sizes: Mamba2Sizes, share: StateShare) -> Mamba2Weights:
    conv, runs = f"{name}.conv1d", share.conv_runs()
    taps = weights.tensor(f"{conv}.weight", (sizes.conv_dim, 1, sizes.conv_kernel), *runs)
    bias = weights.tensor(f"{conv}.bias", (sizes.conv_dim,), *runs).float() if sizes.conv_bias else None
    heads = share.units.held(share.unit_heads)
    a_log, d, dt_bias = (
        weights.tensor(f"{name}.{vector}", (sizes.num_heads,), heads).float() for vector in ("A_log", "D", "dt_bias")
    )
    return Mamba2Weights(taps[:, 0].t().float().contiguous(), bias, -a_log.exp(), d, dt_bias)


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
