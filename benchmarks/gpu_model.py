"""Models of published shapes whose random weights are made where they are computed with, and are stored nowhere.

`write_folder` writes what a server reads besides weights; `build_core` is what `cairn serve` can be given as its core.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
from benchmarks.made_model import widen_vocabulary

from cairn.engine import build
from cairn.engine.contract import EngineConfig
from cairn.engine.core import Core
from cairn.kernels.contract import Kernels
from cairn.layers.communicator import SINGLE_RANK, Communicator
from cairn.layers.model import Model
from cairn.models.decoder_builder import Backend, Execution, build_decoder
from cairn.models.decoder_config import AskedQuantization
from cairn.models.random_weights.make_model import RECIPES, draw_tensor
from cairn.models.random_weights.make_tokenizer import END_OF_MESSAGE, END_OF_TEXT, make_tokenizer
from cairn.models.random_weights.recipe import CheckpointOptions
from cairn.models.registry import Kept, OpenModel, open_model
from cairn.models.sharding import TensorShard
from cairn.models.weights.loader import DType
from cairn.models.weights.tensor_headers import TensorHeader

__all__ = ["SHAPES", "RandomModel", "Shape", "build_core", "open_random", "write_folder"]

TOKENIZER_VOCABULARY = 4096
CONTEXT = 262_144


@dataclass(frozen=True)
class Shape:
    """A model by its published config.json. `family`: of RECIPES; `sizes`: fields that differ from its small one;
    `layers`: the field that lists layers, and how many of them repeat; `vocab_size`: None for the tokenizer's.
    `experts`, `experts_per_token`: of a mixture."""

    family: str
    sizes: Mapping[str, Any]
    layers: tuple[str, int]
    vocab_size: int | None
    experts: int
    experts_per_token: int


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "nemotron-3-nano-30b-a3b": Shape(
            family="nemotron_h",
            sizes={
                "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                "hidden_size": 2688,
                "num_attention_heads": 32,
                "head_dim": 128,
                "mamba_num_heads": 64,
                "intermediate_size": 1856,
                "n_routed_experts": 128,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 1856,
                "moe_shared_expert_intermediate_size": 3712,
            },
            layers=("hybrid_override_pattern", 13),
            vocab_size=131_072,
            experts=128,
            experts_per_token=6,
        ),
        "qwen3.5-35b-a3b": Shape(
            family="qwen3_5_moe",
            sizes={
                "hidden_size": 2048,
                "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10_000_000,
                    "rope_type": "default",
                },
            },
            layers=("layer_types", 4),
            vocab_size=248_320,
            experts=256,
            experts_per_token=8,
        ),
        "tiny-nemotron": Shape("nemotron_h", {}, ("hybrid_override_pattern", 10), None, 8, 2),
        "tiny-qwen": Shape("qwen3_5_moe", {}, ("layer_types", 4), None, 8, 2),
    }
)
"""By name; the tiny ones are for trying the benchmark out."""


def write_folder(out: Path, name: str, most_bytes: float | None = None) -> int:
    """config.json and tokenizer of a model to `out`, an empty folder, and how many layers it has: those of the
    published one, or as many whole periods as come to `most_bytes` of weights in bfloat16. Raises ValueError where not
    even one does."""
    shape = SHAPES[name]
    recipe = RECIPES[shape.family]
    tokens = make_tokenizer(out, TOKENIZER_VOCABULARY, CONTEXT, recipe.tokens)
    if shape.vocab_size is not None:
        widen_vocabulary(out / "tokenizer.json", shape.vocab_size)
    vocab_size = shape.vocab_size or TOKENIZER_VOCABULARY
    options = CheckpointOptions("bfloat16", vocab_size, CONTEXT, tokens[END_OF_MESSAGE], tokens[END_OF_TEXT], tokens)
    raw = recipe.config("small" if shape.vocab_size else "tiny", options) | dict(shape.sizes)
    listed, period = shape.layers
    layers = raw[listed]
    for count in range(len(layers), 0, -period):
        raw |= {listed: layers[:count], "num_hidden_layers": count}
        (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        opened = open_random.__wrapped__(out, "auto", None)
        if most_bytes is None or opened.weight_bytes(opened.stored_tensors()) <= most_bytes:
            return count
    raise ValueError(f"{name}: {period} layers take more than {most_bytes:.0f} bytes")


_STORED = MappingProxyType({torch.float32: "F32", torch.bfloat16: "BF16"})


@dataclass(frozen=True, slots=True)
class RandomModel(OpenModel):
    """A folder without weights. `built`: the model, which is made once, for all engines of a process."""

    built: list[Model] = field(default_factory=list)

    def stored_tensors(self) -> Mapping[str, TensorHeader]:
        tensors = self.family.tensors(self.config)
        return {name: TensorHeader(shape, _STORED[self.dtype], "") for name, shape in tensors.items()}

    def transfer_facts(self) -> dict[str, str | int]:
        """All models of a config.json have the same weights."""
        return {**self.config.transfer_facts(), "weights": "random", "dtype": str(self.dtype)}

    def build(
        self,
        *,
        exact: bool,
        communicator: Communicator = SINGLE_RANK,
        backend: Backend | Kernels | None = None,
        device: torch.device | None = None,
    ) -> Model:
        if not self.built:
            place = device or torch.device("cpu")
            execution = Execution(exact, self.dtype, communicator, backend, place)
            recipe = next(one for one in RECIPES.values() if one.model_type == self.family.model_type)

            def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> torch.Tensor:
                generator = torch.Generator(place).manual_seed(crc32(name.encode()))
                tensor = draw_tensor(recipe, name, shape, generator).to(
                    torch.float32 if self.family.keeps_float32(name) else self.dtype
                )
                if shard is None:
                    return tensor
                return torch.cat(
                    [tensor.narrow(shard.dim, begin, end - begin) for begin, end in shard.slices], shard.dim
                )

            self.built.append(build_decoder(self.family.spec(self.config), load, execution))
        return self.built[0]


@cache
def open_random(
    folder: Path, dtype: DType = "auto", quantization: AskedQuantization | None = None, keeps: Kept | None = None
) -> RandomModel:
    """As `open_model`."""
    opened = open_model(folder, dtype, quantization, keeps)
    return RandomModel(opened.folder, opened.family, opened.config, opened.dtype, None, opened.served_quantization)


def build_core(config: EngineConfig) -> Core:
    """For `cairn.cli.main(core="benchmarks.gpu_model:build_core")`."""
    return build.build_core(config, open_folder=open_random)
