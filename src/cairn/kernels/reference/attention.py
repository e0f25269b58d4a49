"""Paged attention, one query of one head at a time."""

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.reference.elementwise import widen
from cairn.kernels.reference.recurrences import sequences_of


def _place(batch: Batch, group: int, slot: int, position: int, page_size: int) -> tuple[int, int]:
    """The page of a sequence's position, and where in it."""
    return int(batch.block_tables[group][slot, position // page_size]), position % page_size


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, group: int, batch: Batch) -> None:
    """See `Kernels.write_kv`."""
    for sequence in sequences_of(batch.host):
        for row, position in zip(sequence.rows, range(sequence.start, sequence.end), strict=True):
            if position >= sequence.kv_write_from:
                page, offset = _place(batch, group, sequence.slot, position, keys.shape[2])
                keys[page, :, offset] = k[row]
                values[page, :, offset] = v[row]


def attention(q: Tensor, keys: Tensor, values: Tensor, group: int, batch: Batch) -> Tensor:
    """See `Kernels.attention`."""
    out = torch.empty(q.shape, dtype=q.dtype)
    per_key = q.shape[1] // keys.shape[1]
    for sequence in sequences_of(batch.host):
        places = [_place(batch, group, sequence.slot, position, keys.shape[2]) for position in range(sequence.end)]
        k, v = (torch.stack([widen(part[page, :, offset]) for page, offset in places]) for part in (keys, values))
        for row, position in zip(sequence.rows, range(sequence.start, sequence.end), strict=True):
            seen = slice(0, position + 1)
            for head in range(q.shape[1]):
                scores = k[seen, head // per_key] @ widen(q[row, head]) * q.shape[-1] ** -0.5
                out[row, head] = torch.softmax(scores, dim=0) @ v[seen, head // per_key]
    return out
