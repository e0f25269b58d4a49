"""What `pd_bandwidth` moves: the same pages and the same checkpoint in both processes, from the layout and a seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.transfer.contract import ContentName, OfferedCheckpoint
from cairn.transfer.geometry import AttentionUnits, ModelUnits
from cairn.types import Keys, Pages

__all__ = ["LAYOUTS", "PLACEMENTS", "Model", "Placement", "Share", "filled"]

BLOCK = 16
Placement = Literal["in order", "scattered"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
PAGES_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the transfers see it."""

    layout: CacheLayout
    units: ModelUnits
    digest: bytes

    def parts(self, pages: Pages) -> tuple[GroupPages, ...]:
        """These pages, as those of a prompt from its first token on."""
        return tuple(GroupPages(group, 0, pages) for group in self.layout.groups)


def _model(header_bytes: int, state_bytes: int, attention: AttentionUnits, state_units: int) -> Model:
    layout = CacheLayout(
        block_size=BLOCK,
        page_bytes=attention.kv_heads * attention.runs * BLOCK * attention.row_bytes,
        page_units=attention.kv_heads,
        groups=(AttentionGroup("full", BLOCK),),
        header_bytes=header_bytes,
        state_bytes=state_bytes,
        state_units=state_units,
    )
    return Model(layout, ModelUnits((attention,), state_units), b"\7" * 32)


LAYOUTS: Mapping[str, Model] = MappingProxyType(
    {
        "tiny": _model(1_024, 186_880, AttentionUnits(kv_heads=2, layers=2, row_bytes=256), state_units=2),
        "nemotron-3-nano": _model(
            5_376, 49_082_368, AttentionUnits(kv_heads=2, layers=6, row_bytes=256), state_units=8
        ),
    }
)
"""As `cairn check` counts them, in float32 and in bfloat16 with float32 states, on one rank."""


@dataclass(frozen=True, slots=True)
class Share:
    """64 MiB of pages and one checkpoint, half of a pool on each side.

    `in order`: as a fresh pool gives them, so that neighbours here are neighbours there. `scattered`: the worst that a
    cache long in use can come to, no two neighbours the same on both sides but by chance.
    """

    num_pages: int
    keys: Keys
    remote_pages: Pages
    local_pages: Pages
    remote_file: Pages
    local_file: Pages

    @classmethod
    def of(cls, model: Model, placement: Placement, seed: int) -> Self:
        layout = model.layout
        pages, file = PAGES_BYTES // layout.page_bytes, layout.pages_per_checkpoint
        num_pages = 2 * (pages + file)
        rng = np.random.default_rng(seed)
        remote, local = (rng.permutation(num_pages).astype(np.int32) for _ in range(2))
        if placement == "in order":
            remote, local = (np.roll(np.arange(num_pages, dtype=np.int32), -start) for start in (0, pages))
        keys = rng.integers(0, 1 << 17, pages * BLOCK).astype(np.int64)
        ends = slice(pages, pages + file)
        return cls(num_pages, keys, remote[:pages], local[:pages], remote[ends], local[ends])

    @property
    def name(self) -> ContentName:
        return ContentName()

    @property
    def held(self) -> OfferedCheckpoint:
        return OfferedCheckpoint(len(self.keys), self.remote_file)

    @property
    def remote(self) -> Pages:
        """Every page that is read, in the order in which the worker asks for them."""
        return np.concatenate([self.remote_pages, self.remote_file])

    @property
    def local(self) -> Pages:
        """Where each of them goes."""
        return np.concatenate([self.local_pages, self.local_file])


def filled(pool: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`pool` [pages, bytes] with bytes that differ from page to page and within each."""
    size = pool.shape[1]
    for number, page in enumerate(pool):
        page[:] = np.arange(number * 7, number * 7 + size, dtype=np.uint64).view(np.uint8)[:size]
    return pool
