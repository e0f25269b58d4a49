"""All ranks of a model as threads of one process, behind the face of one runner."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from cairn.errors import EngineDead
from cairn.runner.contract import StepRunner
from cairn.step import StepPlan, StepResult, TokenMasks
from cairn.types import Keys
from doubles.step_results import result_records

__all__ = ["RankThreads"]


class RankThreads(StepRunner):
    """Gives every plan to all ranks at once; their communicators are those of one `thread_ranks`.

    `runners`: in rank order. Whatever a rank raises comes out of the call, rank 0's first. After an error that one rank
    alone had, the others give up when their communicator's time is over.
    """

    def __init__(self, runners: Sequence[StepRunner]) -> None:
        self.runners = tuple(runners)
        self.forward_passes = self.steps = 0
        self._threads = ThreadPoolExecutor(len(self.runners), thread_name_prefix="cairn-rank")

    def launch(self, plan: StepPlan) -> None:
        self._on_all(lambda runner: runner.launch(plan))

    def drafts(self, step: int) -> Mapping[int, Keys]:
        """Raises EngineDead when the ranks' heads have drafted different tokens, which would be a bug of cairn's."""
        made = self._on_all(lambda runner: runner.drafts(step))
        plain = [{slot: drafts.tolist() for slot, drafts in each.items()} for each in made]
        if any(each != plain[0] for each in plain):
            raise EngineDead(f"step {step}: the ranks' heads have drafted different tokens: {plain}")
        drafts: Mapping[int, Keys] = made[0]
        return drafts

    def sample(self, step: int, masks: TokenMasks) -> None:
        self._on_all(lambda runner: runner.sample(step, masks if runner is self.runners[0] else {}))

    def collect(self, step: int) -> StepResult:
        """Raises EngineDead when the ranks' results differ, which would be a bug of cairn's."""
        results = self._on_all(lambda runner: runner.collect(step))
        if any(result_records(result) != result_records(results[0]) for result in results):
            raise EngineDead(f"step {step}: the ranks have drawn different tokens: {results}")
        self.forward_passes, self.steps = self.runners[0].forward_passes, self.runners[0].steps
        return results[0]

    def _on_all(self, call: Callable[[StepRunner], Any]) -> list[Any]:
        futures = [self._threads.submit(call, runner) for runner in self.runners]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()
