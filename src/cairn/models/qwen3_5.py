"""Qwen3.5 and Qwen3-Next executed: their layers built from a checkpoint's tensors by their published names.

Each layer is x + mixer(norm(x)), and then the same with an MLP or a mixture of experts; see `qwen3_5_config` for the
architecture. On each of several ranks every one of them gives a partial sum, see `qwen3_5_share` for what it has.
"""

import torch
from torch import Tensor

from cairn.errors import ConfigError
from cairn.layers.backend import Backend, kernels_of
from cairn.layers.blend import Mixer
from cairn.layers.communicator import ALONE, Communicator
from cairn.layers.embedding import Embedding, SpreadEmbedding
from cairn.layers.gated_attention import GatedAttention
from cairn.layers.gated_delta_net import DeltaShape, DeltaWeights, GatedDeltaNet
from cairn.layers.linear import Linear
from cairn.layers.norms import RMSNorm
from cairn.layers.rotary import make_rotary
from cairn.layers.softmax_moe import GatedSharedExpert, SoftmaxMixture, SoftmaxRouter
from cairn.layers.swiglu import SwiGLU
from cairn.models.contract import TensorLoader
from cairn.models.cut import Run
from cairn.models.decoder import Decoder
from cairn.models.qwen3_5_config import DELTA, Qwen35Config, remembered
from cairn.models.qwen3_5_share import Qwen35Share, share_of
from cairn.models.rank_weights import RankWeights

__all__ = ["build"]


def build(
    config: Qwen35Config,
    load: TensorLoader,
    *,
    exact: bool,
    dtype: torch.dtype,
    communicator: Communicator = ALONE,
    backend: Backend = "cpu",
) -> Decoder:
    """The communicator's rank of the model with its weights drawn from `load`.

    Raises ConfigError for `exact` in another dtype than float32 and for a number of ranks that the model cannot be cut
    among, and whatever `load` raises.
    """
    if exact and dtype != torch.float32:
        raise ConfigError(f"--exact needs --dtype float32: the fixed rounding is not kept in {dtype}")
    share = share_of(config, communicator.rank, communicator.size)
    weights = RankWeights(load, kernels_of(backend), communicator)
    builder = _Builder(config, share, weights)
    vectors = builder.vocabulary(f"{config.prefix}embed_tokens")
    layers = tuple(pair for index in range(len(config.layer_types)) for pair in builder.layer(index))
    final_norm = builder.centred_norm(f"{config.prefix}norm", config.hidden_size)
    output = vectors if config.tie_word_embeddings else builder.vocabulary("lm_head")
    lm_head = weights.collect(Linear(weights.kernels, output))
    spread = communicator.size > 1
    return Decoder(
        spec=remembered(config, share).spec(dtype),
        exact=exact,
        vocab_size=config.vocab_size,
        communicator=communicator,
        embedding=SpreadEmbedding(vectors, share.vocab[0], communicator) if spread else Embedding(vectors),
        layers=layers,
        final_norm=final_norm,
        lm_head=lm_head,
        linears=tuple(weights.linears),
    )


class _Builder:
    """Draws one rank's tensors in the order of the layers."""

    def __init__(self, config: Qwen35Config, share: Qwen35Share, weights: RankWeights) -> None:
        self._config = config
        self._share = share
        self._weights = weights

    def vocabulary(self, name: str) -> Tensor:
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._weights.vocabulary(f"{name}.weight", shape, self._share.vocab, self._share.vocab_rows)

    def centred_norm(self, name: str, width: int) -> RMSNorm:
        """A norm whose weight is stored less 1; the sum is kept in float32, as bfloat16 would round it."""
        weight = self._weights.tensor(f"{name}.weight", (width,)).float() + 1.0
        return RMSNorm(self._weights.kernels, weight, self._config.rms_norm_eps)

    def layer(self, index: int) -> tuple[tuple[RMSNorm, Mixer], tuple[RMSNorm, Mixer]]:
        config = self._config
        name, kind = f"{config.prefix}layers.{index}", config.layer_types[index]
        number = config.layer_types[:index].count(kind)
        first = self.centred_norm(f"{name}.input_layernorm", config.hidden_size)
        mixer = (
            self._delta(f"{name}.linear_attn", number)
            if kind == DELTA
            else self._attention(f"{name}.self_attn", number)
        )
        second = self.centred_norm(f"{name}.post_attention_layernorm", config.hidden_size)
        if index in config.sparse_layers:
            return (first, mixer), (second, self._mixture(f"{name}.mlp"))
        dense = self._feed_forward(f"{name}.mlp", config.intermediate_size, self._share.intermediate)
        return (first, mixer), (second, dense)

    def _delta(self, name: str, layer: int) -> GatedDeltaNet:
        config, share, weights = self._config, self._share, self._weights
        weight = weights.tensor(f"{name}.norm.weight", (config.linear_value_head_dim,)).float()
        out_shape = (config.hidden_size, config.values)
        return GatedDeltaNet(
            kernels=weights.kernels,
            shape=DeltaShape(
                key_heads=share.key_heads.count,
                key_dim=config.linear_key_head_dim,
                value_heads=share.key_heads.count * share.unit_heads,
                value_dim=config.linear_value_head_dim,
            ),
            weights=self._delta_vectors(name),
            in_proj=weights.collect(Linear(weights.kernels, self._delta_projection(name))),
            norm=RMSNorm(weights.kernels, weight, config.rms_norm_eps),
            out_proj=weights.row_parallel(f"{name}.out_proj", out_shape, share.key_heads.own(share.unit_values)),
            layer=layer,
            own=share.own_values,
        )

    def _delta_vectors(self, name: str) -> DeltaWeights:
        config, share, weights = self._config, self._share, self._weights
        shape = (2 * config.keys + config.values, 1, config.linear_conv_kernel_dim)
        taps = weights.tensor(f"{name}.conv1d.weight", shape, *share.conv_runs(config))
        heads = share.key_heads.held(share.unit_heads)
        a_log, dt_bias = (
            weights.tensor(f"{name}.{vector}", (config.linear_num_value_heads,), heads).float()
            for vector in ("A_log", "dt_bias")
        )
        return DeltaWeights(taps[:, 0].t().float().contiguous(), -a_log.exp(), dt_bias)

    def _delta_projection(self, name: str) -> Tensor:
        """One matrix for q | k | v | gate | beta | time step, whatever the checkpoint's form."""
        config, share, weights = self._config, self._share, self._weights
        hidden, values, heads = config.hidden_size, config.values, config.linear_num_value_heads
        conv = 2 * config.keys + values
        if config.packed_projections:
            qkvz, ba = share.packed_runs(config)
            parts = [
                weights.tensor(f"{name}.in_proj_qkvz.weight", (conv + values, hidden), *qkvz),
                weights.tensor(f"{name}.in_proj_ba.weight", (2 * heads, hidden), *ba),
            ]
        else:
            held = share.key_heads.held(share.unit_heads)
            parts = [
                weights.tensor(f"{name}.in_proj_qkv.weight", (conv, hidden), *share.conv_runs(config)),
                weights.tensor(f"{name}.in_proj_z.weight", (values, hidden), share.key_heads.held(share.unit_values)),
                weights.tensor(f"{name}.in_proj_b.weight", (heads, hidden), held),
                weights.tensor(f"{name}.in_proj_a.weight", (heads, hidden), held),
            ]
        return torch.cat(parts)

    def _attention(self, name: str, layer: int) -> GatedAttention:
        config, weights, dim = self._config, self._weights, self._config.head_dim
        first, last = self._share.query_heads
        key_values = self._share.kv_heads.held(dim)
        queries, hidden = config.num_attention_heads * dim, config.hidden_size
        kv_shape = (config.num_key_value_heads * dim, hidden)
        return GatedAttention(
            kernels=weights.kernels,
            query_gate=weights.column_parallel(
                f"{name}.q_proj", (2 * queries, hidden), (first * 2 * dim, last * 2 * dim)
            ),
            k_proj=weights.column_parallel(f"{name}.k_proj", kv_shape, key_values),
            v_proj=weights.column_parallel(f"{name}.v_proj", kv_shape, key_values),
            o_proj=weights.row_parallel(f"{name}.o_proj", (hidden, queries), (first * dim, last * dim)),
            q_norm=self.centred_norm(f"{name}.q_norm", dim),
            k_norm=self.centred_norm(f"{name}.k_norm", dim),
            rotary=make_rotary(config.rotary_dim, config.rope_theta, config.mrope_section),
            head_dim=dim,
            layer=layer,
        )

    def _feed_forward(self, name: str, inner: int, run: Run) -> SwiGLU:
        hidden, weights = self._config.hidden_size, self._weights
        gate, up = (weights.column_parallel(f"{name}.{part}_proj", (inner, hidden), run) for part in ("gate", "up"))
        return SwiGLU(weights.kernels, gate, up, weights.row_parallel(f"{name}.down_proj", (hidden, inner), run))

    def _mixture(self, name: str) -> SoftmaxMixture:
        config, weights = self._config, self._weights
        hidden, width = config.hidden_size, config.shared_expert_intermediate_size
        router = weights.tensor(f"{name}.gate.weight", (config.num_experts, hidden)).float()
        experts = [self._expert(f"{name}.experts.{expert}") for expert in range(config.num_experts)]
        shared = self._feed_forward(f"{name}.shared_expert", width, self._share.shared_intermediate)
        return SoftmaxMixture(
            kernels=weights.kernels,
            router=SoftmaxRouter(
                gate=weights.collect(Linear(weights.kernels, router)),
                top_k=config.num_experts_per_tok,
                normalize=config.norm_topk_prob,
            ),
            gate_up=tuple(gate_up.weight for gate_up, _ in experts),
            down=tuple(down.weight for _, down in experts),
            shared=GatedSharedExpert(weights.kernels, shared, weights.whole(f"{name}.shared_expert_gate", (1, hidden))),
        )

    def _expert(self, name: str) -> tuple[Linear, Linear]:
        """gate and up as one product, and down."""
        weights, run = self._weights, self._share.expert_intermediate
        shape = (self._config.moe_intermediate_size, self._config.hidden_size)
        halves = [weights.tensor(f"{name}.{part}_proj.weight", shape, run) for part in ("gate", "up")]
        gate_up = weights.collect(Linear(weights.kernels, torch.cat(halves)))
        return gate_up, weights.row_parallel(f"{name}.down_proj", shape[::-1], run)
