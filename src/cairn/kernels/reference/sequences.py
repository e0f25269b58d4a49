"""The sequences of a batch, one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.batch import HostBatch


@dataclass(frozen=True, slots=True)
class SequencePass:
    """One sequence's tokens of this pass: rows [first_row, first_row + end - start) of the batch, which stand at
    positions [start, end). Its state is wanted after each of the first `snapshot_offsets` of them."""

    slot: int
    first_row: int
    start: int
    end: int
    kv_write_from: int
    snapshot_offsets: tuple[int, ...]

    @property
    def rows(self) -> range:
        """The sequence's rows of the batch."""
        return range(self.first_row, self.first_row + self.end - self.start)

    def state_before(self, states: Tensor) -> Tensor:
        """The sequence's state before this pass, a copy."""
        own = states[self.slot]
        return torch.zeros_like(own) if self.start == 0 else own.clone()


def sequences_of(host: HostBatch, state_slots: Tensor | None = None) -> Iterator[SequencePass]:
    """In the order of the rows, which is that of the snapshots, too. `state_slots`: of a `Batch`, for kernels that work
    on states."""
    slots = host.slots if state_slots is None else state_slots.tolist()
    for i in range(host.num_seqs):
        yield SequencePass(
            slot=int(slots[i]),
            first_row=int(host.cu_seqlens[i]),
            start=int(host.seq_starts[i]),
            end=int(host.seq_lens[i]),
            kv_write_from=int(host.kv_write_from[i]),
            snapshot_offsets=tuple(int(offset) for offset in host.snapshot_offsets[host.snapshot_rows == i]),
        )


def stack_snapshots(kept: list[Tensor], states: Tensor) -> Tensor:
    """States of one slot each -> [N, ...] in the states' dtype, N = 0 included."""
    return torch.stack(kept) if kept else states.new_empty(0, *states.shape[1:])
