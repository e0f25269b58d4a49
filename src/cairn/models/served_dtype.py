"""The dtype that a model is served in unless a flag names one, by what config.json says of it. No torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from cairn.errors import ModelError

ServedDType = Literal["float32", "bfloat16"]

ServedQuantization = Literal["int8"]
"""What the weights of matrix products can be brought to when they are loaded; all else stays in the dtype."""

DTYPE_BYTES: Mapping[ServedDType, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
"""Of one number."""

_BY_SAVED: Mapping[str, ServedDType] = MappingProxyType(
    {"float32": "float32", "float16": "float32", "bfloat16": "bfloat16"}
)


def served_dtype(raw: Mapping[str, object]) -> ServedDType:
    """By `dtype` or `torch_dtype`, also those of `text_config`. float16 is widened to float32, which holds it exactly;
    a config.json that names none is served in float32. Raises ModelError for any other dtype."""
    inner = raw.get("text_config")
    places = [raw, inner] if isinstance(inner, Mapping) else [raw]
    named = [place.get(name) for place in places for name in ("dtype", "torch_dtype")]
    saved = next((name for name in named if name), "float32")
    if not isinstance(saved, str) or saved not in _BY_SAVED:
        raise ModelError(
            f"config.json: torch_dtype {saved!r:.60} is none of {', '.join(_BY_SAVED)}; set it to one of these, or "
            "serve with --dtype"
        )
    return _BY_SAVED[saved]
