"""Nemotron-H and Nemotron 3 (arXiv 2504.03624, NVIDIA's checkpoints and transformers' `models/nemotron_h`): a stack of
layers with one mixer each: Mamba2 (`M`), attention without positions (`*`), a squared-ReLU MLP (`-`) or a mixture of
such MLPs (`E`)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cairn.errors import ModelError
from cairn.models.attention import AttentionLayer
from cairn.models.config_schema import Fields, boolean, custom, integer, interval, layer_kinds, number, only
from cairn.models.contract import Family
from cairn.models.decoder_config import HAS_ATTENTION, MAX_HEADS, MAX_WIDTH, DecoderConfig
from cairn.models.decoder_spec import DecoderSpec, HeadSpec
from cairn.models.feed_forward import ExpertSizes, ExpertsLayer, FeedForwardSizes, SigmoidRule, SquaredReluLayer
from cairn.models.mamba2 import MAMBA2_FLOAT32, Mamba2Layer, Mamba2Sizes
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.weight_specs import MixerSpec

MAMBA, ATTENTION, MLP, MOE = "M", "*", "-", "E"
"""The letters of `hybrid_override_pattern`."""

KINDS = MappingProxyType(
    {
        "mamba": MAMBA,
        "linear_attention": MAMBA,
        "attention": ATTENTION,
        "full_attention": ATTENTION,
        "mlp": MLP,
        "moe": MOE,
    }
)


def _has(kind: str) -> Callable[[Any], bool]:
    return lambda config: kind in config.pattern


def _expert_groups(fields: Fields, name: str, config: Any) -> int:
    """A group is rated by the sum of its two best experts."""
    experts = config.n_routed_experts
    groups = fields.integer(name, 1, experts, default=1)
    if experts % groups or experts // groups < 2:
        raise ModelError(f"config.json: n_routed_experts {experts} must make {name} {groups} equal groups of 2 or more")
    return groups


def _untied(fields: Fields, name: str, config: Any) -> bool:
    """False whatever config.json says: the output is a tensor of its own, as in transformers, which never ties it."""
    fields.boolean(name, default=False)
    return False


def _mtp_pattern(fields: Fields, name: str, config: Any) -> str:
    return str(fields.read(name, str, "a string", ATTENTION + MOE))


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(DecoderConfig):
    """Sizes of a layer kind that `pattern` does not have are 0.

    Biases: `use_bias` of the Mamba2 projections, `use_conv_bias` of the convolution, `mlp_bias` of MLPs, shared expert
    and latent projections (routed experts never have one). `moe_latent_size` None: routed experts work on
    `hidden_size`. `mtp_pattern`: the layers of the head that drafts. Fields that only steer training or a kernel's
    tiling (`chunk_size`, `expand`, ...) are not read.
    """

    pattern: str = layer_kinds(KINDS, names=("layers_block_type", "layer_types"), letters="hybrid_override_pattern")
    eps: float = number(1e-12, 1.0, default=1e-5, names=("layer_norm_epsilon",))
    bos_token_id: int | None = integer(0, lambda config: config.vocab_size - 1, default=None, fact=False)
    pad_token_id: int | None = integer(0, lambda config: config.vocab_size - 1, default=None, fact=False)
    has_attention: bool = custom(lambda fields, name, config: ATTENTION in config.pattern, fact=False)
    # the first published checkpoints say attention_head_dim
    head_dim: int = integer(1, 1 << 12, names=("head_dim", "attention_head_dim"), when=HAS_ATTENTION)
    # Mamba2
    mamba_num_heads: int = integer(1, MAX_HEADS, when=_has(MAMBA))
    mamba_head_dim: int = integer(1, 1 << 12, when=_has(MAMBA))
    ssm_state_size: int = integer(1, 1 << 12, when=_has(MAMBA))
    n_groups: int = integer(1, MAX_HEADS, divides="mamba_num_heads", when=_has(MAMBA))
    conv_kernel: int = integer(2, 64, when=_has(MAMBA))
    use_conv_bias: bool = boolean(default=True, when=_has(MAMBA))
    use_bias: bool = boolean(default=False, when=_has(MAMBA))
    time_step_limit: tuple[float, float] = interval(default=(0.0, float("inf")), when=_has(MAMBA))
    # MLP
    intermediate_size: int = integer(1, MAX_WIDTH, when=_has(MLP))
    mlp_bias: bool = boolean(default=False)
    # mixture of experts
    n_routed_experts: int = integer(2, 1 << 12, when=_has(MOE))
    n_group: int = custom(_expert_groups, default=1, when=_has(MOE))
    topk_group: int = integer(1, lambda config: config.n_group, default=1, when=_has(MOE))
    num_experts_per_tok: int = integer(
        1, lambda config: config.n_routed_experts // config.n_group * config.topk_group, when=_has(MOE)
    )
    moe_intermediate_size: int = integer(1, MAX_WIDTH, when=_has(MOE))
    moe_shared_expert_intermediate_size: int = integer(1, MAX_WIDTH, when=_has(MOE))
    moe_latent_size: int | None = integer(1, 1 << 20, default=None, when=_has(MOE))
    norm_topk_prob: bool = boolean(default=True, when=_has(MOE))
    routed_scaling_factor: float = number(1e-6, 1e6, default=1.0, when=_has(MOE))
    n_shared_experts: int = only(1, when=_has(MOE))
    # transformers reads some of these and ignores others, so that another value would change the model in one program
    # and not in the next: better refused than guessed
    mamba_hidden_act: str = only("silu")
    mlp_hidden_act: str = only("relu2")
    attention_bias: bool = only(False)
    mamba_proj_bias: bool = only(False)
    residual_in_fp32: bool = only(False)
    tie_word_embeddings: bool = custom(_untied)
    mtp_pattern: str = custom(_mtp_pattern, default="", names=("mtp_hybrid_override_pattern",), fact=False)

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
            eps=self.eps,
            dt_limit=self.time_step_limit,
            heads_field="mamba_num_heads",
            groups_field="n_groups",
        )

    def mlp(self, field: str, hidden: int | None = None) -> FeedForwardSizes:
        """Of an MLP without a gate."""
        return self.feed_forward(field, hidden, matrices=2)

    @property
    def experts(self) -> ExpertSizes:
        """Of one mixture, with the way to the latent space and back, and without the shared expert."""
        latent = self.moe_latent_size
        extra = (self.n_routed_experts + 2 * (latent or 0)) * self.hidden_size
        expert = self.mlp("moe_intermediate_size", latent)
        return ExpertSizes(self.n_routed_experts, self.num_experts_per_tok, expert, extra)

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        names = ((f"backbone.layers.{index}", kind) for index, kind in enumerate(self.pattern))
        return DecoderSpec(
            config=self,
            embedding="backbone.embeddings.weight",
            layers=tuple((f"{name}.norm", self._mixer(kind, f"{name}.mixer")) for name, kind in names),
            final_norm="backbone.norm_f",
        )

    def head(self, stored: Collection[str] = ()) -> HeadSpec | None:
        """See `DecoderConfig`. `mtp.*`, which transformers does not read, as vLLM has it (nemotron_h_mtp.py):
        attention and a mixture. The first layer has what comes before all of them, and the last one the norm after
        them."""
        others = {*self.mtp_pattern[1:]}
        if self.mtp_pattern[:1] != ATTENTION or not self.has_attention or not others <= {MLP, MOE} & {*self.pattern}:
            return None
        names = [(f"mtp.layers.{index}", kind) for index, kind in enumerate(self.mtp_pattern)]
        return HeadSpec(
            embedding_norm="mtp.layers.0.enorm",
            hidden_norm="mtp.layers.0.hnorm",
            projection="mtp.layers.0.eh_proj",
            attention_norm="mtp.layers.0.norm",
            attention=AttentionLayer(self.attention, "mtp.layers.0.mixer"),
            others=tuple((f"{name}.norm", self._mixer(kind, f"{name}.mixer")) for name, kind in names[1:]),
            final_norm=f"{names[-1][0]}.final_layernorm",
        )

    def _mixer(self, kind: str, name: str) -> MixerSpec:
        bias = self.mlp_bias
        if kind == MAMBA:
            return Mamba2Layer(self.mamba2, name)
        if kind == ATTENTION:
            return AttentionLayer(self.attention, name)
        if kind == MLP:
            return SquaredReluLayer(self.mlp("intermediate_size"), name, bias)
        latent = (f"{name}.fc1_latent_proj", f"{name}.fc2_latent_proj") if self.moe_latent_size is not None else None
        shared = self.mlp("moe_shared_expert_intermediate_size")
        return ExpertsLayer(
            sizes=self.experts,
            hidden=self.hidden_size,
            router=f"{name}.gate",
            routing=SigmoidRule(
                self.n_group,
                self.topk_group,
                self.routed_scaling_factor,
                f"{name}.gate.e_score_correction_bias",
                normalize=self.norm_topk_prob,
            ),
            experts=f"{name}.experts",
            parts=("up_proj",),
            latent=latent,
            bias=bias,
            shared=SquaredReluLayer(shared, f"{name}.shared_experts", bias),
        )

    def layer_counts(self) -> dict[str, int]:
        words = {MAMBA: "Mamba2", ATTENTION: "attention", MLP: "MLP", MOE: "mixture of experts"}
        return {word: count for kind, word in words.items() if (count := self.pattern.count(kind))}


FAMILY = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    config=NemotronHConfig,
    float32_tensors=(*MAMBA2_FLOAT32, "e_score_correction_bias"),
    ignored_tensors=("mtp.",),
)

RECIPE = Recipe(
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    # About 5 M parameters, a checkpoint is 6 pages of 16 tokens in float32, 11 in bfloat16; about 300 M parameters,
    # with the ratio of state to keys and values of the published models: a checkpoint is worth 3,000 tokens.
    sizes={
        "num_hidden_layers": by_size(10, 27),
        "hybrid_override_pattern": by_size("MEM*M-MEM*", "MEMEM*EMEM-M*EMEMEM*EM-MEM*"),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 16),
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_num_heads": by_size(8, 32),
        "mamba_head_dim": by_size(32, 64),
        "ssm_state_size": by_size(32, 128),
        "n_groups": by_size(2, 8),
        "intermediate_size": by_size(512, 4096),
        "n_routed_experts": by_size(8, 16),
        "num_experts_per_tok": by_size(2, 4),
        "moe_intermediate_size": by_size(128, 512),
        "moe_shared_expert_intermediate_size": by_size(256, 1024),
    },
    fields={
        "attention_bias": False,
        "conv_kernel": 4,
        "expand": 2,
        "layer_norm_epsilon": 1e-05,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "residual_in_fp32": False,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_bias": False,
        "use_conv_bias": True,
    },
    spreads={".D": (1.0, 0.2), "e_score_correction_bias": (0.0, 0.05), "embeddings.weight": (0.0, 1.0)},
    gains={"lm_head.weight": LOGIT_STD},
    float32=("e_score_correction_bias",),
    mtp_fields={"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": ATTENTION + MOE},
)
