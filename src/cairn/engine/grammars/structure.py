"""What an answer has to look like, as a grammar that llguidance compiles.

Everything becomes one text: a JSON object with a list of grammars, of which the first is the whole answer. JSON schemas
and regular expressions are llguidance's own; choices and calls are written as Lark here. Nothing is compiled here.
"""

import json
import re
from types import MappingProxyType
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from cairn.engine.contract import Structure
from cairn.engine.grammars.structural_tag import literal, write_structural_tag
from cairn.errors import InvalidRequest

MAX_TEXT = 1 << 19
"""Characters of a schema, a regular expression, or whatever else is asked for."""

MAX_DEPTH = 64
"""How deep the objects and lists of a JSON schema may be nested."""

MAX_CHOICES = 1024
MAX_CALLS = 32
"""Most calls in one answer that has to consist of calls."""

_MAX_REASON = 300
_MAX_KIND = 64

_NO_WAY_ON = "NoExtensionBias"
"""What llguidance says of a grammar that no token can begin."""

# One space, or a new line with an indent: without a bound, models that are not sure write blanks for ever.
_JSON_RULES = MappingProxyType(
    {
        "whitespace_flexible": True,
        "whitespace_pattern": "( |\\n[ ]{0,32})?",
        "item_separator": ",",
        "key_separator": ":",
    }
)

_REASONING = MappingProxyType(
    {
        "none": "start: @body",
        "opened": "start: thoughts @body\nthoughts: shut gap\nshut[lazy]: /(?s:.*)/ END\ngap: /\\n{0,4}/",
        "possible": "start: thoughts @body | @body\nthoughts: opening shut gap\n"
        "opening: START\nshut[lazy]: /(?s:.*)/ END\ngap: /\\n{0,4}/",
    }
)
"""START, END: the marks of reasoning."""


_HARMONY_RULES = """
shut[lazy]: /(?s:.*)/ "<|end|>"
next: "<|start|>assistant"
final: "<|channel|>final" (" <|constrain|>json")? "<|message|>"
"""
_HARMONY = MappingProxyType(
    {
        "opened": f"start: shut next HEADER @body{_HARMONY_RULES}",
        "possible": "start: thoughts next HEADER @body | HEADER @body\n"
        f'thoughts: "<|channel|>analysis<|message|>" shut{_HARMONY_RULES}',
    }
)
"""HEADER: of the message that has the form, where that does not begin with one."""


def grammar_of(structure: Structure) -> str:
    """The grammar's text for llguidance. Raises InvalidRequest naming the field where it cannot be one, ValueError with
    what is wrong with a structural tag."""
    text = structure.text
    if len(text) > MAX_TEXT:
        raise _refused(structure, f"has {len(text)} characters; at most {MAX_TEXT} are read")
    body: dict[str, Any]
    named: list[dict[str, str]] = []
    match structure.kind:
        case "json":
            body = {"json_schema": _schema(structure, _decoded(structure))}
        case "regex":
            body = {"lark_grammar": _lark_of_regex(text)}
        case "choice":
            body = {"lark_grammar": _lark_of_choices(structure)}
        case "grammar":
            body = {"lark_grammar": _lark_of_grammar(structure)}
        case "calls":
            body = {"lark_grammar": _lark_of_calls(structure)}
        case "structural_tag":
            if _is_deeper(_decoded(structure), MAX_DEPTH):
                raise _too_deep(structure)
            lark, named = write_structural_tag(text, lambda schema: _schema(structure, schema))
            body = {"lark_grammar": lark}
    if structure.is_harmony:
        header = "" if structure.kind == "calls" else "final"
        rule = "opened" if structure.reasoning == "opened" else "possible"
        whole = {"lark_grammar": _HARMONY[rule].replace("HEADER", header)}
        return json.dumps({"grammars": [whole, {"name": "body", **body}, *named]}, ensure_ascii=False)
    if structure.reasoning == "none":
        return json.dumps({"grammars": [body, *named]}, ensure_ascii=False)
    start, end = map(json.dumps, structure.reasoning_marks)
    whole = {"lark_grammar": _REASONING[structure.reasoning].replace("START", start).replace("END", end)}
    return json.dumps({"grammars": [whole, {"name": "body", **body}, *named]}, ensure_ascii=False)


def refusal(structure: Structure, reason: str) -> InvalidRequest:
    """Why llguidance does not take it, in words for the client."""
    where, reason = _refused_tool(structure, reason) or (structure.field, reason)
    line = " ".join(reason.split("<state>")[0].replace("<non-verbose/>", "").split())
    if line == _NO_WAY_ON:
        line = "no answer can fit it; it refers to itself with nothing before that, or contradicts itself"
    return _refused(structure, f"cannot be used: {line[:_MAX_REASON]}", where)


def _refused(structure: Structure, what: str, where: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"{where or structure.field} {what}", structure.field.partition(".")[0])


# -- JSON --------------------------------------------------------------------------------------------------------------


def _decoded(structure: Structure) -> Any:
    try:
        return msgspec.json.decode(structure.text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refused(structure, f"is no JSON: {error}") from None
    except RecursionError:
        raise _too_deep(structure) from None


def _too_deep(structure: Structure) -> InvalidRequest:
    return _refused(structure, f"is nested too deeply: at most {MAX_DEPTH} objects and lists within each other")


def _schema(structure: Structure, schema: Any, *, lenient: bool = False) -> dict[str, Any]:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refused(structure, "must be a JSON schema: an object")
    if _is_deeper(schema, MAX_DEPTH):
        raise _too_deep(structure)
    return {**schema, "x-guidance": {**_JSON_RULES, "lenient": lenient}}


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than `depth` deep; level by level, so that no depth is too much."""
    level = [value]
    for _ in range(depth + 1):
        inner = [
            list(element.values()) if isinstance(element, dict) else element
            for element in level
            if isinstance(element, dict | list)
        ]
        if not inner:
            return False
        level = [element for part in inner for element in part]
    return True


# -- Lark --------------------------------------------------------------------------------------------------------------


def _lark_of_regex(text: str) -> str:
    """It has to match as a whole, so the signs for the ends say nothing new, and llguidance does not take them."""
    text = text.removeprefix("^")
    if text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\"))) % 2:
        text = text[:-1]
    lark: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    return lark


def _lark_of_choices(structure: Structure) -> str:
    choices = _decoded(structure)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise _refused(structure, "must be a list of texts that are not empty")
    if len(choices) > MAX_CHOICES:
        raise _refused(structure, f"has {len(choices)} entries; at most {MAX_CHOICES} are taken")
    return "start: " + " | ".join(map(literal, choices))


def _lark_of_grammar(structure: Structure) -> str:
    try:
        lark: str = any_to_lark(structure.text)
    except Exception as error:  # whatever the conversion of foreign text runs into
        raise refusal(structure, str(error)) from None
    return lark


def _lark_of_calls(structure: Structure) -> str:
    """Calls in the form of `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, or a single one in harmony, behind
    which an answer ends; each tool's schema is a root of its own, so that references within it hold."""
    asked = _decoded(structure)
    lines = []
    for number, tool in enumerate(asked["tools"]):
        kind = tool["parameters"].get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise _refused(structure, f'must be "object", not {json.dumps(kind)[:_MAX_KIND]}', f"{_place(tool)}.type")
        opening = f'<tool_call>\n{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": '
        ending = literal(chr(125) + _CALL_END)
        if structure.is_harmony:
            opening, ending = f"<|channel|>commentary to=functions.{tool['name']} <|constrain|>json<|message|>", ""
        schema = _schema(structure, tool["parameters"] | {"type": "object"}, lenient=True)
        lines.append(f"call{number}: {literal(opening)} arguments{number} {ending}")
        lines.append(f"arguments{number}: %json {json.dumps(schema, ensure_ascii=False)}")
    more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if asked["parallel"] and not structure.is_harmony else ""
    calls = " | ".join(f"call{number}" for number in range(len(asked["tools"])))
    return "\n".join([f"start: call{more}", f"call: {calls}", *lines])


def _place(tool: dict[str, Any]) -> str:
    """Where the client put a tool's schema."""
    return f"tools[{tool['place']}].function.parameters"


def _refused_tool(structure: Structure, reason: str) -> tuple[str, str] | None:
    """The place of the tool whose schema is what is wrong, and what llguidance says of it without quoting the rest."""
    match = _WRONG_TOOL.match(reason) if structure.kind == "calls" else None
    if match is None:
        return None
    return _place(_decoded(structure)["tools"][(int(match[1]) - _HEAD_LINES) // 2 - 1]), match[2]


_WRONG_TOOL = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*)")
_HEAD_LINES = 2
"""Lines of `_lark_of_calls` before those of the tools, of which each has two."""

_CALL_END = "\n</tool_call>"
