"""Which bytes one rank reads from a peer's ranks, when the two servers cut the same model differently. Pure.

    remote   the server that is read from, `tp_size` ranks with pages of `block_size` tokens
    local    the server that reads; everything here is for one of its ranks
    slot     the local units of one remote page, as they lie in staging

`geometry_pairing.pair` says once per peer which ranks hold what; from that, for each request:

    equal block sizes     page_reads: straight into the local pages
    unequal block sizes   staging_reads into slots, then lay_out(staging_copies)
    checkpoint            file_reads
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cairn.transfer.contract import PeerGeometry, num_range_pages
from cairn.transfer.geometry_pairing import Pairing
from cairn.transfer.links.contract import Descriptors
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


def page_reads(
    pairing: Pairing, start: int, end: int, remote_pages: Pages, local_pages: Pages
) -> dict[int, Descriptors]:
    """By remote rank the reads that fill `local_pages` whole, for equal block sizes: one descriptor a page and rank.

    Tokens [start, end); the page lists cover them in each side's block size. Raises ValueError for lists of another
    length, and for unequal block sizes.
    """
    if pairing.staged:
        raise ValueError(f"blocks of {pairing.remote.block_size} and {pairing.local.block_size} tokens need staging")
    _check_pages(pairing, "remote_pages", remote_pages, pairing.remote, start, end)
    _check_pages(pairing, "local_pages", local_pages, pairing.local, start, end)
    return _reads_into(pairing, remote_pages, local_pages.astype(np.int64))


def staging_pages(pairing: Pairing, start: int, end: int) -> int:
    """How many local pages of staging the tokens [start, end) take."""
    return -(-num_range_pages(start, end, pairing.remote.block_size) * pairing.slot_bytes // pairing.local.page_bytes)


def staging_reads(
    pairing: Pairing, start: int, end: int, remote_pages: Pages, first_page: int
) -> dict[int, Descriptors]:
    """By remote rank the reads that fill the slots, which lie back to back from local page `first_page` on.

    Tokens [start, end), covered by `remote_pages`. Raises ValueError for a list of another length.
    """
    _check_pages(pairing, "remote_pages", remote_pages, pairing.remote, start, end)
    staging = np.arange(first_page, first_page + staging_pages(pairing, start, end))
    return _reads_into(pairing, remote_pages, staging)


def _reads_into(pairing: Pairing, remote_pages: Pages, local_pages: _Array) -> dict[int, Descriptors]:
    count, reads = len(remote_pages), {}
    for source in pairing.sources:
        pieces = len(source.page.num_bytes)
        if count and pieces:
            flat = (np.arange(count)[:, None] * pairing.slot_bytes + source.page.local).reshape(-1)
            number, offset = np.divmod(flat, pairing.local.page_bytes)
            reads[source.rank] = Descriptors(
                remote_page=np.repeat(remote_pages.astype(np.int64), pieces),
                remote_offset=np.tile(source.page.remote, count),
                local_page=local_pages[number],
                local_offset=offset,
                num_bytes=np.tile(source.page.num_bytes, count),
            )
    return reads


def file_reads(pairing: Pairing, remote_file: Pages, local_file: Pages) -> dict[int, Descriptors]:
    """By remote rank the reads that fill a checkpoint file. `remote_file` lists the pages of the file on every remote
    rank, `local_file` on every local one. Raises ValueError for lists of another length."""
    for name, pages, side in (("remote_file", remote_file, pairing.remote), ("local_file", local_file, pairing.local)):
        need = max(1, -(-(side.header_bytes + side.state_bytes) // side.page_bytes))
        if len(pages) != need:
            raise ValueError(f"{name} lists {len(pages)} pages, a checkpoint takes {need}")
    reads = {}
    for source in pairing.sources:
        if len(source.file.num_bytes):
            remote, remote_offset = np.divmod(source.file.remote, pairing.remote.page_bytes)
            local, local_offset = np.divmod(source.file.local, pairing.local.page_bytes)
            reads[source.rank] = Descriptors(
                remote_page=remote_file.astype(np.int64)[remote],
                remote_offset=remote_offset,
                local_page=local_file.astype(np.int64)[local],
                local_offset=local_offset,
                num_bytes=source.file.num_bytes,
            )
    return reads


def staging_copies(pairing: Pairing, start: int, end: int, local_pages: Pages) -> TokenCopies:
    """From the slots of tokens [start, end) to the `local_pages` that cover them; exactly these tokens, no others.

    Raises ValueError for a list of another length.
    """
    _check_pages(pairing, "local_pages", local_pages, pairing.local, start, end)
    remote_block, local_block = pairing.remote.block_size, pairing.local.block_size
    granule = min(remote_block, local_block)
    token = np.concatenate(([start], np.arange(start // granule + 1, -(-end // granule)) * granule))[: end - start]
    return TokenCopies(
        slot=token // remote_block - start // remote_block,
        slot_token=token % remote_block,
        page=local_pages.astype(np.int64)[token // local_block - start // local_block],
        page_token=token % local_block,
        num_tokens=np.diff(token, append=end),
        granule=granule,
    )


def lay_out(pairing: Pairing, copies: TokenCopies, staging: NDArray[np.uint8], pool: NDArray[np.uint8]) -> None:
    """Carry the copies out. `staging`: uint8, the pages that hold the slots, back to back and contiguous; `pool`: uint8
    [num_pages, page_bytes], contiguous. The two may be parts of one array, but must not share a page of the copies."""
    if not len(copies):
        return
    heads, row, granule = (pairing.local.page_units, pairing.runs), pairing.row_bytes, copies.granule
    slots = staging.reshape(-1)[: (int(copies.slot[-1]) + 1) * pairing.slot_bytes]
    source = slots.view().reshape(-1, *heads, pairing.remote.block_size // granule, granule * row)
    target = pool.view()
    target.shape = (len(pool), *heads, pairing.local.block_size // granule, granule * row)
    whole = copies.num_tokens == granule
    slot_part, page_part = copies.slot_token // granule, copies.page_token // granule
    target[copies.page[whole], :, :, page_part[whole]] = source[copies.slot[whole], :, :, slot_part[whole]]
    for index in np.flatnonzero(~whole):
        skip = int(copies.slot_token[index]) % granule * row
        part = slice(skip, skip + int(copies.num_tokens[index]) * row)
        piece = source[copies.slot[index], :, :, slot_part[index], part]
        target[copies.page[index], :, :, page_part[index], part] = piece


def _check_pages(pairing: Pairing, name: str, pages: Pages, side: PeerGeometry, start: int, end: int) -> None:
    if not 0 <= start <= end:
        raise ValueError(f"tokens [{start}, {end}) are no range")
    need = num_range_pages(start, end, side.block_size) if pairing.runs else 0
    if len(pages) != need:
        raise ValueError(f"{name} lists {len(pages)} pages, tokens [{start}, {end}) take {need}")
