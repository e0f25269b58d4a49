"""config.json as a dataclass: each of its fields declares which values config.json may have, and the default.

A field is declared by one of the functions here, `head_dim: int = integer(1, 4096, default=128)`, and `parse_config`
makes the dataclass of a parsed config.json. Ranges, defaults and conditions may be functions of the config, which reads
its other fields as soon as they are used, whatever their order. Options of every declaration:

names   the names in config.json, of which the first that is there counts; otherwise that of the dataclass
when    whether the model has what the field is about: where not, it is not read, and is its default, or 0
fact    whether two servers must agree on it before cached bytes may go from one to the other
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, NoReturn, TypedDict, TypeVar, Unpack

import msgspec
from msgspec import Meta

from cairn.errors import ModelError

MAX_LAYERS = 512

REACHES = ("sliding_window", "attention_chunk_size")
"""Fields that limit how many tokens attention sees: a family that does not read them would see too many."""


class Fields:
    """Typed access to a parsed JSON file, a field at a time; null counts as absent. Every method raises ModelError that
    names the file and the field, what it is and what it should be."""

    def __init__(
        self, raw: Mapping[str, object], file: str = "config.json", path_of: Callable[[str], str] = str
    ) -> None:
        """`path_of`: a field's name here -> the path by which errors call it."""
        self._raw = raw
        self._file = file
        self.path_of = path_of

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def says(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self._raw

    def get(self, name: str) -> Any:
        """The value, unchecked."""
        return self._raw.get(name)

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self._file}: {text}")

    def read(self, name: str, kind: Any, expected: str, default: Any = ...) -> Any:
        """A value of the type `kind`, which errors call `expected`. Without a default the field is required."""
        value = self._raw.get(name)
        if value is None:
            if default is ...:
                raise self.error(f"{self.path_of(name)} is missing; it must be {expected}")
            return default
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise self.error(f"{self.path_of(name)} must be {expected}, not {_show(value)}") from None

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in low..high. Without a default the field is required."""
        kind, expected = Annotated[int, Meta(ge=low, le=high)], f"an integer in {low}..{high}"
        return int(self.read(name, kind, expected, ... if default is None else default))

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in low..high; absent is empty."""
        entries = self.read(name, list, f"a list of integers in {low}..{high}", [])
        return tuple(self._with(name, entry).integer(name, low, high) for entry in entries)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in low..high. Without a default the field is required."""
        kind, expected = Annotated[float, Meta(ge=low, le=high)], f"a number in {low:g}..{high:g}"
        return float(self.read(name, kind, expected, ... if default is None else default))

    def numbers(self, name: str, low: float, high: float, default: tuple[float, ...]) -> tuple[float, ...]:
        """As many finite numbers in low..high as the default has."""
        entries = self.read(name, list, f"a list of {len(default)} numbers", default)
        if len(entries) != len(default):
            raise self.error(f"{self.path_of(name)} must be a list of {len(default)} numbers, not {_show(entries)}")
        return tuple(self._with(name, entry).number(name, low, high, math.nan) for entry in entries)

    def boolean(self, name: str, default: bool) -> bool:
        return bool(self.read(name, bool, "true or false", default))

    def interval(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers 0 <= low < high; high may be infinite, also in transformers' form `{"__float__": "Infinity"}`."""
        value = self._raw.get(name)
        if value is None:
            return default
        ends = [_number(entry) for entry in value] if isinstance(value, list | tuple) else []
        if len(ends) != 2 or not 0 <= ends[0] < ends[1]:
            raise self.error(f"{self.path_of(name)} must be two numbers, 0 <= low < high, not {_show(value)}")
        return ends[0], ends[1]

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id, a list of ids, or absent; in their order, without repeats."""
        value = self._raw.get(name)
        entries = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(dict.fromkeys(self._with(name, entries).integers(name, 0, vocab_size - 1)))

    def only(self, name: str, *implemented: object) -> None:
        """The field must be absent or have a value that is implemented."""
        value = self._raw.get(name)
        if value is not None and value not in implemented:
            expected = " or ".join("absent" if each is None else _show(each) for each in implemented)
            raise self.error(f"{self.path_of(name)} is {_show(value)}, but only {expected} is implemented")

    def _with(self, name: str, value: object) -> "Fields":
        """This field alone, with another value."""
        return Fields({name: value}, self._file, self.path_of)


Config = TypeVar("Config")
Reader = Callable[[Fields, str, Any], Any]
"""config.json, the field's name there, the config with its other fields -> the field's value."""


class Options(TypedDict, total=False):
    """See the module."""

    names: tuple[str, ...]
    when: Callable[[Any], object]
    fact: bool


@dataclass(frozen=True, slots=True)
class _Declaration:
    read: Reader
    names: tuple[str, ...] = ()
    when: Callable[[Any], object] | None = None
    fact: bool = True
    default: Any = 0


def parse_config(config: type[Config], fields: Fields, unless_declared: Sequence[str] = ()) -> Config:
    """`unless_declared`: fields that must be absent where the dataclass does not have them. Raises ModelError that
    names the field and the fix."""
    declarations = _declarations(config)
    for name in unless_declared:
        if name not in declarations:
            fields.only(name, None)
    lazy = _LazyConfig(declarations, fields)
    return config(**{name: getattr(lazy, name) for name in declarations})


def transfer_facts(config: Any) -> dict[str, str | int]:
    """Fields on which two servers must agree, by their names in config.json, if it has but one for them."""
    facts: dict[str, str | int] = {}
    for name, declaration in _declarations(config).items():
        if declaration.fact:
            value = getattr(config, name)
            key = declaration.names[0] if len(declaration.names) == 1 else name
            facts[key] = value if type(value) in (int, str) else repr(value)
    return facts


def _declarations(config: Any) -> dict[str, _Declaration]:
    return {field.name: field.metadata["declaration"] for field in dataclasses.fields(config)}


class _LazyConfig:
    """A config whose fields are read when they are first used."""

    def __init__(self, declarations: Mapping[str, _Declaration], fields: Fields) -> None:
        self._declarations = declarations
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        declaration = self._declarations[name]
        if declaration.when is None or declaration.when(self):
            names = declaration.names or (name,)
            value = declaration.read(self._fields, next(filter(self._fields.has, names), names[0]), self)
        else:
            value = _evaluate(declaration.default, self)
        setattr(self, name, value)
        return value


def custom(reader: Reader, default: Any = 0, **options: Unpack[Options]) -> Any:
    """A field with a reader of its own, which raises ModelError that names the field and the fix."""
    return dataclasses.field(metadata={"declaration": _Declaration(reader, default=default, **options)})


def integer(low: Any, high: Any, default: Any = ..., divides: str = "", **options: Unpack[Options]) -> Any:
    """In low..high; required unless there is a default, which may be None. `divides`: another field, a multiple of
    this one."""

    def reader(fields: Fields, name: str, config: Any) -> int | None:
        if default is not ... and not fields.has(name):
            value: int | None = _evaluate(default, config)
        else:
            value = fields.integer(name, _evaluate(low, config), _evaluate(high, config))
        if divides and getattr(config, divides) % value:
            multiple = getattr(config, divides)
            raise fields.error(f"{divides} {multiple} must be a multiple of {name} {value}")
        return value

    return custom(reader, 0 if default is ... else default, **options)


def number(low: float, high: float, default: float, **options: Unpack[Options]) -> Any:
    """In low..high."""
    return custom(lambda fields, name, config: fields.number(name, low, high, default), default, **options)


def numbers(count: int, low: float, high: float, default: float, **options: Unpack[Options]) -> Any:
    """`count` numbers in low..high; where there are none, `default` throughout."""
    return custom(lambda fields, name, config: fields.numbers(name, low, high, (default,) * count), **options)


def boolean(default: bool, **options: Unpack[Options]) -> Any:
    return custom(lambda fields, name, config: fields.boolean(name, default), default, **options)


def interval(default: tuple[float, float], **options: Unpack[Options]) -> Any:
    """0 <= low < high, which may be infinite."""
    return custom(lambda fields, name, config: fields.interval(name, default), default, **options)


def token_ids(**options: Unpack[Options]) -> Any:
    """Ids of the vocabulary: none, one or several under each of `names`, which all count."""

    def reader(fields: Fields, name: str, config: Any) -> tuple[int, ...]:
        ids = [fields.token_ids(each, config.vocab_size) for each in options.get("names", (name,))]
        return tuple(dict.fromkeys(chain.from_iterable(ids)))

    return custom(reader, **options)


def has_layers(kind: str) -> Callable[[Any], bool]:
    """Whether a config has layers of this kind, of the words in `layer_types`."""
    return lambda config: kind in config.layer_types


def reach(kind: str, default: int) -> Any:
    """How many tokens attention reaches over in layers of this kind, of the words in `layer_types`; 0 in a model
    without them. Null would mean that there is no limit."""

    def reader(fields: Fields, name: str, config: Any) -> int:
        layer = config.layer_types.index(kind)
        if fields.says(name) and not fields.has(name):
            raise fields.error(
                f"{fields.path_of(name)} is null, but layer {layer} is {kind}; give the number of tokens it reaches"
            )
        try:
            return fields.integer(name, 1, 1 << 30, default)
        except ModelError as error:
            raise ModelError(f"{error}, as layer {layer} is {kind}") from None

    return custom(reader, when=has_layers(kind))


def only(*values: Any, **options: Unpack[Options]) -> Any:
    """A field of which some values are implemented, the first of them where it is absent: another one would change
    what the model computes."""

    def reader(fields: Fields, name: str, config: Any) -> Any:
        fields.only(name, *values)
        return fields.get(name) if fields.has(name) else values[0]

    options.setdefault("fact", False)
    return custom(reader, values[0], **options)


def unread() -> Any:
    """A field that changes nothing, whatever its value."""
    return custom(lambda fields, name, config: None, default=None, fact=False)


def by_layer(kind_of: Callable[[int], str], count: int | None = None) -> Callable[[Fields], tuple[str, ...]]:
    """A default of `layer_kinds`: of each layer the kind that goes with its number. `count`: of layers where
    config.json does not say it."""

    def kinds(fields: Fields) -> tuple[str, ...]:
        return tuple(map(kind_of, range(fields.integer("num_hidden_layers", 1, MAX_LAYERS, count))))

    return kinds


def layer_kinds(
    named: Mapping[str, str] | Sequence[str],
    default: Callable[[Fields], tuple[str, ...]] | None = None,
    letters: str = "",
    **options: Unpack[Options],
) -> Any:
    """Each layer's kind: by the words of a list that config.json has under any of `names`, or by a letter each in the
    string called `letters`; then the field is such a string. Where there are several, they agree. `named`: the kinds by
    these words, or the words themselves. `default`: where there is none."""
    words = named if isinstance(named, Mapping) else {word: word for word in named}
    word_of = {letter: word for word, letter in reversed(list(words.items()))}
    letters_with_words = ", ".join(f"{letter} ({word_of[letter]})" for letter in dict.fromkeys(words.values()))

    def reader(fields: Fields, name: str, config: Any) -> tuple[str, ...] | str:
        lists = {
            each: [
                words.get(word) or unknown(fields, each, index, word, ", ".join(words))
                for index, word in enumerate(listed)
            ]
            for each in options.get("names", (name,))
            if (listed := fields.read(each, list[str], "a list of strings", None)) is not None
        }
        if letters and fields.has(letters):
            lists[letters] = [
                letter if letter in word_of else unknown(fields, letters, index, letter, letters_with_words)
                for index, letter in enumerate(fields.read(letters, str, "a string"))
            ]
        if not lists:
            if default is None:
                missing = f"{letters} is missing (or {name})" if letters else f"{name} is missing"
                raise fields.error(f"{missing}: which layer is what?")
            return default(fields)
        (first, kinds), *others = lists.items()
        for other, differing in others:
            if differing != kinds:
                raise fields.error(f"{first} and {other} name different layers; keep one of them")
        if not 1 <= len(kinds) <= MAX_LAYERS:
            raise fields.error(f"{first} names {len(kinds)} layers; a model has 1..{MAX_LAYERS}")
        count = fields.integer("num_hidden_layers", 1, MAX_LAYERS, default=len(kinds))
        if count != len(kinds):
            raise fields.error(f"num_hidden_layers is {count}, but {first} names {len(kinds)} layers")
        return "".join(kinds) if letters else tuple(kinds)

    def unknown(fields: Fields, name: str, index: int, word: str, known: str) -> NoReturn:
        raise fields.error(f"{name} has {word!r} for layer {index}; each layer must be one of {known}")

    return custom(reader, **options)


def _evaluate(value: Any, config: Any) -> Any:
    return value(config) if callable(value) else value


def _number(value: object) -> float:
    if isinstance(value, Mapping):
        value = math.inf if value.get("__float__") == "Infinity" else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _show(value: object) -> str:
    """The value as JSON would have it, short enough for an error line."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
