"""Mamba2's state space scan: 64-token chunks for prefill, token by token in place for decode.

The chunked form is that of arXiv 2405.21060, section 6: inside a chunk an attention-like product under the decay
mask, between chunks the state. C B^T is formed once per group of heads, and the state's two products are batched per
group. Each chunk is computed before the next one is touched, so its temporaries stay in the cache.

All products have one shape, and operands that lie in memory of their own: BLAS may round otherwise where they lie
otherwise. Rows of a chunk that are no tokens have a step of 0, which leaves the state as it is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch
from cairn.kernels.exact.elementwise import softplus, widen
from cairn.kernels.exact.metadata import Decode, Prefill, aligned_state, decodes_by_state, metadata_of, round_state


def ssd(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, dt_bias: Tensor,
    dt_limit: tuple[float, float], states: Tensor, batch: Batch,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.ssd`."""
    metadata = metadata_of(batch)
    steps = softplus(widen(dt) + dt_bias).clamp_(*dt_limit)
    y = torch.empty(x.shape, dtype=x.dtype)
    snapshots = states.new_empty(metadata.num_snapshots, *states.shape[1:])
    if decodes := decodes_by_state(batch):
        _decode(x, steps, b, c, a, d, states, decodes, y, snapshots)
    for prefill in metadata.prefills:
        _prefill(x, steps, b, c, a, d, states, prefill, y, snapshots)
    return y, snapshots


def _prefill(
    x: Tensor, steps: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, states: Tensor, prefill: Prefill,
    y: Tensor, snapshots: Tensor,
) -> None:  # fmt: skip
    x, steps, b, c = (prefill.lay_out(part) for part in (x, steps, b, c))
    state = widen(prefill.state_before(states))
    for index, points in enumerate(prefill.snapshots_by_chunk()):
        chunk = slice(index * CHUNK, (index + 1) * CHUNK)
        _run_chunk(x[chunk], steps[chunk], b[chunk], c[chunk], a, d, state, points, snapshots)
        round_state(state, states.dtype)
    y[prefill.rows] = x[prefill.on_grid]
    states[prefill.slot] = state


def _run_chunk(
    x: Tensor, steps: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, state: Tensor,
    points: Sequence[tuple[int, int]], snapshots: Tensor,
) -> None:  # fmt: skip
    """One chunk: x becomes y, the state moves on. `points`: pairs (snapshot, rows of the chunk before it)."""
    length, heads, dim = x.shape
    future = torch.ones(length, length, dtype=torch.bool).triu_(1)
    b, c = b.transpose(0, 1), c.transpose(0, 1)  # [G, L, S]
    groups, per_group = b.shape[0], heads // b.shape[0]
    # [H, L], the log of the decay since the chunk's start. Behind a strong decay its differences are small beside it,
    # and in float32 they would lose what they are needed for.
    cum = (steps * a).t().double().cumsum(-1)
    scores = (cum[:, :, None] - cum[:, None, :]).to(x.dtype).masked_fill_(future, -torch.inf).exp_()
    scores.view(groups, per_group, length, length).mul_(torch.bmm(c, b.transpose(1, 2))[:, None])
    inputs = (x * steps[..., None]).transpose(0, 1)  # [H, L, P]
    y = torch.bmm(scores, inputs)
    carried = torch.bmm(c, state.view(groups, per_group * dim, -1).transpose(1, 2))  # [G, L, R * P]
    carried = carried.view(groups, length, per_group, dim).transpose(1, 2)
    y.view(groups, per_group, length, dim).addcmul_(carried, cum.exp().to(x.dtype).view(groups, per_group, length, 1))
    for number, rows in points:
        snapshots[number] = _advance(state.clone(), cum, inputs, b, rows)
    _advance(state, cum, inputs, b, length)
    x.mul_(d[:, None]).add_(y.transpose(0, 1))


def _advance(state: Tensor, cum: Tensor, inputs: Tensor, b: Tensor, rows: int) -> Tensor:
    """state [H, P, S], as it was at the chunk's start, becomes the state after the chunk's first `rows` rows.

    The rows after them get the weight 0 in products of the same shape, so the bits are those of a pass that ended
    there, whose rows from there on are no tokens.
    """
    heads, length = cum.shape
    groups = b.shape[0]
    last = cum[:, rows - 1 : rows]
    weight = (last - cum).to(inputs.dtype).exp_()
    if rows < length:
        weight[:, rows:] = 0.0
    weighted = (inputs * weight[..., None]).view(groups, heads // groups, length, -1).transpose(2, 3)
    state.mul_(last.exp().to(inputs.dtype)[..., None])
    state.view(groups, -1, state.shape[-1]).baddbmm_(weighted.reshape(groups, -1, length), b)
    return state


def _decode(
    x: Tensor, steps: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, states: Tensor, decodes: Sequence[Decode],
    y: Tensor, snapshots: Tensor,
) -> None:  # fmt: skip
    """Slot by slot on the live array: gathering the states would cost more than the step, and a batched product with
    one column is far slower than `mv`."""
    count, groups = decodes[-1].rows.stop, b.shape[1]
    x, steps = x[:count], steps[:count]
    decay = (steps * a).exp_()[..., None, None]
    inputs = (x * steps[..., None]).view(count, groups, -1, 1)
    torch.mul(x, d[:, None], out=y[:count])
    for decode in decodes:
        with aligned_state(states, decode) as state:
            by_group = state.view(groups, -1, state.shape[-1])
            for row in decode.rows:
                state.mul_(decay[row])
                by_group.addcmul_(inputs[row], b[row][:, None])
                # A copy, because where a row begins depends on its place in the batch, and BLAS may round accordingly.
                vectors = c[row].clone()
                read = torch.cat([torch.mv(by_group[group], vectors[group]) for group in range(groups)])
                y[row].add_(read.view(x.shape[1:]))
                round_state(state, states.dtype)
                decode.store_snapshots(row, state, snapshots)
