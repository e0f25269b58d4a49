"""Answers that repeat themselves are found out, exactly."""

import numpy as np
import pytest

from cairn.engine.contract import RepetitionDetection
from cairn.engine.repetition import RepetitionDetector


def repeats(tokens, params):
    """By definition: the answer ends with a pattern of one of the sizes, `min_count` times."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        length = size * params.min_count
        if length <= len(tokens) and tokens[-length:] == tokens[-size:] * params.min_count:
            return True
    return False


@pytest.mark.parametrize(
    "sizes", [(1, 0, 2), (1, 1, 5), (3, 0, 2), (3, 2, 2), (4, 4, 3), (7, 2, 3), (20, 0, 4), (20, 19, 2)]
)
def test_it_is_found_at_the_token_that_completes_it(sizes):
    params = RepetitionDetection(**dict(zip(("max_pattern_size", "min_pattern_size", "min_count"), sizes, strict=True)))
    random, found = np.random.default_rng(7), 0
    for number in range(42):
        pattern = random.integers(0, 3, 1 + number % 21).tolist()
        tokens = random.integers(0, 3, 10).tolist() + pattern * 6
        tokens[random.integers(0, len(tokens))] = 5
        detector = RepetitionDetector(params)
        for end, token in enumerate(tokens, 1):
            expected = repeats(tokens[:end], params)
            assert detector.push(token) == expected
            found += expected
    assert found
