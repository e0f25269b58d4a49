"""Random-weight checkpoints for the benchmarks, also of sizes that `cairn make-model` does not make.

tiny (5 M parameters) computes a prompt in little more than what a request costs anyway, and small (300 M) needs minutes
for what is to be measured in seconds on a CPU. `medium` is tiny, twice as wide: 16 M parameters.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cairn.models.families import family_of
from cairn.models.random_weights.make_model import RECIPES, SIZES, SavedDType, draw_tensor, make_model

__all__ = [
    "MODEL_SIZES",
    "NARROW",
    "PEER_SHAPES",
    "PUBLISHED_VOCABULARY",
    "given_or_made",
    "make_heavy_model",
    "make_peer_model",
    "make_sized_model",
    "make_thin_model",
    "redraw",
    "widen_vocabulary",
]

MODEL_SIZES = ("tiny", "medium", "small")

FAMILY = "nemotron_h"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
WIDTHS = (
    *("hidden_size", "num_attention_heads", "mamba_num_heads", "intermediate_size"),
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size"),
)
"""What `medium` has twice as much of as tiny."""

PEER_FAMILY = "qwen3_5"
NARROW = "narrow"
PUBLISHED_VOCABULARY = 151_936
"""Entries of the published Qwen3 models' vocabulary."""

_NARROW = {
    "hidden_size": 512,
    "intermediate_size": 1280,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}

_FOUR_LAYERS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
PEER_SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 8,
            "layer_types": [*_FOUR_LAYERS * 2],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
        "small": {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 24,
            "layer_types": [*_FOUR_LAYERS * 6],
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [6, 5, 5],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10_000_000,
                "rope_type": "default",
            },
        },
    }
)
"""Fields of config.json of the Qwen3.5 models that are compared with other servers: 8 M and 333 M parameters."""

NARROW_SHAPE: Mapping[str, Any] = MappingProxyType({**PEER_SHAPES["small"], **_NARROW})
"""As many tensors as the one of 333 M has, and 78 M parameters."""

_THIN: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
    }
)
"""A token's keys and values take 64 bytes, a checkpoint 8 KB: millions of tokens fit into any machine."""

_HEAVY: Mapping[str, Any] = MappingProxyType(
    {"num_key_value_heads": 1, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
)
"""A token's keys and values take 512 bytes, a checkpoint 824 KB."""


def make_sized_model(out: Path, *, size: str, seed: int) -> None:
    """Write a Nemotron-H checkpoint of one of MODEL_SIZES to `out`, a new or empty folder."""
    make_model(FAMILY, out, size=next((known for known in SIZES if known == size), "tiny"), seed=seed)
    if size == "medium":
        raw = json.loads((out / "config.json").read_text())
        redraw(FAMILY, out, {name: 2 * raw[name] for name in WIDTHS}, seed, "float32")


def make_peer_model(out: Path, *, size: str, vocab_size: int | None, seed: int) -> None:
    """Write a Qwen3.5 checkpoint in bfloat16 of one of PEER_SHAPES, or NARROW, to `out`, a new or empty folder.

    `vocab_size`: entries of its vocabulary, at least those of the tokenizer that comes with it; None for just those.
    """
    make_model(PEER_FAMILY, out, seed=seed, dtype="bfloat16")
    fields = dict(NARROW_SHAPE if size == NARROW else PEER_SHAPES[size])
    if vocab_size is not None:
        widen_vocabulary(out / "tokenizer.json", vocab_size)
        fields["vocab_size"] = vocab_size
    redraw(PEER_FAMILY, out, fields, seed, "bfloat16")


@contextmanager
def given_or_made(model: Path | None) -> Iterator[Path]:
    """`model`, or without one a Qwen3.5 of 333 M random parameters, which is there until the end of the block."""
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="cairn-made-") as folder:
        made = Path(folder) / "model"
        make_peer_model(made, size="small", vocab_size=None, seed=0)
        yield made


def make_thin_model(out: Path, *, seed: int) -> None:
    """Write a Qwen3.5 checkpoint in bfloat16 that remembers very little to `out`, a new or empty folder."""
    make_model(PEER_FAMILY, out, seed=seed, dtype="bfloat16")
    redraw(PEER_FAMILY, out, _THIN, seed, "bfloat16")


def make_heavy_model(out: Path, *, seed: int) -> None:
    """Write a checkpoint of a Qwen3.5 that sees images to `out`, a new or empty folder: tiny but for its states, one of
    which takes the bytes of 1,610 tokens' keys and values, as that of the 333 M model does."""
    make_model("qwen3_5_vl", out, seed=seed)
    text = json.loads((out / "config.json").read_text())["text_config"]
    redraw("qwen3_5_vl", out, {"text_config": text | _HEAVY}, seed, "float32")


def redraw(family: str, folder: Path, fields: Mapping[str, Any], seed: int, dtype: SavedDType) -> None:
    """Change fields of config.json of the checkpoint in `folder`, and draw tensors of the shapes that follow. Those of
    a vision model stay."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text()) | dict(fields)
    tensors: dict[str, torch.Tensor] = {}
    for shard in set(json.loads((folder / INDEX).read_text())["weight_map"].values()):
        tensors |= {name: held for name, held in load_file(folder / shard).items() if ".visual." in name}
        (folder / shard).unlink()
    (folder / INDEX).unlink()
    recipe, parsed, generator = RECIPES[family], family_of(raw), torch.Generator().manual_seed(seed)
    for name, shape in parsed.tensors(parsed.parse(raw)).items():
        saved = torch.float32 if name.endswith(recipe.float32) else getattr(torch, dtype)
        tensors[name] = draw_tensor(recipe, name, shape, generator).to(saved)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def widen_vocabulary(file: Path, size: int) -> None:
    """Fill up the vocabulary of a tokenizer.json with words that no text is split into: every id has a text."""
    content = json.loads(file.read_text(encoding="utf-8"))
    words: dict[str, int] = content["model"]["vocab"]
    first = 1 + max(*words.values(), *(token["id"] for token in content["added_tokens"]))
    if size < first:
        raise ValueError(f"the tokenizer has {first} entries: a vocabulary of {size} is too small for it")
    words.update({f"Ġx{token}": token for token in range(first, size)})
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
