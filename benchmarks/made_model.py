"""Random-weight checkpoints for the benchmarks, also of a size that `cairn make-model` does not make.

tiny (5 M parameters) computes a prompt in little more than what a request costs anyway, and small (300 M) needs minutes
for what is to be measured in seconds on a CPU. `medium` is tiny, twice as wide: 16 M parameters.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cairn.models.families import family_of
from cairn.models.make_model import RECIPES, SIZES, drawn, make_model

__all__ = ["MODEL_SIZES", "make_sized_model"]

MODEL_SIZES = ("tiny", "medium", "small")

FAMILY = "nemotron_h"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
WIDTHS = (
    *("hidden_size", "num_attention_heads", "mamba_num_heads", "intermediate_size"),
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size"),
)
"""What `medium` has twice as much of as tiny."""


def make_sized_model(out: Path, *, size: str, seed: int) -> None:
    """Write a Nemotron-H checkpoint of one of MODEL_SIZES to `out`, a new or empty folder."""
    make_model(FAMILY, out, size=next((known for known in SIZES if known == size), "tiny"), seed=seed)
    if size == "medium":
        _widen(out, seed)


def _widen(folder: Path, seed: int) -> None:
    """Make the tiny checkpoint in `folder` the medium one: same layers, same vocabulary."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    raw |= {name: 2 * raw[name] for name in WIDTHS}
    for shard in set(json.loads((folder / INDEX).read_text())["weight_map"].values()):
        (folder / shard).unlink()
    (folder / INDEX).unlink()
    family, generator = family_of(raw), torch.Generator().manual_seed(seed)
    shapes = family.tensors(family.parse(raw))
    tensors = {name: drawn(RECIPES[FAMILY], name, shape, generator) for name, shape in shapes.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
