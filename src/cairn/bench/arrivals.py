"""When requests are sent."""

import math

import numpy as np
from numpy.typing import NDArray


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Seconds after the start at which each of `count` requests is due, ascending.

    `rate`: requests a second; infinite: all at once. The gaps are drawn from a gamma distribution with shape
    `burstiness`: 1 is a Poisson process, less is burstier, infinite is evenly spaced. They are scaled so that the last
    request is due at count / rate, whatever was drawn: runs with different seeds have the same mean rate.
    """
    if math.isinf(rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        gaps = np.ones(count)
    else:
        gaps = rng.gamma(burstiness, 1.0, size=count)
    times = np.cumsum(gaps)
    if not times[-1] > 0:
        # A shape near 0 draws gaps too small for a float: everything in one burst.
        return np.zeros(count)
    scaled: NDArray[np.float64] = times * (count / rate / times[-1])
    return scaled
