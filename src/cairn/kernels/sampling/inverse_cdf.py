"""Inverse transform sampling: from seeds to uniform numbers, and from those and logits to tokens.

Uniform numbers are those of Philox4x32-10, a counter-based generator without a state (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"). All `sample_` functions take logits, float32 [n, width], width a multiple of BLOCK
and filled up with -inf, and leave them alone. Filters: `min_p` (Nguyen et al. 2024) keeps tokens at least that share as
likely as the most likely one, then `top_k` the k best and those that equal the last of them, then `top_p` (Holtzman et
al. 2020) the smallest set of the best that holds that share of what is left, one token at least; the best have the
largest logits, and the lowest ids among equals.

What is drawn in a row depends on that row alone, bit for bit: selection compares, `softmax` goes row by row, and
probabilities are rounded down to whole multiples of 2^-50, so that their sums, below 2^53, are exact in float64 in
whatever order they are added.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.staging import Staging

BLOCK = 128
"""Tokens whose best one, or whose sum, is looked at before themselves."""

_NUMPY_THREADS = 2
"""Up to so many threads numpy finds the largest logits sooner, alone: in 0.4 of the time that one of torch's takes."""

_UNITS = 2.0**50
"""Of which a probability has a whole number."""
LEAST_SHARE = 1e-300
MOST_TEMPERATURE = 1e30
"""Temperatures are held to a range in which float32 makes no infinity of them."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF

Words = NDArray[np.uint64]
"""32-bit numbers in 64 bits, because they are multiplied."""

Numbers = NDArray[np.float64]


def philox(counters: Words, keys: Words) -> Words:
    """`counters`: [4, n]; `keys`: [2, n] -> random words, [4, n]."""
    multipliers, steps = (np.array(pair, np.uint64)[:, None] for pair in (_MULTIPLIERS, _KEY_STEPS))
    word, half = np.uint64(_WORD), np.uint64(32)
    even, odd = counters[::2], counters[1::2]
    for round_keys in keys + steps * np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] & word:
        products = even * multipliers
        even = (products >> half)[::-1] ^ odd ^ round_keys
        odd = products[::-1] & word
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) of 53 random bits for pairs of seed (modulo 2^64) and position (from 0 on), shape
    [n]."""
    pairs = np.array([[seed % (1 << 64) for seed in seeds], positions], np.uint64)
    low, high = pairs & np.uint64(_WORD), pairs >> np.uint64(32)
    empty = np.zeros_like(low[0])
    words = philox(np.stack([low[1], high[1], empty, empty]), np.stack([low[0], high[0]]))
    bits: NDArray[np.uint64] = (words[0] << np.uint64(32) | words[1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


class Draws:
    """Sampling parameters and uniform numbers, in [0, 1), of n rows: arrays of shape [n] on the host, and columns of
    them, [n, 1], on the device.

    `top_k` 0, `top_p` 1 and `min_p` 0 switch the filters off.
    """

    def __init__(
        self,
        temperature: Numbers,
        top_k: NDArray[np.int64],
        top_p: Numbers,
        min_p: Numbers,
        uniform: Numbers,
        staging: Staging,
    ) -> None:
        """The columns may be read once `staging` has been sent."""
        self.temperature, self.top_k, self.top_p, self.min_p, self.uniform = temperature, top_k, top_p, min_p, uniform
        least_log = np.log(min_p.clip(LEAST_SHARE))
        units = np.where(top_p < 1, (top_p * _UNITS).clip(1), np.inf)
        self._floats = staging.add(np.stack([temperature, least_log, np.ceil(units) - 1, uniform]))
        self._top_k = staging.add(top_k)

    def take(self, rows: list[int]) -> "Draws":
        """Some of the rows, with columns of their own."""
        staging = Staging()
        floats = (self.temperature[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows])
        taken = Draws(floats[0], self.top_k[rows], *floats[1:], staging)
        staging.send(self._top_k.tensor.device)
        return taken

    @property
    def temperature_column(self) -> Tensor:
        return self._floats.tensor[0, :, None]

    @property
    def least_log_column(self) -> Tensor:
        """The logarithm of min_p."""
        return self._floats.tensor[1, :, None]

    @property
    def last_unit_column(self) -> Tensor:
        """The number of the unit that fills the share of top_p."""
        return self._floats.tensor[2, :, None]

    @property
    def uniform_column(self) -> Tensor:
        return self._floats.tensor[3, :, None]

    @property
    def top_k_column(self) -> Tensor:
        return self._top_k.tensor[:, None]


def take_largest(logits: Tensor, _: Draws) -> Tensor:
    """The largest logit of each row, the lowest id among equals; int64 [n]."""
    if logits.device.type == "cpu" and torch.get_num_threads() <= _NUMPY_THREADS:
        return torch.from_numpy(logits.numpy().argmax(-1))
    blocks = _blocks(logits)
    best = blocks.amax(-1).argmax(-1)
    inside: Tensor = blocks[_rows(logits), best].argmax(-1)
    return best * BLOCK + inside


def sample_from_best(logits: Tensor, draws: Draws, count: int) -> Tensor:
    """For rows with min_p, or a top_k below `count`: int64 [n], -1 where the filters may keep more than the `count`
    best tokens, so that `sample_from_all` is needed."""
    values, ids = _best(logits, count)
    scaled = (values - values[:, :1]).double() / draws.temperature_column
    keep = scaled >= draws.least_log_column
    keep &= values >= values.gather(1, _last(draws, count))
    weights = scaled.masked_fill(~keep, -torch.inf).softmax(-1).mul_(_UNITS).floor_()
    tokens, _ = _sample_ranked(weights, ids, draws)
    return tokens.masked_fill(keep[:, -1], -1)


def sample_from_nucleus(logits: Tensor, draws: Draws, count: int) -> Tensor:
    """`sample_from_best` for rows with top_p alone."""
    values, ids = _best(logits, count)
    weights = _weights(logits, draws).gather(1, ids).double()
    tokens, num_kept = _sample_ranked(weights, ids, draws)
    # Which of equal tokens are the first is not known where some of them are not here.
    unknown = values.gather(1, (num_kept - 1).clamp_(min=0)) <= values[:, -1:]
    return tokens.masked_fill(unknown.logical_and_(weights[:, -1:] > 0)[:, 0], -1)


def sample_from_all(logits: Tensor, draws: Draws) -> Tensor:
    """For any filters, over the whole vocabulary; int64 [n]."""
    weights = _weights(logits, draws)
    if (draws.top_p < 1).any():
        _cut_to_nucleus(weights, draws.last_unit_column)
    sums = _sums(weights)
    return _search(weights, sums, _place(sums.sum(-1, keepdim=True), draws))[:, 0]


def _weights(logits: Tensor, draws: Draws) -> Tensor:
    """Probabilities in units, float32 like `logits`, after temperature, min_p and top_k."""
    scaled = logits - logits.amax(-1, keepdim=True)
    if (draws.temperature != 1).any():
        scaled /= draws.temperature_column.clamp(1 / MOST_TEMPERATURE, MOST_TEMPERATURE).float()
    if (draws.min_p > 0).any():
        scaled.masked_fill_(scaled < draws.least_log_column, -torch.inf)
    if (draws.top_k > 0).any():
        best = logits.topk(int(draws.top_k.max())).values
        worse = logits < best.gather(1, _last(draws, best.shape[1]))
        scaled.masked_fill_(worse.logical_and_(draws.top_k_column > 0), -torch.inf)
    return scaled.softmax(-1).mul_(_UNITS).floor_()


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens, logits and ids, the best first; among those that equal the last, any. [n, count]"""
    blocks = _blocks(logits)
    # A token better than the last one found is in a block whose best one is.
    chosen = blocks.amax(-1).topk(min(count, blocks.shape[1])).indices
    values, places = blocks[_rows(logits)[:, None], chosen].flatten(1).topk(count)
    ids, order = (chosen.gather(1, places // BLOCK) * BLOCK + places % BLOCK).sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _sample_ranked(weights: Tensor, ids: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Tokens from those of `ids`, the best first, that top_p keeps; [n], and how many it keeps, [n, 1]."""
    keep = weights.cumsum(-1) - weights <= draws.last_unit_column
    kept = weights * keep
    place, _ = _find(kept, _place(kept.sum(-1, keepdim=True), draws))
    return ids.gather(1, place)[:, 0], keep.sum(-1, keepdim=True)


def _cut_to_nucleus(weights: Tensor, last_unit: Tensor) -> None:
    """Take all weight, in place, from tokens outside the smallest set of the best that has unit number `last_unit`."""
    on_host = weights.device.type == "cpu"
    # numpy sorts bare numbers many times faster than torch does numbers and places.
    rising = torch.from_numpy(np.sort(weights.numpy())) if on_host else weights.sort(-1).values
    ranked = rising.flip(-1)
    place = _search(ranked, _sums(ranked), last_unit)
    lightest = ranked.gather(1, place)
    keep = weights >= lightest
    num_left_out = weights.shape[1] - 1 - place - torch.searchsorted(rising, lightest)
    if not on_host or (num_left_out > 0).any():
        equal = weights == lightest
        backwards = equal.flip(-1).cumsum(-1).flip(-1)
        keep &= ~(equal & (backwards <= num_left_out))
    weights.mul_(keep)


def _sums(weights: Tensor) -> Tensor:
    return _blocks(weights).sum(-1, dtype=torch.float64)


def _search(weights: Tensor, sums: Tensor, at: Tensor) -> Tensor:
    """`_find` in long rows, whose blocks have these sums: the block, then the place in it; [n, 1]."""
    block, rest = _find(sums, at)
    place, _ = _find(_blocks(weights)[_rows(weights), block[:, 0]].double(), rest)
    return block * BLOCK + place


def _find(weights: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The place in each row of float64 weights that has unit number `at`, [n, 1], and that unit's number inside it."""
    ends = weights.cumsum(-1)
    place = (ends <= at).sum(-1, keepdim=True).clamp_(max=weights.shape[1] - 1)
    return place, at - (ends - weights).gather(1, place)


def _place(total: Tensor, draws: Draws) -> Tensor:
    """The number of the drawn unit among `total`, below it; both [n, 1]."""
    return (draws.uniform_column * total).floor_()


def _last(draws: Draws, count: int) -> Tensor:
    """The place of the last of the top_k best tokens among `count`, [n, 1]."""
    top_k = draws.top_k_column
    return torch.where(top_k > 0, top_k.clamp(max=count), count) - 1


def _blocks(numbers: Tensor) -> Tensor:
    return numbers.view(len(numbers), -1, BLOCK)


def _rows(like: Tensor) -> Tensor:
    return torch.arange(len(like), device=like.device)
