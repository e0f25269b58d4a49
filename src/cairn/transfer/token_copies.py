"""Tokens of staged pages, laid out in pages of another size. Pure: on a device the same copies are made by a kernel."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cairn.transfer.geometry import GroupPairing
from cairn.types import Pages

_Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenCopies:
    """Tokens from slots to local pages, int64 [n] each; every token is there once for each unit, layer, k and v.

    slots   [slot][unit][layer, k|v][slot_token][row]
    pages   [page][unit][layer, k|v][page_token][row]
    """

    slots: _Array
    slot_tokens: _Array
    pages: _Array
    page_tokens: _Array

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """How many slots they come from, the first one included."""
        return int(self.slots[-1]) + 1 if len(self) else 0


def staging_copies(pairing: GroupPairing, start: int, end: int, local_pages: Pages) -> TokenCopies:
    """From the slots of tokens [start, end) to the `local_pages` that cover them; exactly these tokens, no others."""
    tokens, remote, local = np.arange(start, end), pairing.remote_tokens, pairing.local_tokens
    return TokenCopies(
        slots=tokens // remote - start // remote,
        slot_tokens=tokens % remote,
        pages=local_pages.astype(np.int64)[tokens // local - start // local],
        page_tokens=tokens % local,
    )


def lay_out(pairing: GroupPairing, copies: TokenCopies, staging: NDArray[np.uint8], pool: NDArray[np.uint8]) -> None:
    """Carry the copies out. `staging`: uint8, the pages that hold the slots, back to back and contiguous; `pool`: uint8
    [num_pages, page_bytes], contiguous. The two may be parts of one array, but must not share a page of the copies."""
    if not len(copies):
        return
    units, runs, row, num_slots = pairing.units, pairing.runs, pairing.row_bytes, copies.num_slots
    slots = staging.reshape(-1)[: num_slots * pairing.slot_bytes].reshape(num_slots, -1)
    source = slots[:, : units * runs * pairing.remote_tokens * row].view(f"V{row}")
    target = pool.reshape(len(pool), units, pairing.unit_bytes)[:, :, : runs * pairing.local_tokens * row].view(
        f"V{row}"
    )
    # set, not asked for: what would have to be copied for it is an error
    source.shape = (num_slots, units, runs, pairing.remote_tokens)
    target.shape = (len(pool), units, runs, pairing.local_tokens)
    target[copies.pages, :, :, copies.page_tokens] = source[copies.slots, :, :, copies.slot_tokens]
