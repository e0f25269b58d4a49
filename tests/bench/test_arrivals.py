"""When requests are sent: rate, burstiness, seed."""

import math

import numpy as np
import pytest

from cairn.bench.work import draw_arrival_times


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 7.5, math.inf])
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_the_mean_rate_is_what_was_asked_for(rate, burstiness):
    times = draw_arrival_times(400, rate, burstiness, np.random.default_rng(1))
    assert times[-1] == pytest.approx(400 / rate)
    assert (np.diff(times) >= 0).all() and times[0] >= 0


def test_burstiness_is_the_shape_of_the_gaps():
    """A gamma distribution's coefficient of variation is 1 / sqrt(shape)."""
    for shape in (0.25, 1.0, 4.0):
        gaps = np.diff(draw_arrival_times(100_000, 10.0, shape, np.random.default_rng(3)))
        assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.03)
        assert gaps.mean() == pytest.approx(0.1, rel=0.01)
    assert np.diff(draw_arrival_times(50, 10.0, math.inf, np.random.default_rng(3))) == pytest.approx([0.1] * 49)


def test_an_infinite_rate_is_all_at_once():
    assert draw_arrival_times(5, math.inf, 1.0, np.random.default_rng(0)).tolist() == [0.0] * 5


def test_gaps_too_small_for_a_float_are_one_burst():
    assert draw_arrival_times(3, 1.0, 1e-6, np.random.default_rng(0)).max() <= 3.0


def test_the_seed_decides():
    drawn = [draw_arrival_times(50, 2.0, 1.0, np.random.default_rng(seed)).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
