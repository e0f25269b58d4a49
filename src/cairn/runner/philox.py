"""Random numbers without a state: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF

Words = NDArray[np.uint64]
"""Numbers of 32 bits; twice as wide because they are multiplied."""


def philox(counters: Words, keys: Words) -> Words:
    """`counters`: [4, n]; `keys`: [2, n] -> random words, [4, n]."""
    multipliers, steps = (np.array(pair, np.uint64)[:, None] for pair in (_MULTIPLIERS, _KEY_STEPS))
    word, half = np.uint64(_WORD), np.uint64(32)
    even, odd = counters[::2], counters[1::2]
    for own_keys in keys + steps * np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] & word:
        products = even * multipliers
        even = (products >> half)[::-1] ^ odd ^ own_keys
        odd = products[::-1] & word
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """A number in [0, 1) of 53 random bits for each pair; seeds modulo 2^64, positions from 0 on."""
    pairs = np.array([[seed % (1 << 64) for seed in seeds], positions], np.uint64)
    low, high = pairs & np.uint64(_WORD), pairs >> np.uint64(32)
    empty = np.zeros_like(low[0])
    words = philox(np.stack([low[1], high[1], empty, empty]), np.stack([low[0], high[0]]))
    bits: NDArray[np.uint64] = (words[0] << np.uint64(32) | words[1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
