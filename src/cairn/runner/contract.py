"""The doors of the runner that the engine uses; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cairn.step import StepPlan, StepResult, TokenMasks
from cairn.types import Keys


@dataclass(slots=True)
class EncoderCounters:
    """Vision encoder counts since the start. `encodes`: images that went through the encoder. `hits`: images found in
    the encoder cache. `cached_bytes`: size of the encoder cache now. `dropped`: images whose vectors were evicted from
    it, or were larger than all of it."""

    encodes: int = 0
    hits: int = 0
    cached_bytes: int = 0
    dropped: int = 0


class StepRunner(Protocol):
    """Executes plans: `cairn.runner.runner.Runner` does, alone or behind `CheckedRunner` and the ranks' runners. Steps
    are launched, sampled and collected in the order of their plans, each by its number."""

    forward_passes: int
    steps: int

    def run(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        """Launch, sample and collect one step."""
        self.launch(plan)
        self.sample(plan.step, masks or {})
        return self.collect(plan.step)

    def launch(self, plan: StepPlan) -> None:
        """Run a step up to its logits. All steps before it have been sampled."""

    def drafts(self, step: int) -> Mapping[int, Keys]:
        """By slot, what the model's head has drafted in the step that was launched last, for each row that was open."""
        return {}

    def sample(self, step: int, masks: TokenMasks) -> None:
        """Draw the tokens of the step that was launched last."""

    @property
    def is_complete(self) -> bool:
        """Whether `collect` of the oldest launched step would return at once."""
        return True

    def collect(self, step: int) -> StepResult:
        """Wait for the oldest launched step; returns its tokens. All that it writes is written then, but for what
        `settle` does."""

    def settle(self, *, has_slots: bool = True) -> None:
        """Do what the last step has left for when its tokens have been told; forget it if nobody `has_slots` any more.
        To be called before anything but a launch writes to pages, which does it itself."""
        return

    def close(self) -> None:
        """Shut down, worker processes included."""
