"""Decode steps as graphs: a forward pass of one token a sequence is recorded once for some numbers of rows, and
launched as a whole from then on. The host's share of such a step is one array of lengths.

A graph launches the same kernels with the same arguments every time. So everything that differs between two steps is
read on the device, from tensors that stay where they are:

    rows    int32 [8, rows]: token, three positions, slot, seq_start, seq_len, kv_write_from; the step's one copy
            brings them, and a copy on the device takes them to where the graph reads
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
which size, follows from its plan and from plans before it, which are the same for all (`size_for`).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.contract import Graphs, StepGraphs
from cairn.kernels.staging import Staging
from cairn.layers.memory import Memory
from cairn.layers.model import Model
from cairn.runner.batch_builder import MOST_STOP_TOKENS, SlotTensors, host_batch
from cairn.runner.vision import MultimodalInputs
from cairn.step import StepPlan

_FIELDS = 8
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


@dataclass(slots=True)
class _Pass:
    """A forward pass of one size, as it is recorded. `replay`: None before."""

    metadata: object
    run: Callable[[], None]
    replay: Callable[[], None] | None = None


class DecodeGraphs:
    """The graphs of one runner; none before `capture`."""

    def __init__(self, model: Model, memory: Memory, hidden: Tensor, slot_tensors: SlotTensors) -> None:
        """`memory`: of a pass without snapshots. `hidden`: final hidden states by slot, [slots + 1, hidden]."""
        self._model, self._memory, self._hidden, self._slot_tensors = model, memory, hidden, slot_tensors
        self._num_slots = len(hidden) - 1
        self._sizes: Sequence[int] = ()
        self._recorder: StepGraphs | None = None
        self._passes: dict[int, _Pass] = {}
        self._rows = torch.zeros(0, dtype=torch.int32)
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
            staging = Staging()
            padding = staging.add(self._padding(size))
            forward_pass = self._passes[size] = self._make_pass(size, staging)
            self._view(size).copy_(padding.tensor)
            forward_pass.run()  # compiles kernels, and makes what libraries want to have made before they are recorded
            warmed(size)
            forward_pass.replay = graphs.capture(forward_pass.run)
            captured(size)

    def record(self, graphs: StepGraphs, max_num_seqs: int, max_model_len: int) -> None:
        """Record passes of up to `max_num_seqs` rows, each when its number of rows comes for the second time."""
        self._begin(range(1, max_num_seqs + 1), max_model_len)
        self._recorder = graphs

    def _begin(self, sizes: Sequence[int], max_model_len: int) -> None:
        self._sizes, self._passes, self._max_model_len = sizes, {}, max_model_len
        self._rows = torch.zeros(_FIELDS * _pitch(sizes[-1]), dtype=torch.int32, device=self._model.spec.device)
        self._slot_tensors.reserve_stop_tokens(MOST_STOP_TOKENS)
        self._stop_tokens = self._slot_tensors.stop_tokens

    def _make_pass(self, size: int, staging: Staging) -> _Pass:
        host = HostBatch.captured(size, self._max_model_len)
        metadata, cu_seqlens = self._model.kernels.build_metadata(host, staging), staging.add(host.cu_seqlens)
        staging.send(self._model.spec.device)
        return _Pass(metadata, partial(self._run, size, host, cu_seqlens.tensor, metadata))

    def release(self) -> None:
        """Forget all graphs: NCCL does not end while there is one with operations of its own."""
        self._recorder, self._sizes, self._passes = None, (), {}

    def size_for(self, plan: StepPlan) -> int | None:
        """The size that the plan's rows are padded to; None where they are not replayed: prefill, drafts, and more rows
        than the largest size. None, too, from a request with more stop tokens than there was room for on: the tensor is
        another one then."""
        num_seqs = len(plan.decodes)
        if not self._sizes or plan.verifies or plan.prefills or not 0 < num_seqs <= self._sizes[-1]:
            return None
        width = self._stop_tokens.shape[1]
        if self._slot_tensors.stop_tokens is not self._stop_tokens or any(
            len(admit.stop_token_ids) > width for admit in plan.admits
        ):
            return None
        return self._sizes[bisect_left(self._sizes, num_seqs)]

    def pack(self, plan: StepPlan, inputs: Sequence[MultimodalInputs | None], size: int) -> NDArray[np.int32]:
        """The plan's rows as `replay` takes them, int32 [8, room]. `inputs`: of each row; a decode row after images
        has three positions of its own."""
        rows, decodes = self._padding(size), plan.decodes
        decode_rows = rows[:, : len(decodes)]
        decode_rows[0], decode_rows[1:4] = decodes.tokens, decodes.positions
        decode_rows[4], decode_rows[5], decode_rows[6], decode_rows[7] = (
            decodes.slots,
            decodes.positions,
            decodes.positions + 1,
            decodes.kv_write_from,
        )
        for row, each in enumerate(inputs):
            if each is not None:
                decode_rows[1:4, row] = each.positions[:, 0]
        return rows

    def replay(self, plan: StepPlan, size: int, rows: Tensor) -> None:
        """Launch the pass of `size` rows. `rows`: what `pack` gave of the plan, on the device."""
        self._view(size).copy_(rows)
        first_time = size not in self._passes
        if first_time:
            self._passes[size] = self._make_pass(size, Staging())
        forward_pass, recorder = self._passes[size], self._recorder
        if recorder is not None:
            recorder.set_lengths(forward_pass.metadata, host_batch(plan, ()))
        if forward_pass.replay is not None:
            forward_pass.replay()
        elif first_time or recorder is None:
            forward_pass.run()  # compiles, and fills caches
        else:
            forward_pass.replay = recorder.capture(forward_pass.run)

    def _padding(self, size: int) -> NDArray[np.int32]:
        rows = np.zeros((_FIELDS, _pitch(size)), np.int32)
        rows[4], rows[7] = self._num_slots, 1
        return rows

    def _view(self, size: int) -> Tensor:
        """Where the graph of `size` rows reads them: all of them at the same place, one at a time."""
        pitch = _pitch(size)
        return self._rows[: _FIELDS * pitch].view(_FIELDS, pitch)

    def _run(self, size: int, host: HostBatch, cu_seqlens: Tensor, metadata: object) -> None:
        """What is recorded."""
        rows = self._view(size)[:, :size]
        tokens, state_slots = self._slot_tensors.continue_rows(rows[0].long(), rows[4])
        batch = Batch(
            tokens=tokens,
            positions=rows[1:4].long(),
            cu_seqlens=cu_seqlens,
            slots=rows[4],
            state_slots=state_slots,
            seq_starts=rows[5],
            seq_lens=rows[6],
            kv_write_from=rows[7],
            block_tables=self._slot_tensors.block_tables,
            host=host,
            metadata=metadata,
        )
        self._hidden[state_slots] = self._model.forward(batch, self._memory)


def _pitch(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
