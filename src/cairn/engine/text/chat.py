"""A chat on its way to the template: messages as templates expect them, and how they are marked.

A marked copy has a character of its own at the start and at the end of each message's text, so that one rendering shows
where all of them have come to stand.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cairn.engine.contract import SYSTEM_ROLES, Breakpoint, Pixels, TemplateValue
from cairn.errors import InvalidRequest

Message = dict[str, Any]

_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD
"""The private use plane A of Unicode: no text has a reason to hold any of it, and no template reads it."""
_ANY_MARK = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")


@dataclass(frozen=True, slots=True)
class Chat:
    """All that a template is given. `messages` are in the form that `plain` makes; `chat_template`: the template that
    is meant, None for the checkpoint's."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, TemplateValue] = field(default_factory=dict)
    continue_final_message: bool = False
    chat_template: str | None = None

    def beginning(self, count: int) -> "Chat":
        """The first messages alone, with nothing after them."""
        return self.of(self.messages[:count])

    def of(self, messages: tuple[Message, ...]) -> "Chat":
        """Other messages under the same settings, all of them ended, and nothing after them."""
        return replace(self, messages=messages, add_generation_prompt=False, continue_final_message=False)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a mark stands for: `message` begins, or ends, or its part `part` ends there. `space`: the white space
    between an end and the true end of the text, which some templates cut off."""

    message: int
    place: str
    part: int | None = None
    space: str = ""


def first_turn(messages: Sequence[Message]) -> int:
    """The index of the first message that is not a system message."""
    return next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))


# -- the form that templates expect ------------------------------------------------------------------------------------


def plain(messages: Sequence[Message], takes_parts: Callable[[str], bool]) -> tuple[Message, ...]:
    """Messages as templates expect them: text alone as one string, unless the template takes the parts of this role's
    content, and tool call arguments as objects. Raises InvalidRequest where there are no messages."""
    if not messages:
        raise InvalidRequest("messages must not be empty", "messages")
    return tuple(_plain(message, takes_parts) for message in messages)


def _plain(message: Message, takes_parts: Callable[[str], bool]) -> Message:
    content = message.get("content") or ""
    if not isinstance(content, str):
        is_text = all(part["type"] == "text" for part in content)
        content = [part for part in content if part["type"] != "text" or part["text"]]
        if is_text and (len(content) < 2 or not takes_parts(message["role"])):
            content = text_of(content)
        else:  # images lose their pixels
            content = [{"type": "image"} if part["type"] == "image" else part for part in content]
    plain = {**message, "content": content}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def text_of(content: str | list[Message]) -> str:
    """The texts of a content, one after the other."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _plain_call(call: Message) -> Message:
    """OpenAI sends arguments as a string of JSON; templates write them out themselves, from an object. What is none,
    as of a call that was cut off, has no arguments."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}


def pictures(messages: Sequence[Message]) -> list[tuple[str, Pixels]]:
    """The images of all messages, in order, each after its place."""
    images = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] == "image":
                images.append((f"messages[{index}].content[{number}]", part["image"]))
    return images


# -- marks -------------------------------------------------------------------------------------------------------------


def marked(messages: Sequence[Message], breakpoints: Sequence[Breakpoint]) -> tuple[list[Message], dict[str, Mark]]:
    """`messages`, as the client sent them, with marks in their texts (in the form that `plain` takes), and what each
    mark stands for.

    An assistant's text gets none at its start: templates look for the reasoning there.
    """
    marking = _Marking()
    named = {(place.message, place.part) for place in breakpoints}
    copies = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
        else:
            parts = list(content or ())
        for number, part in enumerate(parts):
            if not _has_text(part):
                continue
            start = Mark(index, "start") if number == 0 and message["role"] != "assistant" else None
            end = Mark(index, "end") if number + 1 == len(parts) else None
            if end is None and (index, number) in named and not _has_text(parts[number + 1]):
                end = Mark(index, "part", number)
            text = marking.mark(part["text"], start, end)
            if number and (index, number - 1) in named:
                # after what joins them, which may be one token with the end of the part before
                text = marking.next(Mark(index, "part", number - 1)) + text
            parts[number] = {**part, "text": text}
        copies.append({**message, "content": parts[0]["text"] if isinstance(content, str) else parts})
    return copies, marking.marks


class _Marking:
    """Hands out marks, each of them once."""

    def __init__(self) -> None:
        self.marks: dict[str, Mark] = {}

    def mark(self, text: str, start: Mark | None, end: Mark | None) -> str:
        """The text with marks within the white space around it, which a template may cut off."""
        lead = len(text) - len(text.lstrip())
        bare = text.strip()
        space = text[lead + len(bare) :]
        before = "" if start is None else self.next(start)
        after = "" if end is None else self.next(replace(end, space=space))
        return text[:lead] + before + bare + after + space

    def next(self, what: Mark) -> str:
        """A character that stands for `what`; none when there are no more."""
        if _FIRST_MARK + len(self.marks) > _LAST_MARK:
            return ""
        character = chr(_FIRST_MARK + len(self.marks))
        self.marks[character] = what
        return character


def _has_text(part: Message) -> bool:
    return part["type"] == "text" and bool(part["text"].strip())


def unmarked(text: str) -> tuple[str, dict[str, list[int]]]:
    """The text without marks, and where in it each of them has stood."""
    pieces: list[str] = []
    marks: dict[str, list[int]] = {}
    at = 0
    for number, match in enumerate(_ANY_MARK.finditer(text)):
        pieces.append(text[at : match.start()])
        marks.setdefault(match[0], []).append(match.start() - number)
        at = match.end()
    return "".join([*pieces, text[at:]]), marks


def behind_last_mark(text: str) -> str | None:
    """What follows the last mark in `text`; None when there is none."""
    for place in range(len(text) - 1, -1, -1):
        if _FIRST_MARK <= ord(text[place]) <= _LAST_MARK:
            return text[place + 1 :]
    return None
