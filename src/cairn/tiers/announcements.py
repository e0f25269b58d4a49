"""KV events for what lies in the tiers, so that a router sends a prompt back to where its cache went down.

    chunk written, or already there when its path is named   BlockStored, of the tier's medium
    chunk dropped                                            BlockRemoved, of the tier's medium

Entries have names and no tokens, so what a folder has from before the start is announced once a path to it has been
used again. A path with images is announced up to the first one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from cairn.cache.events import DIGEST_BYTES, BlockEvents, BlockRemoved, BlockStored, Event, block_hash
from cairn.cache.tree import Node
from cairn.tiers.digests import PathNames
from cairn.tiers.store import TierStore

MEDIA: Mapping[str, str] = MappingProxyType({"host": "CPU", "disk": "DISK"})
"""What routers call the tiers' memory, by the store's name."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBlocks:
    """The blocks that end in the chunk `key`, and their tokens. `parent`: the hash of the block before, None at the
    path's start."""

    key: bytes
    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    adapter: str

    def after(self, number: int, block_size: int) -> "ChunkBlocks":
        """Without its first blocks."""
        if not number:
            return self
        hashes, tokens = self.hashes[number:], self.token_ids[number * block_size :]
        return replace(self, hashes=hashes, parent=self.hashes[number - 1], token_ids=tokens)


class TierEvents:
    """Announces chunks of `stores`. `blocks` announces those of the pool, and names the blocks; `publish` is its own,
    too.

    `blocks_of` is for the threads of tiers, all else for the core's.
    """

    def __init__(
        self, stores: Sequence[TierStore], block_size: int, blocks: BlockEvents, publish: Callable[[Event], None]
    ) -> None:
        self._stores = stores
        self._block_size = block_size
        self._blocks = blocks
        self._publish = publish
        self._dropped = {store.name: store.follow_drops() for store in stores}
        self._announced: dict[str, dict[bytes, tuple[int, ...]]] = {store.name: {} for store in stores}
        self._holders: dict[str, Counter[int]] = {store.name: Counter() for store in stores}
        """How many chunks that are announced have a block, by its hash."""

    def path_digests(self, path: Sequence[Node]) -> bytes:
        """The digests of a path's blocks, as far as they are announced in the pool."""
        return self._blocks.path_digests(path)

    def blocks_of(self, names: PathNames, digests: bytes) -> list[ChunkBlocks]:
        """The blocks of a path's first chunks, with the digests of its blocks."""
        size = names.stride // self._block_size
        images = np.flatnonzero(names.keys < 0)
        num_tokens = int(images[0]) if images.size else len(names.keys)
        number = min(len(names.chunks), len(digests) // DIGEST_BYTES // size, num_tokens // names.stride)
        ends = range(DIGEST_BYTES, (number * size + 1) * DIGEST_BYTES, DIGEST_BYTES)
        hashes = [block_hash(digests[end - DIGEST_BYTES : end]) for end in ends]
        return [
            ChunkBlocks(
                names.chunks[chunk],
                tuple(hashes[chunk * size : (chunk + 1) * size]),
                hashes[chunk * size - 1] if chunk else None,
                tuple(names.keys[chunk * names.stride : (chunk + 1) * names.stride].tolist()),
                names.name.adapter,
            )
            for chunk in range(number)
        ]

    def announce(self, chunks: Sequence[ChunkBlocks]) -> None:
        """Publish those of one path's chunks that a store has, and that have not been."""
        for store in self._stores:
            name = store.name
            announced, holders = self._announced[name], self._holders[name]
            fresh, new = list[ChunkBlocks](), [chunk for chunk in chunks if chunk.key not in announced]
            # asked for now: what is dropped after this is yet to be taken from the store's list
            for chunk, here in zip(new, store.contains([chunk.key for chunk in new]), strict=True):
                if here:
                    announced[chunk.key] = chunk.hashes
                    # paths part within a chunk, too: its first blocks may be another one's
                    fresh.append(chunk.after(sum(number in holders for number in chunk.hashes), self._block_size))
                    holders.update(chunk.hashes)
            for run in _runs(chunk for chunk in fresh if chunk.hashes):
                hashes = tuple(number for chunk in run for number in chunk.hashes)
                tokens = tuple(token for chunk in run for token in chunk.token_ids)
                first, size = run[0], self._block_size
                self._publish(BlockStored(hashes, first.parent, tokens, size, first.adapter, medium=MEDIA[name]))
                self._blocks.num_below += len(hashes)

    def announce_drops(self) -> None:
        """Publish what has been dropped since the last time."""
        for store in self._stores:
            dropped, announced = self._dropped[store.name], self._announced[store.name]
            keys = [dropped.popleft() for _ in range(len(dropped))]
            if not keys:
                continue
            # what was damaged may have been written anew
            gone = [key for key, here in zip(keys, store.contains(keys), strict=True) if not here]
            hashes, holders = list[int](), self._holders[store.name]
            for number in (number for key in gone for number in announced.pop(key, ())[::-1]):
                holders[number] -= 1
                if not holders[number]:
                    del holders[number]
                    hashes.append(number)
            if hashes:
                self._blocks.num_below -= len(hashes)
                self._publish(BlockRemoved(tuple(hashes), MEDIA[store.name]))


def _runs(chunks: Iterable[ChunkBlocks]) -> list[list[ChunkBlocks]]:
    """In runs of which each chunk goes on where the one before ends."""
    runs: list[list[ChunkBlocks]] = []
    for chunk in chunks:
        if runs and chunk.parent == runs[-1][-1].hashes[-1]:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs
