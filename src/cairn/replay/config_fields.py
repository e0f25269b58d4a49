"""A config.json as replay reads it: one field at a time, every refusal naming the flag, the file and the field."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.errors import ConfigError

__all__ = ["ConfigFields", "load_config"]

MOST = 1 << 24
MAX_LAYERS = 512
MAX_CONFIG_BYTES = 1 << 24


def load_config(name: str, known: str) -> Mapping[str, Any]:
    """The JSON object in the file `name`, or in the config.json of the folder `name`. `known`: what else --layout may
    say. Raises ConfigError."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise ConfigError(f"--layout {name}: more than {MAX_CONFIG_BYTES} bytes is no config.json")
        config = json.loads(raw.decode())
    except OSError as error:
        raise ConfigError(f"--layout {name} is neither {known} nor a config.json that can be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--layout {name} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--layout {name} must hold a JSON object")
    return config


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields and where they were found. Every method raises ConfigError; null counts as absent."""

    values: Mapping[str, Any]
    where: str

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def whole(self, name: str, default: int | None = None, low: int = 1, high: int = MOST) -> int:
        """A whole number in low..high. Without a default the field is required."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number above 0."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
            raise self.wrong(name, f"a number above 0 and up to {MOST}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def indices(self, name: str, count: int) -> set[int]:
        """Numbers of layers, of `count`; none where the field is absent."""
        value = self.values.get(name) or []
        if not isinstance(value, list | tuple) or any(type(n) is not int or not 0 <= n < count for n in value):
            raise self.wrong(name, f"a list of layers from 0 to {count - 1}")
        return set(value)

    def kinds(self, words: Mapping[str, str], *names: str) -> tuple[str, ...] | None:
        """The layers' kinds by their words, of the first of the fields `names` that is there: a list or a pattern of
        letters. None where there is none of them."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, list | tuple | str) or not 1 <= len(value) <= MAX_LAYERS:
                raise self.wrong(name, f"a list of the kinds of 1 to {MAX_LAYERS} layers")
            if any(type(word) is not str or word not in words for word in value):
                raise self.wrong(name, f"a list of the layers' kinds, each one of {', '.join(words)}")
            return tuple(words[word] for word in value)
        return None

    def layers(self, default: int | None = None) -> int:
        return self.whole("num_hidden_layers", default, high=MAX_LAYERS)

    def wrong(self, name: str, wanted: str) -> ConfigError:
        found = f"{self.values.get(name)!r:.60}"
        return ConfigError(f"--layout {self.where}: {name} must be {wanted}, not {found}")
