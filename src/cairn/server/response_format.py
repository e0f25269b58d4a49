"""What form a request's answers have to have, by its structure and its tools, and how they are taken apart.

The structure is what a client asks for by OpenAI's `response_format`, vLLM's `structured_outputs` or the older
`guided_*`.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from cairn.engine.contract import RenderedPrompt, Structure
from cairn.errors import InvalidRequest
from cairn.server.chat_message import ChatMessage
from cairn.server.parsers.json_tool_parser import JsonToolParser
from cairn.server.parsers.output_parser import OutputParser, ToolSchemas
from cairn.server.requests import ChatRequest, ResponseFormat, SamplingFields, StructuredOutputs, Tool
from cairn.server.service import Service

_PROMPT_END = 32
"""Tokens at a prompt's end among which the reasoning is opened."""

_MAX_BYTES = 1 << 19
"""Of a schema, or of whatever else is asked for, as JSON."""

_KINDS = ("json", "regex", "choice", "grammar")
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
    """What the engine holds the answers to, and what makes the message of one answer. Raises InvalidRequest naming the
    field."""
    structure = _structure_of(body)
    if not isinstance(body, ChatRequest):
        return structure, lambda: ChatMessage(OutputParser(), service.new_id)
    tools, forced = _tool_use(body, auto=service.options.enable_auto_tool_choice)
    if forced is not None and structure is not None:
        raise InvalidRequest(
            f"{structure.field} and a tool_choice that requires a call cannot go together: send one of them",
            "tool_choice",
        )
    parsers, opened = service.parsers, await _opened(service, body, prompt)
    structure = forced or structure
    if structure is not None and parsers.has_reasoning:
        structure = msgspec.structs.replace(structure, reasoning="opened" if opened else "possible")
    # more than one call may be told
    parallel = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, dict)

    def message() -> ChatMessage:
        # Every model can be held to calls in JSON.
        parser = parsers.make_parser(tools, opened=opened, tool_parser=None if forced is None else JsonToolParser)
        return ChatMessage(parser, service.new_id, parallel=parallel)

    return structure, message


async def _opened(service: Service, body: ChatRequest, prompt: RenderedPrompt) -> bool:
    """Whether the answer begins within the reasoning."""
    if not service.parsers.has_reasoning:
        return False
    content = body.messages[-1].content
    if body.continue_final_message:
        return isinstance(content, str) and service.parsers.leaves_reasoning_open(content)
    return service.parsers.opens_reasoning(await service.tokenizer.decode(prompt.token_ids[-_PROMPT_END:]))


# -- tools and tool_choice ---------------------------------------------------------------------------------------------


def _tool_use(body: ChatRequest, *, auto: bool) -> tuple[ToolSchemas | None, Structure | None]:
    """The tools whose calls are looked for, None for none of them, and what holds the answer to calls, None where the
    model chooses. `auto`: calls of a model that may choose are looked for. Raises InvalidRequest naming `tool_choice`
    or `tools`."""
    tools = {tool["function"]["name"]: _parameters(tool) for tool in body.tools or ()}
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if choice is None or choice == "auto":
        return (tools if tools and auto else None), None
    if choice == "none":
        return None, None
    if choice == "required":
        if not tools:
            raise InvalidRequest("tool_choice is required, but there are no tools: send some", "tool_choice")
        return tools, _forced(body, tools, parallel)
    name = choice["function"]["name"]
    if name not in tools:
        raise InvalidRequest(f"tool_choice names {name[:64]!r}, which is none of the tools", "tool_choice")
    tools = {name: tools[name]}
    return tools, _forced(body, tools, parallel=False)


def _forced(body: ChatRequest, tools: ToolSchemas, parallel: bool) -> Structure:
    places = {tool["function"]["name"]: place for place, tool in enumerate(body.tools or ())}
    asked = {
        "tools": [{"name": name, "parameters": own, "place": places[name]} for name, own in tools.items()],
        "parallel": parallel,
    }
    text = _json_text(asked, "tools")
    if len(text) > _MAX_BYTES:
        raise InvalidRequest(f"tools have {len(text)} characters; at most {_MAX_BYTES} can be required", "tools")
    return Structure(kind="calls", text=text, field="tools")


def _parameters(tool: Tool) -> dict[str, Any]:
    found = tool["function"].get("parameters")
    return {"type": "object"} if found is None else found


# -- structure ---------------------------------------------------------------------------------------------------------


def _structure_of(body: SamplingFields) -> Structure | None:
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


def _response_format(asked: ResponseFormat | None) -> list[Structure]:
    if asked is None or asked["type"] == "text":
        return []
    if asked["type"] == "json_object":
        return [Structure(kind="json", text='{"type":"object"}', field="response_format")]
    holder = asked["json_schema"]
    schema = holder.get("schema", holder.get("json_schema"))
    if schema is None:
        raise InvalidRequest('response_format.json_schema must be {"schema": {...}}', "response_format")
    return [_structure("json", schema, "response_format.json_schema.schema")]


def _structured_outputs(asked: StructuredOutputs | None) -> list[Structure]:
    if asked is None:
        return []
    given = {name: value for name, value in asked.items() if value is not None and name not in _IGNORED}
    if given.pop("json_object", False):
        given["json"] = {"type": "object"}
    if len(given) != 1 or not given.keys() <= set(_KINDS):
        raise InvalidRequest(f"structured_outputs must have one of {', '.join(_KINDS)}", "structured_outputs")
    ((kind, value),) = given.items()
    return [_structure(kind, value, f"structured_outputs.{kind}")]


def _structure(kind: str, value: Any, field: str) -> Structure:
    param = field.partition(".")[0]
    # a JSON schema may come as text, too
    text = value if kind != "choice" and isinstance(value, str) else _json_text(value, field)
    if len(text) > _MAX_BYTES:
        raise InvalidRequest(f"{field} has {len(text)} characters; at most {_MAX_BYTES} are read", param)
    return msgspec.convert({"kind": kind, "text": text, "field": field}, Structure)


def _json_text(value: Any, field: str) -> str:
    """A part of a body as JSON. Raises InvalidRequest for one that has none: nested too deeply, or no Unicode."""
    param = field.partition(".")[0]
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", param) from None
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{field} has no form in JSON: {error}", param) from None
