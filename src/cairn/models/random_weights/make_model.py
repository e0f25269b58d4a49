"""`cairn make-model`: a random-weight checkpoint in the exact Hugging Face form, for tests, demo and benchmarks.

The weights are scaled so that activations keep unit variance through the layers and logits have a standard deviation
of about 2: answers differ from prompt to prompt, and no layer drowns the others.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError
from safetensors.torch import save_file

from cairn.errors import ConfigError
from cairn.models import qwen3_5_vision
from cairn.models.families import FAMILY_RECIPES, family_of
from cairn.models.random_weights.make_tokenizer import CHAT_TEMPLATE, END_OF_MESSAGE, END_OF_TEXT, make_tokenizer
from cairn.models.random_weights.recipe import SIZES, CheckpointOptions, Recipe, Size

SavedDType = Literal["float32", "bfloat16"]

RECIPES: Mapping[str, Recipe] = MappingProxyType({**FAMILY_RECIPES, "qwen3_5_vl": qwen3_5_vision.RECIPE})
"""The families that can be made, and the one whose checkpoints have a vision tower, too."""

MADE_FAMILIES = tuple(RECIPES)
VOCAB_SIZE = 4096
MAX_POSITION_EMBEDDINGS = 32768

_SAVED: Mapping[str, torch.dtype] = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})
_SHARD_BYTES: Mapping[str, int] = MappingProxyType({"tiny": 4 << 20, "small": 256 << 20})


def make_model(
    family: str,
    out: Path,
    *,
    size: Size = "tiny",
    seed: int = 0,
    dtype: SavedDType = "float32",
    mtp: bool = False,
    show: bool = False,
) -> None:
    """Write the checkpoint to `out`, a new or empty folder. `mtp`: with a head of multi-token prediction. `show` draws
    a progress bar on a terminal, except for tiny, which is made at once.

    The same arguments give the same bytes (the tokenizer: with the same standard library). Raises ConfigError when an
    argument is out of range or `out` is not empty or cannot be written.
    """
    if family not in MADE_FAMILIES:
        raise ConfigError(f"make-model: no family {family!r}; known: {', '.join(MADE_FAMILIES)}")
    if size not in SIZES:
        raise ConfigError(f"make-model: no size {size!r}; known: {', '.join(SIZES)}")
    if dtype not in _SAVED:
        raise ConfigError(f"make-model: no dtype {dtype!r}; known: {', '.join(_SAVED)}")
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"make-model: --seed must be in 0..2^63-1, not {seed}")
    if mtp and not RECIPES[family].mtp_fields:
        families = ", ".join(name for name, recipe in RECIPES.items() if recipe.mtp_fields)
        raise ConfigError(
            f"make-model: {family} is published without a head that --mtp could make; {families} have one"
        )
    _prepare_folder(out)
    try:
        _write(out, RECIPES[family], size=size, seed=seed, dtype=dtype, mtp=mtp, show=show and size != "tiny")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"make-model: {out} cannot be written: {error}") from error


def _write(out: Path, recipe: Recipe, *, size: Size, seed: int, dtype: SavedDType, mtp: bool, show: bool) -> None:
    token_ids = make_tokenizer(
        out, VOCAB_SIZE, MAX_POSITION_EMBEDDINGS, recipe.tokens, recipe.chat_template or CHAT_TEMPLATE
    )
    eos, pad = token_ids[END_OF_MESSAGE], token_ids[END_OF_TEXT]
    options = CheckpointOptions(dtype, VOCAB_SIZE, MAX_POSITION_EMBEDDINGS, eos, pad, token_ids, mtp)
    raw = recipe.config(size, options)
    _write_weights(out, recipe, raw, size=size, seed=seed, dtype=dtype, show=show)
    _write_json(out / "generation_config.json", {"do_sample": True, "eos_token_id": [eos, pad], "pad_token_id": pad})
    for name, content in recipe.files.items():
        _write_json(out / name, dict(content))
    # Last, so that a folder with config.json is a finished one.
    _write_json(out / "config.json", raw)


def _prepare_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"make-model: {out} cannot be made: {error.strerror}") from error
    if taken:
        raise ConfigError(f"make-model: {out} is not empty; choose another folder or empty it first")


def _write_weights(
    out: Path, recipe: Recipe, raw: Mapping[str, Any], *, size: Size, seed: int, dtype: SavedDType, show: bool
) -> None:
    """Shard by shard, so that one shard at a time is in memory."""
    family = family_of(raw)
    config = family.parse(raw)
    shapes = family.tensors(config.asking(serves_mtp=config.num_mtp_layers > 0))
    if recipe.other_tensors is not None:
        shapes |= recipe.other_tensors(raw)
    meta = {
        name: torch.empty(shape, dtype=torch.float32 if name.endswith(recipe.float32) else _SAVED[dtype], device="meta")
        for name, shape in shapes.items()
    }
    split = split_torch_state_dict_into_shards(meta, max_shard_size=_SHARD_BYTES[size])
    generator = torch.Generator().manual_seed(seed)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (show and console.is_terminal)) as progress:
        for file, names in progress.track(split.filename_to_tensors.items(), description="weights"):
            tensors = {name: draw_tensor(recipe, name, shapes[name], generator).to(meta[name].dtype) for name in names}
            save_file(tensors, out / file, metadata={"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
    _write_json(out / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def draw_tensor(recipe: Recipe, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One tensor, float32, on the generator's device. Matrices keep the variance of their input; the rest has the range
    trained models show."""
    match name.rpartition(".")[2]:
        case "A_log":
            return torch.log(1 + 15 * torch.rand(shape, generator=generator, device=generator.device))
        case "dt_bias":
            return 12 * torch.rand(shape, generator=generator, device=generator.device) - 10
    normal = torch.randn(shape, generator=generator, device=generator.device)
    for ending, (mean, deviation) in recipe.spreads.items():
        if name.endswith(ending):
            return normal.mul_(deviation).add_(mean)
    if len(shape) == 1:
        return 0.1 * normal if name.endswith("bias") else 1 + 0.1 * normal
    gain = next((gain for ending, gain in recipe.gains.items() if name.endswith(ending)), 1.0)
    # Three dimensions are a depthwise convolution or experts in one tensor.
    inputs = shape[-1] if len(shape) == 3 else math.prod(shape[1:])
    return normal.mul_(gain / math.sqrt(inputs))
