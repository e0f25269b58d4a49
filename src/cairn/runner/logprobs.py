"""Log-probabilities of sampled tokens and of prompt tokens, and of the top k beside each."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from cairn.kernels.sampling.logprobs import ComputeLogprobs, LogprobTensors, compute_logprobs
from cairn.kernels.staging import Staging
from cairn.step import Score

MAX_ROWS = 64
"""Rows whose log-probabilities are computed together: with a vocabulary of 250,000 they take 64 MB."""


class SampledLogprobs:
    """Log-probabilities of the tokens that a step samples. Rows with the same number of other tokens go together."""

    def __init__(
        self,
        num_top: Sequence[int | None],
        staging: Staging,
        token_ids: Sequence[tuple[int, ...]] = (),
        compute: ComputeLogprobs = compute_logprobs,
    ) -> None:
        """`num_top`: top tokens to report for each row; None: no logprobs. `token_ids`: for each row the tokens to
        report instead, empty for the top ones; may be left out where no row has any. `compute`: the
        backend's function."""
        self._compute = compute
        self._groups = []
        groups: dict[tuple[bool, int], list[int]] = {}
        for row, number in enumerate(num_top):
            if number is not None:
                listed = token_ids[row] if token_ids else ()
                groups.setdefault((bool(listed), len(listed) or number), []).append(row)
        for (is_listed, number), group in groups.items():
            for start in range(0, len(group), MAX_ROWS):
                rows = group[start : start + MAX_ROWS]
                tokens = staging.add(np.array([token_ids[row] for row in rows], np.int64)) if is_listed else None
                self._groups.append((number, rows, staging.add(np.array(rows)), tokens))

    def compute(self, logits: Tensor, tokens: Tensor) -> list[tuple[list[int], LogprobTensors]]:
        """Groups of rows and their logprobs, from float32 [n, vocab] and the sampled tokens, int64 [n]; to be called
        once the staging has been sent."""
        return [
            (
                rows,
                self._compute(
                    logits, tokens[index.tensor], number, None if listed is None else listed.tensor, index.tensor
                ),
            )
            for number, rows, index, listed in self._groups
        ]


class PromptLogprobs:
    """Log-probabilities of the prompt tokens that follow the tokens of one prefill row."""

    def __init__(self, score: Score, staging: Staging, compute: ComputeLogprobs = compute_logprobs) -> None:
        self._compute = compute
        self._num_top = score.top
        self._targets = staging.add(score.targets.astype(np.int64))

    def compute(self, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Iterator[LogprobTensors]:
        """The logprobs of `MAX_ROWS` targets at a time; to be called once the staging has been sent. `hidden`: [rows,
        hidden], of the row's tokens from the first one on. `logits`: the model's output layer."""
        targets = self._targets.tensor
        for start in range(0, len(targets), MAX_ROWS):
            part = slice(start, start + MAX_ROWS)
            yield self._compute(logits(hidden[: len(targets)][part]), targets[part], self._num_top)
