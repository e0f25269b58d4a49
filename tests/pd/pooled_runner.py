"""The simulated runner on real bytes, so that a link can carry them: what is read wrong gives another answer.

page    [layer][k|v][token] of int32: the two halves of a token's tag, in each layer of the page's attention group
file    hidden tag, then the state's tag over and over: a torn file does not go unnoticed
"""

import numpy as np

from cairn.cache.layout import AttentionGroup, CacheLayout, reach_name
from cairn.transfer.geometry import AttentionUnits, ModelUnits
from doubles.simulated_runner import SimulatedRunner

STATE_BYTES = 360
LAYERS = (1, 3, 2)
"""Of the attention groups, in order."""

REACHES = ((None, False), (40, False), (64, True))
"""One of unlimited reach, a window and a chunk: with them pages of the others have more tokens."""


def units(limited: bool = False) -> ModelUnits:
    """`limited`: with the groups of limited reach."""
    layers = LAYERS if limited else LAYERS[:1]
    return ModelUnits(tuple(AttentionUnits(kv_heads=1, layers=each, row_bytes=4) for each in layers), state_units=1)


def layout(block_size: int = 16, limited: bool = False) -> CacheLayout:
    """A checkpoint of 368 bytes: three pages of 16 tokens, or with the groups of limited reach one."""
    layers = LAYERS if limited else LAYERS[:1]
    most = max(layers) * block_size
    groups = (
        AttentionGroup(reach_name(*reach), most // each, *reach) for each, reach in zip(layers, REACHES, strict=False)
    )
    return CacheLayout(
        block_size=block_size,
        page_bytes=8 * most,
        page_units=1,
        groups=tuple(groups),
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
        numbers = pool.view(np.int32)
        self.halves = {
            group: numbers[:, : 2 * layers * group.tokens_per_page].reshape(len(pool), layers, 2, -1)
            for group, layers in zip(shape.groups, LAYERS, strict=False)
        }
        assert all(np.shares_memory(halves, pool) for halves in self.halves.values())

    def _read(self, group, page, offset) -> int:
        halves = self.halves[group][page, :, :, offset]
        if (halves != halves[0]).any():
            raise LookupError(f"token {offset} of page {page} has other bytes in one layer than in another")
        return int(halves[0].copy().view(np.int64)[0])

    def _read_first(self, group, pages, count) -> int:
        """Anew in each step: a link writes pages behind its back."""
        used = self.halves[group][pages[: -(-count // group.tokens_per_page)], 0]
        tags = used.transpose(0, 2, 1).copy().view(np.int64).reshape(-1)[:count]
        # no number of 64 bits holds the sum
        return sum(tags.tolist())

    def _read_span(self, group, pages, start, end) -> int:
        first = start // group.tokens_per_page
        used = self.halves[group][pages[first : -(-end // group.tokens_per_page)]]
        tags = used.transpose(1, 0, 3, 2).copy().view(np.int64).reshape(used.shape[1], -1)
        tags = tags[:, start - first * group.tokens_per_page :][:, : end - start]
        if (tags != tags[0]).any():
            raise LookupError(f"tokens [{start}, {end}) have other bytes in one layer than in another")
        return sum(tags[0].tolist())

    def _write(self, group, page, offset, tag) -> None:
        self.halves[group][page, :, :, offset] = np.array([tag], np.int64).view(np.int32)

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
