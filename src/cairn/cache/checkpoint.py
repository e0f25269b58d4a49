"""What a checkpoint was kept for, how its state was computed, and by what kind of request."""

from dataclasses import dataclass
from enum import Enum, StrEnum

__all__ = ["NO_LINEAGE", "Kind", "Lineage", "Origin"]


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
    OFFSET = "offset"
    """Where, measured from its end, prompts before it were left by later ones."""
    GRID = "grid"

    on_probation: bool
    """Made from plentifully free pages or not at all, and the first to go until it is hit."""
    number: int
    """Its place among the kinds."""

    def __init__(self, value: str) -> None:
        # looked at some fifty times a request, so they are worked out once
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


@dataclass(frozen=True, slots=True)
class Lineage:
    """What is known of the request that makes a checkpoint. `turn`: how many requests in a row went on from where the
    one before had ended, up to 2. `new_tokens`: tokens of its prompt that were never seen before."""

    turn: int = 0
    new_tokens: int = 0


NO_LINEAGE = Lineage()
