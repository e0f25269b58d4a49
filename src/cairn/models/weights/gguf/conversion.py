"""How a GGUF file of one of llama.cpp's architectures becomes a checkpoint of a family: what is alike in several."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from cairn.models.weights.gguf.views import Change, Rule, Rules

LayerRules = Callable[[int | None], Rules]
"""Of a layer's tensors by its number, and for None of those that are in no layer."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """`config`: config.json's fields; `layer_name`: what the names of a layer's tensors begin with, before a dot."""

    config: Mapping[str, Any]
    rules: LayerRules
    layer_name: Callable[[int], str]


def layer_name(number: int) -> str:
    """As in most families."""
    return f"model.layers.{number}"


def decoder_rules(
    embedding: str = "model.embed_tokens", final_norm: str = "model.norm", change: Change | None = None
) -> Rules:
    """Of tensors that are in no layer."""
    return {
        "token_embd.weight": Rule(name=f"{embedding}.weight"),
        "output_norm.weight": Rule(name=f"{final_norm}.weight", change=change),
        "output.weight": Rule(name="lm_head.weight"),
    }


def matrices(names: Mapping[str, str], below: str) -> Rules:
    """Weights, and biases if there are any, by the stored names' part."""
    return {
        f"{stored}.{kind}": Rule(name=f"{below}.{name}.{kind}")
        for stored, name in names.items()
        for kind in ("weight", "bias")
    }


PROJECTIONS: Mapping[str, str] = MappingProxyType(
    {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
)
"""Of attention, by their stored names."""

ATTENTION: Rules = MappingProxyType(matrices(PROJECTIONS, "self_attn"))

HEAD_NORMS: Rules = MappingProxyType(matrices({"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}, "self_attn"))

MLP: Rules = MappingProxyType(matrices({"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}, "mlp"))


def swiglu_experts(below: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Rules:
    """Stacks of all experts' matrices, gate and up each in one or together, as matrices of each expert."""
    gates, ups, downs = (f"{below}.{{expert}}.{part}.weight" for part in (gate, up, down))
    return {
        "ffn_gate_exps.weight": Rule(name=gates),
        "ffn_up_exps.weight": Rule(name=ups),
        "ffn_gate_up_exps.weight": Rule(name=gates, other=ups),
        "ffn_down_exps.weight": Rule(name=downs),
    }


def renamed(rules: Rules, pattern: str) -> Rules:
    """With other names, `{}` in `pattern` for what they were."""
    return {
        stored: replace(
            rule,
            name=pattern.replace("{}", rule.name),
            other=None if rule.other is None else pattern.replace("{}", rule.other),
        )
        for stored, rule in rules.items()
    }


def with_rows(rules: Rules, orders: Mapping[str, Any]) -> Rules:
    """With the rows of some in another order."""
    return {stored: replace(rule, row_order=orders.get(stored, rule.row_order)) for stored, rule in rules.items()}
