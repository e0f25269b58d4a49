"""Where tokens stand among images: interleaved text and images in time, height and width (Qwen2-VL, arXiv 2409.12191,
section 2.1).

Text counts up in all three. An image's tokens share one time and count rows and columns from there; the text behind it
goes on after the largest of the three. Only a request's own images matter, so two requests never disturb each other.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cairn.step import Image


def positions_of(start: int, end: int, images: Sequence[Image], merge: int) -> NDArray[np.int64]:
    """Positions of tokens [start, end) in time, height and width, int64 [3, end - start].

    `images`: in order. `merge`: patches that make one token, in height and in width.
    """
    found = np.tile(np.arange(start, end, dtype=np.int64), (3, 1))
    shift = 0
    for image in images:
        if image.start >= end:
            break
        frames, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        low, high = max(start, image.start), min(end, image.end)
        if low < high:
            places = np.indices((frames, height, width)).reshape(3, -1)[:, low - image.start : high - image.start]
            found[:, low - start : high - start] = image.start + shift + places
        shift += max(frames, height, width) - image.length
        if image.end < end:
            behind = max(start, image.end)
            found[:, behind - start :] = np.arange(behind, end) + shift
    return found
