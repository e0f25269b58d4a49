"""Flags of vLLM's that take a JSON object."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cairn.errors import ConfigError

_SHOWN = 80

JsonFlag = TypeVar("JsonFlag", bound=BaseModel)


def parse_json_flag(
    flag: str, model: type[JsonFlag], text: str, remedies: Mapping[str, str] = MappingProxyType({})
) -> JsonFlag:
    """What the flag says. `remedies`: by key, what is said of it whatever is wrong with it. Raises ConfigError of one
    line that names the flag and the key."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "the JSON"
    raise ConfigError(f"{flag}: {where}: {_problem(first, remedies)}")


def _problem(error: Mapping[str, Any], remedies: Mapping[str, str]) -> str:
    key, kind = error["loc"][-1] if error["loc"] else "", error["type"]
    if key in remedies:
        return remedies[key]
    if kind == "extra_forbidden":
        return "is not supported; leave it out"
    if kind == "json_invalid":
        return str(error["msg"])
    return f"{str(error['msg']).removeprefix('Input ')}, not {str(error['input'])[:_SHOWN]!r}"
