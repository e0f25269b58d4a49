"""One rank's share of a gated delta net, drawn by the names that its tensors have below the layer's own."""

import torch
from torch import Tensor

from cairn.layers.gated_delta_net import DeltaShape, DeltaWeights, GatedDeltaNet
from cairn.layers.norms import RMSNorm
from cairn.models.delta_net_share import DeltaNetShare, DeltaNetSizes
from cairn.models.rank_weights import RankWeights


def build_delta_net(weights: RankWeights, name: str, sizes: DeltaNetSizes, layer: int) -> GatedDeltaNet:
    """`layer` counts the model's recurrent layers. Raises ConfigError as `DeltaNetSizes.share` does, and whatever the
    weights raise."""
    share = sizes.share(weights.communicator.rank, weights.communicator.size)
    heads = share.key_heads.held(share.unit_heads)
    dt_bias, a_log = (
        weights.tensor(f"{name}.{vector}", (sizes.value_heads,), heads).float() for vector in ("dt_bias", "A_log")
    )
    conv, _ = weights.taps(f"{name}.conv1d", (sizes.conv_dim, 1, sizes.conv_kernel), *share.conv_runs())
    in_proj = weights.linear(_projection(weights, name, sizes, share))
    norm = weights.tensor(f"{name}.norm.weight", (sizes.value_dim,)).float()
    return GatedDeltaNet(
        kernels=weights.kernels,
        shape=DeltaShape(
            key_heads=share.key_heads.count,
            key_dim=sizes.key_dim,
            value_heads=share.key_heads.count * share.unit_heads,
            value_dim=sizes.value_dim,
        ),
        weights=DeltaWeights(conv, -a_log.exp(), dt_bias),
        in_proj=in_proj,
        norm=RMSNorm(weights.kernels, norm, sizes.eps),
        out_proj=weights.row_parallel(
            f"{name}.out_proj", (sizes.hidden_size, sizes.values), share.key_heads.own(share.unit_values)
        ),
        layer=layer,
        own=share.own_values,
    )


def _projection(weights: RankWeights, name: str, sizes: DeltaNetSizes, share: DeltaNetShare) -> Tensor:
    """One matrix for q | k | v | gate | beta | time step, whatever the checkpoint's form."""
    heads, values = share.key_heads.held(share.unit_heads), share.key_heads.held(share.unit_values)
    parts = {
        "qkv": (sizes.conv_dim, share.conv_runs()),
        "z": (sizes.values, (values,)),
        "b": (sizes.value_heads, (heads,)),
        "a": (sizes.value_heads, (heads,)),
    }
    if sizes.packed:
        qkvz, ba = share.packed_runs()
        parts = {"qkvz": (sizes.conv_dim + sizes.values, tuple(qkvz)), "ba": (2 * sizes.value_heads, tuple(ba))}
    return torch.cat(
        [
            weights.tensor(f"{name}.in_proj_{part}.weight", (rows, sizes.hidden_size), *runs)
            for part, (rows, runs) in parts.items()
        ]
    )
