"""The models that `--layout` names: five published ones, or the config.json of any family that cairn serves.

Of the published ones `published` has what decides sizes: each is a config.json like any other.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError, ModelError
from cairn.kernels.state_encoding import ENCODINGS, STATE_DTYPES
from cairn.models.decoder_config import DTYPE_BYTES, DecoderConfig, served_dtype
from cairn.models.families import family_of
from cairn.models.layer_sizes import ForwardSizes
from cairn.models.weights.tensor_headers import read_json

LAYOUT_NAMES = ("nemotron-3-nano", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "granite-4-h-small", "gpt-oss-20b")
_HALF_BY_DEFAULT = "granite-4-h-small"
"""Its recurrent state is bfloat16 unless told otherwise: its config.json asks for no float32."""

UNNEEDED = MappingProxyType(
    {"vocab_size": 1 << 24, "vocab_size_per_layer_input": 1 << 24, "max_position_embeddings": 1 << 20}
)
"""Fields that decide no size here: a config.json written for a replay may leave them out."""


def sizes_for(name: str) -> ForwardSizes:
    """Forward sizes of a published model or of a config.json, named by itself or by its folder.

    Raises ConfigError naming --layout, the file and the field.
    """
    return _parse_config(name)[0].forward_sizes()


def layout_for(
    name: str,
    block_size: int = 16,
    state_dtype: str | None = None,
    checkpoint_dtype: str | None = None,
    *,
    keeps_all_tokens: bool = False,
) -> CacheLayout:
    """The layout of a published model or of a config.json. `state_dtype`: what states are in while they run; None: what
    config.json names, for granite-4-h-small bfloat16. `checkpoint_dtype`: as the server's, of states that are float32
    while they run; None for checkpoints that are as the state is. `keeps_all_tokens`: also of layers with windows, to
    compare with.

    Raises ConfigError naming --layout, --state-dtype, --checkpoint-dtype or --block-size, and the fix.
    """
    if not 1 <= block_size <= 4096:
        raise ConfigError(f"--block-size must be from 1 to 4096, not {block_size}")
    for flag, known, dtype in (
        ("--checkpoint-dtype", ENCODINGS, checkpoint_dtype),
        ("--state-dtype", STATE_DTYPES, state_dtype),
    ):
        if dtype is not None and dtype not in known:
            raise ConfigError(f"{flag} must be one of {', '.join(known)}, not {dtype!r:.60}")
    config, dtype_bytes = _parse_config(name)
    encoding = None if checkpoint_dtype is None else ENCODINGS[checkpoint_dtype]
    running = state_dtype or ("bfloat16" if name == _HALF_BY_DEFAULT else config.state_dtype)
    if encoding is not None:
        running = "float32"
    config = replace(config, state_dtype=running).asking(keeps_all_tokens=keeps_all_tokens)
    return config.layout(block_size, dtype_bytes, encoding=encoding)


def _parse_config(name: str) -> tuple[DecoderConfig, int]:
    """The model's configuration, and the bytes of the dtype in which `cairn serve` serves it without --dtype."""
    raw = _read_config(name)
    try:
        return family_of(raw).parse(raw), DTYPE_BYTES[served_dtype(raw)]
    except ModelError as error:
        raise ConfigError(f"--layout {name}: {error}") from error


def _read_config(name: str) -> Mapping[str, object]:
    path = Path(__file__).parent / f"published/{name}.json" if name in LAYOUT_NAMES else Path(name)
    try:
        raw = read_json(path / "config.json" if path.is_dir() else path)
    except ModelError as error:
        known = ", ".join(LAYOUT_NAMES)
        raise ConfigError(f"--layout {name} is neither {known} nor a config.json that can be read: {error}") from error
    if isinstance(text := raw.get("text_config"), Mapping):
        return {**raw, "text_config": {**UNNEEDED, **text}}
    return {**UNNEEDED, **raw}
