"""Rotary positions as config.json has them, and how they are scaled to longer contexts. Without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cairn.errors import ModelError
from cairn.models.config_schema import Fields, custom

SCALED = ("linear", "llama3", "yarn")
"""Types of scaling that are implemented: frequencies that do not depend on how long a sequence has become."""

MAX_POSITIONS = 1 << 30

PROPORTIONAL = "proportional"
"""Of which a part of each head is turned, as if all of it were."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`settings`: of transformers' `rope_parameters`, by name, those of `rope_type` alone, the optional ones only where
    config.json says them. `max_positions`: as far as they reach."""

    rope_type: str
    settings: tuple[tuple[str, float | bool], ...]
    max_positions: int

    @property
    def parameters(self) -> Mapping[str, object]:
        """`rope_parameters` without the base; see `make_rotary`."""
        return {"rope_type": self.rope_type, **dict(self.settings)}


@dataclass(frozen=True, slots=True)
class RopeKind:
    """Attention layers of one kind, called `name`, for which `rope_parameters` has an object of their own. `types`: of
    scaling that are implemented for it; `theta`, `scaling`: the fields of config.json that are this kind's where there
    is no such object, if there are any; without them there has to be one. `head_dim`: the field of its heads' size."""

    name: str
    types: tuple[str, ...] = ("default",)
    theta: str | None = None
    scaling: str | None = None
    head_dim: str = "head_dim"

    def settings(self, fields: Fields) -> Fields:
        """This kind's alone, by the names that models with one kind have them under. Raises ModelError where
        `rope_parameters` is not by kind of layer."""
        place = fields.path_of("rope_parameters")
        by_kind = fields.read("rope_parameters", dict[str, Any], "an object", {})
        for name, each in by_kind.items():
            if not isinstance(each, Mapping | None):
                raise fields.error(f"{place}.{name} must be an object: settings are by kind of layer, as {self.name}")
        if self.theta is None and by_kind.get(self.name) is None:
            raise fields.error(f"{place}.{self.name} is missing: it has the positions of layers of this kind")
        raw, paths = {"rope_parameters": by_kind.get(self.name)}, {"rope_parameters": f"{place}.{self.name}"}
        for name, field in (("rope_theta", self.theta), ("rope_scaling", self.scaling)):
            if field is not None:
                raw[name], paths[name] = fields.get(field), fields.path_of(field)
        return Fields(raw, path_of=lambda name: paths.get(name) or fields.path_of(name))


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """How positions turn queries and keys; see `make_rotary`. `interleaved`: a pair are two neighbours, and not an
    element of either half of a head."""

    dim: int
    theta: float
    sections: tuple[int, int, int] | None = None
    scaling: RopeScaling | None = None
    interleaved: bool = False

    queries_alone: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """Layers without positions whose queries grow with theirs; see `cairn.layers.rotary.Temperature`."""

    dim: int
    floor_scale: int
    strength: float

    interleaved: ClassVar[bool] = False
    queries_alone: ClassVar[bool] = True


def rope_fields(fields: Fields, *types: str) -> Fields:
    """The settings of rotary positions: in transformers' `rope_parameters` or, as it was called before, `rope_scaling`,
    or beside the other fields, as they were published first. `types`: those that are implemented, by default
    `default`, which is no scaling, and `SCALED`; which one it is is `rope_type`, if there is any.

    Raises ModelError for any other type, for settings of their own by kind of layer, and for what both objects say and
    say differently: transformers would go by `rope_scaling` alone, and other programs by the other one.
    """
    types, paths, settings, home = types or ("default", *SCALED), dict[str, str](), dict[str, object](), ""
    for field in ("rope_parameters", "rope_scaling"):
        nested = fields.read(field, dict[str, Any], "an object", {})
        place = fields.path_of(field)
        # `type` is the older name, which transformers reads where there is no other.
        type_field = "type" if nested.get("rope_type") is None else "rope_type"
        if nested.get("type") in SCALED and nested[type_field] != nested["type"]:
            raise fields.error(f"{place}.rope_type and {place}.type differ; keep one of them")
        names = {stored: stored for stored in nested if stored not in ("type", "rope_type")} | {type_field: "rope_type"}
        for stored, name in names.items():
            value = nested.get(stored)
            if isinstance(value, Mapping):
                raise fields.error(f"{place} has settings for {stored} alone, which is not implemented")
            if value is None:
                continue
            if settings.setdefault(name, value) != value:
                raise fields.error(f"{paths[name]} and {place}.{stored} differ; keep one of them")
            paths.setdefault(name, f"{place}.{stored}")
            home = f"{place}." if name == "rope_type" else home
    rope = fields
    if settings:
        rope = Fields(settings, path_of=lambda name: paths.get(name) or (home + name if home else fields.path_of(name)))
    try:
        rope.only("rope_type", *types)
    except ModelError as error:
        fix = "; without it the model is served at the length that it was trained for" if "yarn" in types else ""
        raise ModelError(f"{error}{fix}") from None
    return rope


def rope_theta(default: float = 10000.0, kind: RopeKind | None = None, **options: Any) -> Any:
    """A field: the base of rotary positions over whole heads, in layers of the kind."""

    def reader(fields: Fields, name: str, config: Any) -> float:
        if kind is not None:
            fields, name = kind.settings(fields), "rope_theta"
        rope = rope_fields(fields, *(kind.types if kind is not None else ()))
        for each in (fields, rope):
            if rope.get("rope_type") != PROPORTIONAL:
                each.only("partial_rotary_factor", 1.0)
        dim_field = "head_dim" if kind is None else kind.head_dim
        if (head_dim := getattr(config, dim_field)) % 2:
            raise ModelError(f"config.json: {dim_field} {head_dim} must be even, as its elements are turned in pairs")
        return rope.number(name, 1.0, 1e15, default=fields.number(name, 1.0, 1e15, default))

    return custom(reader, **options)


def rope_scaling(kind: RopeKind | None = None, missing: Mapping[str, object] | None = None, **options: Any) -> Any:
    """A field: how positions with the base `rope_theta` are scaled in layers of the kind, or None. `missing`: as
    `rope_parameters`, what it means that config.json says nothing about it."""

    def reader(fields: Fields, name: str, config: Any) -> RopeScaling | None:
        if kind is not None:
            fields = kind.settings(fields)
        rope = rope_fields(fields, *(kind.types if kind is not None else ()))
        if missing is not None and not fields.has("rope_parameters") and not fields.get("rope_scaling"):
            rope = Fields(missing, path_of=lambda name: f"{fields.path_of('rope_parameters')}.{name}")
        rope_type = rope.get("rope_type")
        if rope_type == PROPORTIONAL:
            dim_field = "head_dim" if kind is None else kind.head_dim
            return _proportional(rope, dim_field, getattr(config, dim_field))
        if rope_type not in SCALED:
            return None
        settings: dict[str, float | bool] = {"factor": rope.number("factor", 1.0, 1e4)}
        max_positions = config.max_position_embeddings
        if rope_type == "linear":
            max_positions *= settings["factor"]
        else:
            # Where it stands beside the other fields it counts, as in transformers.
            beside = fields.has("original_max_position_embeddings")
            settings["original_max_position_embeddings"] = (fields if beside else rope).integer(
                "original_max_position_embeddings", 1, 1 << 30, default=max_positions
            )
        if rope_type == "llama3":
            settings |= _llama3(rope)
        elif rope_type == "yarn":
            if config.rope_theta <= 1:
                raise rope.error(f"{rope.path_of('rope_theta')} must be more than 1 where positions are scaled by yarn")
            settings |= _yarn(rope)
            # As in vLLM: what `max_position_embeddings` says is the length without scaling in some checkpoints, Qwen's
            # among them, and with it in others.
            max_positions = settings["original_max_position_embeddings"] * settings["factor"]
        return RopeScaling(rope_type, tuple(settings.items()), min(int(max_positions), MAX_POSITIONS))

    return custom(reader, default=None, **options)


def _proportional(rope: Fields, dim_field: str, head_dim: int) -> RopeScaling:
    """The rotated share of a head has the frequencies that it would have of a head that is rotated whole."""
    settings = {"factor": rope.number("factor", 1.0, 1e4, default=1.0)}
    share = rope.number("partial_rotary_factor", 0.0, 1.0, default=1.0)
    if int(share * head_dim // 2) < 1:
        raise rope.error(f"{rope.path_of('partial_rotary_factor')} {share:g} of {dim_field} {head_dim} is no pair")
    return RopeScaling(PROPORTIONAL, tuple((settings | {"partial_rotary_factor": share}).items()), MAX_POSITIONS)


def _yarn(rope: Fields) -> dict[str, float | bool]:
    settings: dict[str, float | bool] = {
        name: rope.number(name, low, 1e4)
        for name, low in (("attention_factor", 1e-4), ("beta_fast", 1e-4), ("beta_slow", 1e-4))
        if rope.has(name)
    }
    for name in ("mscale", "mscale_all_dim"):
        if rope.has(name):
            settings[name] = rope.number(name, 0.0, 1e4)
    fast, slow = (settings.get(name, default) for name, default in (("beta_fast", 32), ("beta_slow", 1)))
    if fast < slow:
        raise rope.error(f"{rope.path_of('beta_fast')} {fast:g} must be at least beta_slow {slow:g}")
    return settings | {"truncate": rope.boolean("truncate", default=True)}


def _llama3(rope: Fields) -> dict[str, float | bool]:
    low, high = (rope.number(name, 1e-4, 1e4) for name in ("low_freq_factor", "high_freq_factor"))
    # Llama 4 is published with equal ones: no frequency is between them.
    if low > high:
        raise rope.error(f"{rope.path_of('high_freq_factor')} {high:g} must be at least low_freq_factor {low:g}")
    return {"low_freq_factor": low, "high_freq_factor": high}
