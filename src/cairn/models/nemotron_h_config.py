"""Nemotron-H: config.json -> a checked config, the checkpoint's tensors by name, and the cache layout.

What config.json may say is in `nemotron_h_fields`. The architecture is that of arXiv 2504.03624, as published with
NVIDIA's checkpoints and in transformers' `models/nemotron_h`: a stack of layers with one mixer each: Mamba2 (`M`),
attention without positions (`*`), a squared-ReLU MLP (`-`) or a mixture of such MLPs (`E`). Fields keep the names of
config.json.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from cairn.cache.layout import CacheLayout
from cairn.layers.memory import AttentionSpec
from cairn.models.config_fields import Fields
from cairn.models.contract import ModelFacts
from cairn.models.cut import Units
from cairn.models.forward_sizes import ForwardSizes
from cairn.models.mamba2_share import Mamba2Sizes
from cairn.models.nemotron_h_fields import ATTENTION, MAMBA, MLP, MOE, read
from cairn.models.nemotron_h_share import NemotronHShare, share_of
from cairn.models.remembered import STATE_BYTES, Remembered

__all__ = [
    "ATTENTION",
    "FLOAT32_TENSORS",
    "MAMBA",
    "MLP",
    "MODEL_TYPE",
    "MOE",
    "NemotronHConfig",
    "facts",
    "forward_sizes",
    "layers",
    "layout",
    "parse",
    "remembered",
    "tensors",
    "transfer_facts",
    "units",
]

MODEL_TYPE = "nemotron_h"

FLOAT32_TENSORS = ("A_log", "D", "dt_bias", "e_score_correction_bias")
"""Last name parts of the tensors that stay float32 whatever the serving dtype: a few numbers per head or expert that
act through an exponential or a comparison."""


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
    def mamba2(self) -> Mamba2Sizes:
        """Of one Mamba2 layer."""
        return Mamba2Sizes(
            hidden_size=self.hidden_size,
            num_heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            state_size=self.ssm_state_size,
            groups=self.n_groups,
            conv_kernel=self.conv_kernel,
            conv_bias=self.use_conv_bias,
            proj_bias=self.use_bias,
            out_bias=self.use_bias,
            eps=self.layer_norm_epsilon,
            dt_limit=self.time_step_limit,
            heads_field="mamba_num_heads",
            groups_field="n_groups",
        )

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
    mixers = {ATTENTION: _attention_tensors, MLP: _mlp_tensors, MOE: _moe_tensors}
    for index, kind in enumerate(config.pattern):
        name = f"backbone.layers.{index}"
        found[f"{name}.norm.weight"] = (config.hidden_size,)
        if kind == MAMBA:
            found |= config.mamba2.tensors(f"{name}.mixer")
        else:
            found |= {f"{name}.mixer.{part}": shape for part, shape in mixers[kind](config)}
    found["backbone.norm_f.weight"] = (config.hidden_size,)
    found["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return found


def layout(
    config: NemotronHConfig, block_size: int, dtype_bytes: int, tp_size: int = 1, state_bytes: int = STATE_BYTES
) -> CacheLayout:
    """Bytes of pages and checkpoints on one rank; `dtype_bytes` of keys, values, convolution and hidden state.

    page        [kv head][attention layer][k|v][block_size][head_dim]
    checkpoint  header: final hidden state [hidden_size]; with one group also the convolution channels B|C,
                        [mamba layer][conv_kernel - 1][2 * ssm_state_size], which all heads share
                unit:   [mamba layer][conv [conv_kernel - 1][own channels] | ssm [heads][head dim][state size]]
                        of one group of heads with its B|C, or, with one group, of one head

    All ranks have the same layout. Raises ConfigError naming --tensor-parallel-size and the field that does not divide.
    """
    return remembered(config, share_of(config, 0, tp_size)).layout(block_size, dtype_bytes, state_bytes)


def remembered(config: NemotronHConfig, share: NemotronHShare) -> Remembered:
    """What the rank with this share remembers."""
    recurrent = attention = None
    if count := config.pattern.count(MAMBA):
        recurrent = config.mamba2.remembered(count, share.state)
    if count := config.pattern.count(ATTENTION):
        attention = AttentionSpec(count, share.kv_heads.count, config.head_dim)
    return Remembered(config.hidden_size, recurrent, attention)


def units(config: NemotronHConfig) -> Units:
    """What tensor parallelism shares out, counted over the whole model."""
    return remembered(config, share_of(config, 0, 1)).units()


def forward_sizes(config: NemotronHConfig) -> ForwardSizes:
    """What computing a prompt's token takes."""
    scores = config.pattern.count(ATTENTION) * config.num_attention_heads * config.head_dim
    return ForwardSizes.of(tensors(config), scores, config.num_experts_per_tok)


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
