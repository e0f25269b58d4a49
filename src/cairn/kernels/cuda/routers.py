"""Which experts a token goes to: a program has a row of logits and takes the best one K times.

Sigmoid router: DeepSeek-V3's (arXiv 2412.19437, section 2.1.2). A score and its expert are one 64-bit integer, in the
order of the scores and, where these are equal, with the lowest expert as the largest: a maximum finds both, and experts
of a token are different ones whatever the scores, NaN and infinity included.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.cuda.device import kernel, power_of_2

_TAKEN = tl.constexpr(-(2**63))
"""Below every key: of what was chosen before, and of what is padding."""


@triton.jit
def _keys(scores, index):
    """int64 that rise with float32 `scores`; NaN counts as minus infinity, -0 as 0."""
    scores = tl.where(scores == scores, scores, float("-inf"))
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    # The integers of negative numbers rise with their amount: all bits but the sign are turned around.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - index)


@triton.jit
def _index(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@kernel
def _softmax_kernel(
    logits, topk_ids, topk_weights, num_experts, stride,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, CHOSEN: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    row_logits = logits + row * stride
    scores = tl.load(row_logits + expert, mask=expert < num_experts, other=float("-inf"))
    largest = tl.max(scores, axis=0)
    keys = tl.where(expert < num_experts, _keys(scores, expert), _TAKEN)
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros((CHOSEN,), dtype=tl.int32)
    for k in range(TOP_K):
        best = tl.max(keys, axis=0)
        chosen = tl.where(place == k, _index(best), chosen)
        keys = tl.where(keys == best, _TAKEN, keys)
    inside = place < TOP_K
    rates = tl.where(inside, tl.exp(tl.load(row_logits + chosen, mask=inside, other=0) - largest), 0.0)
    if NORMALIZE:
        total = tl.sum(rates, axis=0)
    else:
        total = tl.sum(tl.exp(scores - largest), axis=0)
    tl.store(topk_ids + row * TOP_K + place, chosen.to(tl.int64), mask=inside)
    tl.store(topk_weights + row * TOP_K + place, rates / total, mask=inside)


@kernel
def _sigmoid_kernel(
    logits, correction, topk_ids, topk_weights, per_group, num_groups, stride, scale, epsilon,
    TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUPED: tl.constexpr, NORMALIZE: tl.constexpr,
    CHOSEN: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr,
):  # fmt: skip
    """Experts as [groups, experts of a group]; `GROUPED`: not every group is open."""
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS), tl.arange(0, PER_GROUP)
    expert = (group * per_group)[:, None] + member[None, :]
    real = (group < num_groups)[:, None] & (member < per_group)[None, :]
    row_logits = logits + row * stride
    scores = tl.sigmoid(tl.load(row_logits + expert, mask=real, other=0))
    scores += tl.load(correction + expert, mask=real, other=0)
    keys = tl.where(real, _keys(scores, expert), _TAKEN)
    if GROUPED:
        best = tl.max(keys, axis=1)
        rest = tl.where(keys == best[:, None], _TAKEN, keys)
        second = tl.max(rest, axis=1)
        worth = tl.sum(tl.where(real & (keys == best[:, None]), scores, 0.0), axis=1)
        worth += tl.sum(tl.where((rest > _TAKEN) & (rest == second[:, None]), scores, 0.0), axis=1)
        group_keys = tl.where(group < num_groups, _keys(worth, group), _TAKEN)
        for _ in range(TOP_GROUPS):
            group_keys = tl.where(group_keys == tl.max(group_keys, axis=0), _TAKEN, group_keys)
        is_open = group_keys == _TAKEN
        # Experts of the other groups come after all of the open ones'.
        closed = _keys(tl.full((GROUPS, PER_GROUP), float("-inf"), dtype=tl.float32), expert)
        keys = tl.where(real & (is_open == 0)[:, None], closed, keys)
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros((CHOSEN,), dtype=tl.int32)
    for k in range(TOP_K):
        best_key = tl.max(tl.max(keys, axis=1), axis=0)
        chosen = tl.where(place == k, _index(best_key), chosen)
        keys = tl.where(keys == best_key, _TAKEN, keys)
    inside = place < TOP_K
    rates = tl.where(inside, tl.sigmoid(tl.load(row_logits + chosen, mask=inside, other=0)), 0.0)
    if NORMALIZE:
        rates = rates / (tl.sum(rates, axis=0) + epsilon)
    tl.store(topk_ids + row * TOP_K + place, chosen.to(tl.int64), mask=inside)
    tl.store(topk_weights + row * TOP_K + place, rates * scale, mask=inside)


def softmax_router(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """See `Kernels.softmax_router`."""
    rows, experts = logits.shape
    topk_ids, topk_weights = _results(rows, top_k, logits)
    if rows:
        _softmax_kernel[(rows,)](
            *(logits, topk_ids, topk_weights, experts, logits.stride(0)),
            TOP_K=top_k,
            NORMALIZE=normalize,
            CHOSEN=power_of_2(top_k),
            EXPERTS=power_of_2(experts, 32),
            num_warps=_num_warps(experts),
        )
    return topk_ids, topk_weights


def sigmoid_router(
    logits: Tensor, correction: Tensor, top_k: int, num_groups: int, top_groups: int, normalize: bool, scale: float,
    epsilon: float = 1e-20,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.sigmoid_router`."""
    rows, experts = logits.shape
    topk_ids, topk_weights = _results(rows, top_k, logits)
    # Where every group is open they make no difference.
    groups = num_groups if top_groups < num_groups else 1
    if rows:
        _sigmoid_kernel[(rows,)](
            *(logits, correction, topk_ids, topk_weights, experts // groups, groups, logits.stride(0)),
            *(float(scale), float(epsilon)),
            TOP_K=top_k,
            TOP_GROUPS=top_groups,
            GROUPED=groups > 1,
            NORMALIZE=normalize,
            CHOSEN=power_of_2(top_k),
            GROUPS=power_of_2(groups),
            PER_GROUP=power_of_2(experts // groups),
            num_warps=_num_warps(experts),
        )
    return topk_ids, topk_weights


def _results(rows: int, top_k: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    topk_ids = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    return topk_ids, torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)


def _num_warps(experts: int) -> int:
    """One, whose threads need no memory to agree on a maximum, as long as each has but some of the experts."""
    return 1 if experts <= 512 else 4
