"""What `cairn make-model` has to know of a family: its sizes, its config.json, and how its tensors are spread."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

__all__ = ["LOGIT_STD", "Asked", "Recipe", "Size", "config_head", "drawn"]

Size = Literal["tiny", "small"]

LOGIT_STD = 2.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a checkpoint of any family: `dtype` by name, and the tokenizer's numbers. `tokens`: the ids of
    its control and mark tokens."""

    dtype: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int
    pad_token_id: int
    tokens: Mapping[str, int]


def _none() -> Mapping[str, Any]:
    return MappingProxyType({})


def _no_tensors(raw: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How checkpoints of one family are made.

    `config`: the sizes and what is asked -> config.json, with the fields, names and forms of the published ones; its
    `model_type` names the family. Tensors are told by how their names end, the first ending that fits counts:
    `spreads` gives (mean, standard deviation), `gains` how much a matrix amplifies. All others get what `drawn` says.
    `float32`: endings of tensors that are saved in float32 whatever the dtype. `tokens`: control tokens of the
    tokenizer beside those of any chat. `chat_template`: another one than any chat's. `files`: further JSON files of the
    folder, by name. `other_tensors`: config.json -> tensors that are not the text model's, by name.
    """

    sizes: Mapping[Size, Mapping[str, Any]]
    config: Callable[[Mapping[str, Any], Asked], dict[str, Any]]
    spreads: Mapping[str, tuple[float, float]] = field(default_factory=_none)
    gains: Mapping[str, float] = field(default_factory=_none)
    float32: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    chat_template: str | None = None
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=_none)
    other_tensors: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]] = field(default=_no_tensors)


def config_head(
    architecture: str, model_type: str, sizes: Mapping[str, Any], asked: Asked, dtype_field: str = "torch_dtype"
) -> dict[str, Any]:
    """The fields that every family's config.json begins with. `dtype_field`: newer families call it `dtype`."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        dtype_field: asked.dtype,
        "vocab_size": asked.vocab_size,
        **sizes,
        "max_position_embeddings": asked.max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": asked.eos_token_id,
        "pad_token_id": asked.pad_token_id,
    }


def drawn(recipe: Recipe, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One tensor, float32. Matrices keep the variance of their input; the rest has the range trained models show."""
    match name.rpartition(".")[2]:
        case "A_log":
            return torch.log(1 + 15 * torch.rand(shape, generator=generator))
        case "dt_bias":
            return 12 * torch.rand(shape, generator=generator) - 10
    normal = torch.randn(shape, generator=generator)
    for ending, (mean, deviation) in recipe.spreads.items():
        if name.endswith(ending):
            return normal.mul_(deviation).add_(mean)
    if len(shape) == 1:
        return 0.1 * normal if name.endswith("bias") else 1 + 0.1 * normal
    gain = next((gain for ending, gain in recipe.gains.items() if name.endswith(ending)), 1.0)
    # Three dimensions are a depthwise convolution or experts in one tensor.
    inputs = shape[-1] if len(shape) == 3 else math.prod(shape[1:])
    return normal.mul_(gain / math.sqrt(inputs))
