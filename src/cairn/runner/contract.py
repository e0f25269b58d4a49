"""What carries plans out."""

from typing import Protocol

from cairn.step import StepPlan, StepResult, TokenMasks

__all__ = ["StepRunner"]


class StepRunner(Protocol):
    """What carries plans out: `cairn.runner.runner.Runner`, or `cairn.runner.simulated.SimulatedRunner`. Steps are
    launched, drawn and collected in the order of their plans, each by its number."""

    forward_passes: int
    steps: int

    def run(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        """A step from its launch to its end."""
        self.launch(plan)
        self.draw(plan.step, masks or {})
        return self.collect(plan.step)

    def launch(self, plan: StepPlan) -> None:
        """Begin a step, up to its logits. All before it have been drawn."""
        ...

    def draw(self, step: int, masks: TokenMasks) -> None:
        """Draw the tokens of the step that was launched last."""
        ...

    def collect(self, step: int) -> StepResult:
        """Wait for the oldest step that is out: its tokens are known, and all that it writes is written."""
        ...

    def close(self) -> None:
        """The end: whatever else carries plans out ends, too."""
        ...
