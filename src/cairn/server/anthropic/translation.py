"""From a body of /v1/messages to one of /v1/chat/completions."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

from pydantic_core import PydanticCustomError

from cairn.errors import InvalidRequest
from cairn.server.anthropic.requests import (
    AnthropicTool,
    AnyTool,
    AssistantMessage,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    MessagesRequest,
    ToolResultBlock,
    UserMessage,
)
from cairn.server.anthropic.writer import read_arguments
from cairn.server.chat_translation import ChatTranslation, mark_of
from cairn.server.openai.file_text import read_file_text, title_text
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


def to_chat(body: CountTokensRequest, unseal: Callable[[str], str | None]) -> ChatTranslation:
    """The same as a chat. `unseal`: reads reasoning that was encrypted here, None for any other. Raises InvalidRequest
    naming the field."""
    refuse_unsupported(body)
    chat = ChatTranslation(_RENAMED)
    if body.system:
        chat.add({"role": "system", "content": _parts_or_text(body.system)}, "system")
    open_calls: dict[str, bool] = {}
    for number, message in enumerate(body.messages):
        place = f"messages[{number}]"
        if message["role"] == "user":
            _add_user(chat, message, place, open_calls)
            open_calls = {}
        elif message["role"] == "assistant":
            open_calls = _add_assistant(chat, message, place, unseal)
        else:
            chat.add({"role": "system", "content": _parts_or_text(message["content"])}, place)
    if not all(open_calls.values()):
        place = f"messages[{len(body.messages) - 1}]"
        raise InvalidRequest(f"{place} ends with tool_use blocks: send their tool_result blocks after it", "messages")
    fields: dict[str, Any] = {"model": body.model, "messages": chat.messages}
    if body.tools:
        fields["tools"] = [_translate_tool(tool) for tool in body.tools if _is_own(tool)]
        hosted = {f"tools[{i}]": str(tool["type"]) for i, tool in enumerate(body.tools) if not _is_own(tool)}
        chat.left_out |= hosted
    fields |= _translate_tool_choice(body) | _translate_thinking(body)
    if body.output_config is not None and (form := body.output_config.get("format")) is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    if body.messages[-1]["role"] == "assistant" and not chat.messages[-1].get("tool_calls"):
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
    return [_text_part(block["text"]) | mark_of(block) for block in content]


def _translate_block(block: Any, where: str) -> list[dict[str, Any]]:
    """A block of content as parts of a chat's. Raises InvalidRequest for a document that is no text."""
    match block["type"]:
        case "text":
            parts = [_text_part(block["text"])]
        case "image":
            parts = [_image_part(block)]
        case "tool_reference":
            parts = [_text_part(block["tool_name"])]
        case "search_result":
            text = "\n".join(inner["text"] for inner in block["content"])
            parts = [_text_part(title_text("\n".join(filter(None, (block["title"], block["source"]))), text))]
        case _:
            parts = _document_parts(block, where)
    return [*parts[:-1], parts[-1] | mark_of(block)]


def _document_parts(block: DocumentBlock, where: str) -> list[dict[str, Any]]:
    source, heads = block["source"], (block.get("title"), block.get("context"))
    title = "\n".join(head for head in heads if head)
    if source["type"] == "base64":
        file = f"data:{source['media_type']};base64,{source['data']}"
        try:
            return [_text_part(read_file_text(file, title))]
        except PydanticCustomError as error:
            raise InvalidRequest(f"{where}.source {error.message()}", "messages") from None
    if source["type"] == "text":
        return [_text_part(title_text(title, source["data"]))]
    content = source["content"]
    if isinstance(content, str):
        return [_text_part(title_text(title, content))]
    parts = [part for inner in content for part in _translate_block(inner, where)]
    return [*([_text_part(f"{title}\n\n")] if title or not parts else []), *parts]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image_part(block: ImageBlock) -> dict[str, Any]:
    source = block["source"]
    url = source["url"] if source["type"] == "url" else f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def _add_user(chat: ChatTranslation, message: UserMessage, place: str, open_calls: Mapping[str, bool]) -> None:
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
            block_parts = _translate_block(block, where)
            parts += block_parts
            blocks += [where] * len(block_parts)
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
    sent: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [part for inner in sent for part in _translate_block(inner, where)]
    texts = [part for part in parts if part["type"] == "text"]
    if block.get("is_error"):
        texts = [_text_part("Error: "), *texts]
    result = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": texts}
    chat.add(result | mark_of(block), where, [where] * len(texts))
    return [part for part in parts if part["type"] != "text"]


def _add_assistant(
    chat: ChatTranslation, message: AssistantMessage, place: str, unseal: Callable[[str], str | None]
) -> dict[str, bool]:
    """Returns the ids of its tool calls, and for each whether it was cut off."""
    content = message["content"]
    if isinstance(content, str):
        chat.add({"role": "assistant", "content": content}, place)
        return {}
    parts: list[dict[str, Any]] = []
    blocks: list[str] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    mark: dict[str, Any] = {}
    open_calls: dict[str, bool] = {}
    for number, block in enumerate(content):
        if block["type"] == "text":
            parts.append(_text_part(block["text"]) | mark_of(block))
            blocks.append(f"{place}.content[{number}]")
        elif block["type"] == "tool_use":
            arguments, is_cut = read_arguments(block["input"])
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
            open_calls[block["id"]] = is_cut
            mark = mark_of(block) or mark
        elif block["type"] == "thinking":
            reasoning.append(block["thinking"] or unseal(block.get("signature") or "") or "")
    chatted: dict[str, Any] = {"role": "assistant", "content": parts or None}
    if len(parts) == 1 and "cache_control" not in parts[0]:
        chatted["content"] = parts[0]["text"]
    if calls:
        chatted["tool_calls"] = calls
    if any(reasoning):
        chatted["reasoning_content"] = "\n".join(reasoning)
    chat.add(chatted | mark, place, blocks)
    return open_calls


def _is_own(tool: AnyTool) -> TypeGuard[AnthropicTool]:
    """Whether the client runs it, by a schema that it sends."""
    return tool.get("type") in (None, "custom")


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
    client_tools = [tool["name"] for tool in body.tools or () if _is_own(tool)]
    hosted = [tool.get("name") for tool in body.tools or () if not _is_own(tool)]
    if hosted and (
        (choice["type"] == "any" and not client_tools) or (choice["type"] == "tool" and choice.get("name") in hosted)
    ):
        return fields  # what has to be called is not there
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
