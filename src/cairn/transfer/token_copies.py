"""Tokens of staged pages, laid out in pages of another size. Pure: on a device the same copies are made by a kernel."""

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from cairn.transfer.geometry import GroupPairing
from cairn.types import Pages

_Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenCopies:
    """Runs of tokens from slots to local pages, int64 [n] each; every run is there once for each unit, layer, k and v.

        slots   [slot][unit][layer, k|v][slot_token ...][row]
        pages   [page][unit][layer, k|v][page_token ...][row]

    All but the first and the last run have `granule` tokens and lie at multiples of it on both sides.
    """

    slot: _Array
    slot_token: _Array
    page: _Array
    page_token: _Array
    num_tokens: _Array
    granule: int

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def num_slots(self) -> int:
        """How many slots they come from, the first one included."""
        return int(self.slot[-1]) + 1 if len(self) else 0

    def by_token(self) -> "tuple[_Array, _Array, _Array, _Array]":
        """The same token by token: slot, token of it, page, and token of it, int64 [tokens] each."""
        ends = np.cumsum(self.num_tokens)
        within = np.arange(ends[-1] if len(self) else 0) - np.repeat(ends - self.num_tokens, self.num_tokens)
        slot, slot_token, page, page_token = (
            np.repeat(each, self.num_tokens) for each in (self.slot, self.slot_token, self.page, self.page_token)
        )
        return slot, slot_token + within, page, page_token + within


def staging_copies(pairing: GroupPairing, start: int, end: int, local_pages: Pages) -> TokenCopies:
    """From the slots of tokens [start, end) to the `local_pages` that cover them; exactly these tokens, no others."""
    remote, local = pairing.remote_tokens, pairing.local_tokens
    granule = gcd(remote, local)
    token = np.concatenate(([start], np.arange(start // granule + 1, -(-end // granule)) * granule))[: end - start]
    return TokenCopies(
        slot=token // remote - start // remote,
        slot_token=token % remote,
        page=local_pages.astype(np.int64)[token // local - start // local],
        page_token=token % local,
        num_tokens=np.diff(token, append=end),
        granule=granule,
    )


def lay_out(pairing: GroupPairing, copies: TokenCopies, staging: NDArray[np.uint8], pool: NDArray[np.uint8]) -> None:
    """Carry the copies out. `staging`: uint8, the pages that hold the slots, back to back and contiguous; `pool`: uint8
    [num_pages, page_bytes], contiguous. The two may be parts of one array, but must not share a page of the copies."""
    if not len(copies):
        return
    units, runs, row, granule = pairing.units, pairing.runs, pairing.row_bytes, copies.granule
    num_slots, used = copies.num_slots, units * runs * pairing.remote_tokens * row
    slots = staging.reshape(-1)[: num_slots * pairing.slot_bytes].reshape(num_slots, -1)[:, :used]
    source = slots.reshape(num_slots, units, runs, pairing.remote_tokens // granule, granule * row)
    target = pool.reshape(len(pool), units, pairing.unit_bytes)[:, :, : runs * pairing.local_tokens * row]
    # set, not asked for: what would have to be copied for it is an error
    target.shape = (len(pool), units, runs, pairing.local_tokens // granule, granule * row)
    whole = copies.num_tokens == granule
    slot_part, page_part = copies.slot_token // granule, copies.page_token // granule
    target[copies.page[whole], :, :, page_part[whole]] = source[copies.slot[whole], :, :, slot_part[whole]]
    for index in np.flatnonzero(~whole):
        skip = int(copies.slot_token[index]) % granule * row
        part = slice(skip, skip + int(copies.num_tokens[index]) * row)
        piece = source[copies.slot[index], :, :, slot_part[index], part]
        target[copies.page[index], :, :, page_part[index], part] = piece
