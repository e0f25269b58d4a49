"""What the ranks of a model remember, and what the transfer would move between servers of different sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.step import Save
from cairn.transfer.geometry import AttentionUnits, ModelUnits, pair
from runner.harness import prompt, ranks

SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Model:
    """A config, and what it says of the whole model."""

    config: Any

    @property
    def units(self) -> ModelUnits:
        return units_of(self.config, 2)

    def layout(self, block_size: int, size: int) -> CacheLayout:
        return self.config.layout(block_size, 2, size)


def units_of(config: Any, itemsize: int) -> ModelUnits:
    """The units of the whole model, whose numbers have `itemsize` bytes."""
    spec = config.cache_spec()
    attention = (
        AttentionUnits(each.num_kv_heads, each.num_layers, each.head_dim * itemsize) for each in spec.attention
    )
    return ModelUnits(tuple(attention), spec.num_state_units)


class Remembered:
    """What the ranks of one size hold of the same prompt: page bytes and checkpoint bytes of every rank."""

    def __init__(self, config: Any, weights: dict[str, Tensor], size: int) -> None:
        several = ranks(config, weights, size, exact=True)
        self.size, self.layout = size, several.layout
        track, file = several.sequence(0, 100), several.file()
        several.run(several.row(track, prompt(100, 4)))
        several.run(saves=(Save(0, file),))
        pages, places = track.pages[:6].tolist(), file.tolist()
        self.pages = [runner.pool[pages].numpy().copy() for runner in several.runner.runners]
        self.files = [runner.pool[places].flatten().numpy().copy() for runner in several.runner.runners]
        several.runner.close()

    def file(self, rank: int) -> np.ndarray:
        return self.files[rank][: self.layout.checkpoint_bytes]


def every_pair_of_sizes_is_taken(model: Model, block_size: int, sizes: Sequence[int] = SIZES) -> None:
    """The remote side has blocks of `block_size`, the local one of 16."""
    for remote, local in product(sizes, repeat=2):
        sides = model.layout(block_size, remote), model.layout(16, local)
        pairings = [pair(model.units, *sides, rank) for rank in range(local)]
        owners = [each for pairing in pairings for each in (pairing.states[0], *(g.owners for g in pairing.groups))]
        assert {rank for each in owners for rank in each.tolist()} <= set(range(remote))


def every_share_is_found(model: Model, weights: dict[str, Tensor]) -> None:
    """What the transfer would move from a server of another size is what the own ranks have computed, up to the
    rounding of their sums."""
    remembered = [Remembered(model.config, weights, size) for size in SIZES]
    units = units_of(model.config, 4)
    for remote, local in product(remembered, repeat=2):
        sides = remote.layout, local.layout
        for rank in range(local.size):
            file, pages = np.zeros_like(local.files[rank]), np.zeros_like(local.pages[rank])
            pairing = pair(units, *sides, rank)
            for other, theirs, ours, count in pairing.states.T.tolist():
                file[ours : ours + count] = remote.files[other][theirs : theirs + count]
            for group, tokens in zip(
                pairing.groups, (each.tokens_per_page for each in local.layout.groups), strict=True
            ):
                for other, theirs, ours, count in group.ranges(0, tokens).T.tolist():
                    pages[:, ours : ours + count] = remote.pages[other][:, theirs : theirs + count]
            close(file[: local.layout.checkpoint_bytes], local.file(rank))
            close(pages, local.pages[rank])


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    """The same float32 numbers, but for their last bits."""
    found, wanted = found.reshape(-1).view(np.float32), wanted.reshape(-1).view(np.float32)
    assert np.isfinite(wanted).all() and np.abs(wanted).max() > 0.1
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
