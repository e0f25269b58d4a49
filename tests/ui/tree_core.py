"""A core in memory whose cache is a real one, grown to many nodes, and that goes on being used."""

from collections.abc import Iterator

import numpy as np
from simulation import PLAIN
from trees import grown, request

from cairn.cache.view import CacheView
from cairn.cache.view_builder import build_view
from cairn.engine.contract import EngineConfig
from cairn.types import Clock, SystemClock
from doubles.echo_core import EchoCore


class TreeCore(EchoCore):
    """Shows the tree of `cache`; `visit` sends one more prompt through it."""

    def __init__(self, config: EngineConfig, num_nodes: int, clock: Clock | None = None) -> None:
        super().__init__(config)
        self.cache = grown(num_nodes, clock or SystemClock())
        self.looks = 0

    def cache_view(self, max_paths: int) -> Iterator[CacheView | None]:
        self.looks += 1
        return build_view(self.cache, max_paths)

    def visit(self, seed: int) -> None:
        prompt = np.random.default_rng(seed).integers(0, 1000, 2000)
        request(self.cache, prompt, PLAIN, f"visit {seed}")
