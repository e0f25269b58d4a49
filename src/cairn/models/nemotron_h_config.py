"""Nemotron-H: config.json -> a checked config, the checkpoint's tensors by name, and the cache layout.

What config.json may say is in `nemotron_h_fields`. The architecture is that of arXiv 2504.03624, as published with
NVIDIA's checkpoints and in transformers' `models/nemotron_h`: a stack of layers with one mixer each: Mamba2 (`M`),
attention without positions (`*`), a squared-ReLU MLP (`-`) or a mixture of such MLPs (`E`). Fields keep the names of
config.json.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.models.config_fields import Fields
from cairn.models.contract import ModelFacts
from cairn.models.cut import Units
from cairn.models.nemotron_h_fields import ATTENTION, MAMBA, MLP, MOE, read
from cairn.models.nemotron_h_share import share_of

__all__ = [
    "ATTENTION",
    "FLOAT32_TENSORS",
    "MAMBA",
    "MLP",
    "MODEL_TYPE",
    "MOE",
    "NemotronHConfig",
    "facts",
    "layers",
    "layout",
    "parse",
    "tensors",
    "transfer_facts",
    "units",
]

MODEL_TYPE = "nemotron_h"

FLOAT32_TENSORS = ("A_log", "D", "dt_bias", "e_score_correction_bias")
"""Last name parts of the tensors that stay float32 whatever the serving dtype: a few numbers per head or expert that
act through an exponential or a comparison."""

SSM_STATE_BYTES = 4
"""Bytes of one number of the recurrent state, float32 whatever the serving dtype."""

PAGE_BYTES_WITHOUT_ATTENTION = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig:
    """What config.json says, checked. Sizes of a layer kind that `pattern` does not have are 0.

    `pattern` has one of `M`, `*`, `-`, `E` per layer. Biases: `use_bias` of the Mamba2 projections, `use_conv_bias` of
    the convolution, `mlp_bias` of MLPs, shared expert and latent projections (routed experts never have one).
    `moe_latent_size` None: routed experts work on `hidden_size`. `time_step_limit`: bounds of softplus(dt + dt_bias).
    """

    pattern: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layer_norm_epsilon: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    # attention
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    # Mamba2
    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    ssm_state_size: int = 0
    n_groups: int = 0
    conv_kernel: int = 0
    use_conv_bias: bool = True
    use_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    # MLP
    intermediate_size: int = 0
    mlp_bias: bool = False
    # mixture of experts
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    @property
    def num_hidden_layers(self) -> int:
        return len(self.pattern)

    @property
    def mamba_intermediate_size(self) -> int:
        """Channels of x and of the gate: heads times head dim."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution, in the checkpoint's order x | B | C."""
        return self.mamba_intermediate_size + 2 * self.n_groups * self.ssm_state_size

    @property
    def expert_hidden_size(self) -> int:
        """Width the routed experts read and write."""
        return self.moe_latent_size or self.hidden_size


def parse(raw: Mapping[str, object]) -> NemotronHConfig:
    """config.json -> config. Raises ModelError that names the field and the fix."""
    return NemotronHConfig(**read(Fields(raw)))


def facts(config: NemotronHConfig) -> ModelFacts:
    return ModelFacts(
        model_type=MODEL_TYPE,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
    )


def layers(config: NemotronHConfig) -> dict[str, int]:
    """How many layers of each kind, in words."""
    words = {MAMBA: "Mamba2", ATTENTION: "attention", MLP: "MLP", MOE: "mixture of experts"}
    return {word: count for kind, word in words.items() if (count := config.pattern.count(kind))}


def tensors(config: NemotronHConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by its published name, in the order of the model, with its shape."""
    found: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (config.vocab_size, config.hidden_size)}
    mixers = {MAMBA: _mamba_tensors, ATTENTION: _attention_tensors, MLP: _mlp_tensors, MOE: _moe_tensors}
    for index, kind in enumerate(config.pattern):
        found[f"backbone.layers.{index}.norm.weight"] = (config.hidden_size,)
        for name, shape in mixers[kind](config):
            found[f"backbone.layers.{index}.mixer.{name}"] = shape
    found["backbone.norm_f.weight"] = (config.hidden_size,)
    found["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return found


def layout(config: NemotronHConfig, block_size: int, dtype_bytes: int, tp_size: int = 1) -> CacheLayout:
    """Bytes of pages and checkpoints on one rank; `dtype_bytes` of keys, values, convolution and hidden state.

    page        [kv head][attention layer][k|v][block_size][head_dim]
    checkpoint  header: final hidden state [hidden_size]; with one group also the convolution channels B|C,
                        [mamba layer][conv_kernel - 1][2 * ssm_state_size], which all heads share
                unit:   [mamba layer][conv [conv_kernel - 1][own channels] | ssm [heads][head dim][state size]]
                        of one group of heads with its B|C, or, with one group, of one head

    The recurrent state is float32 whatever the dtype. All ranks have the same layout. Raises ConfigError naming
    --tensor-parallel-size and the field that does not divide.
    """
    share = share_of(config, 0, tp_size)
    kv_heads, state = share.kv_heads.count, share.state
    attention_layers, mamba_layers = config.pattern.count(ATTENTION), config.pattern.count(MAMBA)
    token_bytes = kv_heads * attention_layers * 2 * config.head_dim * dtype_bytes
    conv_column_bytes = mamba_layers * (config.conv_kernel - 1) * dtype_bytes
    shared_channels = 2 * state.bc if state.shared_bc else 0
    own_channels = state.channels + 2 * state.held_bc - shared_channels
    ssm_bytes = mamba_layers * state.channels * config.ssm_state_size * SSM_STATE_BYTES
    return CacheLayout(
        block_size=block_size,
        page_bytes=token_bytes * block_size or PAGE_BYTES_WITHOUT_ATTENTION,
        page_units=kv_heads or 1,
        groups=(AttentionGroup("full", block_size),) if attention_layers else (),
        header_bytes=config.hidden_size * dtype_bytes + conv_column_bytes * shared_channels,
        state_bytes=conv_column_bytes * own_channels + ssm_bytes,
        state_units=state.units.count,
    )


def units(config: NemotronHConfig) -> Units:
    """What tensor parallelism shares out, counted over the whole model."""
    share = share_of(config, 0, 1)
    return Units(share.kv_heads.count, config.pattern.count(ATTENTION), share.state.units.count)


def transfer_facts(config: NemotronHConfig) -> dict[str, str | int]:
    """All fields that decide what keys, values and states are: not how long a prompt may be or which ids end it."""
    found: dict[str, str | int] = {"pattern": "".join(config.pattern)}
    for name in (field.name for field in fields(config)):
        if name != "max_position_embeddings" and not name.endswith(("_token_id", "_token_ids")):
            value = getattr(config, name)
            found.setdefault(name, value if type(value) is int else repr(value))
    return found


_Tensors = Iterator[tuple[str, tuple[int, ...]]]


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> _Tensors:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _mamba_tensors(config: NemotronHConfig) -> _Tensors:
    inner, heads = config.mamba_intermediate_size, config.mamba_num_heads
    yield from _linear("in_proj", inner + config.conv_dim + heads, config.hidden_size, config.use_bias)
    yield "conv1d.weight", (config.conv_dim, 1, config.conv_kernel)
    if config.use_conv_bias:
        yield "conv1d.bias", (config.conv_dim,)
    yield from ((name, (heads,)) for name in ("dt_bias", "A_log", "D"))
    yield "norm.weight", (inner,)
    yield from _linear("out_proj", config.hidden_size, inner, config.use_bias)


def _attention_tensors(config: NemotronHConfig) -> _Tensors:
    rows = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
        "v_proj": config.num_key_value_heads,
    }
    for name, heads in rows.items():
        yield from _linear(name, heads * config.head_dim, config.hidden_size, bias=False)
    yield from _linear("o_proj", config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)


def _mlp_tensors(config: NemotronHConfig) -> _Tensors:
    yield from _linear("up_proj", config.intermediate_size, config.hidden_size, config.mlp_bias)
    yield from _linear("down_proj", config.hidden_size, config.intermediate_size, config.mlp_bias)


def _moe_tensors(config: NemotronHConfig) -> _Tensors:
    hidden, width, inner = config.hidden_size, config.expert_hidden_size, config.moe_intermediate_size
    yield "gate.weight", (config.n_routed_experts, hidden)
    yield "gate.e_score_correction_bias", (config.n_routed_experts,)
    if config.moe_latent_size is not None:
        yield from _linear("fc1_latent_proj", width, hidden, config.mlp_bias)
        yield from _linear("fc2_latent_proj", hidden, width, config.mlp_bias)
    for expert in range(config.n_routed_experts):
        yield from _linear(f"experts.{expert}.up_proj", inner, width, bias=False)
        yield from _linear(f"experts.{expert}.down_proj", width, inner, bias=False)
    shared = config.moe_shared_expert_intermediate_size
    yield from _linear("shared_experts.up_proj", shared, hidden, config.mlp_bias)
    yield from _linear("shared_experts.down_proj", hidden, shared, config.mlp_bias)
