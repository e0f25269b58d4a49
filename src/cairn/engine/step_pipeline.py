"""From plan to progress: which of a step's parts is done when, with one step out at a time or several.

    plan N+1    launch N+1    collect N    apply N    sample N+1  plan N+2    launch N+2    collect N+1    ...

A step is launched when all before it are sampled: it reads on the device what they sampled. Its own sampling follows at
once, unless masks or histories have to be made of the tokens of steps that are still out: then it comes when those are
applied.
"""

from collections import deque

from cairn.runner.contract import StepRunner
from cairn.scheduler.scheduler import Progress, Scheduler
from cairn.step import StepPlan

__all__ = ["StepPipeline"]


class StepPipeline:
    """Turns a scheduler's plans into its progress. As many steps are out as the scheduler allows."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._out: deque[int] = deque()
        self._unsampled: StepPlan | None = None

    @property
    def can_launch(self) -> bool:
        return self._scheduler.can_plan and self._unsampled is None

    @property
    def is_busy(self) -> bool:
        """Whether a step is out."""
        return bool(self._out)

    def launch(self) -> StepPlan:
        """Plan the next step and send it out."""
        plan = self._scheduler.plan()
        self._runner.launch(plan)
        self._out.append(plan.step)
        self._unsampled = plan
        self._sample()
        return plan

    def collect(self) -> list[Progress]:
        """The end of the oldest step that is out, one at least: what came of it."""
        progress = self._scheduler.apply(self._runner.collect(self._out.popleft()))
        self._sample()
        return progress

    def _sample(self) -> None:
        plan = self._unsampled
        if plan is None:
            return
        scheduler, runner = self._scheduler, self._runner
        masks = scheduler.masks(runner.drafts(plan.step)) if plan.is_open else scheduler.masks()
        if masks is not None:
            runner.sample(plan.step, masks)
            self._unsampled = None
