"""The items of a response's output, as they grow: each takes the text that a chat's answer has for it."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cairn.server.openai_responses.tools import CalledTool, read_shell_action


@dataclass(slots=True)
class OutputItem:
    """An item so far. `body`: what it has from the beginning; `text`: of its part, or what its call is made with.

    `delta_event`: what its pieces are called in a stream, None where it has none there; `has_part`: whether its text is
    a part of its content.
    """

    prefix: ClassVar[str]
    delta_event: ClassVar[str | None]
    has_part: ClassVar[bool] = False

    body: dict[str, Any]
    index: int
    text: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.body["type"])

    @property
    def joined(self) -> str:
        return "".join(self.text)

    def add(self, text: str) -> str:
        """More of it; returns the piece that a stream tells."""
        self.text.append(text)
        return text

    def finish(self) -> str:
        """Nothing comes any more; returns what a stream has not told yet."""
        return ""

    def write(self, status: str) -> dict[str, Any]:
        """As it is now."""
        return self.body | self.content() | {"status": status}

    def open(self) -> dict[str, Any]:
        """As it begins."""
        return self.write("in_progress") | ({"content": []} if self.has_part else {})

    def content(self) -> dict[str, Any]:
        """What its text makes of it."""
        return {"content": [self.part()]}

    def part(self) -> dict[str, Any]:
        """The one part of its content."""
        raise NotImplementedError

    def done(self) -> dict[str, Any]:
        """The fields of the event that ends its pieces."""
        return {"text": self.joined}


@dataclass(slots=True)
class OutputMessage(OutputItem):
    """`logprobs`: of its text's tokens."""

    prefix = "msg"
    delta_event = "response.output_text"
    has_part = True

    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.joined, "annotations": [], "logprobs": self.logprobs}

    def done(self) -> dict[str, Any]:
        return {"text": self.joined, "logprobs": self.logprobs}


@dataclass(slots=True)
class OutputReasoning(OutputItem):
    """Reasoning."""

    prefix = "rs"
    delta_event = "response.reasoning_text"
    has_part = True

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.joined}


@dataclass(slots=True)
class OutputFunctionCall(OutputItem):
    """A call of a function."""

    prefix = "fc"
    delta_event = "response.function_call_arguments"

    def content(self) -> dict[str, Any]:
        return {"arguments": self.joined}

    def done(self) -> dict[str, Any]:
        return {"arguments": self.joined, "name": self.body["name"]}


@dataclass(slots=True)
class OutputCustomCall(OutputItem):
    """A call of a custom tool, whose arguments are one text, `input`."""

    prefix = "ctc"
    delta_event = "response.custom_tool_call_input"

    _input: "_InputReader" = field(default_factory=lambda: _InputReader())

    def add(self, text: str) -> str:
        piece = self._input.add(text)
        self.text.append(piece)
        return piece

    def finish(self) -> str:
        piece = self._input.finish()
        self.text.append(piece)
        return piece

    def content(self) -> dict[str, Any]:
        return {"input": self.joined}

    def done(self) -> dict[str, Any]:
        return {"input": self.joined}


@dataclass(slots=True)
class OutputShellCall(OutputItem):
    """A call of the local shell: it has no pieces in a stream."""

    prefix = "lsh"
    delta_event = None

    def content(self) -> dict[str, Any]:
        return {"action": read_shell_action(self.joined)}


def open_call(tool: CalledTool, call_id: str, index: int) -> OutputItem:
    """The item of a call that begins. It has no id yet."""
    called: dict[str, Any] = {"call_id": call_id, "name": tool.name}
    if tool.namespace is not None:
        called["namespace"] = tool.namespace
    match tool.kind:
        case "custom":
            return OutputCustomCall({"type": "custom_tool_call"} | called, index)
        case "local_shell":
            return OutputShellCall({"type": "local_shell_call", "call_id": call_id}, index)
    return OutputFunctionCall({"type": "function_call"} | called, index)


_OPENING = re.compile(r'\s{0,64}\{\s{0,64}"input"\s{0,64}:\s{0,64}"')
_MAX_OPENING = 512
_TOKEN = re.compile(r'[^"\\]+|\\[^u]|\\u[0-9a-fA-F]{4}|\\u(?=.{4})', re.DOTALL)
"""Of a string of JSON, and of one that is none: what is no escape stands for itself."""
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")


class _InputReader:
    """Reads the text `input` of an object of JSON that comes piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._held = ""
        """What has come and is not read yet."""
        self._state = "before"

    def add(self, piece: str) -> str:
        """The text that has become certain."""
        self._pieces.append(piece)
        if self._state in ("after", "other"):
            return ""
        self._held += piece
        if self._state == "before":
            opening = _OPENING.match(self._held)
            if opening is None:
                self._state = "other" if len(self._held) > _MAX_OPENING else "before"
                return ""
            self._held, self._state = self._held[opening.end() :], "within"
        end, last = 0, ""
        while token := _TOKEN.match(self._held, end):
            end, last = token.end(), token[0]
        if self._held[end : end + 1] == '"':
            self._state = "after"
        elif _HIGH.fullmatch(last):
            end -= len(last)  # the other half of the character is yet to come
        text, self._held = self._held[:end], self._held[end:]
        return _decode(text)

    def finish(self) -> str:
        """What is left at the end; all that has come, where it is no such object."""
        if self._state in ("within", "after"):
            return ""
        sent = "".join(self._pieces)
        try:
            text = json.loads(sent)["input"]
        except (ValueError, LookupError, TypeError, RecursionError):
            text = None
        if isinstance(text, str):
            return text
        return "" if sent.strip() in ("", "{", "{}") or _is_cut_opening(sent) else sent


def _is_cut_opening(sent: str) -> bool:
    return '{"input":"'.startswith("".join(sent.split()))


def _decode(text: str) -> str:
    try:
        decoded: str = json.loads(f'"{text}"', strict=False)
    except ValueError:  # an escape that JSON does not have
        return text
    return (
        decoded.encode(errors="replace").decode()
        if any("\ud800" <= character <= "\udfff" for character in decoded)
        else decoded
    )
