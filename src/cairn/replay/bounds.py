"""What a policy's hit rate is to be measured against, and what shares of memory are shares of.

`unlimited` is the longest prefix of each prompt that an earlier prompt, or an earlier prompt and its answer, had:
no cache of whatever size has more to offer.
"""

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.replay.paths import Paths
from cairn.replay.traces import Trace

__all__ = ["footprint_bytes", "unlimited_hits"]


def unlimited_hits(trace: Trace) -> NDArray[np.int64]:
    """Tokens of each prompt's path that were seen before, shape [requests]."""
    paths, hits = Paths(), np.zeros(len(trace.requests), np.int64)
    for index, request in enumerate(trace.requests):
        hits[index] = 0 if request.is_parallel_sample else paths.shared(request.path) * trace.unit
        paths.add(request.path, request.answer)
    return hits


def footprint_bytes(trace: Trace, layout: CacheLayout) -> int:
    """Keys and values of all distinct tokens of all paths, answers included, and a checkpoint for each request."""
    paths = Paths()
    for request in trace.requests:
        paths.add(request.path, request.answer)
    return int(paths.num_units * trace.unit * layout.bytes_per_token) + len(trace.requests) * layout.checkpoint_bytes
