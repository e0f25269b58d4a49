"""What `--layout` names: a published model, or the config.json of any family that cairn serves."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError, ModelError
from cairn.models.served_dtype import DTYPE_BYTES, served_dtype
from cairn.replay.config_fields import load_config
from cairn.replay.family_sizes import model_sizes
from cairn.replay.model_sizes import ModelSizes
from cairn.replay.published import HALF_BY_DEFAULT, PUBLISHED

__all__ = ["LAYOUT_NAMES", "layout_for", "sizes_for"]

LAYOUT_NAMES = tuple(PUBLISHED)

STATE_DTYPES = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


def sizes_for(name: str) -> ModelSizes:
    """Of a published model or of a config.json, named by itself or by its folder.

    Raises ConfigError naming --layout, the file and the field.
    """
    return model_sizes(_config(name), name)


def layout_for(name: str, block_size: int = 16, state_dtype: str | None = None) -> CacheLayout:
    """The layout of a published model or of a config.json. `state_dtype` None: float32, for granite-4-h-small bfloat16.

    Raises ConfigError naming --layout, --state-dtype or --block-size, and the fix.
    """
    if not 1 <= block_size <= 4096:
        raise ConfigError(f"--block-size must be from 1 to 4096, not {block_size}")
    dtype = state_dtype or ("bfloat16" if name in HALF_BY_DEFAULT else "float32")
    if dtype not in STATE_DTYPES:
        raise ConfigError(f"--state-dtype must be one of {', '.join(STATE_DTYPES)}, not {dtype!r}")
    config = _config(name)
    return model_sizes(config, name).layout(block_size, STATE_DTYPES[dtype], _dtype_bytes(config, name))


def _config(name: str) -> Mapping[str, Any]:
    config = PUBLISHED.get(name)
    return load_config(name, ", ".join(LAYOUT_NAMES)) if config is None else config


def _dtype_bytes(config: Mapping[str, Any], name: str) -> int:
    """Of the dtype that `cairn serve` serves a model in whose flags name none."""
    try:
        return DTYPE_BYTES[served_dtype(config)]
    except ModelError as error:
        raise ConfigError(f"--layout {name}: {error}") from error
