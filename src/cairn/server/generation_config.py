"""Sampling parameters that a checkpoint recommends in generation_config.json, for requests that do not send their own:
vLLM's `--generation-config` and `--override-generation-config`."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.engine.contract import RANGES
from cairn.errors import ConfigError

_INTEGERS = ("top_k", "max_new_tokens")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_FILE = "generation_config.json"

logger = logging.getLogger(__name__)


def load_default_sampling(source: str, overrides: str | None, model: Path) -> dict[str, float]:
    """Fields of request bodies and their defaults. `source`: `auto` for the file of `model`, `vllm` for none, or
    another folder; `overrides`: JSON that replaces single fields. Logs what it finds.

    Raises ConfigError naming the file or the flag, and the field.
    """
    fields = _read_folder(source, model)
    if overrides is not None:
        fields |= _read_fields(overrides, "--override-generation-config")
    if "max_new_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_new_tokens")
    if fields:
        named = ", ".join(f"{name} {value:g}" for name, value in fields.items())
        logger.warning("requests that say nothing else are sampled with %s; --generation-config vllm ends that", named)
    return fields


def check_default_sampling(source: str, overrides: str | None) -> None:
    """Raises as `load_default_sampling` does, but for what is wrong with the model's own file."""
    if source != "auto":
        _read_folder(source, Path())
    if overrides is not None:
        _read_fields(overrides, "--override-generation-config")


def _read_folder(source: str, model: Path) -> dict[str, float]:
    if source == "vllm":
        return {}
    path = (model if source == "auto" else Path(source)) / _FILE
    if not os.path.isfile(path):
        if source == "auto":
            return {}
        raise ConfigError(f"--generation-config: there is no {path}: name a folder that has one, auto or vllm")
    try:
        return _read_fields(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"--generation-config: {path} cannot be read: {error.strerror}") from error


def _read_fields(text: str | bytes, where: str) -> dict[str, float]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: is no JSON: {error}") from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: must be a JSON object")
    return {name: _check(name, raw[name], where) for name in (*_NUMBERS, *_INTEGERS) if raw.get(name) is not None}


def _check(name: str, value: Any, where: str) -> float:
    allowed = RANGES["max_tokens" if name == "max_new_tokens" else name]
    integral = name in _INTEGERS
    is_number = isinstance(value, int if integral else int | float) and not isinstance(value, bool)
    if not is_number or not (value in allowed or (name == "top_k" and value == -1)):
        raise ConfigError(f"{where}: {name} must be {'a whole number, ' * integral}{allowed}, not {value!r}")
    checked: float = value
    return checked
