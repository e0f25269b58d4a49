"""The gated delta rule: 64-token chunks for prefill, one token in place for decode.

The chunked form is that of arXiv 2406.06484 with the decay of arXiv 2412.06464: what the tokens of a chunk write is
the solution of one triangular system, everything else are products. Each chunk is computed before the next one is
touched, so its temporaries stay in the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.contract import TILE

NORM_EPS = 1e-6


def gdn_prefill(
    v: Tensor, qk: tuple[Tensor, Tensor], gates: tuple[Tensor, Tensor], state: Tensor, marks: Sequence[int]
) -> list[Tensor]:
    """See `Kernels.gdn_prefill`."""
    # Tensors of their own, aligned like `state`: BLAS may round otherwise where its operands lie otherwise.
    kept = [torch.empty_like(state) for _ in marks]
    pending = list(enumerate(marks))[::-1]
    for begin in range(0, v.shape[0], TILE):
        chunk = slice(begin, begin + TILE)
        here = []
        while pending and pending[-1][1] <= begin + TILE:
            index, mark = pending.pop()
            here.append((kept[index], mark - begin))
        _chunk(v[chunk], (qk[0][chunk], qk[1][chunk]), (gates[0][chunk], gates[1][chunk]), state, here)
    return kept


def _unit(x: Tensor, scale: float, per_head: int) -> Tensor:
    """x [rows, Hk, K] -> scale * x / |x| for every value head, [Hv, rows, K], a tensor of its own."""
    norm = x.square().sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
    return (x * norm).mul_(scale).transpose(0, 1).repeat_interleave(per_head, dim=0)


def _chunk(
    v: Tensor,
    qk: tuple[Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    state: Tensor,
    kept: Sequence[tuple[Tensor, int]],
) -> None:
    """One chunk: v becomes y, state moves on, `kept` pairs (tensor, mark) get the state after the first mark rows."""
    length, heads, _ = v.shape
    per_head = heads // qk[0].shape[1]
    q, k = _unit(qk[0], qk[0].shape[-1] ** -0.5, per_head), _unit(qk[1], 1.0, per_head)
    # [H, L], the log of the decay since the chunk's start. Behind a strong decay its differences are small beside it,
    # and in float32 they would lose what they are needed for.
    cum = gates[0].t().double().cumsum(-1)
    beta, grown = gates[1].t().contiguous()[..., None], cum.exp().to(v.dtype)[..., None]
    future = torch.ones(length, length, dtype=torch.bool, device=v.device).triu_(1)
    decay = (cum[:, :, None] - cum[:, None, :]).to(v.dtype).masked_fill_(future, -torch.inf).exp_()
    # Row i of the system: what token i writes, less what it would have read of the tokens before it in the chunk.
    system = torch.bmm(k, k.transpose(1, 2)).mul_(decay).mul_(beta)
    wanted = v.transpose(0, 1) - torch.bmm(k, state).mul_(grown)
    written = torch.linalg.solve_triangular(system, wanted.mul_(beta), upper=False, unitriangular=True)
    # The solver's result lies column by column; products are wanted of one form.
    written = written.contiguous()
    y = torch.bmm(q, state).mul_(grown)
    y.add_(torch.bmm(torch.bmm(q, k.transpose(1, 2)).mul_(decay), written))
    for target, mark in kept:
        if mark < length:
            _advance(target.copy_(state), cum, k, written, mark)
    _advance(state, cum, k, written, length)
    for target, mark in kept:
        if mark == length:
            target.copy_(state)
    v.copy_(y.transpose(0, 1))


def _advance(state: Tensor, cum: Tensor, k: Tensor, written: Tensor, mark: int) -> None:
    """state [H, K, V], as it was at the chunk's start, becomes the state after the chunk's first `mark` rows.

    Rows from `mark` on get the weight 0 in products of the same shape, so the bits are those of a pass that ended at
    `mark`, whose rows from there on are padding that writes nothing.
    """
    last = cum[:, mark - 1 : mark]
    weight = (last - cum).to(k.dtype).exp_()
    if mark < cum.shape[1]:
        weight[:, mark:] = 0.0
    state.mul_(last.exp().to(k.dtype)[..., None])
    state.baddbmm_((k * weight[..., None]).transpose(1, 2), written)


def gdn_update(
    v: Tensor, qk: tuple[Tensor, Tensor], gates: tuple[Tensor, Tensor], states: Tensor, slots: Sequence[int]
) -> None:
    """See `Kernels.gdn_update`. Slot by slot on the live array: gathering the states would cost more than the step.
    The vectors are rows, since a batched product with one column is far slower than one with one row."""
    per_head = v.shape[1] // qk[0].shape[1]
    q = _unit(qk[0], qk[0].shape[-1] ** -0.5, per_head).transpose(0, 1)[:, :, None]
    k = _unit(qk[1], 1.0, per_head).transpose(0, 1)[:, :, None]  # [T, H, 1, K]
    decay, beta = gates[0].exp()[..., None, None], gates[1][..., None]
    for row, slot in enumerate(slots):
        state = states[slot].mul_(decay[row])
        # Copies, because where a row begins depends on its place in the batch, and BLAS may round accordingly.
        key, query = (part[row].clone(memory_format=torch.contiguous_format) for part in (k, q))
        written = (v[row] - torch.bmm(key, state)[:, 0]).mul_(beta[row])
        state.addcmul_(key.transpose(1, 2), written[:, None])
        v[row] = torch.bmm(query, state)[:, 0]
