"""Mamba2's state space scan: 64-token chunks for prefill, one token in place for decode.

The chunked form is that of arXiv 2405.21060, section 6: inside a chunk an attention-like product under the decay
mask, between chunks the state. C B^T is formed once per group of heads, and the state's two products are batched per
group. Each chunk is computed before the next one is touched, so its temporaries stay in the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.contract import TILE


def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    bc: tuple[Tensor, Tensor],
    ad: tuple[Tensor, Tensor],
    state: Tensor,
    marks: Sequence[int],
) -> list[Tensor]:
    """See `Kernels.ssd_prefill`."""
    # Tensors of their own, aligned like `state`: BLAS may round otherwise where its operands lie otherwise.
    kept = [torch.empty_like(state) for _ in marks]
    pending = list(enumerate(marks))[::-1]
    for begin in range(0, x.shape[0], TILE):
        chunk = slice(begin, begin + TILE)
        here = []
        while pending and pending[-1][1] <= begin + TILE:
            index, mark = pending.pop()
            here.append((kept[index], mark - begin))
        _chunk(x[chunk], dt[chunk], (bc[0][chunk], bc[1][chunk]), ad, state, here)
    return kept


def _chunk(
    x: Tensor,
    dt: Tensor,
    bc: tuple[Tensor, Tensor],
    ad: tuple[Tensor, Tensor],
    state: Tensor,
    kept: Sequence[tuple[Tensor, int]],
) -> None:
    """One chunk: x becomes y, state moves on, `kept` pairs (tensor, mark) get the state after the first mark rows."""
    length, heads, dim = x.shape
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu_(1)
    b, c = (part.transpose(0, 1) for part in bc)  # [G, L, N]
    groups, per_group = b.shape[0], heads // b.shape[0]
    # [H, L], the log of the decay since the chunk's start. Behind a strong decay its differences are small beside it,
    # and in float32 they would lose what they are needed for.
    cum = (dt * ad[0]).t().double().cumsum(-1)
    scores = (cum[:, :, None] - cum[:, None, :]).to(x.dtype).masked_fill_(future, -torch.inf).exp_()
    scores.view(groups, per_group, length, length).mul_(torch.bmm(c, b.transpose(1, 2))[:, None])
    inputs = (x * dt[..., None]).transpose(0, 1)  # [H, L, P]
    y = torch.bmm(scores, inputs)
    carried = torch.bmm(c, state.view(groups, per_group * dim, -1).transpose(1, 2))  # [G, L, R * P]
    carried = carried.view(groups, length, per_group, dim).transpose(1, 2)
    y.view(groups, per_group, length, dim).addcmul_(carried, cum.exp().to(x.dtype).view(groups, per_group, length, 1))
    for target, mark in kept:
        if mark < length:
            _advance(target.copy_(state), cum, inputs, b, mark)
    _advance(state, cum, inputs, b, length)
    for target, mark in kept:
        if mark == length:
            target.copy_(state)
    x.mul_(ad[1][:, None]).add_(y.transpose(0, 1))


def _advance(state: Tensor, cum: Tensor, inputs: Tensor, b: Tensor, mark: int) -> None:
    """state [H, P, N], as it was at the chunk's start, becomes the state after the chunk's first `mark` rows.

    Rows from `mark` on get the weight 0 in products of the same shape, so the bits are those of a pass that ended at
    `mark`, whose rows from there on are padding with dt = 0.
    """
    heads, length = cum.shape
    groups = b.shape[0]
    last = cum[:, mark - 1 : mark]
    weight = (last - cum).to(inputs.dtype).exp_()
    if mark < length:
        weight[:, mark:] = 0.0
    weighted = (inputs * weight[..., None]).view(groups, heads // groups, length, -1).transpose(2, 3)
    state.mul_(last.exp().to(inputs.dtype)[..., None])
    state.view(groups, -1, state.shape[-1]).baddbmm_(weighted.reshape(groups, -1, length), b)


def ssd_update(
    x: Tensor,
    dt: Tensor,
    bc: tuple[Tensor, Tensor],
    ad: tuple[Tensor, Tensor],
    states: Tensor,
    slots: Sequence[int],
) -> None:
    """See `Kernels.ssd_update`. Slot by slot on the live array: gathering the states would cost more than the step,
    and a batched product with one column is far slower than `mv`."""
    b, c = bc
    groups = b.shape[1]
    decay = (dt * ad[0]).exp_()[..., None, None]
    inputs = (x * dt[..., None]).view(x.shape[0], groups, -1, 1)
    x.mul_(ad[1][:, None])
    for row, slot in enumerate(slots):
        state = states[slot]
        state.mul_(decay[row])
        by_group = state.view(groups, -1, state.shape[-1])
        by_group.addcmul_(inputs[row], b[row][:, None])
        # A copy, because where a row begins depends on its place in the batch, and BLAS may round accordingly.
        vectors = c[row].clone()
        y = torch.cat([torch.mv(by_group[group], vectors[group]) for group in range(groups)])
        x[row].add_(y.view(x.shape[1:]))
