"""A step that is out: what it needs of the host, on the device, and what it has given on its way back."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.kernels.staging import Readback, ReadbackArray, StagedArray, Staging
from cairn.runner.batch_builder import BatchBuilder, RowContent
from cairn.runner.sampler import Sampler
from cairn.runner.slots import Slots
from cairn.runner.token_logprobs import DrawnLogprobs, LogprobTensors, Scoring
from cairn.step import Logprobs, Restore, SampledToken, Save, Scored, Snapshot, StepPlan, StepResult

_NOTHING = StagedArray(np.zeros(0, np.int64), 0), StagedArray(np.zeros(0, np.int64), 0)
"""Of records that a plan has none of."""


class LaunchedStep:
    """`staging` is to be sent once everything has been staged; `bring_back` starts the only copy in the other
    direction, and `result` waits for it.

    `batch`: the plan's rows. `copies`: pages, targets and sources. `restores`, `saves`: slots and files. `snapshots`:
    rows of hidden states, and files, in the batch's order. `scorings`: of prefill rows, slot, first position, the row's
    first one in the batch, and what is asked for. `logits`: of what is drawn, once the forward pass has been made.
    """

    def __init__(self, plan: StepPlan, contents: Sequence[RowContent | None], kernels: Kernels) -> None:
        self.plan = plan
        self.logits: Tensor | None = None
        self.sampler: Sampler | None = None
        self.is_drawn = False
        self.staging = Staging()
        self._readback = Readback()
        self._tokens: ReadbackArray | None = None
        self._logprobs: DrawnLogprobs | None = None
        self._told: list[tuple[list[int], _LogprobsReadback]] = []
        self._scores: list[tuple[int, int, _LogprobsReadback]] = []
        self.copies, self.snapshots = self._copies(), _NOTHING
        self.restores, self.saves = self._slots_and_files(plan.restores), self._slots_and_files(plan.saves)
        self.batch = BatchBuilder(plan, contents, kernels, self.staging)
        host = self.batch.host
        if plan.snapshots:
            last_rows = host.cu_seqlens[host.snapshot_rows] + host.snapshot_offsets - 1
            self.snapshots = self.staging.add(last_rows.astype(np.int64)), self._files(self.batch.snapshots)
        self.sampled_slots = self.staging.add(plan.samples.slots.astype(np.int64))
        first_rows = host.cu_seqlens[len(plan.decodes) :].tolist()
        self.scorings = [
            (row.slot, row.start + 1, first, Scoring(row.score, self.staging))
            for row, first in zip(plan.prefills, first_rows, strict=False)
            if row.score is not None
        ]

    def stage_draws(self, slots: Slots, vocab_size: int) -> None:
        """This rank draws the plan's tokens."""
        samples = self.plan.samples
        if len(samples):
            admits = [slots.admit(slot) for slot in samples.slots.tolist()]
            params = [admit.sampling for admit in admits]
            self.sampler = Sampler(params, samples.positions.tolist(), vocab_size, self.staging)
            self._logprobs = DrawnLogprobs([admit.logprobs for admit in admits], self.staging)

    def add_score(self, slot: int, position: int, scored: LogprobTensors) -> None:
        """Of the tokens of the sequence in `slot` from `position` on."""
        self._scores.append((slot, position, _LogprobsReadback(scored, self._readback)))

    def bring_back(self, tokens: Tensor | None) -> None:
        """The step is through: `tokens`, int64 [samples], None where nothing is drawn, and what else was asked for go
        to the host."""
        if tokens is not None:
            self._tokens = self._readback.add(tokens)
            if self._logprobs is not None and self.logits is not None:
                found = self._logprobs.find(self.logits, tokens)
                self._told = [(rows, _LogprobsReadback(told, self._readback)) for rows, told in found]
        self.logits, self.is_drawn = None, True
        self._readback.send()

    def result(self) -> StepResult:
        """Waits for what is brought back."""
        assert self.is_drawn, f"step {self.plan.step} has not been drawn"
        self._readback.wait()
        slots = self.plan.samples.slots.tolist()
        tokens = [] if self._tokens is None else self._tokens.array.tolist()
        of_rows: list[Logprobs | None] = [None] * len(slots)
        for rows, told in self._told:
            for i, row in enumerate(rows):
                of_rows[row] = told.logprobs(slice(i, i + 1))
        return StepResult(
            self.plan.step,
            tuple(SampledToken(*each) for each in zip(slots, tokens, of_rows, strict=True)),
            tuple(Scored(slot, position, scored.logprobs()) for slot, position, scored in self._scores),
        )

    def _copies(self) -> tuple[StagedArray, StagedArray]:
        if not self.plan.copies:
            return _NOTHING
        origins: dict[int, int] = {}  # copies are one after the other in the plan, and all at once on the device
        for copy in self.plan.copies:
            origins[copy.target] = origins.get(copy.source, copy.source)
        targets, sources = np.array(list(origins.items()), np.int64).T.copy()
        return self.staging.add(targets), self.staging.add(sources)

    def _slots_and_files(self, records: Sequence[Restore | Save]) -> tuple[StagedArray, StagedArray]:
        if not records:
            return _NOTHING
        return self.staging.add(np.array([record.slot for record in records])), self._files(records)

    def _files(self, records: Sequence[Restore | Save | Snapshot]) -> StagedArray:
        return self.staging.add(np.array([record.pages for record in records], np.int64))


class _LogprobsReadback:
    """A `Logprobs` on its way."""

    def __init__(self, tensors: LogprobTensors, readback: Readback) -> None:
        self._arrays = [readback.add(tensor) for tensor in tensors]

    def logprobs(self, rows: slice = slice(None)) -> Logprobs:
        """Of some rows."""
        return Logprobs(*(fetched.array[rows] for fetched in self._arrays))
