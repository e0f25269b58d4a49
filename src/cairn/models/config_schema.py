"""config.json as a dataclass: each of its fields says what may be written there, and what holds where it is not.

A field is declared by one of the functions here, `head_dim: int = integer(1, 4096, default=128)`, and `read` makes the
dataclass of a parsed config.json. Ranges, defaults and conditions may be functions of the other fields, whatever their
order. Options of every declaration:

names   what config.json calls the field, the first one that is there counts; otherwise as the dataclass does
when    whether the model has what the field is about: where not, it is not read, and is its default, or 0
fact    whether two servers must agree on it before cached bytes may go from one to the other
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar, Unpack

from cairn.errors import ModelError

MAX_LAYERS = 512


class Fields:
    """Typed access to a parsed config.json, a field at a time. Every method raises ModelError that names the field,
    what it is and what it should be; null counts as absent."""

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


Config = TypeVar("Config")
Reader = Callable[[Fields, str, Any], Any]
"""config.json, the field's name there, the other fields -> the field's value."""


class Options(TypedDict, total=False):
    """See the module."""

    names: tuple[str, ...]
    when: Callable[[Any], object]
    fact: bool


@dataclass(frozen=True, slots=True)
class _Declared:
    read: Reader
    names: tuple[str, ...] = ()
    when: Callable[[Any], object] | None = None
    fact: bool = True
    default: Any = 0


def read(config: type[Config], raw: Mapping[str, object]) -> Config:
    """Raises ModelError that names the field and the fix."""
    found = _Found({each.name: each.metadata["declared"] for each in fields(config)}, Fields(raw))  # type: ignore[arg-type]
    return config(**{each.name: getattr(found, each.name) for each in fields(config)})  # type: ignore[arg-type]


def facts_of(config: Any) -> dict[str, str | int]:
    """Fields on which two servers must agree, by their names in config.json, if it has but one for them."""
    found: dict[str, str | int] = {}
    for each in fields(config):
        declared, value = each.metadata["declared"], getattr(config, each.name)
        if declared.fact:
            name = declared.names[0] if len(declared.names) == 1 else each.name
            found[name] = value if type(value) in (int, str) else repr(value)
    return found


class _Found:
    """The fields that have been read, and every other one as soon as it is asked for."""

    def __init__(self, declared: Mapping[str, _Declared], given: Fields) -> None:
        self._declared = declared
        self._given = given

    def __getattr__(self, name: str) -> Any:
        declared = self._declared[name]
        names = declared.names or (name,)
        if declared.when is None or declared.when(self):
            value = declared.read(self._given, next(filter(self._given.has, names), names[0]), self)
        else:
            value = _value(declared.default, self)
        setattr(self, name, value)
        return value


def other(reader: Reader, default: Any = 0, **options: Unpack[Options]) -> Any:
    """What is read in a way of its own. `reader` raises ModelError that names the field and the fix."""
    return field(metadata={"declared": _Declared(reader, default=default, **options)})


def integer(low: Any, high: Any, default: Any = ..., divides: str = "", **options: Unpack[Options]) -> Any:
    """In low..high; required unless there is a default, which may be None. `divides`: another field, a multiple of
    this one."""

    def reader(given: Fields, name: str, found: Any) -> int | None:
        if default is not ... and not given.has(name):
            value: int | None = _value(default, found)
        else:
            value = given.integer(name, _value(low, found), _value(high, found))
        if divides and getattr(found, divides) % value:
            whole = getattr(found, divides)
            raise ModelError(f"config.json: {divides} {whole} must be a multiple of {name} {value}")
        return value

    return other(reader, 0 if default is ... else default, **options)


def number(low: float, high: float, default: float, **options: Unpack[Options]) -> Any:
    """In low..high."""
    return other(lambda given, name, found: given.number(name, low, high, default), default, **options)


def numbers(count: int, low: float, high: float, default: float, **options: Unpack[Options]) -> Any:
    """`count` numbers in low..high; where there are none, `default` throughout."""
    return other(lambda given, name, found: given.numbers(name, count, low, high, default), **options)


def boolean(default: bool, **options: Unpack[Options]) -> Any:
    return other(lambda given, name, found: given.boolean(name, default), default, **options)


def interval(default: tuple[float, float], **options: Unpack[Options]) -> Any:
    """0 <= low < high, which may be infinite."""
    return other(lambda given, name, found: given.interval(name, default), default, **options)


def token_ids(**options: Unpack[Options]) -> Any:
    """None, one or several ids of the vocabulary."""
    return other(lambda given, name, found: given.token_ids(name, found.vocab_size), **options)


def only(*values: Any, **options: Unpack[Options]) -> Any:
    """A field of which some values are implemented, the first of them where it is absent: another one would change
    what the model computes."""

    def reader(given: Fields, name: str, found: Any) -> Any:
        given.only(name, *values)
        return given.get(name) if given.has(name) else values[0]

    options.setdefault("fact", False)
    return other(reader, values[0], **options)


def layer_kinds(
    words: Mapping[str, str],
    default: Callable[[Fields], tuple[str, ...]] | None = None,
    letters: str = "",
    **options: Unpack[Options],
) -> Any:
    """Each layer's kind: by the `words` of a list that config.json has under any of `names`, or by a letter each in the
    string called `letters`; then the field is such a string. Where there are several, they agree. `default`: where
    there is none."""

    def reader(given: Fields, name: str, found: Any) -> tuple[str, ...] | str:
        lists = {each: _kinds(given, each, words) for each in options.get("names", (name,)) if given.has(each)}
        if letters and given.has(letters):
            lists[letters] = _letters(given, letters, words)
        if not lists:
            if default is None:
                missing = f"{letters} is missing (or {name})" if letters else f"{name} is missing"
                raise ModelError(f"config.json: {missing}: which layer is what?")
            return default(given)
        (first, kinds), *others = lists.items()
        for each, differing in others:
            if differing != kinds:
                raise ModelError(f"config.json: {first} and {each} name different layers; keep one of them")
        if not 1 <= len(kinds) <= MAX_LAYERS:
            raise ModelError(f"config.json: {first} names {len(kinds)} layers; a model has 1..{MAX_LAYERS}")
        count = given.integer("num_hidden_layers", 1, MAX_LAYERS, default=len(kinds))
        if count != len(kinds):
            raise ModelError(f"config.json: num_hidden_layers is {count}, but {first} names {len(kinds)} layers")
        return "".join(kinds) if letters else kinds

    return other(reader, **options)


def _kinds(given: Fields, name: str, words: Mapping[str, str]) -> tuple[str, ...]:
    named = given.texts(name) or ()
    for word in named:
        if word not in words:
            raise ModelError(f"config.json: {name} has {word!r}; each layer must be one of {', '.join(words)}")
    return tuple(words[word] for word in named)


def _letters(given: Fields, name: str, words: Mapping[str, str]) -> tuple[str, ...]:
    named = given.text(name) or ""
    word_of = {letter: word for word, letter in reversed(list(words.items()))}
    for letter in named:
        if letter not in word_of:
            known = ", ".join(f"{each} ({word_of[each]})" for each in dict.fromkeys(words.values()))
            raise ModelError(f"config.json: {name} has {letter!r}; each layer must be one of {known}")
    return tuple(named)


def _value(given: Any, found: Any) -> Any:
    return given(found) if callable(given) else given


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
