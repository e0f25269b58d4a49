"""placeholder"""

from dataclasses import dataclass, field
from typing import Protocol

from cairn.scheduler.request import Request
from cairn.types import Keys

MAX_DRAFT_TOKENS = 32


@dataclass(slots=True)
class SpecDecodeCounters:
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted


class Drafter(Protocol):
    def propose(self, request: Request, most: int, num_decodes: int) -> Keys: ...
    def record(self, request: Request, num_draft_tokens: int, num_accepted: int) -> None: ...
    def end(self, request: Request) -> None: ...
