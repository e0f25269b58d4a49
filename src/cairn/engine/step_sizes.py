"""How many tokens steps have: what `vllm:iteration_tokens_total` is made of."""

from bisect import bisect_left

import msgspec

from cairn.engine.contract import STEP_SIZES, EngineStats
from cairn.step import StepPlan


def tokens_of(plan: StepPlan) -> int:
    """Tokens that go through the model, and those that are drawn without."""
    rows = [*plan.decodes.slots.tolist(), *(row.slot for row in plan.prefills)]
    num_drawn_only = len(set(plan.samples.slots.tolist()).difference(rows))
    return len(plan.decodes) + sum(len(row.tokens) for row in plan.prefills) + num_drawn_only


class StepSizes:
    """Counts steps by their size; empty ones are none."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_SIZES) + 1)
        self._tokens = 0

    def add(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self._counts[bisect_left(STEP_SIZES, num_tokens)] += 1
            self._tokens += num_tokens

    def told(self, stats: EngineStats) -> EngineStats:
        """The same counters with these among them."""
        return msgspec.structs.replace(stats, step_tokens=self._tokens, step_sizes=list(self._counts))
