"""Chats as clients send them: messages, tools, breakpoints and template settings in the form that templates take."""

import json
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from cairn.engine.contract import MAX_BREAKPOINTS, Breakpoint, Pixels, RenderedPrompt
from cairn.errors import InvalidRequest
from cairn.server.images.room import ImageShare
from cairn.server.requests import CacheControl, Message, TemplateFields, Tool
from cairn.server.service import Service

_HOLD_SECONDS: Mapping[str, int] = MappingProxyType({"5m": 300, "1h": 3600})


async def rendered_chat(
    service: Service, body: TemplateFields, messages: list[Message], share: ImageShare
) -> RenderedPrompt:
    """The chat as tokens, with every image fetched and decoded. Raises InvalidRequest naming the part, Overloaded."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other: send one of them",
            "continue_final_message",
        )
    tokenizer, breakpoints = service.engine.tokenizer, _breakpoints(body, messages)
    images = await service.images.decoded(messages, tokenizer.image_markers, share)
    render = partial(
        tokenizer.render_chat,
        [_message(message, i, images) for i, message in enumerate(messages)],
        tools=[_tool(tool, i) for i, tool in enumerate(body.tools or ())],
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        template_kwargs={name: value for name, value in _switches(body) if value is not None},
        breakpoints=breakpoints,
        continue_final_message=continues,
    )
    return await service.tokenizer.run(render)


def _switches(body: TemplateFields) -> list[tuple[str, Any]]:
    return list((body.chat_template_kwargs or {}).items())


def _message(message: Message, number: int, images: Mapping[tuple[int, int], Pixels]) -> dict[str, Any]:
    content: str | list[dict[str, Any]] = message.content if isinstance(message.content, str) else ""
    if isinstance(message.content, list):
        content = [
            {"type": "text", "text": part["text"]}
            if part["type"] == "text"
            else {"type": "image", "image": images[number, place]}
            for place, part in enumerate(message.content)
        ]
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": dict(call["function"])}
            for call in message.tool_calls
        ]
    named = {
        "reasoning_content": message.reasoning_content or message.reasoning,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    return found | {name: value for name, value in named.items() if value is not None}


def _tool(tool: Tool, number: int) -> dict[str, Any]:
    """Without the client's mark, which is no part of the tool: the model must not read it."""
    try:
        json.dumps(tool, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"tools[{number}] is not valid Unicode: {error.reason}", "tools") from None
    function = {name: value for name, value in tool["function"].items() if name != "cache_control"}
    return {name: value for name, value in tool.items() if name != "cache_control"} | {"function": function}


def _breakpoints(body: TemplateFields, messages: list[Message]) -> list[Breakpoint]:
    """The places that a client has marked with `cache_control`: tools, messages and parts of their content.

    Anthropic's convention, as gateways pass it on. Raises InvalidRequest naming the part that is wrong.
    """
    found: list[Breakpoint] = []

    def add(mark: CacheControl | None, where: str, message: int | None = None, part: int | None = None) -> None:
        if mark is None:
            return
        if len(found) == MAX_BREAKPOINTS:
            text = f"{where}.cache_control is one too many: at most {MAX_BREAKPOINTS} can be held"
            raise InvalidRequest(text, where.partition("[")[0])
        found.append(Breakpoint(message=message, part=part, seconds=_HOLD_SECONDS[mark.get("ttl") or "5m"]))

    for i, tool in enumerate(body.tools or ()):
        add(tool.get("cache_control"), f"tools[{i}]")
        add(tool["function"].get("cache_control"), f"tools[{i}]")
    for i, message in enumerate(messages):
        for j, part in enumerate(message.parts):
            mark, where = part.get("cache_control"), f"messages[{i}].content[{j}]"
            if mark is not None and part["type"] == "text" and not part["text"]:
                raise InvalidRequest(f"{where}.cache_control: an empty text cannot be held", "messages")
            add(mark, where, i, j if j + 1 < len(message.parts) else None)
        add(message.cache_control, f"messages[{i}]", i)
    return found
