"""Copies between states and checkpoint files, byte by byte as the spans say, and of pages and tokens one by one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.checkpoint_files import FileSpan


def pack_file_spans(spans: Sequence[FileSpan], entry_bytes: Sequence[int], pool: Tensor) -> Sequence[FileSpan]:
    """See `Kernels.pack_file_spans`."""
    return tuple(spans)


def store_states(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: Sequence[FileSpan]
) -> None:
    """See `Kernels.store_states`."""
    for in_file, in_entry in _places(pool, files, tensors, entries, spans):
        in_file.copy_(in_entry)


def load_states(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: Sequence[FileSpan]
) -> None:
    """See `Kernels.load_states`."""
    for in_file, in_entry in _places(pool, files, tensors, entries, spans):
        in_entry.copy_(in_file)


def _places(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: Sequence[FileSpan]
) -> list[tuple[Tensor, Tensor]]:
    """Views, uint8, of the same bytes in a page and in an entry."""
    found = []
    for number, file in enumerate(files.tolist()):
        entry = number if entries is None else int(entries[number])
        for span in spans:
            whole, tensor = _bytes_of(tensors[span.tensor]), tensors[span.tensor]
            first = (tensor.storage_offset() + entry * tensor.stride(0)) * tensor.itemsize
            for page, begin, piece in span.pieces(pool.shape[1]):
                at = first + piece.offset
                in_page = pool[file[page], begin : begin + piece.num_bytes]
                found.append((in_page, whole[at : at + piece.num_bytes]))
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of the memory that it is a part of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def copy_pages(pool: Tensor, targets: Tensor, sources: Tensor) -> None:
    """See `Kernels.copy_pages`."""
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        pool[target] = pool[source]


def copy_tokens(
    target: Tensor, pages: Tensor, page_tokens: Tensor, source: Tensor, slots: Tensor, slot_tokens: Tensor
) -> None:
    """See `Kernels.copy_tokens`."""
    places = (each.tolist() for each in (pages, page_tokens, slots, slot_tokens))
    for page, page_token, slot, slot_token in zip(*places, strict=True):
        target[page, :, page_token] = source[slot, :, slot_token]
