"""Experts of few tokens. The bound is the reading of the weights, and most experts have but one row: each pair of a
token and one of its experts is a product of a matrix and a vector, and two launches do. Terms are rounded and added as
by `experts`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.cuda.codes import load_codes
from cairn.kernels.cuda.device import kernel, power_of_2
from cairn.kernels.cuda.expert_form import ExpertForm, activated, biases_of, stack_operands, up_rows
from cairn.kernels.cuda.fp8 import block_scales, form_of, load_weights, partial_sums, scaled, scales_of
from cairn.kernels.fp8 import BLOCK

_BLOCK = tl.constexpr(BLOCK)


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
    gate_row, up_row = up_rows(expert, column, inner_width, GATED)
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
        gate_bias, up_bias = biases_of(bias, expert, column, inner_width, is_column)
        gate_sum += gate_bias
        up_sum += up_bias
    result = activated(gate_sum, up_sum, alpha, limit, GATED, CLAMPED, GELU).to(inner.dtype.element_ty)
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


def run_few_tokens(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, form: ExpertForm, out: Tensor) -> None:
    """A product of a matrix and a vector for each pair."""
    up, down, gated = form.up, form.down, form.gated
    (tokens, width), top_k, inner_width = x.shape, topk_ids.shape[1], down.shape[2]
    inner = torch.empty((tokens * top_k, inner_width), dtype=x.dtype, device=x.device)
    (weight, *strides), variant = stack_operands(up, topk_weights), form_of(up)
    tile, options = _up_tile(width, gated=gated, blocked=bool(variant["BLOCKED"]))
    _up_gemv_kernel[(triton.cdiv(inner_width, tile["COLUMNS"]), tokens * top_k)](
        *(x, *weight, *form.of_up(x), topk_ids, inner, top_k, inner_width, width, x.stride(0), *strides),
        GATED=gated,
        CLAMPED=form.up_bias is not None,
        GELU=form.gelu,
        **variant,
        **tile,
        **options,
    )
    (weight, *strides), variant = stack_operands(down, topk_weights), form_of(down)
    tile, options = _down_tile(inner_width, top_k, blocked=bool(variant["BLOCKED"]))
    _down_gemv_kernel[(triton.cdiv(width, tile["COLUMNS"]), tokens)](
        *(inner, *weight, form.bias_of_down(x), topk_ids, topk_weights, out, inner_width, width, *strides),
        TOP_K=top_k,
        BIASED=form.down_bias is not None,
        **variant,
        **tile,
        **options,
    )


def _up_tile(width: int, *, gated: bool, blocked: bool) -> tuple[dict[str, int], dict[str, int]]:
    """4 warps have 8 KB of bfloat16 weights at a time, or of each half. `blocked`: whole blocks of FP8."""
    depth = min(512 if gated else 256, power_of_2(width, BLOCK if blocked else 16))
    return {"COLUMNS": 8 if gated else 16, "DEPTH": depth}, {"num_warps": 4}


def _down_tile(inner_width: int, top_k: int, *, blocked: bool) -> tuple[dict[str, int], dict[str, int]]:
    """4 warps have 16 KB of bfloat16 weights at a time, of all of a token's experts."""
    chosen, least = power_of_2(top_k), BLOCK if blocked else 16
    depth = min(max(least, 2048 // chosen), power_of_2(inner_width, least))
    return {"COLUMNS": 4, "CHOSEN": chosen, "DEPTH": depth}, {"num_warps": 4}
