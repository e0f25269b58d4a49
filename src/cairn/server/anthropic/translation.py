"""From a body of /v1/messages to one of /v1/chat/completions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.errors import InvalidRequest
from cairn.server.anthropic.requests import (
    AnthropicTool,
    AssistantMessage,
    CountTokensRequest,
    ImageBlock,
    MessagesRequest,
    ToolResultBlock,
    UserMessage,
)
from cairn.server.chat_translation import ChatTranslation, mark_of
from cairn.server.openai.requests import refuse_unsupported

_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "stop": "stop_sequences",
        "response_format": "output_config",
        "continue_final_message": "messages",
        "thinking_token_budget": "thinking",
    }
)
"""Fields of chats under the names that they have here."""


def to_chat(body: CountTokensRequest) -> ChatTranslation:
    """The same as a chat. Raises InvalidRequest naming the field."""
    refuse_unsupported(body)
    chat = ChatTranslation(_RENAMED)
    if body.system:
        chat.add({"role": "system", "content": _parts_or_text(body.system)}, "system")
    open_calls: set[str] = set()
    for number, message in enumerate(body.messages):
        place = f"messages[{number}]"
        if message["role"] == "user":
            _add_user(chat, message, place, open_calls)
            open_calls = set()
        elif message["role"] == "assistant":
            open_calls = _add_assistant(chat, message, place)
        else:
            chat.add({"role": "system", "content": _parts_or_text(message["content"])}, place)
    if open_calls:
        place = f"messages[{len(body.messages) - 1}]"
        raise InvalidRequest(f"{place} ends with tool_use blocks: send their tool_result blocks behind it", "messages")
    fields: dict[str, Any] = {"model": body.model, "messages": chat.messages}
    if body.tools:
        fields["tools"] = [_translate_tool(tool) for tool in body.tools]
    fields |= _translate_tool_choice(body) | _translate_thinking(body)
    if body.output_config is not None and (form := body.output_config.get("format")) is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    if body.messages[-1]["role"] == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "cache_salt": body.cache_salt,
            "kv_transfer_params": body.kv_transfer_params,
        }
    chat.validate(fields)
    return chat


def _parts_or_text(content: Any) -> Any:
    """Text blocks are a chat's text parts; fields that a chat does not know are left out."""
    if isinstance(content, str):
        return content
    return [_translate_block(block) for block in content]


def _translate_block(block: Any) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "text", "text": block["text"]} if block["type"] == "text" else _image_part(block)
    return part | mark_of(block)


def _image_part(block: ImageBlock) -> dict[str, Any]:
    source = block["source"]
    url = source["url"] if source["type"] == "url" else f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def _add_user(chat: ChatTranslation, message: UserMessage, place: str, open_calls: set[str]) -> None:
    """Results of tools first, a message each, then the rest. An image in a result goes to the rest: templates have no
    place for one in a result."""
    content = message["content"]
    if isinstance(content, str):
        chat.add({"role": "user", "content": content}, place)
        return
    if not content:
        raise InvalidRequest(f"{place}.content must not be empty", "messages")
    parts: list[dict[str, Any]] = []
    blocks: list[str] = []
    for number, block in enumerate(content):
        where = f"{place}.content[{number}]"
        if block["type"] != "tool_result":
            parts.append(_translate_block(block))
            blocks.append(where)
            continue
        if block["tool_use_id"] not in open_calls:
            text = f"{where}.tool_use_id: the message before has no tool_use block with the id {block['tool_use_id']!r}"
            raise InvalidRequest(text, "messages")
        images = _add_result(chat, block, where)
        parts += images
        blocks += [where] * len(images)
    if parts:
        chat.add({"role": "user", "content": parts}, place, blocks)


def _add_result(chat: ChatTranslation, block: ToolResultBlock, where: str) -> list[dict[str, Any]]:
    """Returns the parts that are images."""
    content = block.get("content") or ""
    texts = content if isinstance(content, str) else "\n".join(one["text"] for one in content if one["type"] == "text")
    images = [] if isinstance(content, str) else [_translate_block(one) for one in content if one["type"] == "image"]
    if block.get("is_error"):
        texts = f"Error: {texts}"
    result = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": texts}
    chat.add(result | mark_of(block), where)
    return images


def _add_assistant(chat: ChatTranslation, message: AssistantMessage, place: str) -> set[str]:
    """Returns the ids of its tool calls."""
    content = message["content"]
    if isinstance(content, str):
        chat.add({"role": "assistant", "content": content}, place)
        return set()
    parts: list[dict[str, Any]] = []
    blocks: list[str] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    mark: dict[str, Any] = {}
    for number, block in enumerate(content):
        if block["type"] == "text":
            parts.append(_translate_block(block))
            blocks.append(f"{place}.content[{number}]")
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
            mark = mark_of(block) or mark
        elif block["type"] == "thinking":
            reasoning.append(block["thinking"])
    chatted: dict[str, Any] = {"role": "assistant", "content": parts or None}
    if len(parts) == 1 and "cache_control" not in parts[0]:
        chatted["content"] = parts[0]["text"]
    if calls:
        chatted["tool_calls"] = calls
    if reasoning:
        chatted["reasoning_content"] = "\n".join(reasoning)
    chat.add(chatted | mark, place, blocks)
    return {str(call["id"]) for call in calls}


def _translate_tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = {"type": "object"} | tool["input_schema"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function} | mark_of(tool)


def _translate_tool_choice(body: CountTokensRequest) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    fields: dict[str, Any] = {"parallel_tool_calls": not choice.get("disable_parallel_tool_use")}
    if choice["type"] == "tool":
        if not choice.get("name"):
            raise InvalidRequest('tool_choice.name is missing: type "tool" needs it', "tool_choice")
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    return fields | {"tool_choice": {"any": "required"}.get(choice["type"], choice["type"])}


def _translate_thinking(body: CountTokensRequest) -> dict[str, Any]:
    switches: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        switches.setdefault("enable_thinking", body.thinking["type"] != "disabled")
    effort = None if body.output_config is None else body.output_config.get("effort")
    if effort is not None:
        switches.setdefault("reasoning_effort", effort)
    fields: dict[str, Any] = {"chat_template_kwargs": switches} if switches else {}
    if body.thinking is not None and body.thinking["type"] == "enabled":
        fields["thinking_token_budget"] = body.thinking["budget_tokens"]
    return fields
