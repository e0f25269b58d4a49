"""Structured outputs and tool calls: the grammar that a request's answers must follow, and how they are parsed.

A grammar is requested by OpenAI's `response_format`, vLLM's `structured_outputs` or the older `guided_*`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cairn.engine.contract import Structure
from cairn.errors import InvalidRequest
from cairn.server.notices import Notices
from cairn.server.openai.chat_message import ChatMessage
from cairn.server.openai.lenient_schema import make_lenient
from cairn.server.openai.requests import ChatRequest, SamplingFields
from cairn.server.options import ServerOptions
from cairn.server.parsers.json_tool_parser import JsonToolParser
from cairn.server.parsers.output_parser import OutputParser, ToolParser, ToolSchemas
from cairn.server.parsers.registry import ParserFactory

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


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """`structure`: the grammar of the answers, None for any text. `new_message` makes the message of one answer.
    `call_heads`: what calls that end the reasoning begin with, without whitespace."""

    structure: Structure | None
    new_message: Callable[[], ChatMessage]
    call_heads: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class FormatRules:
    """What all answers of one server have in common. `notices`: says what is left out of schemas; `new_id`: names
    calls."""

    parsers: ParserFactory
    options: ServerOptions
    notices: Notices
    new_id: Callable[[], str]


def parse_response_format(rules: FormatRules, body: SamplingFields, *, opened: bool) -> AnswerFormat:
    """`opened`: whether the answer begins within the reasoning. Raises InvalidRequest naming the field."""
    structure = _parse_structure(rules, body)
    if not isinstance(body, ChatRequest):
        return AnswerFormat(structure, lambda: ChatMessage(OutputParser(), rules.new_id))
    parsers = rules.parsers
    tools, tool_structure = _parse_tool_choice(
        rules, body, parsers.tool_parser if rules.options.enable_auto_tool_choice else None
    )
    is_required = tool_structure is not None and tool_structure.kind == "calls"
    # A required call leaves no content that response_format could be about: as vLLM, the call alone is held to a form.
    if is_required and structure is not None and body.response_format is None:
        text = f"{structure.field} and a tool_choice that requires a call cannot go together: send one of them"
        raise InvalidRequest(text, "tool_choice")
    # A grammar of calls or content begins after the reasoning, so nothing within that can be either.
    calls_end_reasoning = not is_required and structure is None
    # Where the model may choose, an answer that has a form has no calls.
    structure = tool_structure if is_required else structure or tool_structure
    # Where the model may choose among some tools, the form is that of all messages.
    is_of_whole = parsers.is_harmony and structure is not None and structure.field == "tool_choice"
    if parsers.has_reasoning and structure is not None and not is_of_whole:
        structure = msgspec.structs.replace(
            structure, reasoning="opened" if opened else "possible", reasoning_marks=parsers.reasoning_marks
        )
    if parsers.is_harmony and structure is not None and not is_of_whole:
        structure = msgspec.structs.replace(structure, is_harmony=True)
    names_one = isinstance(body.tool_choice, dict) and body.tool_choice["type"] == "function"
    parallel = body.parallel_tool_calls is not False and not names_one
    # Every model can be held to calls in JSON.
    tool_parser = JsonToolParser if is_required and not parsers.is_harmony else None
    hides_reasoning = parsers.has_reasoning and body.include_reasoning is False

    def new_message() -> ChatMessage:
        parser = parsers.make_parser(
            tools, opened=opened, tool_parser=tool_parser, calls_end_reasoning=calls_end_reasoning
        )
        return ChatMessage(
            parser,
            rules.new_id,
            parallel=parallel,
            hides_reasoning=hides_reasoning,
            joins_calls=not body.stream,
        )

    heads: Sequence[str] = ()
    if calls_end_reasoning and tools and parsers.tool_parser is not None and not parsers.is_harmony:
        heads = parsers.tool_parser.list_heads([*tools])
    return AnswerFormat(structure, new_message, heads)


def _parse_tool_choice(
    rules: FormatRules, body: ChatRequest, auto_parser: type[ToolParser] | None
) -> tuple[ToolSchemas | None, Structure | None]:
    """The tools whose calls are parsed, None for no parsing, and the grammar of required calls, or of an answer that
    may call some of the tools; None if the model chooses. `auto_parser`: of calls of a model that may choose, None if
    those are not parsed. Raises InvalidRequest."""
    sent = [tool["function"] for tool in body.tools or ()]
    tools: ToolSchemas = {}
    for function in sent:
        parameters = function.get("parameters")
        tools[function["name"]] = {"type": "object"} if parameters is None else parameters
    choice, num_sent = body.tool_choice, len(tools)
    mode: str | None = None if isinstance(choice, dict) else choice
    if isinstance(choice, dict):
        if choice["type"] == "allowed_tools":
            mode = choice["allowed_tools"]["mode"]
            tools = _select_tools(tools, [tool["function"]["name"] for tool in choice["allowed_tools"]["tools"]])
        else:
            mode = "function"
            tools = _select_tools(tools, [choice["function"]["name"]])
    if mode is None or mode == "auto":
        if not tools or auto_parser is None:
            return None, None
        return tools, None if len(tools) == num_sent else _limit_calls(auto_parser, tools)
    if mode == "none":
        return None, None
    if mode == "required":
        if not tools:
            raise InvalidRequest("tool_choice is required, but there are no tools: send some", "tool_choice")
    places = {function["name"]: place for place, function in enumerate(sent)}
    held = tools if rules.options.lenient_schemas == "none" else _make_lenient(rules, tools)
    required = {
        "tools": [{"name": name, "parameters": schema, "place": places[name]} for name, schema in held.items()],
        "parallel": mode == "required" and body.parallel_tool_calls is not False,
    }
    text = _encode_json(required, "tools")
    if len(text) > _MAX_CHARS:
        raise InvalidRequest(f"tools have {len(text)} characters; at most {_MAX_CHARS} can be required", "tools")
    return tools, Structure(kind="calls", text=text, field="tools")


def _select_tools(tools: ToolSchemas, names: Sequence[str]) -> ToolSchemas:
    """Those of these names, in the order of the tools. Raises InvalidRequest for others."""
    for name in names:
        if name not in tools:
            raise InvalidRequest(f"tool_choice names {name[:64]!r}, which is none of the tools", "tool_choice")
    return {name: schema for name, schema in tools.items() if name in names}


def _limit_calls(parser: type[ToolParser], tools: ToolSchemas) -> Structure:
    """Any text, in which no others than these tools are called."""
    tags = parser.describe_calls([*tools])
    form = {"type": "triggered_tags", "triggers": [tag["begin"] for tag in tags], "tags": tags}
    text = _encode_json({"type": "structural_tag", "format": form}, "tool_choice")
    return Structure(kind="structural_tag", text=text, field="tool_choice")


def _make_lenient(rules: FormatRules, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Each schema without the keywords that no grammar is made for; the log says which those are."""

    def tell(keyword: str) -> None:
        rules.notices.say(f"{keyword!r} is left out of schemas: no grammar is made for it (--lenient-schemas)")

    return {name: make_lenient(schema, tell) for name, schema in schemas.items()}


def _parse_structure(rules: FormatRules, body: SamplingFields) -> Structure | None:
    """The grammar of an answer; None for any text. Raises InvalidRequest naming the field."""
    structures: list[tuple[str, Any, str]] = []  # kind, value, field
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and form["type"] == "json_object":
        structures.append(("json", {"type": "object"}, "response_format"))
    elif form is not None and form["type"] == "json_schema":
        schema = form["json_schema"].get("schema", form["json_schema"].get("json_schema"))
        if schema is None:
            raise InvalidRequest('response_format.json_schema must be {"schema": {...}}', "response_format")
        structures.append(("json", schema, "response_format.json_schema.schema"))
    elif form is not None and form["type"] == "structural_tag":
        sent = {name: value for name, value in form.items() if value is not None}
        structures.append(("structural_tag", sent, "response_format"))
    if outputs is not None:
        options = {name: value for name, value in outputs.items() if value is not None and name not in _IGNORED}
        if options.pop("json_object", False):
            options["json"] = {"type": "object"}
        if len(options) != 1 or not options.keys() <= set(_KINDS):
            raise InvalidRequest(f"structured_outputs must have one of {', '.join(_KINDS)}", "structured_outputs")
        structures += [(kind, value, f"structured_outputs.{kind}") for kind, value in options.items()]
    guided = {kind: getattr(body, f"guided_{kind}") for kind in _GUIDED}
    structures += [(kind, value, f"guided_{kind}") for kind, value in guided.items() if value is not None]
    if len(structures) > 1:
        names = " and ".join(field for _, _, field in structures)
        raise InvalidRequest(f"{names} cannot go together: send one of them", structures[1][2].partition(".")[0])
    for kind, value, field in structures:
        if kind == "json" and rules.options.lenient_schemas == "all":
            value = _make_lenient(rules, {field: value})[field]
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
