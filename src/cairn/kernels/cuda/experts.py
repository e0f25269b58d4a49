"""Experts as products of groups of rows (the idea of MegaBlocks, arXiv 2211.15841, section 5), without padding.

A `pair` is a token with one of its experts. Pairs are brought into the order of the experts (see `expert_order`); an
expert's pairs make up blocks of rows, the last of which has rows to spare. Three launches then: the first product with
its activation, the second product, and the sum of each token's terms. Nobody on the host knows how many blocks there
are: as many programs are started as there might be, and those too many end at once. A term is, as every product with a
weight, rounded to the model's dtype. Weights may be in FP8 or in codes, as `fp8` reads them.

Few tokens go another way: see `expert_gemv`. Where a token's bits must not depend on the other tokens all go this one,
in blocks of one height.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cuda.codes import load_codes
from cairn.kernels.cuda.device import kernel, power_of_2, takes_tensor_cores
from cairn.kernels.cuda.expert_form import ExpertForm, activated, biases_of, stack_operands, up_rows
from cairn.kernels.cuda.expert_gemv import run_few_tokens
from cairn.kernels.cuda.expert_order import block_of_pairs, sort_pairs
from cairn.kernels.cuda.fp8 import add_product, form_of, load_weights, scaled, scales_of
from cairn.kernels.cuda.metadata import CudaMetadata
from cairn.kernels.weight_rows import WeightRows

_FEW_TOKENS = 4
"""Up to so many each pair reads its expert's weights, even if another one has just done so."""

_FIXED_ROWS = 16
"""Of a block where a token's bits must not depend on the other tokens."""

_MOST_BLOCKS = 65_535
"""Of rows in a launch: of programs, CUDA takes no more along a grid's second axis."""


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
    gate_row, up_row = up_rows(expert, column, inner_width, GATED)
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
        gate_bias, up_bias = biases_of(bias, expert, column, inner_width, is_column)
        gate += gate_bias[None, :]
        up += up_bias[None, :]
    result = activated(gate, up, alpha, limit, GATED, CLAMPED, GELU).to(inner.dtype.element_ty)
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


def experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, up: WeightRows, down: WeightRows, batch: Batch
) -> Tensor:
    """See `Kernels.experts`."""
    return _experts(x, topk_ids, topk_weights, ExpertForm(up, down), batch)


def gated_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: WeightRows, down: WeightRows, batch: Batch
) -> Tensor:
    """See `Kernels.gated_experts`."""
    return _experts(x, topk_ids, topk_weights, ExpertForm(gate_up, down, gated=True), batch)


def gelu_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: WeightRows, down: WeightRows, batch: Batch
) -> Tensor:
    """See `Kernels.gelu_experts`."""
    return _experts(x, topk_ids, topk_weights, ExpertForm(gate_up, down, gated=True, gelu=True), batch)


def clamped_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: WeightRows, down: WeightRows, gate_up_bias: Tensor,
    down_bias: Tensor | None, alpha: float, limit: float, batch: Batch,
) -> Tensor:  # fmt: skip
    """See `Kernels.clamped_experts`."""
    form = ExpertForm(gate_up, down, True, gate_up_bias, down_bias, float(alpha), float(limit))
    return _experts(x, topk_ids, topk_weights, form, batch)


def _experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, form: ExpertForm, batch: Batch) -> Tensor:
    metadata: CudaMetadata = batch.metadata  # type: ignore[assignment]
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    if tokens <= _FEW_TOKENS and not metadata.exact:
        run_few_tokens(x, topk_ids, topk_weights, form, out)
    else:
        num_experts, top_k = form.down.shape[0], topk_ids.shape[1]
        rows = _FIXED_ROWS if metadata.exact else _block_rows(topk_ids.numel(), num_experts, x.dtype)
        most = (_MOST_BLOCKS - num_experts) * rows // top_k
        for part in (slice(first, first + most) for first in range(0, tokens, most)):
            _run_many_tokens(x[part], topk_ids[part], topk_weights[part], form, out[part], rows)
    return out


def _run_many_tokens(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, form: ExpertForm, out: Tensor, rows: int
) -> None:
    """Products of blocks of `rows` rows that go to the same expert."""
    up, down, gated = form.up, form.down, form.gated
    (tokens, width), top_k = x.shape, topk_ids.shape[1]
    num_experts, inner_width, pairs = down.shape[0], down.shape[2], tokens * top_k
    order, starts = sort_pairs(topk_ids, num_experts)
    blocks = min(pairs, pairs // rows + min(num_experts, pairs))
    common = {"TENSOR_CORES": takes_tensor_cores(x), "EXPERTS": power_of_2(num_experts)}

    (weight, *strides), variant = stack_operands(up, topk_weights), form_of(up)
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

    (weight, *strides), variant = stack_operands(down, topk_weights), form_of(down)
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


def _sum_columns(width: int) -> int:
    return min(1024, power_of_2(width))
