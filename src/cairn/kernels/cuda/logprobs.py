"""Log-probabilities of tokens and of the best beside them: two launches, and no second copy of the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.cuda.device import kernel
from cairn.kernels.cuda.processors import load_logits
from cairn.kernels.cuda.sample import (
    BEST,
    BEST_WARPS,
    BLOCK,
    best_of,
    list_best,
    num_chosen,
    num_warps,
    numbers,
    tile_sizes,
)
from cairn.kernels.sampling.logprobs import LogprobTensors, compute_logprobs


@kernel
def _sum_tiles_kernel(
    logits, rows, tokens, tile_maxima, tile_sums, tile_ranks, block_maxima, vocab, stride,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Of each tile the best logit, the sum of exp(logit - best), and how many are better than the row's token; of each
    block the best logit."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = logits + tl.load(rows + row) * stride
    x = load_logits(base, tile * TILE + tl.arange(0, TILE), vocab)
    token_logit = tl.load(base + tl.load(tokens + row))
    maxima = tl.max(tl.reshape(x, (TILE // BLOCK, BLOCK)), axis=1)
    blocks = row * (TILES * TILE // BLOCK) + tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    tl.store(block_maxima + blocks, maxima)
    best = tl.max(maxima, axis=0)
    # A tile that is all masked: minus infinity less itself is no number.
    sums = tl.where(best > float("-inf"), tl.sum(tl.exp(x - best), axis=0), 0.0)
    tl.store(tile_maxima + row * TILES + tile, best)
    tl.store(tile_sums + row * TILES + tile, sums)
    tl.store(tile_ranks + row * TILES + tile, tl.sum((x > token_logit).to(tl.int32), axis=0))


@kernel
def _report_kernel(
    logits, rows, tokens, listed, tile_maxima, tile_sums, tile_ranks, block_maxima, chosen, candidates,
    token_ids, values, ranks, vocab, stride, num_listed, num_top,
    TILE: tl.constexpr, TILES: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """token_ids and values [n, 1 + others]: of the token, then of `num_listed` tokens, or else of the `num_top` best,
    at most BEST."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + tl.load(rows + row) * stride
    tiles = tl.arange(0, TILES)
    there = tiles < tl.cdiv(vocab, TILE)
    best = best_of(tile_maxima, row, vocab, TILE, TILES)
    maxima = tl.load(tile_maxima + row * TILES + tiles, mask=there, other=float("-inf"))
    sums = tl.load(tile_sums + row * TILES + tiles, mask=there, other=0.0)
    total = tl.log(tl.sum(tl.where(sums > 0, sums * tl.exp(maxima - best), 0.0), axis=0))
    better = tl.sum(tl.load(tile_ranks + row * TILES + tiles, mask=there, other=0), axis=0)
    token = tl.load(tokens + row)
    first = row * (1 + num_listed + num_top)
    tl.store(ranks + row, better + 1)
    tl.store(token_ids + first, token.to(tl.int32))
    tl.store(values + first, tl.load(base + token) - best - total)
    places = tl.arange(0, BEST)
    for start in range(0, num_listed, BEST):
        inside = start + places < num_listed
        other = tl.load(listed + row * num_listed + start + places, mask=inside, other=0)
        x = tl.load(base + other, mask=inside, other=0.0)
        tl.store(token_ids + first + 1 + start + places, other.to(tl.int32), mask=inside)
        tl.store(values + first + 1 + start + places, x - best - total, mask=inside)
    if num_top > 0:
        row_maxima = block_maxima + row * (TILES * TILE // BLOCK)
        best_keys, _ = list_best(
            base, row_maxima, chosen + row * BEST, candidates + row * BEST, vocab, TILES * TILE // BLOCK, CHOSEN
        )
        x = numbers((best_keys >> 32).to(tl.int32))
        other = 0x7FFFFFFF - (best_keys & 0x7FFFFFFF).to(tl.int32)
        tl.store(token_ids + first + 1 + places, other, mask=places < num_top)
        tl.store(values + first + 1 + places, x - best - total, mask=places < num_top)


def logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, listed: Tensor | None = None, rows: Tensor | None = None
) -> LogprobTensors:
    """See `Kernels.logprobs`. For more of the best than the sampler lists torch sorts out some 64 rows."""
    num_rows, vocab_size = len(tokens), logits.shape[1]
    num_listed = 0 if listed is None else listed.shape[1]
    num_top = 0 if listed is not None else min(num_top, vocab_size)
    if num_top > BEST.value:
        return compute_logprobs(logits, tokens, num_top, listed, rows)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tile = tile_sizes(vocab_size)
    if rows is None:
        rows = torch.arange(num_rows, device=logits.device)
    result = LogprobTensors(
        empty(torch.int32, num_rows, 1 + num_listed + num_top),
        empty(torch.float32, num_rows, 1 + num_listed + num_top),
        empty(torch.int32, num_rows),
    )
    maxima, sums = (empty(torch.float32, num_rows, tile["TILES"]) for _ in range(2))
    block_maxima = empty(torch.float32, num_rows, tile["TILES"] * tile["TILE"] // BLOCK.value)
    summary = (maxima, sums, empty(torch.int32, num_rows, tile["TILES"]), block_maxima)
    lists = (empty(torch.int32, num_rows, BEST.value), empty(torch.int64, num_rows, BEST.value))
    sizes = (vocab_size, logits.stride(0))
    _sum_tiles_kernel[(num_rows, triton.cdiv(vocab_size, tile["TILE"]))](
        *(logits, rows, tokens, *summary, *sizes), **tile, num_warps=num_warps(tile["TILE"])
    )
    _report_kernel[(num_rows,)](
        *(logits, rows, tokens, tokens if listed is None else listed, *summary, *lists, *result, *sizes),
        *(num_listed, num_top),
        **tile,
        CHOSEN=num_chosen(vocab_size),
        num_warps=BEST_WARPS,
    )
    return result
