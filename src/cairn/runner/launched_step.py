"""A launched step: its inputs, staged in one copy to the device, and its outputs, read back in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.kernels.sampling.contract import Sampler
from cairn.kernels.sampling.logprobs import LogprobTensors
from cairn.kernels.staging import Readback, ReadbackArray, StagedArray, Staging, StepBuffers
from cairn.runner.batch_builder import BatchBuilder
from cairn.runner.decode_graphs import DecodeGraphs, PassShape
from cairn.runner.logprobs import PromptLogprobs, SampledLogprobs
from cairn.runner.verification import FoldBatch, FoldPiece, KeptInputs, parts_of_folds
from cairn.runner.vision import MultimodalInputs
from cairn.step import Logprobs, PageCopy, Restore, Save, Scored, Snapshot, StepPlan, StepResult, VerifiedTokens

_EMPTY = StagedArray(np.zeros(0, np.int64)), StagedArray(np.zeros(0, np.int64))


class StepInputs:
    """The arrays of a plan, to be read once `staging` has been sent.

    `batch`: the plan's rows, unless they go through a CUDA graph: then `graph` has its shape and what it is given.
    `copies`: target and source pages, in groups that are made one after the other. `restores`, `saves`: slots and
    state pages. `folds`: None where there are none, and where a graph does them: `fold_parts`, each with slots and
    state pages of what is saved after it.
    `snapshots`: rows of hidden states and state pages, by row and position; after a graph slots and state pages, as of
    `saves`. `sampled_slots`: of the plan's samples. `continuing_slots`: of its decodes, if one of them continues with
    a token that only the device knows.
    `prompt_logprobs`: for each prefill row that wants them the slot, the position of the first target, the row's first
    token in the batch, and the computation.
    """

    def __init__(
        self,
        plan: StepPlan,
        inputs: Sequence[MultimodalInputs | None],
        kernels: Kernels,
        buffers: StepBuffers,
        graphs: DecodeGraphs,
        kept: KeptInputs | None = None,
        *,
        continues: bool,
    ) -> None:
        """`inputs`: of each row, in their order, None for a row of text alone; empty where all rows are. `kept`: by the
        plan before. `continues`: see `DecodeRows`."""
        self.buffers, self.staging = buffers, Staging(buffers)
        self.restores = self.saves = self.snapshots = _EMPTY
        self.copies: list[tuple[StagedArray, StagedArray]] = []
        if plan.copies:
            groups = [np.array(group, np.int64) for group in independent_copies(plan.copies)]
            self.copies = [(self.staging.add(targets), self.staging.add(sources)) for targets, sources in groups]
        if plan.restores:
            self.restores = self._slots_and_pages(plan.restores)
        if plan.saves:
            self.saves = self._slots_and_pages(plan.saves)
        self.folds: FoldBatch | None = None
        self.fold_parts: list[tuple[Sequence[FoldPiece], tuple[StagedArray, StagedArray] | None]] = []
        if plan.folds:
            if kept is None:
                raise LookupError(f"step {plan.step} folds, but the plan before it verified nothing")
            if not graphs.replays_folds(kept):
                self.folds = FoldBatch(plan.folds, kept, kernels, self.staging)
            else:
                parts = parts_of_folds(plan.folds, kept)
                self.fold_parts = [
                    (part.pieces, self._slots_and_pages(part.saves) if part.saves else None) for part in parts
                ]
        self.sampled_slots = self.staging.add(plan.samples.slots.astype(np.int64))
        self.continuing_slots: StagedArray | None = None
        if continues:
            self.continuing_slots = self.staging.add(plan.decodes.slots.astype(np.int64))
        self.batch: BatchBuilder | None = None
        self.graph: tuple[PassShape, StagedArray] | None = None
        self.prompt_logprobs: list[tuple[int, int, int, PromptLogprobs]] = []
        moved = inputs and any(row is not None and row.head_positions is not None for row in inputs)
        shape = None if moved else graphs.shape_for(plan)
        if shape is not None:
            self.graph = shape, self.staging.add(graphs.pack(plan, inputs, shape))
            if plan.snapshots:
                slots = plan.decodes.slots[[snapshot.row for snapshot in plan.snapshots]]
                self.snapshots = self.staging.add(slots.astype(np.int64)), self._checkpoint_pages(plan.snapshots)
        elif plan.num_seqs:
            self.batch = self._eager_rows(plan, inputs, kernels)

    def _eager_rows(self, plan: StepPlan, inputs: Sequence[MultimodalInputs | None], kernels: Kernels) -> BatchBuilder:
        batch = BatchBuilder(plan, inputs, kernels, self.staging, continues=self.continuing_slots is not None)
        host = batch.host
        if plan.snapshots:
            last_rows = host.cu_seqlens[host.snapshot_seqs] + host.snapshot_offsets - 1
            self.snapshots = self.staging.add(last_rows.astype(np.int64)), self._checkpoint_pages(batch.snapshots)
        if plan.prefills:
            first_rows = host.cu_seqlens[host.first_prefill : -1].tolist()
            self.prompt_logprobs = [
                (row.slot, row.start + 1, first, PromptLogprobs(row.score, self.staging, kernels.logprobs))
                for row, first in zip(plan.prefills, first_rows, strict=True)
                if row.score is not None
            ]
        return batch

    def _slots_and_pages(self, records: Sequence[Restore | Save]) -> tuple[StagedArray, StagedArray]:
        return self.staging.add(np.array([record.slot for record in records])), self._checkpoint_pages(records)

    def _checkpoint_pages(self, records: Sequence[Restore | Save | Snapshot]) -> StagedArray:
        return self.staging.add(np.array([record.pages for record in records], np.int64))


def independent_copies(copies: Sequence[PageCopy]) -> list[tuple[list[int], list[int]]]:
    """Target and source pages of copies that are made one after the other, as few groups of them as can be that may be
    made in any order: no page that one writes is another one's."""
    groups = list[tuple[list[int], list[int]]]()
    written, touched = set[int](), set[int]()
    for copy in copies:
        if not groups or copy.target in touched or copy.source in written:
            groups.append(([], []))
            written, touched = set(), set()
        groups[-1][0].append(copy.target)
        groups[-1][1].append(copy.source)
        written.add(copy.target)
        touched |= {copy.target, copy.source}
    return groups


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step from its launch until it is collected. `sampler` and `logprobs`: on the rank that samples, of a plan with
    samples. `logits`: of the samples, then of the verify rows, until they are sampled. `is_sampled`: whether its
    outputs are on their way. `verified`: what verify rows have given. `is_first`: see `StepResult`."""

    plan: StepPlan
    inputs: StepInputs
    sampler: Sampler | None = None
    logprobs: SampledLogprobs | None = None
    logits: Tensor | None = None
    is_sampled: bool = False
    verified: tuple[VerifiedTokens, ...] = ()
    is_first: bool = False
    _readback: Readback = field(init=False)
    _tokens: ReadbackArray | None = None
    _advanced: ReadbackArray | None = None
    _sampled_logprobs: list[tuple[list[int], list[ReadbackArray]]] = field(default_factory=list)
    _prompt_logprobs: list[tuple[int, int, list[ReadbackArray]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._readback = Readback(self.inputs.buffers)

    def add_prompt_logprobs(self, slot: int, position: int, logprobs: LogprobTensors) -> None:
        """Of tokens of the sequence in `slot`, from `position` on."""
        self._prompt_logprobs.append((slot, position, [self._readback.add(tensor) for tensor in logprobs]))

    def read_back(self, tokens: Tensor | None, advanced: Tensor | None) -> None:
        """Start the copy to the host. `tokens`: int64 [samples]; None for a plan without samples. `advanced`: bool
        [decodes]; None where all are."""
        if advanced is not None:
            self._advanced = self._readback.add(advanced)
        if tokens is not None:
            self._tokens = self._readback.add(tokens)
            if self.logprobs is not None and self.logits is not None:
                self._sampled_logprobs = [
                    (rows, [self._readback.add(tensor) for tensor in tensors])
                    for rows, tensors in self.logprobs.compute(self.logits, tokens)
                ]
        self.logits, self.is_sampled = None, True
        self._readback.send()

    @property
    def is_complete(self) -> bool:
        """Whether `result` would return at once."""
        return self._readback.is_complete

    def result(self) -> StepResult:
        """Waits for the copy to the host, and for everything that the step writes."""
        assert self.is_sampled, f"step {self.plan.step} has not been sampled"
        self._readback.wait()
        slots = self.plan.samples.slots
        logprobs: dict[int, Logprobs] = {}
        for rows, arrays in self._sampled_logprobs:
            for i, row in enumerate(rows):
                logprobs[int(slots[row])] = Logprobs(*(each.array[i : i + 1] for each in arrays))
        return StepResult(
            self.plan.step,
            slots,
            np.zeros(0, np.int64) if self._tokens is None else self._tokens.array,
            logprobs,
            tuple(map(_scored, self._prompt_logprobs)),
            ~np.zeros(len(self.plan.decodes), np.bool_) if self._advanced is None else self._advanced.array,
            self.verified,
            self.is_first,
        )


def _scored(prompt_logprobs: tuple[int, int, list[ReadbackArray]]) -> Scored:
    slot, position, arrays = prompt_logprobs
    return Scored(slot, position, Logprobs(*(each.array for each in arrays)))
