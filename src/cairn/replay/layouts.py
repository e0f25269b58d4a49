"""The models that `--layout` names: four published ones, or the config.json of any family that cairn serves."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError, ModelError
from cairn.kernels.state_encoding import ENCODINGS, StateEncoding
from cairn.models.decoder_config import DTYPE_BYTES, DecoderConfig, served_dtype
from cairn.models.families import family_of
from cairn.models.layer_sizes import ForwardSizes
from cairn.models.weights.tensor_headers import read_json

__all__ = ["LAYOUT_NAMES", "layout_for", "sizes_for"]


def _qwen(layers: int, vocab_size: int, experts: int, experts_per_token: int) -> Mapping[str, object]:
    """The text part of Qwen3.5-35B-A3B and of Qwen3-Next-80B-A3B, as far as it decides sizes."""
    return MappingProxyType(
        {
            "dtype": "bfloat16",
            "vocab_size": vocab_size,
            "max_position_embeddings": 262144,
            "hidden_size": 2048,
            "num_hidden_layers": layers,
            "full_attention_interval": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        }
    )


PUBLISHED: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "nemotron-3-nano": MappingProxyType(
            {
                "model_type": "nemotron_h",
                "dtype": "bfloat16",
                "vocab_size": 131072,
                "max_position_embeddings": 262144,
                "hidden_size": 2688,
                "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                "num_attention_heads": 32,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "mamba_num_heads": 64,
                "mamba_head_dim": 64,
                "ssm_state_size": 128,
                "n_groups": 8,
                "conv_kernel": 4,
                "n_routed_experts": 128,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 1856,
                "moe_shared_expert_intermediate_size": 3712,
            }
        ),
        "qwen3.5-35b-a3b": MappingProxyType({"model_type": "qwen3_5_moe", "text_config": _qwen(40, 248320, 256, 8)}),
        "qwen3-next-80b-a3b": MappingProxyType({"model_type": "qwen3_next", **_qwen(48, 151936, 512, 10)}),
        "granite-4-h-small": MappingProxyType(
            {
                "model_type": "granitemoehybrid",
                "dtype": "bfloat16",
                "vocab_size": 100352,
                "max_position_embeddings": 131072,
                "hidden_size": 4096,
                "layer_types": tuple("attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)),
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "mamba_n_heads": 128,
                "mamba_d_head": 64,
                "mamba_d_state": 128,
                "mamba_n_groups": 1,
                "mamba_d_conv": 4,
                "num_local_experts": 72,
                "num_experts_per_tok": 10,
                "intermediate_size": 768,
                "shared_intermediate_size": 1536,
            }
        ),
    }
)

HALF_BY_DEFAULT = frozenset({"granite-4-h-small"})
"""Layouts whose recurrent state is bfloat16 unless told otherwise: their config.json asks for no float32."""

LAYOUT_NAMES = tuple(PUBLISHED)

STATE_DTYPES = MappingProxyType(
    {name: StateEncoding(name, size) for name, size in (("float32", 4), ("bfloat16", 2), ("float16", 2))}
)
"""Of states that are in this dtype while they run, too, and so have no scales."""

UNNEEDED = MappingProxyType({"vocab_size": 1 << 24, "max_position_embeddings": 1 << 20})
"""Fields that decide no size here: a config.json written for a replay may leave them out."""


def sizes_for(name: str) -> ForwardSizes:
    """Forward sizes of a published model or of a config.json, named by itself or by its folder.

    Raises ConfigError naming --layout, the file and the field.
    """
    return _parse_config(name)[0].forward_sizes()


def layout_for(
    name: str, block_size: int = 16, state_dtype: str | None = None, checkpoint_dtype: str | None = None
) -> CacheLayout:
    """The layout of a published model or of a config.json. `state_dtype` None: float32, for granite-4-h-small bfloat16.
    `checkpoint_dtype`: as the server's; None for checkpoints that are as the state is.

    Raises ConfigError naming --layout, --state-dtype, --checkpoint-dtype or --block-size, and the fix.
    """
    if not 1 <= block_size <= 4096:
        raise ConfigError(f"--block-size must be from 1 to 4096, not {block_size}")
    dtype = state_dtype or ("bfloat16" if name in HALF_BY_DEFAULT else "float32")
    if dtype not in STATE_DTYPES:
        raise ConfigError(f"--state-dtype must be one of {', '.join(STATE_DTYPES)}, not {dtype!r}")
    if checkpoint_dtype is not None and checkpoint_dtype not in ENCODINGS:
        raise ConfigError(f"--checkpoint-dtype must be one of {', '.join(ENCODINGS)}, not {checkpoint_dtype!r:.60}")
    config, dtype_bytes = _parse_config(name)
    encoding = STATE_DTYPES[dtype] if checkpoint_dtype is None else ENCODINGS[checkpoint_dtype]
    return config.layout(block_size, dtype_bytes, encoding=encoding)


def _parse_config(name: str) -> tuple[DecoderConfig, int]:
    """The model's configuration, and the bytes of the dtype in which `cairn serve` serves it without --dtype."""
    raw = PUBLISHED.get(name) or _read_config(name)
    try:
        return family_of(raw).parse(raw), DTYPE_BYTES[served_dtype(raw)]
    except ModelError as error:
        raise ConfigError(f"--layout {name}: {error}") from error


def _read_config(name: str) -> Mapping[str, object]:
    path = Path(name)
    try:
        raw = read_json(path / "config.json" if path.is_dir() else path)
    except ModelError as error:
        known = ", ".join(LAYOUT_NAMES)
        raise ConfigError(f"--layout {name} is neither {known} nor a config.json that can be read: {error}") from error
    text = raw.get("text_config")
    if isinstance(text, Mapping):
        return {**raw, "text_config": {**UNNEEDED, **text}}
    return {**UNNEEDED, **raw}
