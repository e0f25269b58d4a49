"""Reading config.json one field at a time: every refusal names the field, what it is, and what it should be."""

import math
from collections.abc import Mapping
from typing import Any

from cairn.errors import ModelError

__all__ = ["Fields"]


class Fields:
    """Typed access to a parsed config.json. Every method raises ModelError; null counts as absent."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self._raw = raw

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def get(self, name: str) -> Any:
        """Whatever is there, unchecked."""
        return self._raw.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in low..high. Without a default the field is required."""
        value = self._raw.get(name)
        if value is None:
            if default is None:
                raise ModelError(f"config.json: {name} is missing; it must be an integer in {low}..{high}")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ModelError(f"config.json: {name} must be an integer in {low}..{high}, not {_show(value)}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A finite number in low..high."""
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise ModelError(f"config.json: {name} must be a number in {low:g}..{high:g}, not {_show(value)}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be true or false, not {_show(value)}")
        return value

    def text(self, name: str) -> str | None:
        value = self._raw.get(name)
        if value is not None and not isinstance(value, str):
            raise ModelError(f"config.json: {name} must be a string, not {_show(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
            raise ModelError(f"config.json: {name} must be a list of strings, not {_show(value)}")
        return tuple(value)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in low..high; absent is empty."""
        value = self._raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise ModelError(f"config.json: {name} must be a list of integers in {low}..{high}, not {_show(value)}")
        return tuple(Fields({name: entry}).integer(name, low, high) for entry in value)

    def numbers(self, name: str, count: int, low: float, high: float, default: float) -> tuple[float, ...]:
        """A list of `count` finite numbers in low..high; absent is `default` throughout."""
        value = self._raw.get(name)
        if value is None:
            return (default,) * count
        if not isinstance(value, list | tuple) or len(value) != count:
            raise ModelError(f"config.json: {name} must be a list of {count} numbers, not {_show(value)}")
        return tuple(Fields({name: entry}).number(name, low, high, default) for entry in value)

    def token_id(self, name: str, vocab_size: int) -> int | None:
        return self.integer(name, 0, vocab_size - 1) if self.has(name) else None

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id, a list of ids, or absent; in the order given, without repeats."""
        value = self._raw.get(name)
        entries = value if isinstance(value, list) else [] if value is None else [value]
        read = (Fields({name: entry}).integer(name, 0, vocab_size - 1) for entry in entries)
        return tuple(dict.fromkeys(read))

    def interval(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers 0 <= low < high; high may be infinite, also in transformers' form `{"__float__": "Infinity"}`."""
        value = self._raw.get(name)
        if value is None:
            return default
        ends = [_float(entry) for entry in value] if isinstance(value, list | tuple) else []
        if len(ends) != 2 or any(math.isnan(end) for end in ends) or not 0 <= ends[0] < ends[1]:
            raise ModelError(f"config.json: {name} must be two numbers, 0 <= low < high, not {_show(value)}")
        return ends[0], ends[1]

    def only(self, name: str, *implemented: object) -> None:
        """The field must be absent or have a value that is implemented."""
        value = self._raw.get(name)
        if value is not None and value not in implemented:
            wanted = " or ".join("absent" if each is None else _show(each) for each in implemented)
            raise ModelError(f"config.json: {name} is {_show(value)}, but only {wanted} is implemented")


def _float(value: object) -> float:
    if isinstance(value, Mapping):
        value = {"Infinity": math.inf}.get(str(value.get("__float__")), math.nan)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return math.nan


def _show(value: object) -> str:
    """The value as JSON would have it, short enough for an error line."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
