"""Nemotron-H executed: its layers built from a checkpoint's tensors by their published names.

Each layer is x + mixer(norm(x)) with one mixer; see `nemotron_h_config` for the architecture.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.errors import ConfigError
from cairn.layers.attention import PagedAttention
from cairn.layers.backend import Backend, Kernels, kernels_of
from cairn.layers.batch import Batch
from cairn.layers.embedding import Embedding
from cairn.layers.linear import Linear
from cairn.layers.mamba2 import Mamba2, Mamba2Shape, Mamba2Weights
from cairn.layers.memory import AttentionSpec, ConvPart, Memory, MemorySpec, RecurrentSpec
from cairn.layers.mlp import SquaredReluMLP
from cairn.layers.moe import MixtureOfExperts, Router
from cairn.layers.norms import GatedRMSNorm, RMSNorm
from cairn.models.contract import TensorLoader
from cairn.models.nemotron_h_config import ATTENTION, MAMBA, MLP, MOE, NemotronHConfig

__all__ = ["NemotronH", "build"]

Mixer = Callable[[Tensor, Batch, Memory], Tensor]
"""[rows, hidden] -> [rows, hidden]."""


@dataclass(frozen=True, slots=True)
class NemotronH:
    """The model. `layers`: (norm, mixer) pairs. `linears`: every matrix product, experts' included."""

    spec: MemorySpec
    exact: bool
    embedding: Embedding
    layers: tuple[tuple[RMSNorm, Mixer], ...]
    final_norm: RMSNorm
    lm_head: Linear
    linears: tuple[Linear, ...]

    @property
    def vocab_size(self) -> int:
        return self.lm_head.weight.shape[0]

    def forward(self, batch: Batch, memory: Memory) -> Tensor:
        """See `Model.forward`."""
        hidden = self.embedding(batch.tokens)
        for norm, mixer in self.layers:
            hidden.add_(mixer(norm(hidden), batch, memory))
        return self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        return (self.lm_head.row_tiled(hidden) if self.exact else self.lm_head(hidden, None)).float()


def build(
    config: NemotronHConfig,
    load: TensorLoader,
    *,
    exact: bool,
    dtype: torch.dtype,
    dt_min: float = 0.0,
    backend: Backend = "cpu",
) -> NemotronH:
    """The model with its weights drawn from `load`.

    `dt_min` is for tests: a lower bound of the time steps in prefill alone, which transformers has and cairn has not.
    Raises ConfigError for `exact` in another dtype than float32, and whatever `load` raises.
    """
    if exact and dtype != torch.float32:
        raise ConfigError(f"--exact needs --dtype float32: the fixed rounding is not kept in {dtype}")
    builder = _Builder(config, load, kernels_of(backend), dt_min)
    embedding = Embedding(load("backbone.embeddings.weight", (config.vocab_size, config.hidden_size)))
    layers = tuple(builder.layer(index) for index in range(len(config.pattern)))
    final_norm = builder.norm("backbone.norm_f")
    lm_head = builder.linear("lm_head", config.vocab_size, config.hidden_size, bias=False)
    return NemotronH(
        spec=_spec(config, dtype),
        exact=exact,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        lm_head=lm_head,
        linears=tuple(builder.linears),
    )


def _spec(config: NemotronHConfig, dtype: torch.dtype) -> MemorySpec:
    recurrent = attention = None
    if layers := config.pattern.count(MAMBA):
        groups = config.n_groups
        bc = ConvPart(groups * config.ssm_state_size, shared=groups == 1)
        recurrent = RecurrentSpec(
            num_layers=layers,
            columns=config.conv_kernel - 1,
            parts=(ConvPart(config.mamba_intermediate_size), bc, bc),
            state=(config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size),
            units=groups if groups > 1 else config.mamba_num_heads,
        )
    if layers := config.pattern.count(ATTENTION):
        attention = AttentionSpec(layers, config.num_key_value_heads, config.head_dim)
    return MemorySpec(dtype, config.hidden_size, recurrent, attention)


class _Builder:
    """Draws tensors in the order of the layers and collects the matrix products."""

    def __init__(self, config: NemotronHConfig, load: TensorLoader, kernels: Kernels, dt_min: float) -> None:
        self.linears: list[Linear] = []
        self._config = config
        self._load = load
        self._kernels = kernels
        self._dt_min = dt_min

    def linear(self, name: str, outputs: int, inputs: int, bias: bool) -> Linear:
        weight = self._load(f"{name}.weight", (outputs, inputs))
        return self._collect(Linear(self._kernels, weight, self._load(f"{name}.bias", (outputs,)) if bias else None))

    def norm(self, name: str) -> RMSNorm:
        config = self._config
        return RMSNorm(self._kernels, self._load(f"{name}.weight", (config.hidden_size,)), config.layer_norm_epsilon)

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

    def _collect(self, linear: Linear) -> Linear:
        self.linears.append(linear)
        return linear

    def _mamba(self, name: str, layer: int) -> Mamba2:
        config, load = self._config, self._load
        inner, heads, channels = config.mamba_intermediate_size, config.mamba_num_heads, config.conv_dim
        taps = load(f"{name}.conv1d.weight", (channels, 1, config.conv_kernel))
        bias = load(f"{name}.conv1d.bias", (channels,)).float() if config.use_conv_bias else None
        a_log, d, dt_bias = (load(f"{name}.{vector}", (heads,)).float() for vector in ("A_log", "D", "dt_bias"))
        norm_weight = load(f"{name}.norm.weight", (inner,))
        return Mamba2(
            kernels=self._kernels,
            shape=Mamba2Shape(
                num_heads=heads,
                head_dim=config.mamba_head_dim,
                num_groups=config.n_groups,
                state_size=config.ssm_state_size,
                dt_limit=config.time_step_limit,
                prefill_dt_min=self._dt_min,
            ),
            weights=Mamba2Weights(taps[:, 0].t().float().contiguous(), bias, -a_log.exp(), d, dt_bias),
            in_proj=self.linear(f"{name}.in_proj", inner + channels + heads, config.hidden_size, config.use_bias),
            norm=GatedRMSNorm(self._kernels, norm_weight, config.n_groups, config.layer_norm_epsilon),
            out_proj=self.linear(f"{name}.out_proj", config.hidden_size, inner, config.use_bias),
            layer=layer,
        )

    def _attention(self, name: str, layer: int) -> PagedAttention:
        config = self._config
        queries = config.num_attention_heads * config.head_dim
        key_values = config.num_key_value_heads * config.head_dim
        return PagedAttention(
            kernels=self._kernels,
            q_proj=self.linear(f"{name}.q_proj", queries, config.hidden_size, bias=False),
            k_proj=self.linear(f"{name}.k_proj", key_values, config.hidden_size, bias=False),
            v_proj=self.linear(f"{name}.v_proj", key_values, config.hidden_size, bias=False),
            o_proj=self.linear(f"{name}.o_proj", config.hidden_size, queries, bias=False),
            head_dim=config.head_dim,
            layer=layer,
        )

    def _feed_forward(self, name: str, inner: int) -> SquaredReluMLP:
        hidden, bias = self._config.hidden_size, self._config.mlp_bias
        up = self.linear(f"{name}.up_proj", inner, hidden, bias)
        return SquaredReluMLP(up, self.linear(f"{name}.down_proj", hidden, inner, bias))

    def _mlp(self, name: str, layer: int) -> SquaredReluMLP:
        return self._feed_forward(name, self._config.intermediate_size)

    def _moe(self, name: str, layer: int) -> MixtureOfExperts:
        config = self._config
        hidden, width, bias = config.hidden_size, config.expert_hidden_size, config.mlp_bias
        latent = config.moe_latent_size is not None
        return MixtureOfExperts(
            kernels=self._kernels,
            router=self._router(f"{name}.gate"),
            up=self._experts(name, "up_proj", (config.moe_intermediate_size, width)),
            down=self._experts(name, "down_proj", (width, config.moe_intermediate_size)),
            shared=self._feed_forward(f"{name}.shared_experts", config.moe_shared_expert_intermediate_size),
            to_latent=self.linear(f"{name}.fc1_latent_proj", width, hidden, bias) if latent else None,
            from_latent=self.linear(f"{name}.fc2_latent_proj", hidden, width, bias) if latent else None,
        )

    def _router(self, name: str) -> Router:
        config, experts = self._config, self._config.n_routed_experts
        weight = self._load(f"{name}.weight", (experts, config.hidden_size)).float()
        return Router(
            kernels=self._kernels,
            gate=self._collect(Linear(self._kernels, weight)),
            correction_bias=self._load(f"{name}.e_score_correction_bias", (experts,)).float(),
            top_k=config.num_experts_per_tok,
            num_groups=config.n_group,
            top_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )

    def _experts(self, name: str, projection: str, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        names: Sequence[str] = [f"{name}.experts.{i}.{projection}" for i in range(self._config.n_routed_experts)]
        return tuple(
            self._collect(Linear(self._kernels, self._load(f"{expert}.weight", shape))).weight for expert in names
        )
