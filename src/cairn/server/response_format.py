"""Structured outputs and tool calls: the grammar that a request's answers must follow, and how they are parsed.

A grammar is requested by OpenAI's `response_format`, vLLM's `structured_outputs` or the older `guided_*`.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from cairn.engine.contract import RenderedPrompt, Structure
from cairn.errors import InvalidRequest
from cairn.server.chat_message import ChatMessage
from cairn.server.parsers.json_tool_parser import JsonToolParser
from cairn.server.parsers.output_parser import OutputParser, ToolSchemas
from cairn.server.requests import ChatRequest, SamplingFields
from cairn.server.service import Service
from cairn.server.thinking_budget import is_reasoning_open

_MAX_CHARS = 1 << 19
"""Of a schema, or of whatever else is requested, as JSON."""

_GUIDED = ("json", "regex", "choice", "grammar")
_KINDS = (*_GUIDED, "structural_tag")
_IGNORED = frozenset(
    (
        *("backend", "disable_additional_properties", "disable_any_whitespace", "disable_fallback"),
        *("whitespace_pattern", "_backend", "_backend_was_auto"),
    )
)
"""Fields of `structured_outputs` that say how, not what."""


async def parse_response_format(
    service: Service, body: SamplingFields, prompt: RenderedPrompt
) -> tuple[Structure | None, Callable[[], ChatMessage]]:
    """The grammar of the answers, None for any text, and what makes the message of one answer. Raises InvalidRequest
    naming the field."""
    structure = _parse_structure(body)
    if not isinstance(body, ChatRequest):
        return structure, lambda: ChatMessage(OutputParser(), service.new_id)
    tools, tool_structure = _parse_tool_choice(body, parse_auto=service.options.enable_auto_tool_choice)
    # A required call leaves no content that response_format could be about: as vLLM, the call alone is held to a form.
    if tool_structure is not None and structure is not None and body.response_format is None:
        text = f"{structure.field} and a tool_choice that requires a call cannot go together: send one of them"
        raise InvalidRequest(text, "tool_choice")
    parsers, structure = service.parsers, tool_structure or structure
    opened = await is_reasoning_open(service, body, prompt)
    if parsers.has_reasoning and structure is not None:
        structure = msgspec.structs.replace(structure, reasoning="opened" if opened else "possible")
    parallel = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, dict)
    # Every model can be held to calls in JSON.
    tool_parser = None if tool_structure is None else JsonToolParser

    hides_reasoning = parsers.has_reasoning and body.include_reasoning is False

    def new_message() -> ChatMessage:
        parser = parsers.make_parser(tools, opened=opened, tool_parser=tool_parser)
        return ChatMessage(parser, service.new_id, parallel=parallel, hides_reasoning=hides_reasoning)

    return structure, new_message


def _parse_tool_choice(body: ChatRequest, *, parse_auto: bool) -> tuple[ToolSchemas | None, Structure | None]:
    """The tools whose calls are parsed, None for no parsing, and the grammar of required calls, None if the model
    chooses. `parse_auto`: parse calls of a model that may choose. Raises InvalidRequest."""
    sent = [tool["function"] for tool in body.tools or ()]
    tools: ToolSchemas = {}
    for function in sent:
        parameters = function.get("parameters")
        tools[function["name"]] = {"type": "object"} if parameters is None else parameters
    choice = body.tool_choice
    if choice is None or choice == "auto":
        return (tools if tools and parse_auto else None), None
    if choice == "none":
        return None, None
    if choice == "required":
        if not tools:
            raise InvalidRequest("tool_choice is required, but there are no tools: send some", "tool_choice")
    else:
        name = choice["function"]["name"]
        if name not in tools:
            raise InvalidRequest(f"tool_choice names {name[:64]!r}, which is none of the tools", "tool_choice")
        tools = {name: tools[name]}
    places = {function["name"]: place for place, function in enumerate(sent)}
    required = {
        "tools": [{"name": name, "parameters": own, "place": places[name]} for name, own in tools.items()],
        "parallel": choice == "required" and body.parallel_tool_calls is not False,
    }
    text = _encode_json(required, "tools")
    if len(text) > _MAX_CHARS:
        raise InvalidRequest(f"tools have {len(text)} characters; at most {_MAX_CHARS} can be required", "tools")
    return tools, Structure(kind="calls", text=text, field="tools")


def _parse_structure(body: SamplingFields) -> Structure | None:
    """The grammar of an answer; None for any text. Raises InvalidRequest naming the field."""
    found: list[tuple[str, Any, str]] = []  # kind, value, field
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and form["type"] == "json_object":
        found.append(("json", {"type": "object"}, "response_format"))
    elif form is not None and form["type"] == "json_schema":
        schema = form["json_schema"].get("schema", form["json_schema"].get("json_schema"))
        if schema is None:
            raise InvalidRequest('response_format.json_schema must be {"schema": {...}}', "response_format")
        found.append(("json", schema, "response_format.json_schema.schema"))
    elif form is not None and form["type"] == "structural_tag":
        sent = {name: value for name, value in form.items() if value is not None}
        found.append(("structural_tag", sent, "response_format"))
    if outputs is not None:
        options = {name: value for name, value in outputs.items() if value is not None and name not in _IGNORED}
        if options.pop("json_object", False):
            options["json"] = {"type": "object"}
        if len(options) != 1 or not options.keys() <= set(_KINDS):
            raise InvalidRequest(f"structured_outputs must have one of {', '.join(_KINDS)}", "structured_outputs")
        found += [(kind, value, f"structured_outputs.{kind}") for kind, value in options.items()]
    guided = {kind: getattr(body, f"guided_{kind}") for kind in _GUIDED}
    found += [(kind, value, f"guided_{kind}") for kind, value in guided.items() if value is not None]
    if len(found) > 1:
        names = " and ".join(field for _, _, field in found)
        raise InvalidRequest(f"{names} cannot go together: send one of them", found[1][2].partition(".")[0])
    for kind, value, field in found:
        # A JSON schema may come as text, too.
        text = value if kind != "choice" and isinstance(value, str) else _encode_json(value, field)
        if len(text) > _MAX_CHARS:
            message = f"{field} has {len(text)} characters; at most {_MAX_CHARS} are read"
            raise InvalidRequest(message, field.partition(".")[0])
        return msgspec.convert({"kind": kind, "text": text, "field": field}, Structure)
    return None


def _encode_json(value: Any, field: str) -> str:
    """A part of a body as JSON. Raises InvalidRequest for what is nested too deeply or is no Unicode."""
    param = field.partition(".")[0]
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", param) from None
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{field} has no form in JSON: {error}", param) from None
