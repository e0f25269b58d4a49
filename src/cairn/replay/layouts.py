"""What `--layout` names: a published model, or the config.json of any family that cairn serves."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError, ModelError
from cairn.models.decoder_config import DecoderConfig
from cairn.models.families import family_of
from cairn.models.layer_sizes import ForwardSizes
from cairn.models.served_dtype import DTYPE_BYTES, served_dtype
from cairn.models.weights.tensor_headers import read_json
from cairn.replay.published import HALF_BY_DEFAULT, PUBLISHED

__all__ = ["LAYOUT_NAMES", "layout_for", "sizes_for"]

LAYOUT_NAMES = tuple(PUBLISHED)

STATE_DTYPES = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})

UNNEEDED = MappingProxyType({"vocab_size": 1 << 24, "max_position_embeddings": 1 << 20})
"""Fields that decide no size here: a config.json written for a replay may leave them out."""


def sizes_for(name: str) -> ForwardSizes:
    """Of a published model or of a config.json, named by itself or by its folder.

    Raises ConfigError naming --layout, the file and the field.
    """
    return _named(name).config.forward_sizes()


def layout_for(name: str, block_size: int = 16, state_dtype: str | None = None) -> CacheLayout:
    """The layout of a published model or of a config.json. `state_dtype` None: float32, for granite-4-h-small bfloat16.

    Raises ConfigError naming --layout, --state-dtype or --block-size, and the fix.
    """
    if not 1 <= block_size <= 4096:
        raise ConfigError(f"--block-size must be from 1 to 4096, not {block_size}")
    dtype = state_dtype or ("bfloat16" if name in HALF_BY_DEFAULT else "float32")
    if dtype not in STATE_DTYPES:
        raise ConfigError(f"--state-dtype must be one of {', '.join(STATE_DTYPES)}, not {dtype!r}")
    model = _named(name)
    return model.config.layout(block_size, model.dtype_bytes, state_bytes=STATE_DTYPES[dtype])


@dataclass(frozen=True, slots=True)
class _Model:
    """`dtype_bytes`: of the dtype that `cairn serve` serves it in whose flags name none."""

    config: DecoderConfig
    dtype_bytes: int


def _named(name: str) -> _Model:
    raw = PUBLISHED.get(name) or _with_unneeded(_read(name))
    try:
        return _Model(family_of(raw).parse(raw), DTYPE_BYTES[served_dtype(raw)])
    except ModelError as error:
        raise ConfigError(f"--layout {name}: {error}") from error


def _with_unneeded(raw: Mapping[str, object]) -> Mapping[str, object]:
    text = raw.get("text_config")
    if isinstance(text, Mapping):
        return {**raw, "text_config": {**UNNEEDED, **text}}
    return {**UNNEEDED, **raw}


def _read(name: str) -> Mapping[str, object]:
    path = Path(name)
    try:
        return read_json(path / "config.json" if path.is_dir() else path)
    except ModelError as error:
        known = ", ".join(LAYOUT_NAMES)
        raise ConfigError(f"--layout {name} is neither {known} nor a config.json that can be read: {error}") from error
