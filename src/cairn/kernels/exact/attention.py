"""Paged attention, one sequence at a time: gather its pages once, then SDPA with a key head's query heads as rows.

The length of keys and values is a multiple of 64 that depends on the position alone, so a query's bits depend neither
on the batch nor on how the prompt was cut. Of limited reach they begin at a multiple of 64 as well. Bytes after the
valid length, and before the reach, are cleared: pages are recycled, and what they held may read as NaN, which no mask
would stop.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import CHUNK, Batch
from cairn.kernels.exact.elementwise import widen
from cairn.kernels.exact.metadata import Prefill, metadata_of


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, group: int, batch: Batch) -> None:
    """See `Kernels.write_kv`."""
    metadata = metadata_of(batch)
    page_size = keys.shape[2]
    positions = metadata.write_positions
    pages = batch.block_tables[group][metadata.write_slots, positions // page_size].long()
    offsets = positions % page_size
    keys[pages, :, offsets] = k[metadata.write_rows]
    values[pages, :, offsets] = v[metadata.write_rows]


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
    metadata, table = metadata_of(batch), batch.block_tables[group]
    out = torch.empty(q.shape, dtype=q.dtype)
    for decode in metadata.decodes:
        for length, row in enumerate(decode.rows, start=decode.start + 1):
            out[row] = _decode(q[row], keys, values, table[decode.slot], length, rule, sinks)
    for prefill in metadata.prefills:
        out[prefill.rows] = _prefill(q, keys, values, table[prefill.slot], prefill, rule, sinks)
    return out


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """cache [page, Hk, token, D] -> the first `length` tokens, zeros up to a multiple of CHUNK: [1, Hk, padded, D].
    `table` [entries]: the sequence's pages."""
    _, heads, tokens, dim = cache.shape
    used = -(-length // tokens)
    padded = -(-length // CHUNK) * CHUNK
    room = -(-max(used * tokens, padded) // CHUNK) * CHUNK  # whole chunks, so that every head begins aligned
    out = cache.new_empty(1, heads, room, dim)
    pages = cache[table[:used].long()].transpose(0, 1)
    out[0, :, : used * tokens].view(heads, used, tokens, dim).copy_(pages)
    out[:, :, length:] = 0
    return out[:, :, :padded]


def _gather_reach(cache: Tensor, table: Tensor, begin: int, first: int, length: int) -> Tensor:
    """As `_gather`, of tokens [first, length) in their places after `begin`, a multiple of CHUNK, with zeros before
    them. Pages that have none of these tokens are not read."""
    if not first:
        return _gather(cache, table, length)
    _, heads, tokens, dim = cache.shape
    page = first // tokens
    pages = cache[table[page : -(-length // tokens)].long()].transpose(0, 1).reshape(heads, -1, dim)
    out = cache.new_zeros(1, heads, -(-length // CHUNK) * CHUNK - begin, dim)
    out[0, :, first - begin : length - begin] = pages[:, first - page * tokens : length - page * tokens]
    return out


def _prefill(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, prefill: Prefill, rule: AttentionRule, sinks: Tensor | None
) -> Tensor:
    """All rows of one sequence, [length, Hq, D]. Keys and values are trimmed to the chunks that each chunk of queries
    sees, be it whole or with a part of its rows in this pass."""
    chunks = prefill.lay_out(q)
    rows, heads, dim = chunks.shape
    kv_heads = keys.shape[1]
    per_key = heads // kv_heads
    first, end = prefill.start - prefill.front, prefill.start + prefill.length
    origin = _begin(rule, first)
    k, v = (_gather_reach(each, table, origin, rule.first_key(prefill.start), end) for each in (keys, values))
    past_masks = _causal(q, per_key, first + rows) if rule.reach is None else None
    for begin in range(0, rows, CHUNK):
        chunk = chunks[begin : begin + CHUNK].view(CHUNK, kv_heads, per_key, dim)
        visible = first + begin + CHUNK
        grouped = chunk.permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        if past_masks is not None:
            mask, seen = past_masks[:, rows + first - visible :], slice(0, visible)
        else:
            mask = _limited(q, per_key, first + begin, rule)
            seen = slice(_begin(rule, first + begin) - origin, visible - origin)
        result = _attend(grouped, k[:, :, seen], v[:, :, seen], mask, rule, sinks)
        chunk.copy_(result.view(kv_heads, per_key, CHUNK, dim).permute(2, 0, 1, 3))
    return chunks[prefill.on_grid]


def _begin(rule: AttentionRule, position: int) -> int:
    """Where the chunk begins that has the first key which a query sees."""
    return rule.first_key(position) // CHUNK * CHUNK


def _causal(q: Tensor, per_key: int, length: int) -> Tensor:
    """Additive mask [per_key * CHUNK, length] of the last chunk; dropping columns in front gives an earlier one's."""
    mask = q.new_zeros(per_key, CHUNK, length)
    mask[:, :, -CHUNK:] = torch.full((CHUNK, CHUNK), -torch.inf, dtype=q.dtype).triu_(1)
    return mask.view(-1, length)


def _limited(q: Tensor, per_key: int, first: int, rule: AttentionRule) -> Tensor:
    """Additive mask [per_key * CHUNK, keys] of the chunk of queries at `first`, of limited reach."""
    queries, positions = torch.arange(first, first + CHUNK)[:, None], torch.arange(_begin(rule, first), first + CHUNK)
    first_keys = torch.tensor([rule.first_key(position) for position in range(first, first + CHUNK)])[:, None]
    unseen = (positions > queries) | (positions < first_keys)
    return q.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf).repeat(per_key, 1)


def _decode(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int, rule: AttentionRule, sinks: Tensor | None
) -> Tensor:
    """One query [Hq, D], the last of `length` tokens -> [Hq, D]."""
    heads, dim = q.shape
    kv_heads = keys.shape[1]
    first, begin = rule.first_key(length - 1), _begin(rule, length - 1)
    k, v = (_gather_reach(each, table, begin, first, length) for each in (keys, values))
    mask = q.new_zeros(1, k.shape[2])
    mask[:, : first - begin] = mask[:, length - begin :] = -torch.inf
    # A copy, because where a row begins depends on its place in the batch, and BLAS may round accordingly.
    grouped = q.clone(memory_format=torch.contiguous_format).view(1, kv_heads, heads // kv_heads, dim)
    return _attend(grouped, k, v, mask.expand(heads // kv_heads, -1), rule, sinks).view(heads, dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: AttentionRule, sinks: Tensor | None) -> Tensor:
    """q [1, Hk, rows, D], a query head's rows after another's; k and v [1, Hk, keys, D]; mask [rows, keys]."""
    if rule.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale)
    scores = widen(q) @ widen(k).transpose(2, 3) * (q.shape[3] ** -0.5 if rule.scale is None else rule.scale)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores += mask
    out = torch.softmax(scores, dim=-1) @ widen(v)
    if sinks is not None:
        logits = sinks.to(scores.dtype).repeat_interleave(q.shape[1] * q.shape[2] // len(sinks)).view(*q.shape[:3], 1)
        # What the keys' weights sum up to beside a sink's.
        out *= torch.sigmoid(torch.logsumexp(scores, dim=-1, keepdim=True) - logits)
    return out.to(q.dtype)
