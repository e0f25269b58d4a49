"""Experts as products of groups of rows (the idea of MegaBlocks, arXiv 2211.15841, section 5), without padding.

A `pair` is a token with one of its experts. Pairs are brought into the order of the experts (see `expert_order`); an
expert's pairs make up blocks of rows, the last of which has rows to spare. Three launches then: the first product with
its activation, the second product, and the sum of each token's terms. Nobody on the host knows how many blocks there
are: as many programs are started as there might be, and those too many end at once. A term is, as every product with a
weight, rounded to the model's dtype. Weights may be in FP8 or in codes, as `fp8` reads them.

With few tokens the bound is the reading of the weights, and most experts have but one row: there each pair is a product
of a matrix and a vector, and two launches do. Where a token's bits must not depend on the other tokens all go the first
way, in blocks of one height.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cuda.codes import load_codes
from cairn.kernels.cuda.device import kernel, power_of_2, takes_tensor_cores
from cairn.kernels.cuda.expert_order import block_of_pairs, sort_pairs
from cairn.kernels.cuda.fp8 import (
    add_product,
    block_scales,
    form_of,
    load_weights,
    operands_of,
    partial_sums,
    scaled,
    scales_of,
)
from cairn.kernels.cuda.metadata import CudaMetadata
from cairn.kernels.fp8 import BLOCK
from cairn.kernels.weight_rows import WeightRows

_FEW_TOKENS = 4
"""Up to so many each pair reads its expert's weights, even if another one has just done so."""

_FIXED_ROWS = 16
"""Of a block where a token's bits must not depend on the other tokens."""

_MOST_BLOCKS = 65_535
"""Of rows in a launch: of programs, CUDA takes no more along a grid's second axis."""

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _activated(gate, up, alpha, limit, GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr):
    if CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
        return (up + 1) * gate * tl.sigmoid(alpha * gate)
    if GELU:
        # As `gelu_mul` has it.
        inner = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(tl.maximum(inner, -80.0)) * up
    if GATED:
        return gate * tl.sigmoid(gate) * up
    return tl.where(up < 0, 0.0, up * up)


@triton.jit
def _biases(bias, expert, column, inner_width, is_column):
    """Of the columns of gate and up, float32."""
    first = bias + expert.to(tl.int64) * inner_width * 2 + column
    gate = tl.load(first, mask=is_column, other=0).to(tl.float32)
    return gate, tl.load(first + inner_width, mask=is_column, other=0).to(tl.float32)


@triton.jit
def _up_rows(expert, column, inner_width, GATED: tl.constexpr):
    """Those of the columns of gate and up, counted over all experts; without a gate both are those of up."""
    first = expert.to(tl.int64) * inner_width + column
    if GATED:
        first += expert.to(tl.int64) * inner_width
        return first, first + inner_width
    return first, first


@kernel
def _up_kernel(
    x, weight, scales, zeros, minimums, factors, minimum_factors, fifths, bias, alpha, limit, inner, order, starts,
    num_experts, top_k, inner_width, width, x_stride, expert_stride, weight_stride,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr,
    FP8: tl.constexpr, BLOCKED: tl.constexpr, CODES: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """inner [pairs in the order of experts, inner_width]."""
    expert, first, end = block_of_pairs(starts, num_experts, tl.program_id(1), ROWS, EXPERTS)
    if expert >= num_experts:
        return
    pair = first + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    token = (tl.load(order + pair, mask=pair < end, other=0) // top_k).to(tl.int64)
    a_pointers = x + (token * x_stride)[:, None] + depth[None, :]
    b_pointers = weight + expert.to(tl.int64) * expert_stride
    b_pointers += column.to(tl.int64)[None, :] * weight_stride + depth[:, None]
    # The rows of `up` lie after those of `gate`.
    half = tl.cast(inner_width, tl.int64) * weight_stride
    is_column = column < inner_width
    gate_row, up_row = _up_rows(expert, column, inner_width, GATED)
    gate_scales, up_scales = scales_of(scales, gate_row, width, BLOCKED), scales_of(scales, up_row, width, BLOCKED)
    more = zeros, minimums, factors, minimum_factors, fifths
    gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, width, DEPTH):
        a_mask = (pair < end)[:, None] & (depth < width - k)[None, :]
        b_mask = (depth < width - k)[:, None] & is_column[None, :]
        a = tl.load(a_pointers, mask=a_mask, other=0)
        if CODES is None:
            b = load_weights(b_pointers, b_mask, a.dtype, FP8)
        else:
            b = tl.trans(load_codes(weight, scales, more, gate_row, is_column, k, width, DEPTH, a.dtype, CODES))
        if GATED:
            gate = add_product(a, b, gate, gate_scales, is_column, k, TENSOR_CORES, BLOCKED)
            if CODES is None:
                b = load_weights(b_pointers + half, b_mask, a.dtype, FP8)
            else:
                b = tl.trans(load_codes(weight, scales, more, up_row, is_column, k, width, DEPTH, a.dtype, CODES))
        up = add_product(a, b, up, up_scales, is_column, k, TENSOR_CORES, BLOCKED)
        a_pointers += DEPTH
        b_pointers += DEPTH
    gate = scaled(gate, gate_scales[None, :], is_column[None, :], FP8, BLOCKED)
    up = scaled(up, up_scales[None, :], is_column[None, :], FP8, BLOCKED)
    if CLAMPED:
        gate_bias, up_bias = _biases(bias, expert, column, inner_width, is_column)
        gate += gate_bias[None, :]
        up += up_bias[None, :]
    result = _activated(gate, up, alpha, limit, GATED, CLAMPED, GELU).to(inner.dtype.element_ty)
    places = (pair.to(tl.int64) * inner_width)[:, None] + column[None, :]
    tl.store(inner + places, result, mask=(pair < end)[:, None] & (column < inner_width)[None, :])


@kernel
def _down_kernel(
    inner, weight, scales, zeros, minimums, factors, minimum_factors, fifths, bias, terms, order, starts,
    num_experts, inner_width, width, expert_stride, weight_stride,
    BIASED: tl.constexpr, FP8: tl.constexpr, BLOCKED: tl.constexpr, CODES: tl.constexpr, TENSOR_CORES: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """terms [pairs in the order of tokens, width]."""
    expert, first, end = block_of_pairs(starts, num_experts, tl.program_id(1), ROWS, EXPERTS)
    if expert >= num_experts:
        return
    pair = first + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    a_pointers = inner + (pair.to(tl.int64) * inner_width)[:, None] + depth[None, :]
    b_pointers = weight + expert.to(tl.int64) * expert_stride
    b_pointers += column.to(tl.int64)[None, :] * weight_stride + depth[:, None]
    is_column = column < width
    weight_row = expert.to(tl.int64) * width + column
    column_scales = scales_of(scales, weight_row, inner_width, BLOCKED)
    more = zeros, minimums, factors, minimum_factors, fifths
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, inner_width, DEPTH):
        a_mask = (pair < end)[:, None] & (depth < inner_width - k)[None, :]
        b_mask = (depth < inner_width - k)[:, None] & is_column[None, :]
        a = tl.load(a_pointers, mask=a_mask, other=0)
        if CODES is None:
            b = load_weights(b_pointers, b_mask, a.dtype, FP8)
        else:
            b = load_codes(weight, scales, more, weight_row, is_column, k, inner_width, DEPTH, a.dtype, CODES)
            b = tl.trans(b)
        total = add_product(a, b, total, column_scales, is_column, k, TENSOR_CORES, BLOCKED)
        a_pointers += DEPTH
        b_pointers += DEPTH
    total = scaled(total, column_scales[None, :], is_column[None, :], FP8, BLOCKED)
    if BIASED:
        total += tl.load(bias + expert.to(tl.int64) * width + column, mask=is_column, other=0).to(tl.float32)[None, :]
    place = tl.load(order + pair, mask=pair < end, other=0).to(tl.int64)
    mask = (pair < end)[:, None] & is_column[None, :]
    tl.store(terms + (place * width)[:, None] + column[None, :], total.to(terms.dtype.element_ty), mask=mask)


@kernel
def _sum_kernel(
    topk_ids, topk_weights, terms, out, width, TOP_K: tl.constexpr, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr
):
    """A token's terms times their shares, in ascending order of the experts."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, CHOSEN)
    experts = tl.load(topk_ids + token * TOP_K + place, mask=place < TOP_K, other=2147483647).to(tl.int32)
    shares = tl.load(topk_weights + token * TOP_K + place, mask=place < TOP_K, other=0)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for _ in tl.static_range(TOP_K):
        lowest = tl.min(experts, axis=0)
        mine = experts == lowest
        pair = token * TOP_K + tl.sum(tl.where(mine, place, 0), axis=0)
        term = tl.load(terms + pair * width + column, mask=column < width, other=0).to(tl.float32)
        total += tl.sum(tl.where(mine, shares, 0.0), axis=0) * term
        experts = tl.where(mine, 2147483647, experts)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@kernel
def _up_gemv_kernel(
    x, weight, scales, zeros, minimums, factors, minimum_factors, fifths, bias, alpha, limit,
    topk_ids, inner, top_k, inner_width, width, x_stride, expert_stride, weight_stride,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr,
    FP8: tl.constexpr, BLOCKED: tl.constexpr, CODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """inner [pairs in the order of tokens, inner_width]."""
    pair = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    expert = tl.load(topk_ids + pair)
    token = x + (pair // top_k).to(tl.int64) * x_stride
    rows = weight + expert * expert_stride + column.to(tl.int64)[:, None] * weight_stride + depth[None, :]
    half = tl.cast(inner_width, tl.int64) * weight_stride
    is_column = column < inner_width
    gate_row, up_row = _up_rows(expert, column, inner_width, GATED)
    gate_scales, up_scales = scales_of(scales, gate_row, width, BLOCKED), scales_of(scales, up_row, width, BLOCKED)
    more = zeros, minimums, factors, minimum_factors, fifths
    PARTS: tl.constexpr = DEPTH // _BLOCK if BLOCKED else DEPTH
    gate = tl.zeros((COLUMNS, PARTS), dtype=tl.float32)
    up = tl.zeros((COLUMNS, PARTS), dtype=tl.float32)
    for k in range(0, width, DEPTH):
        mask = is_column[:, None] & (depth < width - k)[None, :]
        given = tl.load(token + k + depth, mask=depth < width - k, other=0)
        values = given.to(tl.float32)[None, :]
        if CODES is None:
            weights = load_weights(rows + k, mask, tl.float32, FP8)
        else:
            weights = load_codes(weight, scales, more, gate_row, is_column, k, width, DEPTH, given.dtype, CODES)
        if GATED:
            # Both loads come before the sums, so that both are under way at once.
            if CODES is None:
                up_weights = load_weights(rows + half + k, mask, tl.float32, FP8)
            else:
                up_weights = load_codes(weight, scales, more, up_row, is_column, k, width, DEPTH, given.dtype, CODES)
            gate += partial_sums(weights.to(tl.float32) * values, gate_scales, is_column, k, width, BLOCKED)
            up += partial_sums(up_weights.to(tl.float32) * values, up_scales, is_column, k, width, BLOCKED)
        else:
            up += partial_sums(weights.to(tl.float32) * values, up_scales, is_column, k, width, BLOCKED)
    gate_sum = scaled(tl.sum(gate, axis=1), gate_scales, is_column, FP8, BLOCKED)
    up_sum = scaled(tl.sum(up, axis=1), up_scales, is_column, FP8, BLOCKED)
    if CLAMPED:
        gate_bias, up_bias = _biases(bias, expert, column, inner_width, is_column)
        gate_sum += gate_bias
        up_sum += up_bias
    result = _activated(gate_sum, up_sum, alpha, limit, GATED, CLAMPED, GELU).to(inner.dtype.element_ty)
    tl.store(inner + pair.to(tl.int64) * inner_width + column, result, mask=is_column)


@kernel
def _down_gemv_kernel(
    inner, weight, scales, zeros, minimums, factors, minimum_factors, fifths, bias, topk_ids, topk_weights, out,
    inner_width, width, expert_stride, weight_stride,
    TOP_K: tl.constexpr, BIASED: tl.constexpr, FP8: tl.constexpr, BLOCKED: tl.constexpr, CODES: tl.constexpr,
    CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A token's terms, all at once, and their sum, in ascending order of the experts."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    place = tl.arange(0, CHOSEN)
    pairs = token * TOP_K + place
    experts = tl.load(topk_ids + pairs, mask=place < TOP_K, other=0)
    shares = tl.load(topk_weights + pairs, mask=place < TOP_K, other=0)
    vectors = inner + (pairs * inner_width)[:, None] + depth[None, :]
    rows = weight + (experts * expert_stride)[None, :, None]
    rows += (column.to(tl.int64) * weight_stride)[:, None, None] + depth[None, None, :]
    known_columns = (column < width)[:, None] & (place < TOP_K)[None, :]
    weight_rows = (experts * width)[None, :] + column[:, None]
    column_scales = scales_of(scales, weight_rows, inner_width, BLOCKED)
    more = zeros, minimums, factors, minimum_factors, fifths
    ROWS: tl.constexpr = COLUMNS * CHOSEN
    flat_rows, flat_known = tl.reshape(weight_rows, (ROWS,)), tl.reshape(known_columns, (ROWS,))
    PARTS: tl.constexpr = DEPTH // _BLOCK if BLOCKED else DEPTH
    sums = tl.zeros((COLUMNS, CHOSEN, PARTS), dtype=tl.float32)
    for k in range(0, inner_width, DEPTH):
        known = (place < TOP_K)[:, None] & (depth < inner_width - k)[None, :]
        mask = (column < width)[:, None, None] & known[None, :, :]
        values = tl.load(vectors + k, mask=known, other=0)
        if CODES is None:
            weights = load_weights(rows + k, mask, tl.float32, FP8)
        else:
            weights = load_codes(
                weight, scales, more, flat_rows, flat_known, k, inner_width, DEPTH, values.dtype, CODES
            )
            weights = tl.reshape(weights, (COLUMNS, CHOSEN, DEPTH))
        products = weights.to(tl.float32) * values.to(tl.float32)[None, :, :]
        if BLOCKED:
            parts = tl.sum(tl.reshape(products, (COLUMNS, CHOSEN, PARTS, _BLOCK)), axis=3)
            sizes = block_scales(column_scales[:, :, None], known_columns[:, :, None], k, inner_width, PARTS)
            sums += parts * sizes
        else:
            sums += products
    totals = scaled(tl.sum(sums, axis=2), column_scales, known_columns, FP8, BLOCKED)
    if BIASED:
        places = bias + (experts * width)[None, :] + column[:, None]
        totals += tl.load(places, mask=known_columns, other=0).to(tl.float32)
    # Rounded as they are where there are more tokens.
    terms = totals.to(out.dtype.element_ty).to(tl.float32) * shares[None, :]
    waiting = tl.where(place < TOP_K, experts.to(tl.int32), 2147483647)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for _ in range(TOP_K):
        is_next = waiting == tl.min(waiting, axis=0)
        total += tl.sum(tl.where(is_next[None, :], terms, 0.0), axis=1)
        waiting = tl.where(is_next, 2147483647, waiting)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


def experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, up: WeightRows, down: WeightRows, batch: Batch
) -> Tensor:
    """See `Kernels.experts`."""
    return _experts(x, topk_ids, topk_weights, _Form(up, down), batch)


def gated_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: WeightRows, down: WeightRows, batch: Batch
) -> Tensor:
    """See `Kernels.gated_experts`."""
    return _experts(x, topk_ids, topk_weights, _Form(gate_up, down, gated=True), batch)


def gelu_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: WeightRows, down: WeightRows, batch: Batch
) -> Tensor:
    """See `Kernels.gelu_experts`."""
    return _experts(x, topk_ids, topk_weights, _Form(gate_up, down, gated=True, gelu=True), batch)


def clamped_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: WeightRows, down: WeightRows, gate_up_bias: Tensor,
    down_bias: Tensor | None, alpha: float, limit: float, batch: Batch,
) -> Tensor:  # fmt: skip
    """See `Kernels.clamped_experts`."""
    form = _Form(gate_up, down, True, gate_up_bias, down_bias, float(alpha), float(limit))
    return _experts(x, topk_ids, topk_weights, form, batch)


@dataclass(frozen=True, slots=True)
class _Form:
    """What experts are made of. `up_bias`: of those that are clamped, by `alpha` and `limit`; `gelu`: in the place of
    the silu."""

    up: WeightRows
    down: WeightRows
    gated: bool = False
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0
    gelu: bool = False

    def of_up(self, no_bias: Tensor) -> tuple[Tensor, float, float]:
        """What the kernels of the first product get; `no_bias` where there is none."""
        return (no_bias if self.up_bias is None else self.up_bias), self.alpha, self.limit

    def bias_of_down(self, no_bias: Tensor) -> Tensor:
        """What the kernels of the second product get; `no_bias` where there is none."""
        return no_bias if self.down_bias is None else self.down_bias


def _experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, form: _Form, batch: Batch) -> Tensor:
    metadata: CudaMetadata = batch.metadata  # type: ignore[assignment]
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    if tokens <= _FEW_TOKENS and not metadata.exact:
        _run_few_tokens(x, topk_ids, topk_weights, form, out)
    else:
        num_experts, top_k = form.down.shape[0], topk_ids.shape[1]
        rows = _FIXED_ROWS if metadata.exact else _block_rows(topk_ids.numel(), num_experts, x.dtype)
        most = (_MOST_BLOCKS - num_experts) * rows // top_k
        for part in (slice(first, first + most) for first in range(0, tokens, most)):
            _run_many_tokens(x[part], topk_ids[part], topk_weights[part], form, out[part], rows)
    return out


def _run_few_tokens(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, form: _Form, out: Tensor) -> None:
    """A product of a matrix and a vector for each pair."""
    up, down, gated = form.up, form.down, form.gated
    (tokens, width), top_k, inner_width = x.shape, topk_ids.shape[1], down.shape[2]
    inner = torch.empty((tokens * top_k, inner_width), dtype=x.dtype, device=x.device)
    (weight, *strides), variant = _operands(up, topk_weights), form_of(up)
    tile, options = _few_up_tile(width, gated=gated, blocked=bool(variant["BLOCKED"]))
    _up_gemv_kernel[(triton.cdiv(inner_width, tile["COLUMNS"]), tokens * top_k)](
        *(x, *weight, *form.of_up(x), topk_ids, inner, top_k, inner_width, width, x.stride(0), *strides),
        GATED=gated,
        CLAMPED=form.up_bias is not None,
        GELU=form.gelu,
        **variant,
        **tile,
        **options,
    )
    (weight, *strides), variant = _operands(down, topk_weights), form_of(down)
    tile, options = _few_down_tile(inner_width, top_k, blocked=bool(variant["BLOCKED"]))
    _down_gemv_kernel[(triton.cdiv(width, tile["COLUMNS"]), tokens)](
        *(inner, *weight, form.bias_of_down(x), topk_ids, topk_weights, out, inner_width, width, *strides),
        TOP_K=top_k,
        BIASED=form.down_bias is not None,
        **variant,
        **tile,
        **options,
    )


def _run_many_tokens(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, form: _Form, out: Tensor, rows: int) -> None:
    """Products of blocks of `rows` rows that go to the same expert."""
    up, down, gated = form.up, form.down, form.gated
    (tokens, width), top_k = x.shape, topk_ids.shape[1]
    num_experts, inner_width, pairs = down.shape[0], down.shape[2], tokens * top_k
    order, starts = sort_pairs(topk_ids, num_experts)
    blocks = min(pairs, pairs // rows + min(num_experts, pairs))
    common = {"TENSOR_CORES": takes_tensor_cores(x), "EXPERTS": power_of_2(num_experts)}

    (weight, *strides), variant = _operands(up, topk_weights), form_of(up)
    inner = torch.empty((pairs, inner_width), dtype=x.dtype, device=x.device)
    tile, options = _tile(rows, inner_width, width, x.dtype, gated=gated)
    _up_kernel[(triton.cdiv(inner_width, tile["COLUMNS"]), blocks)](
        *(
            x,
            *weight,
            *form.of_up(x),
            inner,
            order,
            starts,
            num_experts,
            top_k,
            inner_width,
            width,
            x.stride(0),
            *strides,
        ),
        GATED=gated,
        CLAMPED=form.up_bias is not None,
        GELU=form.gelu,
        **variant,
        **common,
        **tile,
        **options,
    )

    (weight, *strides), variant = _operands(down, topk_weights), form_of(down)
    terms = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    tile, options = _tile(rows, width, inner_width, x.dtype, gated=False)
    _down_kernel[(triton.cdiv(width, tile["COLUMNS"]), blocks)](
        *(inner, *weight, form.bias_of_down(x), terms, order, starts, num_experts, inner_width, width, *strides),
        BIASED=form.down_bias is not None,
        **variant,
        **common,
        **tile,
        **options,
    )

    columns = _sum_columns(width)
    _sum_kernel[(tokens, triton.cdiv(width, columns))](
        *(topk_ids, topk_weights, terms, out, width),
        TOP_K=top_k,
        CHOSEN=power_of_2(top_k),
        COLUMNS=columns,
        num_warps=4,
    )


def _operands(weight: WeightRows, no_scales: Tensor) -> tuple[tuple[Tensor, ...], int, int]:
    """What kernels get of a stack of weights: see `operands_of`; and how far experts and rows are from each other."""
    numbers, *more = operands_of(weight, no_scales)
    return (numbers, *more), numbers.stride(0), numbers.stride(1)


def _block_rows(pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Rows of a block: about as many as an expert has."""
    most = 128 if dtype == torch.bfloat16 else 32
    return min(most, power_of_2(triton.cdiv(pairs, num_experts), 16))


def _tile(
    rows: int, columns: int, depth: int, dtype: torch.dtype, *, gated: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """The tile of a product of `depth`, and how it is launched. With few rows the bound is the reading of the weights,
    for which tiles are narrow, so that there are enough of them, and deep, so that much is under way."""
    if dtype != torch.bfloat16:
        tile, warps, stages = (rows, 32, 32), 4, 2
    elif rows == 16:
        tile, warps, stages = (rows, 32 if gated else 64, 128), 4, 4
    elif rows == 32:
        tile, warps, stages = (rows, 64, 64), 4, 4
    elif rows == 64:
        tile, warps, stages = (rows, 64 if gated else 128, 64), 4, 4
    else:
        tile, warps, stages = (rows, 64 if gated else 128, 64), 8, 3
    extents = (tile[0], min(tile[1], power_of_2(columns, 16)), min(tile[2], power_of_2(depth, 16)))
    return dict(zip(("ROWS", "COLUMNS", "DEPTH"), extents, strict=True)), {"num_warps": warps, "num_stages": stages}


def _few_up_tile(width: int, *, gated: bool, blocked: bool) -> tuple[dict[str, int], dict[str, int]]:
    """4 warps have 8 KB of bfloat16 weights at a time, or of each half. `blocked`: whole blocks of FP8."""
    depth = min(512 if gated else 256, power_of_2(width, BLOCK if blocked else 16))
    return {"COLUMNS": 8 if gated else 16, "DEPTH": depth}, {"num_warps": 4}


def _few_down_tile(inner_width: int, top_k: int, *, blocked: bool) -> tuple[dict[str, int], dict[str, int]]:
    """4 warps have 16 KB of bfloat16 weights at a time, of all of a token's experts."""
    chosen, least = power_of_2(top_k), BLOCK if blocked else 16
    depth = min(max(least, 2048 // chosen), power_of_2(inner_width, least))
    return {"COLUMNS": 4, "CHOSEN": chosen, "DEPTH": depth}, {"num_warps": 4}


def _sum_columns(width: int) -> int:
    return min(1024, power_of_2(width))
