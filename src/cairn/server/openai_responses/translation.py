"""From a body of /v1/responses to one of /v1/chat/completions."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cairn.errors import InvalidRequest
from cairn.http.handover import ITEM_ID
from cairn.server.chat_translation import ChatTranslation, mark_of
from cairn.server.openai.engine_request import encode_json
from cairn.server.openai.requests import SharedFields, refuse_unsupported
from cairn.server.openai_responses.requests import HOSTED_ITEMS, UNSUPPORTED, ResponsesRequest
from cairn.server.openai_responses.tools import ToolTable

_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "response_format.json_schema.schema": "text.format.schema",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "truncate_prompt_tokens": "truncation",
        "continue_final_message": "input",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
    }
)
"""Fields of chats under the names that they have here."""

_SAME_FIELDS = (*SharedFields.model_fields, "parallel_tool_calls", "chat_template_kwargs", "mm_processor_kwargs")
_ITEM_FIELDS = frozenset(
    (
        *("type", "id", "status", "role", "content", "call_id", "name", "arguments", "output", "summary"),
        *("encrypted_content", "namespace", "input", "action"),
    )
)
_PART_FIELDS = frozenset(
    ("type", "text", "refusal", "image_url", "detail", "file_data", "file_url", "filename", "cache_control")
)
_PART_LISTS = frozenset(("content", "output", "summary"))
_OWN_ID = re.compile(ITEM_ID)
_CALLS = frozenset(("function_call", "custom_tool_call", "local_shell_call"))
_OUTPUTS = frozenset(f"{call}_output" for call in _CALLS)
_MAX_OUTPUT_DEPTH = 64

_LOGPROBS = "message.output_text.logprobs"


def get_response_id(item_id: str | None) -> str | None:
    """Of the response that an item of this server's belongs to; None for other ids."""
    match = _OWN_ID.fullmatch(item_id or "")
    return None if match is None else f"resp_{match[1]}"


def make_input_items(body: ResponsesRequest, response_id: str, find: Callable[[str, str], Any]) -> list[Any]:
    """The items of a body as they are stored: with ids, their content as parts, and what references refer to. Those of
    tools that OpenAI runs are left out.

    `find`: gets the id of a reference and the field that it stands in."""
    sent: Sequence[Any] = body.input if isinstance(body.input, list) else [_user_message(body.input)]
    items = []
    for number, item in enumerate(sent):
        if item["type"] == "item_reference":
            items.append(find(item["id"], f"input[{number}].id"))
            continue
        if item["type"] in HOSTED_ITEMS:
            continue
        stored = _keep_known(item) | {"id": item.get("id") or f"in_{response_id.removeprefix('resp_')}_{number}"}
        if stored["type"] == "message":
            _check_parts(stored, f"input[{number}].content")
        if isinstance(stored.get("content"), str):
            kind = "output_text" if stored["role"] == "assistant" else "input_text"
            stored["content"] = [{"type": kind, "text": stored["content"]}]
        if stored["type"] != "reasoning":
            stored["status"] = stored.get("status") or "completed"
        items.append(stored)
    return items


def _keep_known(item: Mapping[str, Any]) -> dict[str, Any]:
    """Without fields that nobody has looked at: what is stored is sent again."""
    known = {name: value for name, value in item.items() if name in _ITEM_FIELDS}
    for name in _PART_LISTS & known.keys():
        if isinstance(known[name], list):
            known[name] = [_keep_known_part(part) for part in known[name]]
    return known


def _keep_known_part(part: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in part.items() if name in _PART_FIELDS}
    if (mark := known.get("cache_control")) is not None:
        known["cache_control"] = {name: mark[name] for name in ("type", "ttl") if name in mark}
    return known


def _check_parts(item: Any, place: str) -> None:
    """Raises InvalidRequest for parts that a message of its role cannot have."""
    refused = {"user": ("refusal",), "assistant": ("input_image", "input_file")}
    for number, part in enumerate(item["content"] if isinstance(item["content"], list) else ()):
        kind, where = part["type"], f"{place}[{number}]"
        if kind in refused.get(item["role"], ("refusal", "input_image")):
            text = f"{where}: a message of the role {item['role']} can have no {kind}: leave it out"
            raise InvalidRequest(text, where)
    if not item["content"] and item["role"] != "assistant":
        raise InvalidRequest(f"{place} must not be empty", place)


def _user_message(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def to_chat(
    body: ResponsesRequest,
    history: Sequence[Any],
    items: Sequence[Any],
    tools: ToolTable,
    unseal: Callable[[str], str | None],
) -> ChatTranslation:
    """The same as a chat. `history`: the items of the responses before it; `items`: its own, references resolved;
    `tools`: those of the body. `unseal`: reads reasoning that was encrypted here, None for any other.

    Raises InvalidRequest naming the field.
    """
    refuse_unsupported(body, UNSUPPORTED)
    chat = ChatTranslation(_RENAMED)
    conversation = _Conversation(chat, tools, unseal)
    if body.instructions:
        conversation.add({"type": "message", "role": "system", "content": body.instructions}, "instructions")
    for item in history:
        conversation.add(item, "previous_response_id")
    for number, item in enumerate(items):
        conversation.add(item, "input" if isinstance(body.input, str) else f"input[{number}]")
    conversation.end()
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_FIELDS}
    fields |= {"messages": chat.messages, "max_completion_tokens": body.max_output_tokens}
    fields["reasoning_effort"] = (body.reasoning or {}).get("effort")
    fields |= {"tool_choice": tools.translate_choice(body.tool_choice)} | _translate_text(body)
    if tools.functions:
        fields["tools"] = tools.functions
    chat.left_out |= tools.left_out
    if body.enable_response_messages:
        fields["return_prompt_text"] = True
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if items and items[-1].get("role") == "assistant" and items[-1].get("status") in ("in_progress", "incomplete"):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    chat.validate(fields)
    return chat


@dataclass(slots=True)
class _Answer:
    """One message of the assistant, of the items of one response."""

    place: str
    response: str | None
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def takes(self, kind: str, response: str | None) -> bool:
        """Whether an item of this type and response belongs to it. Clients may leave ids out: then a text begins a
        message unless there is none before it or there are calls, and so does reasoning after either."""
        if self.response is not None and response is not None:
            return self.response == response
        match kind:
            case "message":
                return not self.texts or bool(self.calls)
            case "reasoning":
                return not self.texts and not self.calls
        return True


@dataclass(slots=True)
class _Conversation:
    """Puts a chat together. `open_calls`: tool calls without output; `due_calls`: those of them that nothing of the
    user's has come after; `images`: of outputs, for which templates have no place there, with their places;
    `shell_calls`: by the ids of items, those of calls that an output may name so."""

    chat: ChatTranslation
    tools: ToolTable
    unseal: Callable[[str], str | None]
    answer: _Answer | None = None
    open_calls: set[str] = field(default_factory=set)
    due_calls: set[str] = field(default_factory=set)
    images: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    shell_calls: dict[str, str] = field(default_factory=dict)

    def add(self, item: Any, place: str) -> None:
        if item["type"] in _OUTPUTS:
            self._close_answer()
            self._add_output(item, place)
        elif item["type"] == "reasoning" or item["type"] in _CALLS or item["role"] == "assistant":
            self._flush_images()
            self._add_to_answer(item, place)
        else:
            self._close_answer()
            self._flush_images()
            self._add_message(item, place)

    def end(self) -> None:
        """Raises InvalidRequest for tool calls that wait for their output."""
        self._close_answer()
        self._flush_images()
        if self.due_calls:
            call = min(self.due_calls)
            raise InvalidRequest(f"input has no function_call_output for the call_id {call!r}: send it", "input")

    def _add_message(self, item: Any, place: str) -> None:
        self.due_calls.clear()
        role = item["role"]
        content, blocks = _translate_content(item["content"], f"{place}.content")
        self.chat.add({"role": role, "content": content}, place, blocks)

    def _add_output(self, item: Any, place: str) -> None:
        call = item.get("call_id") or self.shell_calls.get(item["id"], item["id"])
        if call not in self.open_calls:
            text = f"{place}.call_id: no function_call before it waits for the output of {call!r}"
            raise InvalidRequest(text, f"{place}.call_id")
        self.open_calls.discard(call)
        self.due_calls.discard(call)
        content, blocks = _translate_content(_read_output(item["output"], f"{place}.output"), f"{place}.output")
        if not isinstance(content, str):
            parts = list(zip(content, blocks, strict=True))
            self.images += [(part, block) for part, block in parts if part["type"] == "image_url"]
            texts = [(part, block) for part, block in parts if part["type"] != "image_url"]
            content, blocks = [part for part, _ in texts] or "", [block for _, block in texts]
        self.chat.add({"role": "tool", "tool_call_id": call, "content": content}, place, blocks)

    def _add_to_answer(self, item: Any, place: str) -> None:
        kind, item_id = item["type"], str(item.get("id"))
        # Inputs without ids have got some; they say nothing about which belong together.
        response = None if item_id.startswith("in_") else get_response_id(item_id)
        if self.answer is None or not self.answer.takes(kind, response):
            self._close_answer()
            self.answer = _Answer(place, response)
        answer = self.answer
        if kind == "message":
            answer.texts += [part.get("text", part.get("refusal")) for part in item["content"]]
        elif kind == "reasoning":
            answer.reasoning += self._read_reasoning(item)
        else:
            call = str(item.get("call_id") or item_id)
            answer.calls.append({"id": call, "type": "function", "function": self.tools.read_call(item)})
            self.open_calls.add(call)
            if kind == "local_shell_call":
                self.shell_calls[item_id] = call
            if item.get("status") != "incomplete":  # nobody can have run one that was cut off
                self.due_calls.add(call)

    def _read_reasoning(self, item: Any) -> list[str]:
        if not item.get("content") and (sealed := item.get("encrypted_content")):
            text = self.unseal(sealed)
            if text is not None:
                return [text]
        return [part["text"] for part in item.get("content") or item.get("summary") or ()]

    def _close_answer(self) -> None:
        answer, self.answer = self.answer, None
        if answer is None:
            return
        text, reasoning = "".join(answer.texts), "".join(answer.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not answer.calls else None}
        if answer.calls:
            message["tool_calls"] = answer.calls
        if reasoning:
            message["reasoning_content"] = reasoning
        self.chat.add(message, answer.place)

    def _flush_images(self) -> None:
        if self.images:
            parts, blocks = zip(*self.images, strict=True)
            self.images = []
            self.chat.add({"role": "user", "content": list(parts)}, blocks[0], list(blocks))


def _read_output(output: Any, place: str) -> Any:
    """A tool's output as content: an object as its JSON, an empty list as no text. Raises InvalidRequest for an object
    that has no JSON."""
    return encode_json(output, place, _MAX_OUTPUT_DEPTH).decode() if isinstance(output, dict) else output or ""


def _translate_content(content: Any, place: str) -> tuple[Any, list[str]]:
    """A chat's content, and the place of each of its parts. One text is no list."""
    if isinstance(content, str):
        return content, []
    parts, blocks = [], [f"{place}[{number}]" for number in range(len(content))]
    for part in content:
        if part["type"] == "input_image":
            translated: dict[str, Any] = {"type": "image_url", "image_url": {"url": part["image_url"]}}
        elif part["type"] == "input_file":
            translated = {name: value for name, value in part.items() if name != "cache_control"}
        else:
            translated = {"type": "text", "text": part["text"]}
        parts.append(translated | mark_of(part))
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return parts[0]["text"], []
    return parts, blocks


def _translate_text(body: ResponsesRequest) -> dict[str, Any]:
    form = (body.text or {}).get("format")
    if form is None or form["type"] == "text":
        return {}
    if form["type"] == "json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": form["schema"]}}}
    return {"response_format": {"type": "json_object"}}
