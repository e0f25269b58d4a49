"""Paged attention, one query of one head at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor


def write_kv(keys: Tensor, values: Tensor, kv: tuple[Tensor, Tensor], pages: Tensor, offsets: Tensor) -> None:
    """See `Kernels.write_kv`."""
    for row, (page, offset) in enumerate(zip(pages.tolist(), offsets.tolist(), strict=True)):
        keys[page, :, offset] = kv[0][row]
        values[page, :, offset] = kv[1][row]


def _attend(query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, length: int) -> Tensor:
    """query [Hq, D] over the first `length` tokens of `pages` -> [Hq, D]."""
    heads, dim = query.shape
    tokens = keys.shape[2]
    out = torch.empty_like(query)
    places = [(int(pages[position // tokens]), position % tokens) for position in range(length)]
    for head in range(heads):
        kv_head = head * keys.shape[1] // heads
        k = torch.stack([keys[page, kv_head, offset] for page, offset in places])
        v = torch.stack([values[page, kv_head, offset] for page, offset in places])
        out[head] = torch.softmax(k @ query[head] * dim**-0.5, dim=0) @ v
    return out


def attend_prefill(q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, first: int, end: int) -> Tensor:
    """See `Kernels.attend_prefill`. Padding rows give 0."""
    out = torch.zeros_like(q)
    for row in range(min(q.shape[0], end - first)):
        out[row] = _attend(q[row], keys, values, pages, first + row + 1)
    return out


def attend_decode(q: Tensor, keys: Tensor, values: Tensor, pages: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """See `Kernels.attend_decode`."""
    rows = [_attend(*row, pages[i], lengths[i]) for i, row in enumerate((query, keys, values) for query in q)]
    return torch.stack(rows) if rows else torch.empty_like(q)
