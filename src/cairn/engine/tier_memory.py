"""The pool in a GPU's memory, as tiers see it. Imports torch: for the engine's worker alone.

    copy_out   pages -> rows on the device -> pinned memory      in a stream beside the steps
    copy_in    pinned memory -> rows on the device -> pages      likewise

Steps that have written pages have been collected before these are copied out, and the host waits for the stream before
it says that pages have come: so nothing is ordered on the device.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.tiers.memory import HostTierMemory, TierMemory
from cairn.tiers.store import PageBytes
from cairn.types import Pages

PIECE_BYTES = 8 << 20
"""Moved by one call, and so taken of the device beside the pool."""


def open_tier_memory(pool: Tensor, *, on_host: bool) -> TierMemory:
    """The pool of one rank, uint8 [rows, page_bytes]. `on_host`: whether that is where the rank computes."""
    return HostTierMemory(pool.numpy()) if on_host else DeviceTierMemory(pool)


def allocate_pinned(num_bytes: int, page_bytes: int) -> PageBytes:
    """Memory of a host tier that a GPU reaches best, uint8 [num_pages, page_bytes]."""
    return torch.empty(num_bytes // page_bytes, page_bytes, dtype=torch.uint8, pin_memory=True).numpy()


class DeviceTierMemory:
    """A `TierMemory` of any device."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._on_gpu = pool.device.type == "cuda"
        self._streams: dict[str, torch.cuda.Stream] = {}
        if self._on_gpu:
            torch.cuda.synchronize(pool.device)
            for name in ("out", "in"):
                self._streams[name] = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def copy_out(self, pages: Pages) -> PageBytes:
        rows = self._pinned(len(pages))
        with torch.no_grad(), torch.cuda.stream(self._streams.get("out")):
            for piece in self._pieces(len(pages)):
                rows[piece].copy_(self._pool.index_select(0, self._numbers(pages[piece])), non_blocking=True)
        self._wait("out")
        return rows.numpy()

    def copy_in(self, pages: Pages, fill: Callable[[Sequence[PageBytes]], bool]) -> bool:
        rows = self._pinned(len(pages))
        if not fill(list(rows.numpy())):
            return False
        with torch.no_grad(), torch.cuda.stream(self._streams.get("in")):
            for piece in self._pieces(len(pages)):
                came = rows[piece].to(self._pool.device, non_blocking=True)
                self._pool.index_copy_(0, self._numbers(pages[piece]), came)
        self._wait("in")
        return True

    def _pinned(self, num_pages: int) -> Tensor:
        return torch.empty(num_pages, self._pool.shape[1], dtype=torch.uint8, pin_memory=self._on_gpu)

    def _pieces(self, num_pages: int) -> list[slice]:
        size = max(1, PIECE_BYTES // self._pool.shape[1])
        return [slice(first, first + size) for first in range(0, num_pages, size)]

    def _numbers(self, pages: Pages) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self._pool.device)

    def _wait(self, stream: str) -> None:
        if self._on_gpu:
            self._streams[stream].synchronize()
