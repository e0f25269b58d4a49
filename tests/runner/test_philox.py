"""Random numbers that depend on a seed and a position alone."""

import numpy as np
import pytest

from cairn.kernels.sampling.inverse_cdf import philox, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    """Random123's `kat_vectors` for philox4x32 with 10 rounds, alone and among others."""
    words = [np.array([int(word, 16) for word in text.split()], np.uint64) for text in (counter, key, expected)]
    assert philox(words[0][:, None], words[1][:, None])[:, 0].tolist() == words[2].tolist()
    counters, keys = np.zeros((4, 5), np.uint64), np.ones((2, 5), np.uint64)
    counters[:, 3], keys[:, 3] = words[0], words[1]
    assert philox(counters, keys)[:, 3].tolist() == words[2].tolist()


def test_a_number_is_made_of_the_first_two_words() -> None:
    """Seed 0 at position 0 is the first published answer."""
    assert uniform([0], [0])[0] == (0x6627E8D5E169C58D >> 11) / 2**53
    # seed and position have 64 bits each, the lower word first
    key, counter = [0x299F31D0, 0xA4093822], [0x85A308D3, 0x243F6A88]
    words = philox(np.array([[*counter, 0, 0]], np.uint64).T, np.array([key], np.uint64).T)[:, 0].tolist()
    assert uniform([0xA4093822299F31D0], [0x243F6A8885A308D3])[0] == ((words[0] << 32 | words[1]) >> 11) / 2**53


def test_numbers_are_those_of_the_pair_alone() -> None:
    seeds = [0, 1, -1, 12, 1, (1 << 63) + 5, -(1 << 63), 1 << 32]
    positions = [0, 23, 5, 3, 1 << 32, 7, 9, 0]
    together = uniform(seeds, positions)
    assert [uniform([seed], [at])[0] for seed, at in zip(seeds, positions, strict=True)] == together.tolist()
    assert len(set(together.tolist())) == len(seeds)
    assert uniform([-1], [5]) == uniform([(1 << 64) - 1], [5])


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_numbers_fill_the_range_evenly(along: str) -> None:
    """64 bins of 500 each, and pairs of neighbours in 8 x 8: chi-square of 63 degrees, at most 5 deviations off."""
    count = 32_000
    numbers = uniform([7] * count, range(count)) if along == "positions" else uniform(range(count), [7] * count)
    assert numbers.min() >= 0 and numbers.max() < 1
    pairs = (numbers[::2] * 8).astype(int) * 8 + (numbers[1::2] * 8).astype(int)
    for found in (np.bincount((numbers * 64).astype(int), minlength=64), np.bincount(pairs, minlength=64)):
        expected = found.sum() / 64
        assert ((found - expected) ** 2 / expected).sum() < 63 + 5 * (2 * 63) ** 0.5
