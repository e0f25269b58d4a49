"""Nemotron-H executed: its layers built from a checkpoint's tensors by their published names.

Each layer is x + mixer(norm(x)) with one mixer; see `nemotron_h_config` for the architecture. On each of several ranks
the mixer gives a partial sum, see `nemotron_h_share` for what it has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.errors import ConfigError
from cairn.layers.attention import PagedAttention
from cairn.layers.backend import Backend, kernels_of
from cairn.layers.batch import Batch
from cairn.layers.blend import Mixer
from cairn.layers.communicator import ALONE, Communicator
from cairn.layers.embedding import Embedding, SpreadEmbedding, TokenVectors
from cairn.layers.linear import Linear
from cairn.layers.mamba2 import Mamba2
from cairn.layers.memory import Memory, MemorySpec
from cairn.layers.mlp import SquaredReluMLP
from cairn.layers.moe import MixtureOfExperts, Router
from cairn.layers.norms import RMSNorm
from cairn.models.contract import TensorLoader
from cairn.models.cut import Run
from cairn.models.mamba2_build import build_mamba2
from cairn.models.nemotron_h_config import ATTENTION, MAMBA, MLP, MOE, NemotronHConfig, remembered
from cairn.models.nemotron_h_share import NemotronHShare, share_of
from cairn.models.rank_weights import RankWeights

__all__ = ["NemotronH", "build"]


@dataclass(frozen=True, slots=True)
class NemotronH:
    """The model, or one rank's share. `layers`: (norm, mixer) pairs. `linears`: every matrix product, experts'
    included."""

    spec: MemorySpec
    exact: bool
    vocab_size: int
    communicator: Communicator
    embedding: TokenVectors
    layers: tuple[tuple[RMSNorm, Mixer], ...]
    final_norm: RMSNorm
    lm_head: Linear
    linears: tuple[Linear, ...]

    def forward(self, batch: Batch, memory: Memory) -> Tensor:
        """See `Model.forward`."""
        hidden = batch.replace(self.embedding(batch.tokens))
        for norm, mixer in self.layers:
            hidden.add_(self.communicator.gather_add(mixer(norm(hidden), batch, memory)))
        return self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        mine = self.lm_head.row_tiled(hidden) if self.exact else self.lm_head(hidden, None)
        return self.communicator.gather_columns(mine)[:, : self.vocab_size].float()


def build(
    config: NemotronHConfig,
    load: TensorLoader,
    *,
    exact: bool,
    dtype: torch.dtype,
    communicator: Communicator = ALONE,
    dt_min: float = 0.0,
    backend: Backend = "cpu",
) -> NemotronH:
    """The communicator's rank of the model with its weights drawn from `load`.

    `dt_min` is for tests: a lower bound of the time steps in prefill alone, which transformers has and cairn has not.
    Raises ConfigError for `exact` in another dtype than float32 and for a number of ranks that the model cannot be cut
    among, and whatever `load` raises.
    """
    if exact and dtype != torch.float32:
        raise ConfigError(f"--exact needs --dtype float32: the fixed rounding is not kept in {dtype}")
    share = share_of(config, communicator.rank, communicator.size)
    weights = RankWeights(load, kernels_of(backend), communicator)
    builder = _Builder(config, share, weights, dt_min)
    embedding = builder.embedding()
    layers = tuple(builder.layer(index) for index in range(len(config.pattern)))
    final_norm = builder.norm("backbone.norm_f")
    lm_head = weights.collect(Linear(weights.kernels, builder.vocabulary("lm_head")))
    return NemotronH(
        spec=remembered(config, share).spec(dtype),
        exact=exact,
        vocab_size=config.vocab_size,
        communicator=communicator,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        lm_head=lm_head,
        linears=tuple(weights.linears),
    )


class _Builder:
    """Draws one rank's tensors in the order of the layers."""

    def __init__(self, config: NemotronHConfig, share: NemotronHShare, weights: RankWeights, dt_min: float) -> None:
        self._config = config
        self._share = share
        self._weights = weights
        self._dt_min = dt_min

    def vocabulary(self, name: str) -> Tensor:
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._weights.vocabulary(f"{name}.weight", shape, self._share.vocab, self._share.vocab_rows)

    def embedding(self) -> TokenVectors:
        """Cut like the output, which is as large: a sum over ranks a pass against a copy on every rank."""
        weight, communicator = self.vocabulary("backbone.embeddings"), self._weights.communicator
        if communicator.size == 1:
            return Embedding(weight)
        return SpreadEmbedding(weight, self._share.vocab[0], communicator)

    def norm(self, name: str) -> RMSNorm:
        config, weights = self._config, self._weights
        weight = weights.tensor(f"{name}.weight", (config.hidden_size,))
        return RMSNorm(weights.kernels, weight, config.layer_norm_epsilon)

    def layer(self, index: int) -> tuple[RMSNorm, Mixer]:
        makers: Mapping[str, Callable[[str, int], Mixer]] = {
            MAMBA: self._mamba,
            ATTENTION: self._attention,
            MLP: self._mlp,
            MOE: self._moe,
        }
        kind = self._config.pattern[index]
        name = f"backbone.layers.{index}"
        return self.norm(f"{name}.norm"), makers[kind](f"{name}.mixer", self._config.pattern[:index].count(kind))

    def _mamba(self, name: str, layer: int) -> Mamba2:
        return build_mamba2(self._weights, name, self._config.mamba2, self._share.state, layer, self._dt_min)

    def _attention(self, name: str, layer: int) -> PagedAttention:
        config, weights, dim = self._config, self._weights, self._config.head_dim
        first, last = self._share.query_heads
        queries, key_values = (first * dim, last * dim), self._share.kv_heads.held(dim)
        q_shape = (config.num_attention_heads * dim, config.hidden_size)
        kv_shape = (config.num_key_value_heads * dim, config.hidden_size)
        return PagedAttention(
            kernels=weights.kernels,
            q_proj=weights.column_parallel(f"{name}.q_proj", q_shape, queries),
            k_proj=weights.column_parallel(f"{name}.k_proj", kv_shape, key_values),
            v_proj=weights.column_parallel(f"{name}.v_proj", kv_shape, key_values),
            o_proj=weights.row_parallel(f"{name}.o_proj", (q_shape[1], q_shape[0]), queries),
            head_dim=dim,
            layer=layer,
        )

    def _feed_forward(self, name: str, inner: int, run: Run) -> SquaredReluMLP:
        hidden, bias, weights = self._config.hidden_size, self._config.mlp_bias, self._weights
        up = weights.column_parallel(f"{name}.up_proj", (inner, hidden), run, bias=bias)
        return SquaredReluMLP(up, weights.row_parallel(f"{name}.down_proj", (hidden, inner), run, bias))

    def _mlp(self, name: str, layer: int) -> SquaredReluMLP:
        return self._feed_forward(name, self._config.intermediate_size, self._share.intermediate)

    def _moe(self, name: str, layer: int) -> MixtureOfExperts:
        config, weights = self._config, self._weights
        hidden, width = config.hidden_size, config.expert_hidden_size
        run, latent = self._share.expert_intermediate, config.moe_latent_size is not None
        shared_inner = config.moe_shared_expert_intermediate_size
        to_latent = weights.whole(f"{name}.fc1_latent_proj", (width, hidden), config.mlp_bias) if latent else None
        from_latent = None
        if latent:
            # All of its inputs, but its outputs are a partial sum.
            from_latent = weights.row_parallel(f"{name}.fc2_latent_proj", (hidden, width), (0, width), config.mlp_bias)
        return MixtureOfExperts(
            kernels=weights.kernels,
            router=self._router(f"{name}.gate"),
            up=self._experts(name, lambda expert, shape: weights.column_parallel(f"{expert}.up_proj", shape, run)),
            down=self._experts(
                name, lambda expert, shape: weights.row_parallel(f"{expert}.down_proj", shape[::-1], run)
            ),
            shared=self._feed_forward(f"{name}.shared_experts", shared_inner, self._share.shared_intermediate),
            to_latent=to_latent,
            from_latent=from_latent,
        )

    def _router(self, name: str) -> Router:
        config, experts, weights = self._config, self._config.n_routed_experts, self._weights
        weight = weights.tensor(f"{name}.weight", (experts, config.hidden_size)).float()
        return Router(
            kernels=weights.kernels,
            gate=weights.collect(Linear(weights.kernels, weight)),
            correction_bias=weights.tensor(f"{name}.e_score_correction_bias", (experts,)).float(),
            top_k=config.num_experts_per_tok,
            num_groups=config.n_group,
            top_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )

    def _experts(self, name: str, draw: Callable[[str, tuple[int, int]], Linear]) -> tuple[Tensor, ...]:
        """Every expert's share; `draw` gets its name and the shape of its first projection."""
        shape = (self._config.moe_intermediate_size, self._config.expert_hidden_size)
        return tuple(draw(f"{name}.experts.{expert}", shape).weight for expert in range(self._config.n_routed_experts))
