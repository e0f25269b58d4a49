"""Results of steps, of records of each token."""

from collections.abc import Sequence

import numpy as np

from cairn.step import SampledToken, Scored, StepResult

MAX_SLOTS = 1 << 12
"""Of a runner without memory."""


def step_result(
    step: int, sampled: Sequence[SampledToken] = (), scored: Sequence[Scored] = (), advanced: Sequence[bool] = ()
) -> StepResult:
    """The result of these records."""
    return StepResult(
        step,
        np.array([one.slot for one in sampled], np.int32),
        np.array([one.token for one in sampled], np.int64),
        {one.slot: one.logprobs for one in sampled if one.logprobs is not None},
        tuple(scored),
        np.array(advanced, np.bool_),
    )


def result_records(result: StepResult) -> tuple[object, ...]:
    """What can be compared."""
    return result.step, result.sampled, result.scored, result.advanced.tolist()
