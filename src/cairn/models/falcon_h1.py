"""Falcon-H1 executed; see `falcon_h1_config` for the architecture."""

from dataclasses import replace

import torch

from cairn.layers.blend import Mixer, Parallel, Scaled
from cairn.layers.linear import ScaledLinear
from cairn.layers.rotary import Rotary, make_rotary
from cairn.models.contract import TensorLoader
from cairn.models.decoder import Decoder, Layer
from cairn.models.decoder_builder import DecoderBuilder, Execution
from cairn.models.falcon_h1_config import FalconH1Config
from cairn.models.mamba2_build import build_mamba2
from cairn.models.mamba2_share import StateShare

__all__ = ["build"]


def build(config: FalconH1Config, load: TensorLoader, execution: Execution) -> Decoder:
    """The rank of the model with its weights drawn from `load`. Raises ConfigError for a number of ranks that the model
    cannot be cut among, and as `DecoderBuilder` does."""
    rank, size = execution.communicator.rank, execution.communicator.size
    remembered = config.remembered(rank, size)
    builder = _Layers(config, DecoderBuilder(config.text, load, execution), rank, size)
    embedding = builder.decoder.vocabulary("model.embed_tokens")
    layers = [layer for index in range(config.num_hidden_layers) for layer in builder.block(index)]
    final_norm = builder.decoder.norm("model.final_layernorm")
    scales = (config.multipliers.embedding, config.multipliers.lm_head)
    return builder.decoder.decoder(remembered, embedding, layers, final_norm, scales)


class _Layers:
    def __init__(self, config: FalconH1Config, decoder: DecoderBuilder, rank: int, size: int) -> None:
        self.decoder = decoder
        self._config = config
        self._attention_share = config.attention.share(rank, size)
        self._state_share = config.mamba2.share(rank, size)
        self._inner = config.inner(rank, size)
        self._rotary: Rotary = make_rotary(config.attention.head_dim, config.rope_theta)
        self._steps = _projection_multipliers(config, self._state_share)

    def block(self, index: int) -> tuple[Layer, Layer]:
        name, by = f"model.layers.{index}", self._config.multipliers
        first = self.decoder.norm(f"{name}.input_layernorm")
        mixers = (
            Scaled(self._mamba2(f"{name}.mamba", index), by.ssm_out, by.ssm_in),
            Scaled(self._attention(f"{name}.self_attn", index), by.attention_out, by.attention_in),
        )
        second = self.decoder.norm(f"{name}.pre_ff_layernorm")
        return (first, Parallel(mixers)), (second, self._mlp(f"{name}.feed_forward"))

    def _mamba2(self, name: str, layer: int) -> Mixer:
        mamba2 = build_mamba2(self.decoder.weights, name, self._config.mamba2, self._state_share, layer)
        return replace(mamba2, in_proj=ScaledLinear(mamba2.in_proj, self._steps))

    def _attention(self, name: str, layer: int) -> Mixer:
        attention = self.decoder.attention(name, self._config.attention, self._attention_share, layer, self._rotary)
        return replace(attention, k_proj=ScaledLinear(attention.k_proj, self._config.multipliers.key))

    def _mlp(self, name: str) -> Mixer:
        config = self._config
        gate, up, down = (f"{name}.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
        mlp = self.decoder.swiglu((gate, up, down), config.intermediate_size, self._inner, config.mlp_bias)
        before, after = config.multipliers.mlp
        return Scaled(replace(mlp, gate=ScaledLinear(mlp.gate, before)), after)


def _projection_multipliers(config: FalconH1Config, share: StateShare) -> torch.Tensor:
    """One number for each of the rank's rows of in_proj: gate | x | B | C | dt."""
    sizes = config.mamba2
    bc = sizes.groups * sizes.state_size
    widths = (sizes.inner, sizes.inner, bc, bc, sizes.num_heads)
    parts = [torch.full((width,), by) for width, by in zip(widths, config.multipliers.ssm, strict=True)]
    whole = torch.cat(parts)
    return torch.cat([whole[begin:end] for begin, end in share.projection_runs()])
