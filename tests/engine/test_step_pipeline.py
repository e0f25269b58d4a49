"""When the parts of steps are done: with one step out or several, with draws that wait and draws that do not."""

from collections import deque

import pytest

from cairn.engine.step_pipeline import StepPipeline
from cairn.step import StepPlan, StepResult


class Plans:
    """A scheduler that only counts. The draws of the steps in `waiting` need what the ones before them gave."""

    def __init__(self, num_out: int, waiting: set[int], num_steps: int, log: list[str]) -> None:
        self._num_out, self._waiting, self._num_steps, self._log = num_out, waiting, num_steps, log
        self._flying: deque[int] = deque()
        self._step = 0

    @property
    def can_plan(self) -> bool:
        return self._step < self._num_steps and len(self._flying) < self._num_out

    def plan(self) -> StepPlan:
        self._step += 1
        self._flying.append(self._step)
        return StepPlan(self._step)

    def masks(self) -> dict | None:
        return None if self._flying[-1] in self._waiting and len(self._flying) > 1 else {0: self._flying[-1]}

    def apply(self, result: StepResult) -> list:
        assert result.step == self._flying.popleft()
        self._log.append(f"apply {result.step}")
        return [result.step]


class Runs:
    """A runner that takes down what it is asked for."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def launch(self, plan: StepPlan) -> None:
        self._log.append(f"launch {plan.step}")

    def sample(self, step: int, masks: dict) -> None:
        assert masks == {0: step}
        self._log.append(f"sample {step}")

    def collect(self, step: int) -> StepResult:
        self._log.append(f"collect {step}")
        return StepResult(step)


def parts_of(num_out: int, waiting: set[int] = frozenset(), num_steps: int = 4) -> list[str]:
    log: list[str] = []
    pipeline = StepPipeline(Plans(num_out, waiting, num_steps, log), Runs(log))
    for step in range(1, num_steps + 1):
        while pipeline.can_launch:
            pipeline.launch()
        assert pipeline.is_busy and pipeline.collect() == [step]
    assert not pipeline.is_busy and not pipeline.can_launch
    return log


@pytest.mark.parametrize("waiting", [set(), {1, 2, 3, 4}])
def test_one_step_out_is_one_after_the_other(waiting):
    wanted = [f"{part} {step}" for step in range(1, 5) for part in ("launch", "sample", "collect", "apply")]
    assert parts_of(1, waiting) == wanted


def test_with_two_out_the_next_is_launched_before_this_one_is_collected():
    assert parts_of(2)[:8] == [
        *("launch 1", "sample 1", "launch 2", "sample 2", "collect 1", "apply 1", "launch 3", "sample 3"),
    ]


@pytest.mark.parametrize("num_out", [2, 3])
def test_a_draw_that_needs_what_was_drawn_waits_until_it_is_applied(num_out):
    log = parts_of(num_out, waiting={3})
    at = {part: place for place, part in enumerate(log)}
    assert at["launch 3"] < at["apply 2"] < at["sample 3"] < at["launch 4"]
    assert at["sample 2"] < at["collect 1"]


@pytest.mark.parametrize("num_out", [1, 2, 3, 4])
@pytest.mark.parametrize("waiting", [set(), {2}, {1, 4}, {1, 2, 3, 4}])
def test_no_step_is_launched_before_the_ones_before_it_are_drawn_or_collected_before_it_is_drawn(num_out, waiting):
    at = {part: place for place, part in enumerate(parts_of(num_out, waiting))}
    for step in range(1, 5):
        assert at[f"launch {step}"] < at[f"sample {step}"] < at[f"collect {step}"] < at[f"apply {step}"]
        if step > 1:
            assert at[f"sample {step - 1}"] < at[f"launch {step}"]
