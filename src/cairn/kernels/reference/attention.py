"""Paged attention, one query of one head at a time."""

import torch
from torch import Tensor

from cairn.kernels.attention_rule import FULL, AttentionRule
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


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: int,
    batch: Batch,
    rule: AttentionRule = FULL,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `Kernels.attention`."""
    out = torch.empty(q.shape, dtype=q.dtype)
    per_key = q.shape[1] // keys.shape[1]
    for sequence in sequences_of(batch.host):
        first = rule.first_key(sequence.start)
        places = [
            _place(batch, group, sequence.slot, position, keys.shape[2]) for position in range(first, sequence.end)
        ]
        k, v = (torch.stack([widen(part[page, :, offset]) for page, offset in places]) for part in (keys, values))
        for row, position in zip(sequence.rows, range(sequence.start, sequence.end), strict=True):
            seen = slice(rule.first_key(position) - first, position + 1 - first)
            for head in range(q.shape[1]):
                sink = None if sinks is None else widen(sinks[head])
                weights = _weights(k[seen, head // per_key] @ widen(q[row, head]), q.shape[-1], rule, sink)
                out[row, head] = weights @ v[seen, head // per_key]
    return out


def _weights(products: Tensor, dim: int, rule: AttentionRule, sink: Tensor | None) -> Tensor:
    """Of the keys that a query sees, by its products with them: [keys]."""
    scores = products * (dim**-0.5 if rule.scale is None else rule.scale)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if sink is None:
        return torch.softmax(scores, dim=0)
    return torch.softmax(torch.cat([scores, sink.to(scores.dtype)[None]]), dim=0)[:-1]
