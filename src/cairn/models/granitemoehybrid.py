"""Granite 4.0 executed; see `granitemoehybrid_config` for the architecture."""

import math
from dataclasses import replace

from torch import Tensor

from cairn.layers.blend import Mixer, Scaled
from cairn.layers.linear import Linear, ScaledLinear
from cairn.layers.rotary import make_rotary
from cairn.layers.softmax_moe import SoftmaxMixture, SoftmaxRouter
from cairn.layers.swiglu import SwiGLU
from cairn.models.contract import TensorLoader
from cairn.models.cut import Run
from cairn.models.decoder import Decoder, Layer
from cairn.models.decoder_builder import DecoderBuilder, Execution
from cairn.models.granitemoehybrid_config import ATTENTION, MAMBA, GraniteConfig
from cairn.models.mamba2_build import build_mamba2

__all__ = ["build"]


def build(config: GraniteConfig, load: TensorLoader, execution: Execution) -> Decoder:
    """The rank of the model with its weights drawn from `load`. Raises ConfigError for a number of ranks that the model
    cannot be cut among, and as `DecoderBuilder` does."""
    rank, size = execution.communicator.rank, execution.communicator.size
    remembered = config.remembered(rank, size)
    builder = _Layers(config, DecoderBuilder(config.text, load, execution), rank, size)
    embedding = builder.decoder.vocabulary("model.embed_tokens")
    layers = [layer for index in range(len(config.pattern)) for layer in builder.block(index)]
    final_norm = builder.decoder.norm("model.norm")
    scales = (config.embedding_scale, config.logit_scale)
    return builder.decoder.decoder(remembered, embedding, layers, final_norm, scales)


class _Layers:
    def __init__(self, config: GraniteConfig, decoder: DecoderBuilder, rank: int, size: int) -> None:
        self.decoder = decoder
        self._config = config
        self._rank, self._size = rank, size
        dim, theta = config.attention.head_dim, config.rope_theta
        self._rotary = None if theta is None else make_rotary(dim, theta)

    def block(self, index: int) -> tuple[Layer, Layer]:
        config, name = self._config, f"model.layers.{index}"
        kind = config.pattern[index]
        make = {MAMBA: self._mamba2, ATTENTION: self._attention}[kind]
        first = self.decoder.norm(f"{name}.input_layernorm")
        mixer = make(name, config.pattern[:index].count(kind))
        second = self.decoder.norm(f"{name}.post_attention_layernorm")
        return (first, self._residual(mixer)), (second, self._residual(self._feed_forward(name)))

    def _residual(self, mixer: Mixer) -> Scaled:
        return Scaled(mixer, self._config.residual_scale)

    def _mamba2(self, name: str, layer: int) -> Mixer:
        sizes = self._config.mamba2
        return build_mamba2(self.decoder.weights, f"{name}.mamba", sizes, sizes.share(self._rank, self._size), layer)

    def _attention(self, name: str, layer: int) -> Mixer:
        sizes = self._config.attention
        share = sizes.share(self._rank, self._size)
        attention = self.decoder.attention(f"{name}.self_attn", sizes, share, layer, self._rotary)
        # The kernels scale by head_dim^-0.5.
        scale = self._config.score_scale * math.sqrt(sizes.head_dim)
        return replace(attention, q_proj=ScaledLinear(attention.q_proj, scale))

    def _feed_forward(self, name: str) -> Mixer:
        shared = self._shared(f"{name}.shared_mlp")
        return self._mixture(f"{name}.block_sparse_moe", shared) if self._config.experts else shared

    def _shared(self, name: str) -> SwiGLU:
        config, weights = self._config, self.decoder.weights
        inner, shapes = config.shared_inner(self._rank, self._size), config.feed_forward_shapes()
        rows, hidden = shapes["shared_mlp.input_linear"]
        both = weights.tensor(f"{name}.input_linear.weight", (rows, hidden), inner, _up(inner, rows))
        gate, up = (weights.collect(Linear(weights.kernels, half.clone())) for half in both.chunk(2))
        return SwiGLU(
            weights.kernels, gate, up, weights.row_parallel(f"{name}.output_linear", (hidden, rows // 2), inner)
        )

    def _mixture(self, name: str, shared: SwiGLU) -> SoftmaxMixture:
        config, weights = self._config, self.decoder.weights
        run, shapes = config.expert_inner(self._rank, self._size), config.feed_forward_shapes()
        router = weights.tensor(f"{name}.router.layer.weight", shapes["block_sparse_moe.router.layer"]).float()
        first, second = shapes["block_sparse_moe.input_linear"], shapes["block_sparse_moe.output_linear"]
        gate_up = weights.tensor(f"{name}.input_linear.weight", first, run, _up(run, first[1]), dim=1)
        down = weights.tensor(f"{name}.output_linear.weight", second, run, dim=2)
        return SoftmaxMixture(
            kernels=weights.kernels,
            # The softmax over the chosen experts alone is that over all of them, made to sum up to 1.
            router=SoftmaxRouter(
                weights.collect(Linear(weights.kernels, router)), config.experts_per_token, normalize=True
            ),
            gate_up=self._experts(gate_up),
            down=self._experts(down),
            shared=shared,
        )

    def _experts(self, together: Tensor) -> tuple[Tensor, ...]:
        """[expert, out, in] -> a matrix each, where the allocator puts it."""
        weights = self.decoder.weights
        return tuple(weights.collect(Linear(weights.kernels, one.clone())).weight for one in together)


def _up(gate: Run, rows: int) -> Run:
    """Where up's rows are, if the gate's are at `gate` of the tensor's first half."""
    return gate[0] + rows // 2, gate[1] + rows // 2
