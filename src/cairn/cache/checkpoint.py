"""A checkpoint: a file of pages that resumes a token path at one position, and where it came from."""

from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from cairn.types import Pages

if TYPE_CHECKING:
    from cairn.cache.tree import Node

__all__ = ["Checkpoint", "Kind", "Origin"]


class Kind(StrEnum):
    """What a checkpoint was kept for. Those of kind GRID are on probation until they are hit."""

    SYSTEM_END = "system_end"
    MESSAGE_END = "message_end"
    PROMPT_END = "prompt_end"
    ANSWER_END = "answer_end"
    JUNCTION = "junction"
    BLOCK = "block"
    PREEMPTION = "preemption"
    GRID = "grid"


class Origin(Enum):
    """How the state was computed, which decides who may use it in exact mode."""

    GRID = "grid"
    """By prefill, at a multiple of 64: equal to every other computation of it, bit for bit."""
    TAIL = "tail"
    """By prefill, at another position: equal to that of a prompt ending there, but not to continue from."""
    DECODE = "decode"
    """With the help of decode steps, which round differently."""


class Checkpoint:
    """Hangs at the end of `node`; `pages` is its file. `maker` is the request that computed it.

    `version` is that of its newest entry in the eviction queue. `hits` and `last_used` (a tick) are for eviction.
    """

    __slots__ = ("hits", "kind", "last_used", "maker", "node", "origin", "pages", "version")

    def __init__(self, node: "Node", pages: Pages, kind: Kind, origin: Origin, maker: str) -> None:
        self.node = node
        self.pages = pages
        self.kind = kind
        self.origin = origin
        self.maker = maker
        self.hits = 0
        self.last_used = 0
        self.version = 0

    @property
    def position(self) -> int:
        return self.node.end
