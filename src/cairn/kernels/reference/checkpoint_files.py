"""Copies between states and checkpoint files, byte by byte as the spans say, states that are encoded head by head, and
copies of pages and tokens one by one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from cairn.kernels.checkpoint_files import StateSpan
from cairn.kernels.state_encoding import EncodedStates, StateEncoding

VALUES: Mapping[str, torch.dtype] = MappingProxyType({"float16": torch.float16, "int8": torch.int8})
"""The numbers of each `StateEncoding` that has scales."""

LEAST = 2.0**-126
"""The least float32 number that has all its bits."""

MOST_HALF = 2.0**15 - 2.0**4
"""One more would be rounded to a number that times its scale may be no float32 number."""


@dataclass(frozen=True, slots=True)
class SpanCopies:
    """What `pack_state_spans` makes here: what it was given."""

    spans: Sequence[StateSpan]
    states: EncodedStates | None


def pack_state_spans(
    spans: Sequence[StateSpan], entry_bytes: Sequence[int], pool: Tensor, states: EncodedStates | None = None
) -> SpanCopies:
    """See `Kernels.pack_state_spans`."""
    return SpanCopies(tuple(spans), states)


def store_states(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: SpanCopies
) -> None:
    """See `Kernels.store_states`."""
    for in_file, in_entry in _places(pool, files, tensors, entries, spans.spans):
        in_file.copy_(in_entry)
    for states, file, head, values_offset, scales_offset in _heads(files, tensors, entries, spans.states):
        values, scales = encode_head(head, states.encoding)
        _write(pool, file, values_offset, values)
        _write(pool, file, scales_offset, scales)


def load_states(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: SpanCopies
) -> None:
    """See `Kernels.load_states`."""
    for in_file, in_entry in _places(pool, files, tensors, entries, spans.spans):
        in_entry.copy_(in_file)
    for states, file, head, values_offset, scales_offset in _heads(files, tensors, entries, spans.states):
        values = _read(pool, file, values_offset, states.value_bytes).view(VALUES[states.encoding.name])
        scales = _read(pool, file, scales_offset, states.scale_bytes).view(torch.float32)
        head.copy_(values.view(head.shape).float() * scales[:, None])


def encode_head(head: Tensor, encoding: StateEncoding) -> tuple[Tensor, Tensor]:
    """Numbers and scales, float32 [1] or [rows], of a head's state, float32 [rows, columns]: see `StateEncoding`."""
    parts = head.unsqueeze(0) if encoding.scale == "head" else head
    values = torch.zeros(parts.shape, dtype=VALUES[encoding.name])
    scales = torch.empty(len(parts))
    for number, part in enumerate(parts):
        most = float(part.abs().max())
        if not math.isfinite(most):
            scales[number] = math.nan
        elif encoding.scale == "head":
            scales[number] = half_scale(most) if most >= LEAST else 1.0
            values[number] = (part / scales[number]).clamp(-MOST_HALF, MOST_HALF).half()
        else:
            scales[number] = row_scale(most) if most >= LEAST else 1.0
            values[number] = (part / scales[number]).round().to(torch.int8)
    return values.view(head.shape), scales


def half_scale(most: float) -> float:
    """The power of two with which `most`, rounded to 11 bits, is from 2^14 on and below 2^15."""
    mantissa, exponent = math.frexp(most)
    if round(mantissa * 2**11) == 2**11:
        exponent += 1
    # Of float32 numbers that round up to infinity, and of those whose scale would have fewer bits.
    return math.ldexp(1.0, max(min(exponent, 128) - 15, -126))


def row_scale(most: float) -> float:
    """`most` / 127, rounded to 17 bits."""
    mantissa, exponent = math.frexp(float(torch.tensor(most, dtype=torch.float32) / 127))
    return max(math.ldexp(math.floor(mantissa * 2**17 + 0.5), exponent - 17), LEAST)


def _heads(
    files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, states: EncodedStates | None
) -> Iterator[tuple[EncodedStates, list[int], Tensor, int, int]]:
    """Each head of each file: the file's pages, a view of the head in its entry, [rows, columns], and where its numbers
    and its scales lie in the file."""
    if states is None:
        return
    tensor = tensors[states.tensor]
    for number, file in enumerate(files.tolist()):
        entry = number if entries is None else int(entries[number])
        for span in states.spans:
            for head in range(span.num_heads):
                first = tensor.storage_offset() + entry * tensor.stride(0) + span.offset // 4
                place = first + head * states.rows * states.columns
                view = tensor.as_strided((states.rows, states.columns), (states.columns, 1), place)
                values_offset = span.values_offset + head * states.value_bytes
                yield states, file, view, values_offset, span.scales_offset + head * states.scale_bytes


def _write(pool: Tensor, file: list[int], offset: int, numbers: Tensor) -> None:
    for number, byte in enumerate(numbers.flatten().view(torch.uint8).tolist(), offset):
        pool[file[number // pool.shape[1]], number % pool.shape[1]] = byte


def _read(pool: Tensor, file: list[int], offset: int, num_bytes: int) -> Tensor:
    places = range(offset, offset + num_bytes)
    return torch.stack([pool[file[place // pool.shape[1]], place % pool.shape[1]] for place in places])


def _places(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: Sequence[StateSpan]
) -> list[tuple[Tensor, Tensor]]:
    """Views, uint8, of the same bytes in a page and in an entry."""
    places = []
    for number, file in enumerate(files.tolist()):
        entry = number if entries is None else int(entries[number])
        for span in spans:
            whole, tensor = _bytes_of(tensors[span.tensor]), tensors[span.tensor]
            first = (tensor.storage_offset() + entry * tensor.stride(0)) * tensor.itemsize
            for page, begin, piece in span.pieces(pool.shape[1]):
                at = first + piece.offset
                in_page = pool[file[page], begin : begin + piece.num_bytes]
                places.append((in_page, whole[at : at + piece.num_bytes]))
    return places


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of the memory that it is a part of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def copy_pages(pool: Tensor, targets: Tensor, sources: Tensor) -> None:
    """See `Kernels.copy_pages`."""
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        pool[target] = pool[source]
