"""From logits to tokens: the inverse of the cumulative distribution of what the filters leave (see
`cairn.kernels.sampling.inverse_cdf`), all rows of a step in the same launches, in tiles of the vocabulary.

Nothing is sorted but the best 128 tokens of a row. A token's weight is a whole number of units, exp((x - best) /
temperature) in 2^-44, so sums are exact in 64 bits and do not depend on their order. A radix select finds the k-th
largest logit, 8 bits at a time; one that adds up weights, 10 bits at a time, finds the last weight that top_p keeps. Of
equal weights the tokens with the lowest ids are kept.

    _summarize_kernel  penalties; the best logit of each tile, and of each block of 128 tokens
    _weigh_kernel      the tiles' weights, after min_p
    _best_kernel       a row's 128 best tokens, drawn from if they suffice; else the top_k threshold
    _histogram_kernel  three times: weights by digits, for top_p
    _filter_kernel     the tiles' weights, after all filters
    _pick_kernel       the tile, and the token in it
"""

import triton
import triton.language as tl

from cairn.kernels.cuda.device import kernel, power_of_2
from cairn.kernels.cuda.processors import load_logits
from cairn.kernels.cuda_support import SAMPLE_BEST, SAMPLE_BINS, SAMPLE_BLOCK, sample_tiles

BLOCK = tl.constexpr(SAMPLE_BLOCK)
"""Tokens of a block; a token among the best 128 is in one of the 128 blocks with the best maxima."""

BEST = tl.constexpr(SAMPLE_BEST)
FEW = tl.constexpr(64)

LARGEST, FROM_FEW, NUCLEUS, ALL = (tl.constexpr(each) for each in (0, 1, 3, 4))
"""Values of `SampleFrom`."""

_UNITS = tl.constexpr(2.0**44)
"""Of a weight of 1: the sum of MAX_VOCAB of them fits 64 bits."""

_LEAST_BITS = tl.constexpr((127 - 44) << 23)
"""Of the smallest float32 rate that has a unit; what is above it has 29 bits."""

BINS = tl.constexpr(SAMPLE_BINS)

_LOWEST = tl.constexpr(-(2**31))
"""Below the key of every number: of what is not there."""


def tile_sizes(vocab_size: int) -> dict[str, int]:
    """TILE tokens a program, in TILES places for tiles: of a vocabulary alone, so that a row does not depend on its
    batch."""
    tile, tiles = sample_tiles(vocab_size)
    return {"TILE": tile, "TILES": tiles}


def num_chosen(vocab_size: int) -> int:
    """Blocks that the best tokens are looked for in."""
    return min(int(BEST.value), power_of_2(triton.cdiv(vocab_size, BLOCK.value)))


def num_warps(tile: int) -> int:
    return 8 if tile > 2048 else 4


BEST_WARPS = 16
"""Of the programs that have a row's best blocks, 16,384 logits, in their registers."""


@triton.jit
def _row_of(logits, processed, sources, row, stride, vocab):
    """Where a row's logits are read."""
    source = tl.load(sources + row).to(tl.int64)
    if source >= 0:
        base = processed + source * vocab
    else:
        base = logits + row * stride
    return base


@triton.jit
def _keys(x):
    """int32 that rise with float32 numbers; -0 counts as 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def numbers(keys):
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(tile_maxima, row, vocab, TILE: tl.constexpr, TILES: tl.constexpr):
    tiles = tl.arange(0, TILES)
    there = tiles < tl.cdiv(vocab, TILE)
    return tl.max(tl.load(tile_maxima + row * TILES + tiles, mask=there, other=float("-inf")), axis=0)


@triton.jit
def _is_greedy(kind, best):
    """Where nothing is drawn: temperature 0, and logits of which the best one is infinite."""
    return (kind == LARGEST) | (best == float("-inf")) | (best == float("inf"))


@triton.jit
def _rates(x, best, temperature, least_log):
    """float32 in [0, 1], the best token's 1; 0 of what min_p leaves out."""
    scaled = (x - best) / temperature
    return tl.where(scaled >= least_log, tl.minimum(tl.exp(scaled), 1.0), 0.0)


@triton.jit
def _weights(rates):
    return (rates * _UNITS).to(tl.int64)


@triton.jit
def _weight_keys(rates):
    """Of weights above 0: 29 bits that rise with them; -1 of the others."""
    return tl.where(rates * _UNITS >= 1.0, rates.to(tl.int32, bitcast=True) - _LEAST_BITS, -1)


@triton.jit
def _last_unit(top_p, total):
    """The number of the unit that fills the share of top_p."""
    share = top_p * total.to(tl.float64)
    units = share.to(tl.int64)
    units = tl.where(units.to(tl.float64) < share, units + 1, units)
    return tl.maximum(tl.minimum(units, total), 1) - 1


@triton.jit
def _unit_at(uniform, total):
    """The number of the drawn unit, below `total`."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _last_of(keys, count: tl.constexpr):
    """The largest key that at least `count` of them reach; the lowest int32 where there are fewer."""
    reached = tl.sum((keys >= 0).to(tl.int32), axis=0) >= count
    last = tl.where(reached, 0, _LOWEST)
    step = last * 0 + (1 << 30)
    for _ in range(31):
        reached = tl.sum((keys >= last + step).to(tl.int32), axis=0) >= count
        last = tl.where(reached, last + step, last)
        step = step >> 1
    return last


@triton.jit
def _choose(keys, count: tl.constexpr):
    """The `count` largest keys, of those that equal the last one the first."""
    last = _last_of(keys, count)
    equal = (keys == last) & (keys > _LOWEST)
    left = count - tl.sum((keys > last).to(tl.int32), axis=0)
    return (keys > last) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= left))


@triton.jit
def _kth_value(base, k, vocab, TILE: tl.constexpr):
    """The k-th largest logit: digit by digit of 8 bits, the first one with the sign."""
    digits = tl.arange(0, 256)
    prefix = k * 0
    for level in tl.static_range(4):
        counts = tl.zeros((256,), dtype=tl.int32)
        for first in range(0, vocab, TILE):
            columns = first + tl.arange(0, TILE)
            keys = _keys(load_logits(base, columns, vocab))
            there = columns < vocab
            if level == 0:
                digit = (keys >> 24) + 128
            else:
                there = there & ((keys >> (32 - 8 * level)) == prefix)
                digit = (keys >> (24 - 8 * level)) & 255
            counts += tl.histogram(digit, 256, mask=there)
        above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
        kth_digit = tl.sum((above >= k).to(tl.int32), axis=0)
        k -= tl.sum(tl.where(digits == kth_digit, above, 0), axis=0)
        if level == 0:
            prefix = kth_digit - 128
        else:
            prefix = prefix * 256 + kth_digit
    return numbers(prefix)


@triton.jit
def _resolve(histograms, top_p, LEVELS: tl.constexpr):
    """From the histograms of the first levels the first bits of the last key that top_p keeps, and the number of its
    unit among those of the keys that begin so."""
    bins = tl.arange(0, BINS)
    prefix = tl.sum(bins * 0, axis=0)
    target = prefix.to(tl.int64)
    for level in tl.static_range(LEVELS):
        sums = tl.load(histograms + level * BINS + (BINS - 1) - bins)
        if level == 0:
            target = _last_unit(top_p, tl.sum(sums, axis=0))
        index = tl.minimum(tl.sum((tl.cumsum(sums, axis=0) <= target).to(tl.int32), axis=0), BINS - 1)
        target -= tl.sum(tl.where(bins < index, sums, 0), axis=0)
        prefix = prefix * (512 if level == 2 else 1024) + (BINS - 1) - index
    return prefix, target


@kernel
def _summarize_kernel(
    logits, processed, sources, slots, counts, repetition, frequency, presence, tile_maxima, block_maxima,
    vocab, stride,
    COPIED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Row r has the counts of slot slots[r] if it has penalties, else -1. COPIED: whether rows that change have been
    copied before."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    if COPIED:
        base = _row_of(logits, processed, sources, row, stride, vocab)
    else:
        base = logits + row * stride
    x = load_logits(base, columns, vocab)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        used = tl.load(counts + slot * vocab + columns, mask=columns < vocab, other=0)
        times, rate = used >> 1, tl.load(repetition + row)
        changed = tl.where(x > 0, tl.div_rn(x, rate + tl.zeros_like(x)), x * rate)
        loss = tl.load(frequency + row) * times.to(tl.float32) + tl.where(times > 0, tl.load(presence + row), 0.0)
        x = tl.where(used > 0, changed - loss, x)
        tl.store(processed + tl.load(sources + row).to(tl.int64) * vocab + columns, x, mask=columns < vocab)
    maxima = tl.max(tl.reshape(x, (TILE // BLOCK, BLOCK)), axis=1)
    blocks = row * (TILES * TILE // BLOCK) + tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    tl.store(block_maxima + blocks, maxima)
    tl.store(tile_maxima + row * TILES + tile, tl.max(maxima, axis=0))


@kernel
def _weigh_kernel(
    logits, processed, sources, kinds, temperatures, least_logs, tile_maxima, tile_weights, vocab, stride,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = best_of(tile_maxima, row, vocab, TILE, TILES)
    if not _is_greedy(tl.load(kinds + row), best):
        base = _row_of(logits, processed, sources, row, stride, vocab)
        x = load_logits(base, tile * TILE + tl.arange(0, TILE), vocab)
        rates = _rates(x, best, tl.load(temperatures + row), tl.load(least_logs + row))
        tl.store(tile_weights + row * TILES + tile, tl.sum(_weights(rates), axis=0))


@triton.jit
def list_best(base, block_maxima, chosen, candidates, vocab, BLOCKS: tl.constexpr, CHOSEN: tl.constexpr):
    """The best tokens of a row, at most BEST, the best first: keys of logit and id, and how many. `chosen`,
    `candidates`: memory for BEST numbers."""
    blocks = tl.arange(0, BLOCKS)
    keys = _keys(tl.load(block_maxima + blocks, mask=blocks < tl.cdiv(vocab, BLOCK), other=0.0))
    is_chosen = _choose(tl.where(blocks < tl.cdiv(vocab, BLOCK), keys, _LOWEST), CHOSEN)
    tl.store(chosen + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1, blocks, mask=is_chosen)
    num_chosen = tl.sum(is_chosen.to(tl.int32), axis=0)
    tl.debug_barrier()
    places = tl.arange(0, CHOSEN * BLOCK)
    there = places // BLOCK < num_chosen
    columns = tl.load(chosen + places // BLOCK, mask=there, other=0) * BLOCK + places % BLOCK
    there = there & (columns < vocab)
    keys = tl.where(there, _keys(load_logits(base, tl.where(there, columns, vocab), vocab)), _LOWEST)
    is_chosen = _choose(keys, BEST)
    wide = (keys.to(tl.int64) << 32) + (0x7FFFFFFF - columns)
    tl.store(candidates + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1, wide, mask=is_chosen)
    num_best = tl.sum(is_chosen.to(tl.int32), axis=0)
    tl.debug_barrier()
    ranks = tl.arange(0, BEST)
    best_keys = tl.load(candidates + ranks, mask=ranks < num_best, other=-(2**63))
    return tl.sort(best_keys, descending=True), num_best


@kernel
def _best_kernel(
    logits, processed, sources, kinds, temperatures, least_logs, top_ks, top_ps, uniforms,
    tile_maxima, block_maxima, tile_weights, chosen, candidates, thresholds, histograms, tokens,
    vocab, stride,
    TILE: tl.constexpr, TILES: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """tokens[r]: the row's token, or -1 where all of the vocabulary has to be looked at: then thresholds[r] is the
    least logit that top_k keeps, and the row's histograms are empty."""
    row = tl.program_id(0).to(tl.int64)
    kind, k = tl.load(kinds + row), tl.load(top_ks + row)
    top_p, uniform = tl.load(top_ps + row), tl.load(uniforms + row)
    best = best_of(tile_maxima, row, vocab, TILE, TILES)
    base = _row_of(logits, processed, sources, row, stride, vocab)
    token = kind * 0 - 1
    threshold = best * 0 + float("-inf")
    if _is_greedy(kind, best):
        token = kind * 0
    elif kind == ALL:
        if k > 0:
            threshold = _kth_value(base, k, vocab, TILE)
    else:
        maxima = block_maxima + row * (TILES * TILE // BLOCK)
        best_keys, num_best = list_best(
            base, maxima, chosen + row * BEST, candidates + row * BEST, vocab, TILES * TILE // BLOCK, CHOSEN
        )
        ranks = tl.arange(0, BEST)
        values = tl.where(ranks < num_best, numbers((best_keys >> 32).to(tl.int32)), float("-inf"))
        last_value = tl.sum(tl.where(ranks == k - 1, values, 0.0), axis=0)
        threshold = tl.where(k > 0, last_value, float("-inf"))
        scaled = (values - best) / tl.load(temperatures + row)
        keep = (ranks < num_best) & (scaled >= tl.load(least_logs + row)) & (values >= threshold)
        weights = tl.where(keep, _weights(tl.minimum(tl.exp(scaled), 1.0)), 0)
        total = tl.sum(weights, axis=0)
        if kind == NUCLEUS:
            tiles = tl.arange(0, TILES)
            there = tiles < tl.cdiv(vocab, TILE)
            total = tl.sum(tl.load(tile_weights + row * TILES + tiles, mask=there, other=0), axis=0)
        last_unit = tl.where(top_p < 1, _last_unit(top_p, total), total)
        is_kept = tl.cumsum(weights, axis=0) - weights <= last_unit
        if kind == NUCLEUS:
            # Which of equal tokens are the first is not known where some of them are not here.
            num_kept = tl.sum(is_kept.to(tl.int32), axis=0)
            end = tl.sum(tl.where(ranks == num_kept - 1, values, 0.0), axis=0)
            bottom = tl.sum(tl.where(ranks == BEST - 1, values, 0.0), axis=0)
            weight = tl.sum(tl.where(ranks == BEST - 1, weights, 0), axis=0)
            unknown = (num_best == BEST) & (end <= bottom) & (weight > 0)
        else:
            unknown = tl.sum(keep.to(tl.int32), axis=0) >= tl.where(kind == FROM_FEW, FEW, BEST)
        kept = tl.where(is_kept, weights, 0)
        at = _unit_at(uniform, tl.sum(kept, axis=0))
        rank = tl.sum((tl.cumsum(kept, axis=0) <= at).to(tl.int32), axis=0)
        drawn = 0x7FFFFFFF - (tl.sum(tl.where(ranks == rank, best_keys, 0), axis=0) & 0x7FFFFFFF).to(tl.int32)
        token = tl.where(unknown, -1, drawn)
    tl.store(thresholds + row, threshold)
    tl.store(tokens + row, token.to(tl.int64))
    if (token < 0) & (top_p < 1):
        bins = tl.arange(0, BINS)
        for level in tl.static_range(3):
            tl.store(histograms + (row * 3 + level) * BINS + bins, tl.zeros((BINS,), dtype=tl.int64))


@kernel
def _histogram_kernel(
    logits, processed, sources, temperatures, least_logs, top_ps, tile_maxima, thresholds, histograms, tokens,
    vocab, stride,
    LEVEL: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Adds a tile's weights to the histogram of digit LEVEL, without keys that differ from the wanted one before it."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_p = tl.load(top_ps + row)
    if (tl.load(tokens + row) < 0) & (top_p < 1):
        base = _row_of(logits, processed, sources, row, stride, vocab)
        best = best_of(tile_maxima, row, vocab, TILE, TILES)
        x = load_logits(base, tile * TILE + tl.arange(0, TILE), vocab)
        rates = _rates(x, best, tl.load(temperatures + row), tl.load(least_logs + row))
        rates = tl.where(x >= tl.load(thresholds + row), rates, 0.0)
        keys = _weight_keys(rates)
        row_histograms = histograms + row * 3 * BINS
        prefix, _ = _resolve(row_histograms, top_p, LEVEL)
        if LEVEL == 0:
            matches = keys >= 0
            digits = keys >> 19
        elif LEVEL == 1:
            matches = (keys >= 0) & (keys >> 19 == prefix)
            digits = (keys >> 9) & 1023
        else:
            matches = (keys >= 0) & (keys >> 9 == prefix)
            digits = keys & 511
        tl.atomic_add(row_histograms + LEVEL * BINS + digits, _weights(rates), mask=matches, sem="relaxed")


@kernel
def _filter_kernel(
    logits, processed, sources, temperatures, least_logs, top_ps, tile_maxima, thresholds, histograms, tokens,
    tile_weights, tile_equals, vocab, stride,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The weights that the filters leave of a tile; of those that equal the last one of top_p the number."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_p, threshold = tl.load(top_ps + row), tl.load(thresholds + row)
    if (tl.load(tokens + row) < 0) & ((top_p < 1) | (threshold > float("-inf"))):
        base = _row_of(logits, processed, sources, row, stride, vocab)
        best = best_of(tile_maxima, row, vocab, TILE, TILES)
        x = load_logits(base, tile * TILE + tl.arange(0, TILE), vocab)
        rates = _rates(x, best, tl.load(temperatures + row), tl.load(least_logs + row))
        rates = tl.where(x >= threshold, rates, 0.0)
        weights = _weights(rates)
        if top_p < 1:
            last, _ = _resolve(histograms + row * 3 * BINS, top_p, 3)
            keys = _weight_keys(rates)
            weights = tl.where(keys > last, weights, 0)
            tl.store(tile_equals + row * TILES + tile, tl.sum((keys == last).to(tl.int32), axis=0))
        tl.store(tile_weights + row * TILES + tile, tl.sum(weights, axis=0))


@kernel
def _pick_kernel(
    logits, processed, sources, kinds, temperatures, least_logs, top_ps, uniforms, slots, counts,
    tile_maxima, tile_weights, tile_equals, thresholds, histograms, tokens, vocab, stride,
    FILTERED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """tokens[r], which is there already where `_best_kernel` has drawn it; adds it to the counts of the row's slot.
    FILTERED: whether `_filter_kernel` was launched."""
    row = tl.program_id(0).to(tl.int64)
    tiles, places = tl.arange(0, TILES), tl.arange(0, TILE)
    there = tiles < tl.cdiv(vocab, TILE)
    maxima = tl.load(tile_maxima + row * TILES + tiles, mask=there, other=float("-inf"))
    best = tl.max(maxima, axis=0)
    base = _row_of(logits, processed, sources, row, stride, vocab)
    token = tl.sum(tiles * 0, axis=0).to(tl.int64) - 1
    if FILTERED:
        token = tl.load(tokens + row)
    if _is_greedy(tl.load(kinds + row), best):
        tile = tl.min(tl.where(maxima == best, tiles, TILES - 1), axis=0)
        columns = tile * TILE + places
        x = load_logits(base, columns, vocab)
        token = tl.min(tl.where((x == best) & (columns < vocab), columns, vocab - 1), axis=0).to(tl.int64)
    elif token < 0:
        top_p = tl.load(top_ps + row)
        sums = tl.load(tile_weights + row * TILES + tiles, mask=there, other=0)
        last, num_equal, threshold = 0, tl.sum(sums * 0, axis=0), float("-inf")
        equals = sums * 0
        if FILTERED:
            threshold = tl.load(thresholds + row)
            if top_p < 1:
                last, unit = _resolve(histograms + row * 3 * BINS, top_p, 3)
                weight = _weights((last + _LEAST_BITS).to(tl.float32, bitcast=True))
                num_equal = unit // weight + 1
                equals = tl.load(tile_equals + row * TILES + tiles, mask=there, other=0).to(tl.int64)
                equals = tl.maximum(tl.minimum(equals, num_equal - tl.cumsum(equals, axis=0) + equals), 0)
                sums += equals * weight
        ends = tl.cumsum(sums, axis=0)
        at = _unit_at(tl.load(uniforms + row), tl.sum(sums, axis=0))
        tile = tl.minimum(tl.sum((ends <= at).to(tl.int32), axis=0), tl.cdiv(vocab, TILE) - 1)
        at -= tl.sum(tl.where(tiles < tile, sums, 0), axis=0)
        num_equal -= tl.sum(tl.where(tiles < tile, equals, 0), axis=0)
        columns = tile * TILE + places
        x = load_logits(base, columns, vocab)
        rates = _rates(x, best, tl.load(temperatures + row), tl.load(least_logs + row))
        weights = _weights(tl.where(x >= threshold, rates, 0.0))
        if FILTERED:
            if top_p < 1:
                keys = _weight_keys(rates)
                equal = (x >= threshold) & (keys == last)
                is_first = equal & (tl.cumsum(equal.to(tl.int64), axis=0) <= num_equal)
                weights = tl.where((keys > last) | is_first, weights, 0)
        place = tl.sum((tl.cumsum(weights, axis=0) <= at).to(tl.int32), axis=0)
        token = tl.minimum(tile * TILE + place, vocab - 1).to(tl.int64)
    tl.store(tokens + row, token)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        count = counts + slot * vocab + token
        tl.store(count, tl.load(count) + 2)
