"""A chat's answer as a message of Anthropic's Messages API, whole or as its events."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from cairn.engine.contract import GenerateOutput
from cairn.errors import RequestError
from cairn.http.error_responses import encode_anthropic_error
from cairn.server.openai.response_writer import ChatWriter, Choice, count_cached_tokens, encode_event

_STOP_REASONS = MappingProxyType(
    {"length": "max_tokens", "tool_calls": "tool_use", **dict.fromkeys(("stop", "abort", "repetition"), "end_turn")}
)


Event: TypeAlias = tuple[str, dict[str, Any]]
"""The name of a server-sent event, and its fields."""

_TEXT_FIELDS = MappingProxyType({"text": "text", "thinking": "thinking", "tool_use": "input"})


@dataclass(slots=True)
class MessagesWriter(ChatWriter):
    """POST /v1/messages: one answer.

    `seal`: encrypts reasoning, for a client that sends it back without its text; `shows_thinking`: whether the text is
    in the answer. `blocks`: its content so far, and `pieces` the text of each, which for a tool call is JSON;
    `is_open`: whether the last block may grow; `events`: of a stream, not sent yet.
    """

    seal: Callable[[str], str] = field(kw_only=True)
    shows_thinking: bool = field(kw_only=True)
    blocks: list[dict[str, Any]] = field(init=False, default_factory=list)
    pieces: list[list[str]] = field(init=False, default_factory=list)
    is_open: bool = field(init=False, default=False)
    events: list[Event] = field(init=False, default_factory=list)

    def add(self, prompt: int, output: GenerateOutput) -> Choice:
        choice = ChatWriter.add(self, prompt, output)
        choice.message = message = choice.message or self.new_message()
        last = output.finish_reason is not None
        for delta in message.add_in_order(output.text, last=last, truncated=choice.is_truncated):
            self._add_delta(delta)
        return choice

    def _add_delta(self, delta: dict[str, Any]) -> None:
        if text := delta.get("reasoning"):
            self._open_block({"type": "thinking", "thinking": "", "signature": ""})
            self._add_to_block({"type": "thinking_delta", "thinking": text}, text, is_sent=self.shows_thinking)
        if text := delta.get("content"):
            self._open_block({"type": "text", "text": ""})
            self._add_to_block({"type": "text_delta", "text": text}, text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                begun = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                self._open_block(begun)
            if text := call["function"]["arguments"]:
                self._add_to_block({"type": "input_json_delta", "partial_json": text}, text)

    def write_response(self) -> dict[str, Any]:
        self._close_block()
        content = []
        for block, pieces in zip(self.blocks, self.pieces, strict=True):
            text = "".join(pieces) if self.shows_thinking or block["type"] != "thinking" else ""
            value = _decode_arguments(text) if block["type"] == "tool_use" else text
            content.append(block | {_TEXT_FIELDS[block["type"]]: value})
        params = self.kv_transfer_params
        return self._envelope_message(content) | {
            **self._ending(),
            "usage": self.usage(),
            "kv_transfer_params": None if params is None else msgspec.Raw(params),
            "cairn": self.cache_use(),
        }

    def usage(self) -> dict[str, Any]:
        """As Anthropic counts: what was read from the cache, and what lies between it and the last marked place, are no
        part of `input_tokens`."""
        prompt, choice = self.prompts[0], self.choices[0]
        read = count_cached_tokens(self.caches[0])
        marked = max((place.position for place in prompt.boundaries if place.retain_seconds), default=0)
        created = 0 if self.caches[0] is None else max(0, marked - read)
        return {
            "input_tokens": len(prompt.token_ids) - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": len(choice.token_ids),
        }

    def opening_events(self) -> list[bytes]:
        ending = {"stop_reason": None, "stop_sequence": None, "usage": self.usage()}
        return [_encode("message_start", message=self._envelope_message([]) | ending), _encode("ping")]

    def output_events(self, prompt: int, output: GenerateOutput) -> list[bytes]:
        self.add(prompt, output)
        return self._take_events()

    def closing_events(self) -> list[bytes]:
        params = self.kv_transfer_params
        handed = {} if params is None else {"kv_transfer_params": msgspec.Raw(params)}
        self._close_block()
        return [
            *self._take_events(),
            _encode("message_delta", delta=self._ending(), usage=self.usage(), cairn=self.cache_use(), **handed),
            _encode("message_stop"),
        ]

    def _take_events(self) -> list[bytes]:
        events, self.events = self.events, []
        return [_encode(name, **fields) for name, fields in events]

    def error_events(self, error: RequestError) -> list[bytes]:
        return [encode_event(encode_anthropic_error(error, self.id), "error")]

    def _open_block(self, block: dict[str, Any]) -> None:
        """Begin a block, unless the open one is of this type and no tool call."""
        if self.is_open and block["type"] == self.blocks[-1]["type"] != "tool_use":
            return
        self._close_block()
        self.is_open = True
        self.blocks.append(block)
        self.pieces.append([])
        self._note("content_block_start", index=len(self.blocks) - 1, content_block=dict(block))

    def _add_to_block(self, delta: dict[str, Any], text: str, *, is_sent: bool = True) -> None:
        self.pieces[-1].append(text)
        if is_sent:
            self._note("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def _close_block(self) -> None:
        """Nothing more comes for the last block, if it is open."""
        if not self.is_open:
            return
        self.is_open = False
        block, index = self.blocks[-1], len(self.blocks) - 1
        if block["type"] == "thinking":
            block["signature"] = self.seal("".join(self.pieces[-1]))
            self._note(
                "content_block_delta", index=index, delta={"type": "signature_delta", "signature": block["signature"]}
            )
        self._note("content_block_stop", index=index)

    def _note(self, name: str, **fields: Any) -> None:
        if self.body.stream:
            self.events.append((name, fields))

    def _envelope_message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def _ending(self) -> dict[str, Any]:
        choice = self.choices[0]
        reason = choice.finish_reason if choice.message is None else choice.message.finish_reason(choice.finish_reason)
        if reason == "stop" and isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        return {"stop_reason": _STOP_REASONS.get(reason or "stop"), "stop_sequence": None}


_CUT = "partial_json"


def _decode_arguments(text: str) -> dict[str, Any]:
    """A call that was cut off by `max_tokens` is no JSON: its text is kept where a client can see it."""
    try:
        arguments = msgspec.json.decode(text) if text else None
    except (msgspec.DecodeError, RecursionError):
        return {_CUT: text}
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {_CUT: text}


def read_arguments(sent: dict[str, Any] | None) -> tuple[Any, bool]:
    """The arguments of a call that is sent back, and whether it was cut off: then they are the text that there was."""
    is_cut = sent is not None and sent.keys() == {_CUT} and isinstance(sent[_CUT], str)
    return (sent[_CUT] if is_cut and sent is not None else sent or {}), is_cut


def _encode(name: str, **fields: Any) -> bytes:
    return encode_event(msgspec.json.encode({"type": name} | fields), name)
