"""`cairn make-model`: a random-weight checkpoint in the exact Hugging Face form, for tests, demo and benchmarks.

The weights are scaled so that activations keep unit variance through the layers and logits have a standard deviation
of about 2: answers differ from prompt to prompt, and no layer drowns the others.
"""

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError
from safetensors.torch import save_file

from cairn.errors import ConfigError
from cairn.models import nemotron_h_config
from cairn.models.make_tokenizer import END_OF_MESSAGE, END_OF_TEXT, make_tokenizer

__all__ = ["MADE_FAMILIES", "SIZES", "make_model"]

Size = Literal["tiny", "small"]
SavedDType = Literal["float32", "bfloat16"]

MADE_FAMILIES = (nemotron_h_config.MODEL_TYPE,)
VOCAB_SIZE = 4096
MAX_POSITION_EMBEDDINGS = 32768
LOGIT_STD = 2.0

SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # About 5 M parameters; a checkpoint is 6 pages of 16 tokens in float32, 11 in bfloat16.
        "tiny": MappingProxyType(
            {
                "hybrid_override_pattern": "MEM*M-MEM*",
                "hidden_size": 256,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "mamba_num_heads": 8,
                "mamba_head_dim": 32,
                "ssm_state_size": 32,
                "n_groups": 2,
                "intermediate_size": 512,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 128,
                "moe_shared_expert_intermediate_size": 256,
            }
        ),
        # About 300 M parameters, with the ratio of state to keys and values of the published models: a checkpoint is
        # worth 3,000 tokens.
        "small": MappingProxyType(
            {
                "hybrid_override_pattern": "MEMEM*EMEM-M*EMEMEM*EM-MEM*",
                "hidden_size": 1024,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "mamba_num_heads": 32,
                "mamba_head_dim": 64,
                "ssm_state_size": 128,
                "n_groups": 8,
                "intermediate_size": 4096,
                "n_routed_experts": 16,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 512,
                "moe_shared_expert_intermediate_size": 1024,
            }
        ),
    }
)

_SAVED: Mapping[str, torch.dtype] = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})
_SHARD_BYTES: Mapping[str, int] = MappingProxyType({"tiny": 4 << 20, "small": 256 << 20})


def make_model(
    family: str, out: Path, *, size: Size = "tiny", seed: int = 0, dtype: SavedDType = "float32", show: bool = False
) -> None:
    """Write the checkpoint to `out`, a new or empty folder. `show` draws a progress bar on a terminal, except for
    tiny, which is made at once.

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
    _claim(out)
    try:
        _write(out, size, seed, dtype, show and size != "tiny")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"make-model: {out} cannot be written: {error}") from error


def _write(out: Path, size: Size, seed: int, dtype: SavedDType, show: bool) -> None:
    token_ids = make_tokenizer(out, VOCAB_SIZE, MAX_POSITION_EMBEDDINGS)
    eos, pad = token_ids[END_OF_MESSAGE], token_ids[END_OF_TEXT]
    raw = _config(SIZES[size], eos, pad, dtype)
    _write_weights(out, nemotron_h_config.parse(raw), size, seed, dtype, show)
    _write_json(out / "generation_config.json", {"do_sample": True, "eos_token_id": [eos, pad], "pad_token_id": pad})
    # Last, so that a folder with config.json is a finished one.
    _write_json(out / "config.json", raw)


def _claim(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"make-model: {out} cannot be made: {error.strerror}") from error
    if taken:
        raise ConfigError(f"make-model: {out} is not empty; choose another folder or empty it first")


def _config(dimensions: Mapping[str, Any], eos: int, pad: int, dtype: SavedDType) -> dict[str, Any]:
    """config.json with the fields, names and forms of the published one."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": nemotron_h_config.MODEL_TYPE,
        "torch_dtype": dtype,
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": len(dimensions["hybrid_override_pattern"]),
        **dimensions,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
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
        "num_logits_to_keep": 1,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "topk_group": 1,
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
    }


def _write_weights(
    out: Path, config: nemotron_h_config.NemotronHConfig, size: Size, seed: int, dtype: SavedDType, show: bool
) -> None:
    """Shard by shard, so that one shard at a time is in memory."""
    shards = _plan_shards(nemotron_h_config.tensors(config), _SHARD_BYTES[size], _SAVED[dtype].itemsize)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    generator = torch.Generator().manual_seed(seed)
    weight_map, total = {}, 0
    console = Console(stderr=True)
    with Progress(console=console, transient=True) if show and console.is_terminal else nullcontext() as progress:
        task = progress.add_task("weights", total=len(shards)) if progress else None
        for file, shapes in zip(names, shards, strict=True):
            tensors = {
                name: _random(name, shape, generator).to(_dtype_of(name, _SAVED[dtype]))
                for name, shape in shapes.items()
            }
            save_file(tensors, out / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shapes, file))
            total += sum(tensor.nbytes for tensor in tensors.values())
            if progress and task is not None:
                progress.advance(task)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(out / "model.safetensors.index.json", index)


def _plan_shards(
    shapes: Mapping[str, tuple[int, ...]], shard_bytes: int, item_bytes: int
) -> list[dict[str, tuple[int, ...]]]:
    """Tensors in order, a new shard whenever the next one would not fit."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * item_bytes
        if used + size > shard_bytes and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += size
    return shards


def _dtype_of(name: str, saved: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith("e_score_correction_bias") else saved


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One tensor, float32. Matrices keep the variance of their input; the rest has the range trained models show."""
    match name.rpartition("mixer.")[2]:
        case "A_log":
            return torch.log(1 + 15 * torch.rand(shape, generator=generator))
        case "dt_bias":
            return 12 * torch.rand(shape, generator=generator) - 10
    normal = torch.randn(shape, generator=generator)
    match name.rpartition("mixer.")[2]:
        case "D":
            return 1 + 0.2 * normal
        case "gate.e_score_correction_bias":
            return 0.05 * normal
        case "backbone.embeddings.weight":
            return normal
        case "lm_head.weight":
            return normal.mul_(LOGIT_STD / math.sqrt(shape[-1]))
    if len(shape) == 1:
        return 0.1 * normal if name.endswith("bias") else 1 + 0.1 * normal
    return normal.mul_(1 / math.sqrt(math.prod(shape[1:])))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
