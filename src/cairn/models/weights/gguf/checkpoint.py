"""A GGUF file as a checkpoint: config.json's fields, and the published tensors that it has. Without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cairn.errors import ModelError
from cairn.models.weights.gguf.conversion import Conversion
from cairn.models.weights.gguf.header import GgufHeader, GgufTensor, read_header
from cairn.models.weights.gguf.lfm2 import convert_lfm2, convert_lfm2_moe
from cairn.models.weights.gguf.mamba import (
    convert_falcon_h1,
    convert_granite,
    convert_granite_hybrid,
    convert_nemotron_h,
)
from cairn.models.weights.gguf.metadata import GgufMetadata
from cairn.models.weights.gguf.qwen import convert_qwen3, convert_qwen3_5, convert_qwen3_5_moe, convert_qwen3_moe
from cairn.models.weights.gguf.views import GgufView, make_views

_CONVERSIONS: Mapping[str, Callable[[GgufMetadata], Conversion]] = MappingProxyType(
    {
        "falcon-h1": convert_falcon_h1,
        "granite": convert_granite,
        "granitehybrid": convert_granite_hybrid,
        "lfm2": convert_lfm2,
        "lfm2moe": convert_lfm2_moe,
        "nemotron_h": convert_nemotron_h,
        "nemotron_h_moe": convert_nemotron_h,
        "qwen3": convert_qwen3,
        "qwen3moe": convert_qwen3_moe,
        "qwen35": convert_qwen3_5,
        "qwen35moe": convert_qwen3_5_moe,
    }
)
"""By llama.cpp's names of the architectures that are read."""


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """`config`: config.json's fields; `views`: published tensors by name; `tensors`: those that are stored."""

    path: Path
    config: Mapping[str, Any]
    views: Mapping[str, GgufView]
    tensors: Mapping[str, GgufTensor]


def open_gguf(path: Path) -> GgufCheckpoint:
    """Read a file's header. Raises ModelError: no GGUF file, damaged or cut short, of an architecture that is not
    served, or with a field that is missing or not read."""
    try:
        stamp = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    return _open_as_it_is(path, stamp.st_mtime_ns, stamp.st_size)


# A server asks for a file's config, tensors and identity, each by itself.
@lru_cache(maxsize=2)
def _open_as_it_is(path: Path, mtime_ns: int, size: int) -> GgufCheckpoint:
    header = read_header(path)
    conversion = _convert(header)
    views = make_views(header.tensors, conversion.rules, conversion.layer_name)
    return GgufCheckpoint(path, conversion.config, views, header.tensors)


def _convert(header: GgufHeader) -> Conversion:
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{header.path}: general.type is {kind!r}: this file is a part of a model, and not the model")
    architecture = header.architecture
    if architecture not in _CONVERSIONS:
        known = ", ".join(_CONVERSIONS)
        raise ModelError(f"{header.path}: general.architecture {architecture!r} is not served; known: {known}")
    return _CONVERSIONS[architecture](GgufMetadata(header))
