"""What parsers of answers take and give: text in pieces of any size, and what of it is content, reasoning or a call."""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the client's user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model has written for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The answer's call number `index`, from 0, is of the tool `name`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of that call's arguments: all pieces together are a JSON object, unless the answer is cut off in it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """That call is complete. A call without its end was cut off."""

    index: int


Event: TypeAlias = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd

Tools: TypeAlias = dict[str, dict[str, Any]]
"""A tool's name -> the JSON schema of its parameters, empty where it has none."""


class OutputParser(Protocol):
    """Takes one answer apart. However its text is cut into pieces, the events say the same.

    No text raises, and none is lost: what is no markup, or is wrong markup, comes out as content. Only line breaks next
    to markup are left out, and what an answer that is cut off has of the mark that closes a complete call, or of a call
    whose name is not there yet. What is held back is bounded.
    """

    @property
    def held(self) -> int:
        """Characters that have come in and are not told yet."""
        ...

    def push(self, text: str) -> list[Event]: ...

    def finish(self, *, cut_off: bool = False) -> list[Event]:
        """What is left when the answer ends. Nothing may be pushed afterwards. `cut_off`: it did not end by itself: a
        call that has no name yet behind its mark is nothing then; the beginning of a mark is content still."""
        ...
