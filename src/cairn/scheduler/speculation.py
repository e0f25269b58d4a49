"""Speculative decoding as the scheduler sees it: what was asked for, who drafts, and the counts.

A drafter proposes tokens that may follow; a step verifies them, all at once; those that the model would have drawn
itself are accepted.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from cairn.errors import ConfigError
from cairn.types import Keys

if TYPE_CHECKING:  # settings need no request, and start sooner without
    from cairn.scheduler.request import Request

MAX_DRAFT_TOKENS = 32
"""Most tokens that one verification can have beside the one that is known."""

MAX_LOOKUP_TOKENS = 64
"""Longest end of a sequence that is looked up."""


@dataclass(slots=True)
class SpecDecodeCounters:
    """Since the start. `num_drafts`: verifications. `accepted_per_pos`: how often the draft at each position was
    accepted, shape [MAX_DRAFT_TOKENS]."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count a verification of `num_draft_tokens`, the first `num_accepted` of which were accepted."""
        assert 0 <= num_accepted <= num_draft_tokens <= MAX_DRAFT_TOKENS, f"{num_accepted} of {num_draft_tokens}"
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_pos[position] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What --speculative-config asks for, in vLLM's words.

    `method`: `ngram` looks the sequence's end up in the sequence itself, `suffix` also in its prediction and in recent
    answers; `mtp` has the checkpoint's own head draft; `auto` is what pays on the device; `none` drafts nothing.
    `num_speculative_tokens`: most drafts of one verification. `prompt_lookup_min`, `prompt_lookup_max`: tokens of the
    end that is looked up.
    """

    method: Literal["auto", "mtp", "ngram", "suffix", "none"] = "auto"
    num_speculative_tokens: int = 31
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 32

    def __post_init__(self) -> None:
        if self.method not in ("auto", "mtp", "ngram", "suffix", "none"):
            raise _refusal("method", f"must be auto, mtp, ngram, suffix or none, not {self.method!r}")
        for name, most in (
            ("num_speculative_tokens", MAX_DRAFT_TOKENS),
            ("prompt_lookup_min", MAX_LOOKUP_TOKENS),
            ("prompt_lookup_max", MAX_LOOKUP_TOKENS),
        ):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise _refusal(name, f"must be 1 to {most}, not {value}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            text = f"must be at most prompt_lookup_max, which is {self.prompt_lookup_max}, not {self.prompt_lookup_min}"
            raise _refusal("prompt_lookup_min", text)


def _refusal(name: str, text: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {name}: {text}")


class Drafter(Protocol):
    """Proposes tokens, and learns from what becomes of them. Used by the scheduler's thread alone. `max_decodes`: in a
    step with more sequences that decode it is not asked."""

    max_decodes: int

    def propose(self, request: "Request", most: int, num_decodes: int) -> Keys:
        """Tokens that may follow the request's prompt and output, int64 [n] with n <= `most`, or DRAFTED for each; none
        where drafting does not pay. `num_decodes`: sequences that decode in this step."""

    def idle_tokens(self, request: "Request") -> int:
        """Of a request that nothing was proposed for just now: before it has so many tokens more it need not be asked
        again in the same company; 0 where that is not known."""

    def record(self, request: "Request", num_draft_tokens: int, num_accepted: int) -> None:
        """Learn that of `num_draft_tokens` that were verified the first `num_accepted` were accepted."""

    def record_step(self, num_decodes: int, num_draft_tokens: int, seconds: float, has_folds: bool = False) -> None:
        """Learn that a step of so many sequences that decode, and of nothing else, has taken so long with so many
        drafts, and perhaps the folds of those before."""

    def end(self, request: "Request") -> None:
        """Forget a request that has ended; others may profit from its answer."""
