"""From a body of /v1/responses to one of /v1/chat/completions."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cairn.errors import InvalidRequest
from cairn.server.chat_translation import ChatTranslation, mark_of
from cairn.server.openai.requests import refuse_unsupported
from cairn.server.openai_responses.requests import UNSUPPORTED, FunctionChoice, FunctionTool, ResponsesRequest

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

_SAME_FIELDS = (
    *("model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "stop_token_ids", "priority"),
    *("skip_special_tokens", "include_stop_str_in_output", "structured_outputs", "cache_salt", "kv_transfer_params"),
    *("request_id", "prompt_cache_key", "chat_template_kwargs", "vllm_xargs", "mm_processor_kwargs"),
)
_ITEM_FIELDS = frozenset(
    (
        *("type", "id", "status", "role", "content", "call_id", "name", "arguments", "output", "summary"),
        "encrypted_content",
    )
)
_PART_FIELDS = frozenset(("type", "text", "refusal", "image_url", "detail", "cache_control"))
_PART_LISTS = frozenset(("content", "output", "summary"))
_TOOL_FIELDS = ("name", "description", "parameters", "strict")
_OWN_ID = re.compile(r"(msg|rs|fc|in)_([0-9a-f]{32})_[0-9]+")
"""`in`: of an input; the others are of answers."""

_LOGPROBS = "message.output_text.logprobs"


def get_response_id(item_id: str | None) -> str | None:
    """Of the response that an item of this server's belongs to; None for other ids."""
    found = _OWN_ID.fullmatch(item_id or "")
    return None if found is None else f"resp_{found[2]}"


def make_input_items(body: ResponsesRequest, response_id: str, find: Callable[[str, str], Any]) -> list[Any]:
    """The items of a body as they are stored: with ids, their content as parts, and what references refer to.

    `find`: gets the id of a reference and the field that it stands in."""
    sent: Sequence[Any] = body.input if isinstance(body.input, list) else [_user_message(body.input)]
    items = []
    for number, item in enumerate(sent):
        if item["type"] == "item_reference":
            items.append(find(item["id"], f"input[{number}].id"))
            continue
        own = _keep_known(item) | {"id": item.get("id") or f"in_{response_id.removeprefix('resp_')}_{number}"}
        if own["type"] == "message":
            _check_parts(own, f"input[{number}].content")
        if isinstance(own.get("content"), str):
            kind = "output_text" if own["role"] == "assistant" else "input_text"
            own["content"] = [{"type": kind, "text": own["content"]}]
        if own["type"] != "reasoning":
            own["status"] = own.get("status") or "completed"
        items.append(own)
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
    refused = {"user": "refusal", "assistant": "input_image"}
    for number, part in enumerate(item["content"] if isinstance(item["content"], list) else ()):
        kind, where = part["type"], f"{place}[{number}]"
        if kind == refused.get(item["role"], kind if kind in ("refusal", "input_image") else None):
            text = f"{where}: a message of the role {item['role']} can have no {kind}: leave it out"
            raise InvalidRequest(text, where)
    if not item["content"] and item["role"] != "assistant":
        raise InvalidRequest(f"{place} must not be empty", place)


def _user_message(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def to_chat(body: ResponsesRequest, history: Sequence[Any], items: Sequence[Any]) -> ChatTranslation:
    """The same as a chat. `history`: the items of the responses before it; `items`: its own, references resolved.

    Raises InvalidRequest naming the field.
    """
    refuse_unsupported(body, UNSUPPORTED)
    chat = ChatTranslation(_RENAMED)
    conversation = _Conversation(chat)
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
    fields |= _translate_tools(body) | _translate_text(body)
    if body.enable_response_messages:
        fields["return_prompt_text"] = True
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if items[-1].get("role") == "assistant" and items[-1].get("status") in ("in_progress", "incomplete"):
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
        message unless there is none before it or there are calls, and so does reasoning behind either."""
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
    user's has come behind; `images`: of outputs, for which templates have no place there, with their places."""

    chat: ChatTranslation
    answer: _Answer | None = None
    open_calls: set[str] = field(default_factory=set)
    due_calls: set[str] = field(default_factory=set)
    images: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def add(self, item: Any, place: str) -> None:
        if item["type"] == "function_call_output":
            self._close_answer()
            self._add_output(item, place)
        elif item["type"] in ("reasoning", "function_call") or item["role"] == "assistant":
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
        role = "user" if item["role"] == "user" else "system"
        content, blocks = _translate_content(item["content"], f"{place}.content")
        before = self.chat.messages[-1] if self.chat.messages else {}
        are_texts = isinstance(content, str) and isinstance(before.get("content"), str)
        if role == "system" == before.get("role") and are_texts:
            # Templates take one system message, at the beginning; clients send instructions and a developer's message.
            before["content"] += f"\n\n{content}"
            return
        self.chat.add({"role": role, "content": content}, place, blocks)

    def _add_output(self, item: Any, place: str) -> None:
        call = item["call_id"]
        if call not in self.open_calls:
            text = f"{place}.call_id: no function_call before it waits for the output of {call!r}"
            raise InvalidRequest(text, f"{place}.call_id")
        self.open_calls.discard(call)
        self.due_calls.discard(call)
        content, blocks = _translate_content(item["output"], f"{place}.output")
        if not isinstance(content, str):
            parts = list(zip(content, blocks, strict=True))
            self.images += [(part, block) for part, block in parts if part["type"] != "text"]
            texts = [(part, block) for part, block in parts if part["type"] == "text"]
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
            if item.get("encrypted_content"):
                where = f"{place}.encrypted_content"
                raise InvalidRequest(f"{where} can only be read by the server that encrypted it: leave it out", where)
            answer.reasoning += [part["text"] for part in item.get("content") or item.get("summary") or ()]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            answer.calls.append({"id": item["call_id"], "type": "function", "function": function})
            self.open_calls.add(item["call_id"])
            self.due_calls.add(item["call_id"])

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


def _translate_content(content: Any, place: str) -> tuple[Any, list[str]]:
    """A chat's content, and the place of each of its parts. One text is no list."""
    if isinstance(content, str):
        return content, []
    parts, blocks = [], [f"{place}[{number}]" for number in range(len(content))]
    for part in content:
        if part["type"] == "input_image":
            own: dict[str, Any] = {"type": "image_url", "image_url": {"url": part["image_url"]}}
        else:
            own = {"type": "text", "text": part["text"]}
        parts.append(own | mark_of(part))
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return parts[0]["text"], []
    return parts, blocks


def _translate_tools(body: ResponsesRequest) -> dict[str, Any]:
    choice = body.tool_choice
    fields: dict[str, Any] = {"tool_choice": choice}
    if body.tools:
        fields["tools"] = [_translate_tool(tool) for tool in body.tools]
    if isinstance(choice, dict):
        if choice["type"] == "function":
            fields["tool_choice"] = _name_function(choice)
        else:
            allowed = {"mode": choice["mode"], "tools": [_name_function(tool) for tool in choice["tools"]]}
            fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    return fields


def _name_function(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice["name"]}}


def _translate_tool(tool: FunctionTool) -> dict[str, Any]:
    """Its fields in the client's order: templates write them."""
    function = {name: value for name, value in tool.items() if name in _TOOL_FIELDS and value is not None}
    return {"type": "function", "function": function} | mark_of(tool)


def _translate_text(body: ResponsesRequest) -> dict[str, Any]:
    form = (body.text or {}).get("format")
    if form is None or form["type"] == "text":
        return {}
    if form["type"] == "json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": form["schema"]}}}
    return {"response_format": {"type": "json_object"}}


def describe_tools(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The tools as a response says them again."""
    return [{"type": "function"} | {name: tool.get(name) for name in _TOOL_FIELDS} for tool in body.tools or ()]
