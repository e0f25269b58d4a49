"""The form that a client asks an answer to have: OpenAI's `response_format`, vLLM's `structured_outputs` and the older
`guided_*`, brought to one record."""

from typing import Any

import msgspec

from cairn.engine.contract import Structure
from cairn.errors import InvalidRequest
from cairn.server.messages import check_text
from cairn.server.requests import SamplingFields

MAX_BYTES = 1 << 19
"""Of a schema, or of whatever else is asked for, as JSON."""

_KINDS = ("json", "regex", "choice", "grammar")
_IGNORED = frozenset(
    {
        "backend",
        "disable_additional_properties",
        "disable_any_whitespace",
        "disable_fallback",
        "whitespace_pattern",
        "_backend",
        "_backend_was_auto",
    }
)
"""Fields of `structured_outputs` that say how, not what."""


def structure_of(body: SamplingFields) -> Structure | None:
    """What a body asks for; None where an answer may be anything. Raises InvalidRequest naming the field."""
    found = [*_response_format(body.response_format), *_structured_outputs(body.structured_outputs)]
    for kind in _KINDS:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            found.append(_structure(kind, value, f"guided_{kind}"))
    if len(found) > 1:
        names = " and ".join(one.field for one in found)
        raise InvalidRequest(f"{names} cannot go together: send one of them", found[1].field.partition(".")[0])
    return found[0] if found else None


def _response_format(asked: Any) -> list[Structure]:
    if asked is None:
        return []
    kind = asked.get("type") if isinstance(asked, dict) else None
    match kind:
        case "text":
            return []
        case "json_object":
            return [Structure(kind="json", text='{"type":"object"}', field="response_format")]
        case "json_schema":
            holder = asked.get("json_schema")
            if not isinstance(holder, dict) or holder.get("schema", holder.get("json_schema")) is None:
                raise InvalidRequest('response_format.json_schema must be {"schema": {...}}', "response_format")
            schema = holder.get("schema", holder.get("json_schema"))
            return [_structure("json", schema, "response_format.json_schema.schema")]
    shown = repr(kind)[:64]
    raise InvalidRequest(
        f'response_format.type must be "text", "json_object" or "json_schema", not {shown}', "response_format"
    )


def _structured_outputs(asked: Any) -> list[Structure]:
    if asked is None:
        return []
    if not isinstance(asked, dict):
        raise InvalidRequest("structured_outputs must be an object", "structured_outputs")
    given = {name: value for name, value in asked.items() if value is not None and name not in _IGNORED}
    if given.pop("json_object", False):
        given["json"] = {"type": "object"}
    if len(given) != 1 or not given.keys() <= set(_KINDS):
        raise InvalidRequest(f"structured_outputs must have one of {', '.join(_KINDS)}", "structured_outputs")
    ((kind, value),) = given.items()
    return [_structure(kind, value, f"structured_outputs.{kind}")]


def _structure(kind: str, value: Any, field: str) -> Structure:
    param = field.partition(".")[0]
    if kind in ("regex", "grammar"):
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{field} must be text that is not empty", param)
        text = check_text(value, field, param)
    elif kind == "json" and isinstance(value, str):
        text = check_text(value, field, param)
    else:
        text = json_text(value, field)
    if len(text) > MAX_BYTES:
        raise InvalidRequest(f"{field} has {len(text)} characters; at most {MAX_BYTES} are read", param)
    return msgspec.convert({"kind": kind, "text": text, "field": field}, Structure)


def json_text(value: Any, field: str) -> str:
    """A part of a body as JSON. Raises InvalidRequest for one that has none: nested too deeply, or no Unicode."""
    param = field.partition(".")[0]
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", param) from None
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{field} has no form in JSON: {error}", param) from None
