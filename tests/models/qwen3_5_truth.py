"""transformers' Qwen3.5 and Qwen3-Next as the reference, in float64 from end to end, and tiny models for it."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from cairn.models.families import FAMILIES
from cairn.models.families.qwen3_5 import Qwen35Config
from models.logits_bar import Truth
from models.wide_float import wide_float
from runner.harness import tensors

CLASSES: dict[str, tuple[str, str, ModuleType]] = {
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", modeling_qwen3_5),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", modeling_qwen3_5),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", modeling_qwen3_5_moe),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", modeling_qwen3_5_moe),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", modeling_qwen3_next),
}

# Sizes are chosen so that no two of them are equal by accident.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 56,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def raw_qwen(model_type: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model. `changes` are of the text model."""
    rope = dict(_ROPE)
    if model_type != "qwen3_next":
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text: dict[str, Any] = _TEXT | {"rope_parameters": rope}
    if "moe" in model_type or model_type == "qwen3_next":
        text |= _EXPERTS
    text |= changes
    if not model_type.endswith(("_text", "_next")):
        return {"model_type": model_type, "text_config": text}
    return {"model_type": model_type, **text}


def parse_qwen(raw: Mapping[str, Any]) -> Qwen35Config:
    found = FAMILIES[raw["model_type"]].parse(raw)
    assert isinstance(found, Qwen35Config)
    return found


def qwen_weights(config: Qwen35Config, seed: int) -> dict[str, Tensor]:
    """Weights by published name, of a size that keeps every layer's output near 1; decay and router are spread out."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    weights = {}
    for name, shape in tensors(config).items():
        if name.endswith("A_log"):
            weights[name] = uniform(shape, 0.0, 2.8)
        elif name.endswith("dt_bias"):
            weights[name] = uniform(shape, -8.0, 2.0)
        elif name.endswith("linear_attn.norm.weight"):
            weights[name] = uniform(shape, 0.5, 1.5)
        elif name.endswith("norm.weight"):  # stored less 1
            weights[name] = uniform(shape, -0.5, 0.5)
        else:
            fan_in = 1 if "embed_tokens" in name else shape[-1]
            weights[name] = torch.randn(shape, generator=generator) * fan_in**-0.5
    return weights


def published_qwen(raw: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """transformers' text model with these weights."""
    kind = raw["model_type"]
    if "text_config" in raw:  # the text model alone, which has the same tensors under shorter names
        kind, raw = f"{kind}_text", raw["text_config"]
    config_class, model_class, _ = CLASSES[kind]
    fields = {name: value for name, value in raw.items() if name != "model_type"}
    # The other implementations of experts have no float64.
    options = {"experts_implementation": "eager"} if "num_experts" in fields else {}
    config = getattr(transformers, config_class)(**fields, **options)
    model = getattr(transformers, model_class)(config).eval()
    state = {name.replace("language_model.", ""): value for name, value in weights.items()}
    for name in [name for name in model.state_dict() if name.endswith("experts.gate_up_proj")]:
        base, count = name.removesuffix(".gate_up_proj"), fields["num_experts"]
        parts = {
            part: torch.stack([state.pop(f"{base}.{expert}.{part}_proj.weight") for expert in range(count)])
            for part in ("gate", "up", "down")
        }
        state[name] = torch.cat([parts["gate"], parts["up"]], dim=1)
        state[f"{base}.down_proj"] = parts["down"]
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def qwen_logits(
    model: Any, tokens: list[int], wide: bool, content: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """Logits at every position by full recompute, [n, vocab]; `wide`: computed in float64 throughout. `content`: the
    positions [3, n], and at which tokens [k] which vectors [k, hidden] stand for embeddings."""
    arguments: dict[str, Any] = {"use_cache": False, "input_ids": torch.tensor([tokens]).clamp(min=0)}
    with torch.inference_mode(), ExitStack() as stack:
        if wide:
            model = model.double()
            stack.enter_context(wide_float(sys.modules[type(model).__module__]))
        if content is not None:
            positions, places, vectors = content
            embedded = model.get_input_embeddings()(arguments.pop("input_ids"))
            embedded[0, places] = vectors.to(embedded.dtype)
            arguments["inputs_embeds"] = embedded
            arguments["position_ids"] = torch.cat([torch.arange(len(tokens))[None], positions])[:, None]
        logits: Tensor = model(**arguments).logits[0]
    assert logits.dtype == (torch.float64 if wide else torch.float32)
    return logits


def qwen_truth(
    raw: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokens: list[int],
    content: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Truth:
    """See `qwen_logits`. transformers' float32 error is that of the model with its hidden channels in several orders.

    Where a head of the gated delta net gives almost nothing, the norm behind it magnifies whatever float32 has rounded
    before, in any layer and by any form of the rule. How large that is, one computation does not tell: at one such
    position transformers' own error is anything from 8e-6 to 3e-5, depending on how many tokens it takes in one go
    before it steps. The order of channels changes nothing but what is rounded.
    """
    wide = qwen_logits(published_qwen(raw, weights), tokens, True, content)
    narrow = []
    for seed in range(16):
        order = torch.randperm(raw.get("text_config", raw)["hidden_size"], generator=torch.manual_seed(seed))
        moved = content and (*content[:2], content[2][:, order])
        narrow.append(qwen_logits(published_qwen(raw, _reordered(weights, order)), tokens, False, moved))
    return Truth.of_several(tokens, narrow, wide)


def _reordered(weights: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """The same model with its hidden channels in another order. Matrices that lead back to them have them in front."""
    found = {}
    for name, weight in weights.items():
        if weight.shape[-1] == len(order):
            found[name] = weight[..., order]
        else:
            found[name] = weight[order] if len(weight) == len(order) else weight
    return found
