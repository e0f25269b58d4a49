"""Metadata of the exact backend: where a batch's rows lie in tiles and on the grid of chunks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch, HostBatch
from cairn.kernels.exact.elementwise import widen
from cairn.kernels.staging import Staging

TILE: Final = 64
"""Rows of a product's tile of prefill rows."""

ROW_TILE: Final = 16
"""Rows of a product's tile of decode rows, of an expert's tokens and of logits."""


@dataclass(frozen=True, slots=True)
class _SequenceRows:
    """One sequence's rows [first_row, first_row + length) of the batch, at positions from `start` on. Snapshot
    `first_snapshot + i` is taken after the first `offsets[i]` tokens."""

    slot: int
    first_row: int
    start: int
    length: int
    offsets: tuple[int, ...]
    first_snapshot: int


@dataclass(frozen=True, slots=True)
class Decode(_SequenceRows):
    """Rows in the one-token form: the one row of a decode, or all those of a verify or of a fold. `in_place`: whether
    the live state is written."""

    in_place: bool

    @property
    def is_fresh(self) -> bool:
        """The sequence has no state before it."""
        return self.start == 0

    @property
    def rows(self) -> range:
        """The sequence's rows of the batch."""
        return range(self.first_row, self.first_row + self.length)

    @property
    def numbered_snapshots(self) -> Iterator[tuple[int, int]]:
        """Pairs (snapshot, row after which it is taken)."""
        for number, offset in enumerate(self.offsets, start=self.first_snapshot):
            yield number, self.first_row + offset - 1

    def store_snapshots(self, row: int, state: Tensor, snapshots: Tensor) -> None:
        """Those that are taken of the state after a row."""
        for number, last_row in self.numbered_snapshots:
            if last_row == row:
                snapshots[number] = state


@dataclass(frozen=True, slots=True)
class Prefill(_SequenceRows):
    """Rows in the chunked form. Laid out on the grid of chunks they have `front` rows before them and some after, whole
    chunks together."""

    @property
    def rows(self) -> slice:
        """The sequence's rows of the batch."""
        return slice(self.first_row, self.first_row + self.length)

    @property
    def front(self) -> int:
        """Rows of the first chunk that are before the sequence's."""
        return self.start % CHUNK

    @property
    def on_grid(self) -> slice:
        """The sequence's rows of its chunks."""
        return slice(self.front, self.front + self.length)

    @property
    def num_chunks(self) -> int:
        """Chunks that its tokens touch."""
        return -(-(self.front + self.length) // CHUNK)

    def lay_out(self, x: Tensor) -> Tensor:
        """The sequence's rows of x [T, ...] in their chunks [num_chunks * CHUNK, ...], zeros around them."""
        out = x.new_empty(self.num_chunks * CHUNK, *x.shape[1:])
        out[: self.front] = 0
        out[self.on_grid] = x[self.rows]
        out[self.front + self.length :] = 0
        return out

    def state_before(self, states: Tensor) -> Tensor:
        """The sequence's state before the pass, a copy: aligned, wherever the slot lies."""
        return torch.zeros_like(states[self.slot]) if self.start == 0 else states[self.slot].clone()

    def snapshots_by_chunk(self) -> list[list[tuple[int, int]]]:
        """For every chunk: its snapshots as pairs (snapshot, rows of the chunk up to it)."""
        snapshots: list[list[tuple[int, int]]] = [[] for _ in range(self.num_chunks)]
        for number, offset in enumerate(self.offsets, start=self.first_snapshot):
            chunk, last = divmod(self.front + offset - 1, CHUNK)
            snapshots[chunk].append((number, last + 1))
        return snapshots


@dataclass(frozen=True, slots=True)
class ExactMetadata:
    """`Batch.metadata` of this backend. Keys and values are written of `write_rows`, which stand at `write_positions`
    of the sequences in `write_slots`, all int64."""

    decodes: Sequence[Decode]
    prefills: Sequence[Prefill]
    num_snapshots: int
    write_rows: Tensor
    write_slots: Tensor
    write_positions: Tensor


def build_metadata(host: HostBatch, staging: Staging) -> ExactMetadata:
    """See `Kernels.build_metadata`."""
    first_snapshots = np.searchsorted(host.snapshot_seqs, np.arange(host.num_seqs + 1)).tolist()
    slots, starts, ends = host.slots.tolist(), host.seq_starts.tolist(), host.seq_lens.tolist()
    edges, offsets = host.cu_seqlens.tolist(), host.snapshot_offsets.tolist()
    counts = host.seq_lens - host.seq_starts
    positions = np.arange(host.num_tokens) - np.repeat(host.cu_seqlens[:-1] - host.seq_starts, counts)
    written = np.flatnonzero(positions >= np.repeat(host.kv_write_from, counts))
    sequences = [
        (
            slots[i],
            edges[i],
            starts[i],
            ends[i] - starts[i],
            tuple(offsets[first_snapshots[i] : first_snapshots[i + 1]]),
            first_snapshots[i],
        )
        for i in range(host.num_seqs)
    ]
    return ExactMetadata(
        decodes=[Decode(*each, i < host.num_in_place) for i, each in enumerate(sequences[: host.first_prefill])],
        prefills=[Prefill(*each) for each in sequences[host.first_prefill :]],
        num_snapshots=host.num_snapshots,
        write_rows=torch.from_numpy(written),
        write_slots=torch.from_numpy(np.repeat(host.slots, counts)[written].astype(np.int64)),
        write_positions=torch.from_numpy(positions[written].astype(np.int64)),
    )


def decodes_by_state(batch: Batch) -> Sequence[Decode]:
    """The sequences of a batch in the one-token form, whose slots are those of their states."""
    decodes = metadata_of(batch).decodes
    if batch.state_slots is batch.slots:
        return decodes
    slots = batch.state_slots.tolist()
    return [replace(decode, slot=slot) for decode, slot in zip(decodes, slots[: len(decodes)], strict=True)]


_ALIGNMENT: Final = 64


@contextmanager
def aligned_state(states: Tensor, decode: Decode) -> Iterator[Tensor]:
    """The live state of a sequence's slot, to be changed in place, in float32 or wider: zeros where the sequence is
    fresh. A copy stands in for it where it is to stay as it is, where it is narrower, and where the slot begins at an
    address that another slot's does not: BLAS may round otherwise there."""
    live = states[decode.slot]
    is_live = decode.in_place and live.data_ptr() % _ALIGNMENT == 0
    state = widen(live, copy=not is_live)
    if decode.is_fresh:
        state.zero_()
    yield state
    if decode.in_place and state is not live:
        live.copy_(state)


def round_state(state: Tensor, dtype: torch.dtype) -> None:
    """Each number becomes what it would be if it had been kept in a dtype."""
    if state.dtype != dtype:
        state.copy_(state.to(dtype))


def metadata_of(batch: Batch) -> ExactMetadata:
    """The result of `build_metadata` for the batch."""
    return cast(ExactMetadata, batch.metadata)
