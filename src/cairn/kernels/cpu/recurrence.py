"""What the compiled loops over sequences share: the sequences and their snapshots, gates, copies of blocks."""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cpu.compiled import ELEMENTS, F32, I32, INT, STATE_ELEMENTS, StateKey, intrinsic, jit, record
from cairn.kernels.cpu.recording import recording
from cairn.kernels.cpu.scalars import ZERO, advance, load, rounded, store
from cairn.kernels.cpu.vectors import LANES, aligned


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor, float32 or of a state's dtype. numpy asks for huge pages: each small page of a large tensor costs its
    first use a fault, which takes longer than what is computed on it. In a pass that is recorded it is the record's."""
    if recording() is not None:
        return torch.empty(shape, dtype=dtype)
    numbers = np.empty(shape, np.float32 if dtype == torch.float32 else np.uint16)
    return torch.from_numpy(numbers).view(dtype)


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x itself if each of its rows x[i] is one piece of memory, a copy if not."""
    if x.is_contiguous():
        return x
    step = 1
    for size, stride in zip(x.shape[:0:-1], x.stride()[:0:-1], strict=True):
        if stride != step and size != 1:
            return x.contiguous()
        step *= size
    return x


def check_states(states: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raises ValueError unless each slot's state is one piece of memory of this shape and of any of these dtypes, or
    where none is given, of any that recurrent states may have."""
    dtypes = dtypes or tuple(STATE_ELEMENTS)
    if states.shape[1:] != shape or states.dtype not in dtypes or with_contiguous_rows(states) is not states:
        raise ValueError(
            f"states are {states.dtype} {list(states.shape)} with strides {list(states.stride())}, "
            f"wanted are {' or '.join(map(str, dtypes))} [slots, {', '.join(map(str, shape))}], each slot's contiguous"
        )


class Sequences(NamedTuple):
    """The sequences of a batch with their states, as kernels see them: arrays and counts as in `Batch` and `HostBatch`.

    `states` [slots, state_size]: the live ones, of which two are `slot_stride` numbers apart. `snapshots`
    [num_snapshots, state_size].
    """

    cu_seqlens: Any
    slots: Any
    seq_starts: Any
    num_in_place: int
    first_prefill: int
    snapshot_seqs: Any
    snapshot_offsets: Any
    num_snapshots: int
    states: Any
    slot_stride: int
    snapshots: Any
    state_size: int


KernelTypes = Mapping[Hashable, tuple[Any, ...]]
"""Types of a kernel's arguments, by `StateKey`."""


def sequences_type(state: Any) -> Any:
    """The type of `Sequences` whose states are numbers at pointers of type `state`."""
    return record(Sequences, I32, I32, I32, INT, INT, I32, I32, INT, state, INT, state, INT)


def sequence_kernel_types(types: Callable[[Any], tuple[Any, ...]]) -> tuple[KernelTypes, KernelTypes]:
    """Of a kernel of one token a sequence, whose gates are in the model's dtype, and of one of whole prompts, whose
    gates are float32, in any model. `types`: of the arguments before the `Sequences`, by the type of the gates."""
    decode: KernelTypes = {
        StateKey(model, state): (*types(gate), sequences_type(element))
        for model, gate in ELEMENTS.items()
        for state, element in STATE_ELEMENTS.items()
    }
    prefill: KernelTypes = {
        StateKey(None, state): (*types(F32), sequences_type(element)) for state, element in STATE_ELEMENTS.items()
    }
    return decode, prefill


def sequence_arguments(batch: Batch, states: Tensor, snapshots: Tensor, state_size: int) -> tuple[int, ...]:
    """The fields of `Sequences`."""
    host, count = batch.host, batch.host.num_snapshots
    seqs, offsets = (host.snapshot_seqs.ctypes.data, host.snapshot_offsets.ctypes.data) if count else (0, 0)
    return (
        *(batch.cu_seqlens.data_ptr(), batch.state_slots.data_ptr(), batch.seq_starts.data_ptr()),
        *(host.num_in_place, host.first_prefill),
        *(seqs, offsets, count, states.data_ptr(), states.stride(0), snapshots.data_ptr(), state_size),
    )


@jit
def has_verifies(s: Any) -> bool:
    """Whether there are sequences whose states are to stay as they are: for them a thread needs memory."""
    return bool(s.num_in_place < s.first_prefill)


@jit
def room_for_state(count: int) -> int:
    """Numbers of a float32 buffer that has room for `count` numbers of a state, see `scratch_state`."""
    return count + LANES


@intrinsic
def _retyped(typingctx: Any, address: Any, pointer: Any) -> Any:
    """`address` as a pointer of the other one's type."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(pointer))

    return pointer(address, pointer), code


@jit
def scratch_state(s: Any, buffer: Any) -> Any:
    """A pointer as those to states, to an aligned place of a buffer, which is to be mentioned after its last use."""
    return _retyped(aligned(buffer), s.states)


@jit
def begin_steps(s: Any, sequence: int, begin: int, count: int, scratch: Any) -> Any:
    """Where a sequence in the one-token form has a part of its state, `count` numbers from `begin` on, to be changed in
    place: the live one, or for a verify a copy in `scratch`."""
    state = advance(s.states, s.slots[sequence] * s.slot_stride + begin)
    if sequence < s.num_in_place:
        return state
    if s.cu_seqlens[sequence] == s.cu_seqlens[sequence + 1]:
        return state  # of nobody, see `HostBatch.captured_mix`
    copy(state, scratch, count)
    return scratch


@jit
def first_snapshot(s: Any, sequence: int) -> int:
    """Index of the first snapshot of this sequence or a later one, by binary search."""
    low, high = 0, s.num_snapshots
    while low < high:
        middle = (low + high) // 2
        if s.snapshot_seqs[middle] < sequence:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def end_of_snapshots(s: Any, first: int, sequence: int, num_tokens: int) -> int:
    """Index after those snapshots from `first` on that are of the sequence's first `num_tokens` tokens of the pass."""
    while first < s.num_snapshots and s.snapshot_seqs[first] == sequence and s.snapshot_offsets[first] <= num_tokens:
        first += 1
    return first


@jit
def store_snapshots(s: Any, sequence: int, num_tokens: int, begin: int, part: Any, count: int) -> None:
    """Copies a part of the state after the sequence's first `num_tokens` tokens of the pass, `count` numbers from
    `begin` on, into the snapshots of it."""
    index = first_snapshot(s, sequence)
    while index < s.num_snapshots and s.snapshot_seqs[index] == sequence:
        if s.snapshot_offsets[index] == num_tokens:
            copy(part, advance(s.snapshots, index * s.state_size + begin), count)
        index += 1


@jit
def copy(source: Any, target: Any, count: int) -> None:
    """target[:count] = source[:count], of one dtype."""
    for j in range(count):
        target[j] = source[j]


@jit
def softplus(x: float) -> float:
    """log(1 + e^x)."""
    return x if x > np.float32(20) else math.log1p(math.exp(x))


@jit
def copy_block(
    source: Any, source_row: int, rows: int, columns: int, target: Any, target_row: int, all_rows: int, all_columns: int
) -> None:
    """target [all_rows, all_columns] = source [rows, columns], and zeros to the right of it and below it; rounded where
    the target has fewer bits."""
    for i in range(rows):
        for j in range(columns):
            store(target, i * target_row + j, load(source, i * source_row + j))
        for j in range(columns, all_columns):
            store(target, i * target_row + j, ZERO)
    for i in range(rows, all_rows):
        for j in range(all_columns):
            store(target, i * target_row + j, ZERO)


@jit
def round_block(block: Any, row: int, rows: int, columns: int, states: Any) -> None:
    """Each of the block's float32 numbers [rows, columns] becomes what it would be if it were one of `states`."""
    for i in range(rows):
        for j in range(columns):
            block[i * row + j] = rounded(states, block[i * row + j])


@jit
def transpose(source: Any, source_row: int, rows: int, columns: int, target: Any, target_row: int) -> None:
    """target[j, i] = source[i, j] of the source's `rows` and `columns`."""
    for j in range(columns):
        for i in range(rows):
            target[j * target_row + i] = source[i * source_row + j]
