"""Decode steps as graphs: a forward pass of one token a sequence is recorded once for some numbers of rows, and
launched as a whole from then on. The host's share of such a step is one array of lengths. On the CPU so is the pass of
one verify row, for each number of its tokens, and its fold; and that of a few decodes and verify rows in any mix, for
some numbers of tokens.

A graph launches the same kernels with the same arguments every time. So everything that differs between two steps is
read on the device, from tensors that stay where they are:

    rows    int32 [8, tokens]: token, three positions; and of each sequence slot, seq_start, seq_len, kv_write_from; of
            a mix also cu_seqlens; the step's one copy brings them, and a copy on the device takes them to where the
            graph reads
    slots   block tables, newest and stop tokens, running states, as for any step
    pages   the pool

and nothing is chosen by lengths: see `HostBatch.captured`. On a GPU, by CUDA, passes of some sizes are recorded before
serving begins. On the CPU any size is recorded when it comes for the second time, which computes the step, too.

A batch of fewer rows has padding after them: decodes of
length 0 in the slot that is no request's, which read and write no pages. What a graph ends with is the final hidden
state in each row's slot; logits and the sampling are of the plan's samples, not of its rows, and come after it. So do
snapshots: a decode has one token, and the state after it is what its slot has when the pass is over.

With several ranks the sums among them are in the graph. NCCL wants a graph recorded by all of them together and
replayed by all or none: each records the same sizes in the same order, and whether a step is replayed, and padded to
which size, follows from its plan and from plans before it, which are the same for all (`shape_for`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.graphs import Graphs, StepGraphs
from cairn.kernels.staging import Staging
from cairn.layers.memory import Memory
from cairn.layers.model import Model
from cairn.runner.batch_builder import MOST_STOP_TOKENS, SlotTensors, host_batch
from cairn.runner.verification import FoldPiece, KeptInputs, fold_batch
from cairn.runner.vision import MultimodalInputs
from cairn.step import StepPlan

_FIELDS, _FOLD_FIELDS = 8, 5
MOST_VERIFY_TOKENS = 64
"""Of a verify row whose pass is recorded."""

MOST_MIXED_SEQS, MOST_MIXED_TOKENS = 8, 72
"""Sequences, and tokens, of a mix of decodes and verify rows that is recorded."""
_MIXED_TOKENS_STEP = 4
"""Such a pass has tokens that are nobody's, up to a multiple of so many: there are as few passes to record. Not where
products are made in float32, of which the bits depend on how many rows there are."""

_MOST_PADDED = 3
"""So often a mix that is not recorded yet is given the tokens of a larger one that is: to record a pass takes as long
as to repeat a few, and most mixes do not come often."""

_ALIGNMENT = 16
"""Rows of the array have room for a multiple of so many numbers, 64 bytes: kernels are compiled for how operands are
aligned, and are the same for all sizes then."""


class CudaGraphs:
    """By CUDA, with one pool of memory for all graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Graphs.capture`."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a transfer's, may ask the driver for something meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


class PassShape(NamedTuple):
    """What is the same in all passes of a graph: so many decodes, or one verify row of so many tokens. Or a mix, with
    places for so many decodes and so many verify rows, any of which may be empty, and so many tokens for all of them:
    `num_verify_tokens`, since a verify row has those that are left over."""

    num_decodes: int
    num_verify_tokens: int = 0
    num_places: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_verify_tokens

    @property
    def num_seqs(self) -> int:
        if self.num_places:
            return 2 * self.num_places + 1
        return self.num_decodes + bool(self.num_verify_tokens)

    @property
    def rows_shape(self) -> tuple[int, int]:
        """Of the array that its graph reads."""
        if self.num_places:
            return _FIELDS + 1, _pitch(max(self.num_tokens, self.num_seqs + 1))
        return _FIELDS, _pitch(self.num_tokens)


@dataclass(slots=True)
class _Pass:
    """A forward pass of one shape, as it is recorded. `replay`: None before. `kept`: what it leaves of its verify row,
    whose folds are `fold`, once one was recorded."""

    metadata: object
    run: Callable[[], None]
    replay: Callable[[], None] | None = None
    kept: KeptInputs | None = None
    fold: Callable[[], None] | None = None


class DecodeGraphs:
    """The graphs of one runner; none before `capture`."""

    def __init__(
        self,
        model: Model,
        make_memory: Callable[[KeptInputs | None], Memory],
        hidden: Tensor,
        slot_tensors: SlotTensors,
    ) -> None:
        """`make_memory`: of a pass without snapshots. `hidden`: final hidden states by slot, [slots + 1, hidden]."""
        self._model, self._make_memory, self._hidden = model, make_memory, hidden
        self._slot_tensors = slot_tensors
        self._num_slots = len(hidden) - 1
        self._sizes: Sequence[int] = ()
        self._recorder: StepGraphs | None = None
        self._fold_recorder: StepGraphs | None = None
        self._passes: dict[PassShape, _Pass] = {}
        self._num_padded: Counter[PassShape] = Counter()
        self._rows = torch.zeros(0, dtype=torch.int32)
        self._fold_rows = torch.zeros(_FOLD_FIELDS, 0, dtype=torch.int32)
        self._num_places = 0
        self._stop_tokens = slot_tensors.stop_tokens
        self._max_model_len = 0

    def capture(
        self,
        graphs: Graphs,
        sizes: Sequence[int],
        max_model_len: int,
        captured: Callable[[int], object],
        warmed: Callable[[int], object] = lambda size: None,
    ) -> None:
        """Record a pass for each of the sizes, the largest first: the others find room in its memory. `max_model_len`:
        tokens of the longest sequence. `captured` is called with each size, `warmed` before that, while the pass that
        is not recorded is out: recording begins with a wait for the device, and so for the other ranks.
        """
        self._begin(sorted(set(sizes)), max_model_len)
        for size in reversed(self._sizes):
            staging, shape = Staging(), PassShape(size)
            padding = staging.add(self._padding(shape))
            forward_pass = self._passes[shape] = self._make_pass(shape, staging)
            self._view(shape).copy_(padding.tensor)
            forward_pass.run()  # compiles kernels, and makes what libraries want to have made before they are recorded
            warmed(size)
            forward_pass.replay = graphs.capture(forward_pass.run)
            captured(size)

    def record(self, graphs: StepGraphs, folds: StepGraphs, max_num_seqs: int, max_model_len: int) -> None:
        """Record passes of up to `max_num_seqs` rows, and those with verify rows, each when its shape comes for the
        second time, a mix when it comes for the first. `folds`: what records folds, in memory of their own: they read
        what passes have left."""
        self._begin(range(1, max_num_seqs + 1), max_model_len)
        self._recorder, self._fold_recorder = graphs, folds

    def _begin(self, sizes: Sequence[int], max_model_len: int) -> None:
        self._sizes, self._passes, self._max_model_len = sizes, {}, max_model_len
        pitch, device = _pitch(max(sizes[-1], MOST_VERIFY_TOKENS, MOST_MIXED_TOKENS)), self._model.spec.device
        self._rows = torch.zeros((_FIELDS + 1) * pitch, dtype=torch.int32, device=device)
        self._num_places = min(sizes[-1], MOST_MIXED_SEQS)
        self._fold_rows = torch.zeros(_FOLD_FIELDS, _pitch(2 * self._num_places + 2), dtype=torch.int32, device=device)
        self._slot_tensors.reserve_stop_tokens(MOST_STOP_TOKENS)
        self._stop_tokens = self._slot_tensors.stop_tokens

    def _make_pass(self, shape: PassShape, staging: Staging) -> _Pass:
        if shape.num_places:
            host = HostBatch.captured_mix(shape.num_places, shape.num_tokens, self._max_model_len)
        else:
            host = HostBatch.captured(shape.num_decodes, self._max_model_len, shape.num_verify_tokens)
        metadata, cu_seqlens = self._model.kernels.build_metadata(host, staging), staging.add(host.cu_seqlens)
        staging.send(self._model.spec.device)
        run = partial(self._run, shape, host, cu_seqlens.tensor, metadata)
        return _Pass(metadata, run)

    def release(self) -> None:
        """Forget all graphs: NCCL does not end while there is one with operations of its own."""
        self._recorder, self._fold_recorder, self._sizes, self._passes = None, None, (), {}

    def shape_for(self, plan: StepPlan) -> PassShape | None:
        """The shape that the plan's rows are padded to; None where they are not replayed: prefill, more rows than the
        largest size, and drafts with more tokens or sequences than a mix has. None, too, from a request with more stop
        tokens than there was room for on: the tensor is another one then."""
        if not self._sizes or plan.prefills:
            return None
        num_decodes, verifies = len(plan.decodes), plan.verifies
        if not 0 < num_decodes + len(verifies) <= self._sizes[-1]:
            return None
        if verifies and self._recorder is None:
            return None
        width = self._stop_tokens.shape[1]
        if self._slot_tensors.stop_tokens is not self._stop_tokens or any(
            len(admit.stop_token_ids) > width for admit in plan.admits
        ):
            return None
        if verifies:
            num_tokens = num_decodes + sum(len(verify.tokens) for verify in verifies)
            if num_decodes or len(verifies) > 1:
                return self._mix_for(max(num_decodes, len(verifies)), num_tokens)
            return PassShape(0, num_tokens) if num_tokens <= MOST_VERIFY_TOKENS else None
        return PassShape(self._sizes[bisect_left(self._sizes, num_decodes)])

    def _mix_for(self, num_seqs: int, num_tokens: int) -> PassShape | None:
        in_float32 = self._model.kernels.packed_dtype(self._model.spec.dtype) == torch.float32
        step = 1 if in_float32 else _MIXED_TOKENS_STEP
        num_tokens = -(-num_tokens // step) * step
        if num_seqs > self._num_places or num_tokens > MOST_MIXED_TOKENS:
            return None
        shape = PassShape(0, num_tokens, self._num_places)
        if in_float32 or self.has_recorded(shape) or self._num_padded[shape] >= _MOST_PADDED:
            return shape
        larger = [each for each in self._passes if each.num_places and each > shape and self.has_recorded(each)]
        self._num_padded[shape] += bool(larger)
        return min(larger, default=shape)

    def pack(self, plan: StepPlan, inputs: Sequence[MultimodalInputs | None], shape: PassShape) -> NDArray[np.int32]:
        """The plan's rows as `replay` takes them, int32 `shape.rows_shape`. `inputs`: of each row; a row after images
        has three positions of its own."""
        rows, decodes = self._padding(shape), plan.decodes
        seqs = rows[4:_FIELDS, : len(decodes)]
        rows[0, : len(decodes)], rows[1:4, : len(decodes)] = decodes.tokens, decodes.positions
        seqs[0], seqs[1], seqs[2], seqs[3] = (
            decodes.slots,
            decodes.positions,
            decodes.positions + 1,
            decodes.kv_write_from,
        )
        edges = list(range(len(decodes) + 1))
        for place, verify in enumerate(plan.verifies, start=shape.num_places):
            begin, end = edges[-1], edges[-1] + len(verify.tokens)
            rows[0, begin:end], rows[1:4, begin:end] = verify.tokens, np.arange(verify.start, verify.end)
            rows[4:_FIELDS, place] = verify.slot, verify.start, verify.end, verify.kv_write_from
            edges.append(end)
        for begin, end, each in zip(edges, edges[1:], inputs, strict=False):
            if each is not None:
                rows[1:4, begin:end] = each.positions
        if shape.num_places:
            # Behind the decodes, and behind the verify rows, places without tokens; the last one has what is left.
            rows[_FIELDS] = edges[-1]
            rows[_FIELDS, : shape.num_places] = len(decodes)
            rows[_FIELDS, : len(decodes)] = edges[: len(decodes)]
            rows[_FIELDS, shape.num_places : shape.num_places + len(plan.verifies)] = edges[len(decodes) : -1]
            rows[_FIELDS, shape.num_seqs] = shape.num_tokens
        return rows

    def replay(self, plan: StepPlan, shape: PassShape, rows: Tensor) -> KeptInputs | None:
        """Launch the pass of a shape. `rows`: what `pack` gave of the plan, on the device. Returns what it leaves of
        the plan's verify row, if there is one."""
        self._view(shape).copy_(rows)
        first_time = shape not in self._passes
        if first_time:
            self._passes[shape] = self._make_pass(shape, Staging())
        forward_pass, recorder = self._passes[shape], self._recorder
        if recorder is not None:
            recorder.set_lengths(forward_pass.metadata, host_batch(plan, ()))
        if forward_pass.replay is not None:
            forward_pass.replay()
        elif recorder is None or (first_time and not shape.num_places):
            forward_pass.run()  # compiles, and fills caches, which a mix finds full: it comes after other passes
        else:
            forward_pass.replay = recorder.capture(forward_pass.run)
        if forward_pass.kept is not None:
            forward_pass.kept.assign(plan.verifies, len(plan.decodes))
        return forward_pass.kept

    def has_recorded(self, shape: PassShape) -> bool:
        """Whether `replay` repeats what was recorded."""
        return shape in self._passes and self._passes[shape].replay is not None

    def has_recorded_folds(self, kept: KeptInputs) -> bool:
        """Whether `replay_folds` does so."""
        shape = self._shape_of(kept)
        return shape is not None and self._passes[shape].fold is not None

    def replays_folds(self, kept: KeptInputs) -> bool:
        """Whether `replay_folds` does those of a pass: of what a recorded one has left."""
        shape = self._shape_of(kept)
        return shape is not None and self.has_recorded(shape)

    def replay_folds(self, kept: KeptInputs, folds: Sequence[FoldPiece]) -> None:
        """Launch folds of a pass, of each slot one at most; they are recorded when they come for the first time."""
        shape, recorder = self._shape_of(kept), self._fold_recorder
        assert shape is not None and recorder is not None
        forward_pass, rows = self._passes[shape], self._pack_folds(kept, folds, shape)
        self._fold_rows[:, : rows.shape[1]] = torch.from_numpy(rows)
        if forward_pass.fold is None:
            forward_pass.fold = recorder.capture(partial(self._run_folds, kept, shape))
        else:
            forward_pass.fold()

    def _shape_of(self, kept: KeptInputs) -> PassShape | None:
        """Of the pass that has left it, if it is one of these."""
        for shape in (PassShape(0, kept.num_tokens), PassShape(0, kept.num_tokens, self._num_places)):
            if shape in self._passes and self._passes[shape].kept is kept:
                return shape
        return None

    def _pack_folds(self, kept: KeptInputs, folds: Sequence[FoldPiece], shape: PassShape) -> NDArray[np.int32]:
        """cu_seqlens, slots, starts, ends and last rows of the folds. Of a mix there are places of nobody before each
        of them, and behind the last: for rows of decodes, and of drafts that were wrong."""
        between, end = int(shape.num_places > 0), 0
        rows = np.zeros((_FOLD_FIELDS, shape.num_seqs + 1), np.int32)
        rows[1] = self._num_slots
        folded = sorted(((*kept.find(fold.slot), fold) for fold in folds), key=lambda each: each[0])
        for number, (first, row, fold) in enumerate(folded):
            place = between + (1 + between) * number
            end = first + fold.end
            rows[0, place], rows[0, place + 1 :] = first + fold.begin, end
            rows[1:, place] = row.slot, row.start + fold.begin, row.start + fold.end, end - 1
        if between:
            rows[0, -1] = shape.num_tokens
        return rows

    def _run_folds(self, kept: KeptInputs, shape: PassShape) -> None:
        """What is recorded of folds: of how many tokens each is, is read from memory."""
        if shape.num_places:
            host = HostBatch.captured_mix(shape.num_places, shape.num_tokens, self._max_model_len, is_fold=True)
        else:
            host = HostBatch.captured(0, self._max_model_len, shape.num_tokens, is_fold=True)
        metadata = self._model.kernels.build_metadata(host, Staging())
        rows, count, tables = self._fold_rows, shape.num_seqs, self._slot_tensors.block_tables
        slots, starts, ends, last_rows = rows[1:, :count]
        batch = fold_batch(host, metadata, rows[0, : count + 1], slots, starts, ends, tables)
        kept.fold(batch, self._make_memory(None))
        self._hidden.index_copy_(0, slots.long(), kept.hidden.index_select(0, last_rows.long()))

    def _padding(self, shape: PassShape) -> NDArray[np.int32]:
        rows = np.zeros(shape.rows_shape, np.int32)
        rows[4], rows[7] = self._num_slots, 1
        return rows

    def _view(self, shape: PassShape) -> Tensor:
        """Where the graph of a shape reads its rows: all of them at the same place, one at a time."""
        fields, pitch = shape.rows_shape
        return self._rows[: fields * pitch].view(fields, pitch)

    def _run(self, shape: PassShape, host: HostBatch, cu_seqlens: Tensor, metadata: object) -> None:
        """What is recorded."""
        rows = self._view(shape)
        seqs = rows[4:_FIELDS, : shape.num_seqs]
        kept = KeptInputs(0, shape.num_verify_tokens) if shape.num_verify_tokens else None
        tokens, state_slots = rows[0, : shape.num_tokens].long(), seqs[0]
        num_decodes = shape.num_decodes + min(shape.num_places, shape.num_tokens)
        if kept is None:
            tokens, state_slots = self._slot_tensors.continue_rows(tokens, state_slots)
        elif shape.num_places:
            cu_seqlens = rows[_FIELDS, : shape.num_seqs + 1]
            # Behind the decodes there are tokens of verify rows, in the slot that is nobody's: they stay as they are.
            newest, slots = self._slot_tensors.continue_rows(tokens[:num_decodes], state_slots[:num_decodes])
            tokens = torch.cat([newest, tokens[num_decodes:]])
            state_slots = torch.cat([slots, state_slots[num_decodes:]])
        batch = Batch(
            tokens=tokens,
            positions=rows[1:4, : shape.num_tokens].long(),
            cu_seqlens=cu_seqlens,
            slots=seqs[0],
            state_slots=state_slots,
            seq_starts=seqs[1],
            seq_lens=seqs[2],
            kv_write_from=seqs[3],
            block_tables=self._slot_tensors.block_tables,
            host=host,
            metadata=metadata,
        )
        hidden = self._model.forward(batch, self._make_memory(kept))
        if num_decodes:
            self._hidden[state_slots[:num_decodes]] = hidden[:num_decodes]
        if kept is not None:
            kept.keep_hidden(hidden)
            self._passes[shape].kept = kept


def _pitch(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
