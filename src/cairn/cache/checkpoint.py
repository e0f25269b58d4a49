"""What a checkpoint was kept for, how its state was computed, and by what kind of request."""

from dataclasses import dataclass
from enum import Enum, StrEnum

from cairn.cache.hazard import Watched

__all__ = ["Kind", "Lineage", "Origin"]


class Kind(StrEnum):
    """What a checkpoint was kept for."""

    SYSTEM_END = "system_end"
    MESSAGE_END = "message_end"
    """The end of the last message before the generation suffix."""
    IMAGE_END = "image_end"
    """The end of the last image."""
    INNER_END = "inner_end"
    """The end of a message or an image that is not the last."""
    BREAKPOINT = "breakpoint"
    """Where a client has asked for it."""
    PROMPT_END = "prompt_end"
    ANSWER_END = "answer_end"
    JUNCTION = "junction"
    BLOCK = "block"
    PREEMPTION = "preemption"
    GRID = "grid"

    on_probation: bool
    """Nothing says that prompts diverge there: until it is hit, it is worth what is expected of its place."""
    number: int
    """Its place among the kinds."""

    def __init__(self, value: str) -> None:
        # looked at some fifty times a request, so it is worked out once
        self.on_probation = value in ("grid", "inner_end")
        self.number = len(type(self).__members__)


class Origin(Enum):
    """How the state was computed, which decides who may use it in exact mode."""

    GRID = "grid"
    """By prefill, at a multiple of 64: equal to every other computation of it, bit for bit."""
    TAIL = "tail"
    """By prefill, at another position: equal to that of a prompt ending there, but not to continue from."""
    DECODE = "decode"
    """With the help of decode steps, which round differently."""


@dataclass(slots=True, eq=False)
class Lineage(Watched):
    """What is known of the request that makes a checkpoint, and of the path that it adds: tokens `start` to `end` of
    its prompt were never seen before. `turn`: how many requests in a row went on from where the one before had ended,
    up to 2. `forked`: it begins inside the path of an earlier request. `message_end`: where the prompt's last message
    ends, as far as that is known, and otherwise the prompt: its answer comes after that. `awaits_tools`: the
    answer was a call.

    `visits`: later requests that left the path at a place that was not known for that, each of which is a use of it.
    """

    turn: int = 0
    start: int = 0
    end: int = 0
    forked: bool = False
    message_end: int = 0
    awaits_tools: bool = False
    visits: int = 0

    @property
    def new_tokens(self) -> int:
        return self.end - self.start
