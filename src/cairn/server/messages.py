"""Chats as clients send them: messages, tools, breakpoints and template settings, checked and brought to one form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cairn.engine.contract import MAX_BREAKPOINTS, Breakpoint, TemplateValue
from cairn.errors import InvalidRequest
from cairn.server.images import pixels_of
from cairn.server.requests import Message, TemplateFields

TEMPLATE_SWITCHES: Mapping[str, type] = MappingProxyType(
    {
        "add_vision_id": bool,
        "enable_thinking": bool,
        "preserve_thinking": bool,
        "reasoning_effort": str,
        "thinking": bool,
        "truncate_history_thinking": bool,
    }
)
"""What a client may tell the chat template, and of which type: settings of published templates that change nothing but
the prompt's text."""

_TOOL_FIELDS = (
    ("description", str, "text"),
    ("parameters", dict, "a JSON schema: an object"),
    ("strict", bool, "true or false"),
)
_MAX_SWITCH = 64
_HOLD_SECONDS: Mapping[object, int] = MappingProxyType({"5m": 300, "1h": 3600})


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A chat in the form that the tokenizer takes."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, TemplateValue]
    breakpoints: list[Breakpoint]
    add_generation_prompt: bool
    continue_final_message: bool


def conversation(body: TemplateFields, messages: list[Message], breakpoints: list[Breakpoint]) -> ChatInput:
    """`messages`: those of `body` with their images decoded. Raises InvalidRequest naming the part that is wrong."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other: send one of them",
            "continue_final_message",
        )
    return ChatInput(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())],
        template_kwargs=_template_kwargs(body.chat_template_kwargs or {}),
        breakpoints=breakpoints,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
    )


def check_text(text: str, where: str, param: str) -> str:
    """The same text. Raises InvalidRequest for half a surrogate pair: JSON can spell it, no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{where} is not valid Unicode: {error.reason}, character {error.start}", param) from None
    return text


# -- messages and tools ------------------------------------------------------------------------------------------------


def _message(message: Message, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _content(message.content, f"{where}.content")}
    if message.tool_calls:
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(message.tool_calls)]
    reasoning = message.reasoning_content or message.reasoning
    if isinstance(reasoning, str):
        found["reasoning_content"] = check_text(reasoning, f"{where}.reasoning_content", "messages")
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return check_text(content, where, "messages")
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be text or a list of text parts", "messages")
    return [_part(part, f"{where}[{j}]") for j, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if pixels_of(part) is not None:
        return {"type": "image", "image": part["image"]}
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where} is no text part; only text is supported yet", "messages")
    return {"type": "text", "text": check_text(part["text"], where, "messages")}


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise InvalidRequest(f'{where} must be {{"type": "function", "function": {{...}}}}', "messages")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{where}.function.name must be text", "messages")
    if not isinstance(function.get("arguments", ""), str | dict):
        raise InvalidRequest(f"{where}.function.arguments must be JSON in text", "messages")
    kept = {name: function[name] for name in ("name", "arguments") if name in function}
    return {"id": call.get("id"), "type": "function", "function": kept}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise InvalidRequest(f'{where} must be {{"type": "function", "function": {{...}}}}', "tools")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{where}.function.name must be text", "tools")
    for name, kind, wanted in _TOOL_FIELDS:
        if not isinstance(function.get(name), kind | None):
            raise InvalidRequest(f"{where}.function.{name} must be {wanted}", "tools")
    check_text(json.dumps(tool, ensure_ascii=False), where, "tools")
    # a mark of the client, not a part of the tool: the model must not read it
    function = {name: value for name, value in function.items() if name != "cache_control"}
    return {name: value for name, value in tool.items() if name != "cache_control"} | {"function": function}


def _template_kwargs(given: dict[str, Any]) -> dict[str, TemplateValue]:
    for name, value in given.items():
        kind, where = TEMPLATE_SWITCHES.get(name), f"chat_template_kwargs.{name[:_MAX_SWITCH]}"
        if kind is None:
            known = ", ".join(TEMPLATE_SWITCHES)
            raise InvalidRequest(f"{where} is not supported: {known} are", "chat_template_kwargs")
        if value is not None and (type(value) is not kind or (isinstance(value, str) and len(value) > _MAX_SWITCH)):
            wanted = "true or false" if kind is bool else f"text of at most {_MAX_SWITCH} characters"
            raise InvalidRequest(f"{where} must be {wanted}", "chat_template_kwargs")
        if isinstance(value, str):
            check_text(value, where, "chat_template_kwargs")
    return {name: value for name, value in given.items() if value is not None}


# -- breakpoints -------------------------------------------------------------------------------------------------------


def breakpoints_of(body: TemplateFields, messages: list[Message]) -> list[Breakpoint]:
    """The places that a client has marked with `cache_control`: tools, messages and parts of their content.

    Anthropic's convention, as gateways pass it on. Raises InvalidRequest naming the part that is wrong.
    """
    found: list[Breakpoint] = []

    def add(holder: Any, where: str, param: str, message: int | None = None, part: int | None = None) -> None:
        seconds = _seconds(holder.get("cache_control"), f"{where}.cache_control", param)
        if seconds is None:
            return
        if len(found) == MAX_BREAKPOINTS:
            raise InvalidRequest(f"{where}.cache_control is one too many: at most {MAX_BREAKPOINTS} can be held", param)
        found.append(Breakpoint(message=message, part=part, seconds=seconds))

    for i, tool in enumerate(body.tools or ()):
        for holder in (tool, tool.get("function") if isinstance(tool, dict) else None):
            if isinstance(holder, dict):
                add(holder, f"tools[{i}]", "tools")
    for i, message in enumerate(messages):
        for j, part in enumerate(message.parts):
            if not isinstance(part, dict):
                continue
            where = f"messages[{i}].content[{j}]"
            if part.get("cache_control") is not None and part.get("type") == "text" and not part.get("text"):
                raise InvalidRequest(f"{where}.cache_control: an empty text cannot be held", "messages")
            add(part, where, "messages", i, j if j + 1 < len(message.parts) else None)
        add(message.model_extra or {}, f"messages[{i}]", "messages", i)
    return found


def _seconds(mark: Any, where: str, param: str) -> int | None:
    if mark is None:
        return None
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        raise InvalidRequest(f'{where} must be {{"type": "ephemeral"}}', param)
    ttl = "5m" if mark.get("ttl") is None else mark["ttl"]
    if not isinstance(ttl, str) or ttl not in _HOLD_SECONDS:
        raise InvalidRequest(f'{where}.ttl must be "5m" or "1h"', param)
    return _HOLD_SECONDS[ttl]
