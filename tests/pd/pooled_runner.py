"""The simulated runner on real bytes, so that a link can carry them: what is read wrong gives another answer.

page    [k|v][token] of int32: the two halves of a token's tag
file    hidden tag, then the state's tag over and over: a torn file does not go unnoticed
"""

import numpy as np

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.transfer.geometry import ModelUnits
from doubles.simulated_runner import SimulatedRunner

UNITS = ModelUnits(kv_heads=1, attention_layers=1, state_units=1)
STATE_BYTES = 360


def layout(block_size: int = 16) -> CacheLayout:
    """A checkpoint of 368 bytes: three pages of 16 tokens."""
    return CacheLayout(
        block_size=block_size,
        page_bytes=8 * block_size,
        page_units=1,
        groups=(AttentionGroup("full", block_size),),
        header_bytes=8,
        state_bytes=STATE_BYTES,
        state_units=1,
    )


class PooledRunner(SimulatedRunner):
    """`pool`: uint8 [num_pages and more, page_bytes], filled with noise at first."""

    def __init__(
        self, shape: CacheLayout, pool: np.ndarray, num_pages: int, num_slots: int, vocab_size: int = 50
    ) -> None:
        super().__init__(shape, num_pages, num_slots, vocab_size, numerics=False)
        self.pool = pool
        self.half = pool.view(np.int32).reshape(len(pool), 2, shape.block_size)

    def _read(self, page, offset) -> int:
        return int(self.half[page, :, offset].copy().view(np.int64)[0])

    def _read_first(self, group, pages, count) -> int:
        """Anew in each step: a link writes pages behind its back."""
        used = self.half[pages[: -(-count // self._layout.block_size)]]
        tags = used.transpose(0, 2, 1).copy().view(np.int64).reshape(-1)[:count]
        # no number of 64 bits holds the sum
        return sum(tags.tolist())

    def _write(self, page, offset, tag) -> None:
        self.half[page, :, offset] = np.array([tag], np.int64).view(np.int32)

    def _copy(self, source, target) -> None:
        self.pool[target] = self.pool[source]

    def _read_file(self, pages):
        tags = self.pool[pages].reshape(-1)[: 8 + STATE_BYTES].view(np.int64)
        hidden, state = tags[0], tags[1:]
        if len(set(state.tolist())) != 1:
            raise LookupError(f"pages {pages.tolist()} hold no checkpoint")
        return int(state[0]), int(hidden)

    def _write_file(self, pages, state) -> None:
        assert len(pages) == self._layout.pages_per_checkpoint
        tags = np.full(1 + STATE_BYTES // 8, state[0], np.int64)
        tags[0] = state[1]
        raw = np.zeros((len(pages), self.pool.shape[1]), np.uint8)
        raw.reshape(-1)[: 8 + STATE_BYTES] = tags.view(np.uint8)
        self.pool[pages] = raw
