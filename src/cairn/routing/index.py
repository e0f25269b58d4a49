"""Which replica has which block of a prompt: an approximate index, kept by KV events and by what was routed.

    block hash -> the replicas that announced it       one Python int, a bit for each replica
    block hash -> the replicas it was sent to          the same, in two generations that age

Block hashes are chained, so a replica that has a block has all blocks before it: along a prompt the set of replicas
only shrinks. So it is enough to look at some blocks and, where all are too many, to keep some: those whose hash says
so, which are the same in events and in prompts.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import islice
from sys import getsizeof

import numpy as np
from numpy.typing import NDArray

from cairn.cache.events import POOL_MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Event

_KEY_BYTES = 36
"""A block hash as a Python int of 64 bits."""
_EVICTED_SHARE = 16
"""At the bound a sixteenth of the blocks goes at once, so that finding them costs little a block."""
_BELOW = "\0"
"""Between the name of a replica and that of one of its tiers."""
_TIERS = ("CPU", "OTHER")
"""Media beside the pool's that are told apart, so that what leaves one may stay in the other."""
_SPARE_NUMBERS = 64
"""Numbers of replicas that are gone are given again after a sweep over all blocks, which pays for so many at once."""


class PrefixIndex:
    """Bounded: at `max_blocks` announced blocks every other one goes, down to one of `max_sample_every`, a power of
    two, and then those that no routed prompt has used lately, the oldest first; of blocks that were only routed there
    are as many more at most. What a replica has is known up to `sample_every` blocks, more or less.

    `routed_seconds`: how long a routed prompt is expected to be cached where it went, at least, unless an event says
    so or it is routed there again; at most twice as long. Single-threaded.
    """

    def __init__(self, max_blocks: int = 1 << 20, routed_seconds: float = 600.0, max_sample_every: int = 1) -> None:
        """Raises ValueError for a bound below 1, a time that is not positive, or no power of two."""
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be positive, not {max_blocks}")
        if not routed_seconds > 0:
            raise ValueError(f"routed_seconds must be positive, not {routed_seconds}")
        if max_sample_every < 1 or max_sample_every & (max_sample_every - 1):
            raise ValueError(f"max_sample_every must be a power of two, not {max_sample_every}")
        self.num_changes = 0
        """Grows whenever a replica gets another number."""
        self.num_numbers = 0
        """Every number is below."""
        self._max_blocks = max_blocks
        self._max_routed = max(1, max_blocks // 2)
        self._routed_seconds = routed_seconds
        self.sample_every = 1
        """One block of so many is kept."""
        self._max_sample_every = max_sample_every
        self._numbers: dict[str, int] = {}
        self._alive = 0
        self._free_numbers: list[int] = []
        self._stored: dict[int, int] = {}
        self._used: set[int] = set()
        self._routed: dict[int, int] = {}
        self._routed_before: dict[int, int] = {}
        self._routed_since = 0.0

    # -- what replicas have --------------------------------------------------------------------------------------

    def apply(self, replica: str, event: Event) -> None:
        """A KV event of this replica."""
        match event:
            case BlockStored():
                self._number(replica)
                self._store(1 << self._number(_place(replica, event.medium)), self._sampled(event.block_hashes))
            case BlockRemoved():
                self._number(replica)
                bit = 1 << self._number(_place(replica, event.medium))
                for masks in (self._stored, self._routed, self._routed_before):
                    _remove_bit(masks, bit, self._sampled(event.block_hashes))
            case AllBlocksCleared():
                self.clear(replica)

    def add_routed(self, replica: str, block_hashes: Sequence[int], now: float) -> None:
        """A prompt with these blocks was sent to this replica at `now`, in seconds of any clock that never goes back.

        Of a prompt of which more than `max_blocks` / 2 blocks would be kept the first count.
        """
        self._age(now)
        kept = self._sampled(block_hashes)
        while len(self._routed) + len(kept) > self._max_routed and self._sample_fewer():
            kept = self._sampled(kept)
        block_hashes = kept[: self._max_routed]
        if len(self._routed) + len(block_hashes) > self._max_routed:
            self._start_generation(now)
        bit, masks = 1 << self._number(replica), self._routed
        known = masks.get
        for block_hash in block_hashes:
            mask = known(block_hash)
            masks[block_hash] = bit if mask is None else mask | bit
        if len(self._used) > self._max_blocks:
            self._used.clear()
        self._used.update(block_hashes)

    def clear(self, replica: str) -> None:
        """Forget what this replica has."""
        if replica in self._numbers:
            self.remove(replica)
            self._number(replica)

    def remove(self, replica: str) -> None:
        """Forget this replica."""
        numbers = [self._numbers.pop(place) for place in (replica, *places_below(replica)) if place in self._numbers]
        if not numbers:
            return
        for number in numbers:
            self._alive &= ~(1 << number)
        self.num_changes += 1
        if self.num_numbers - len(self._free_numbers) > 2 * len(self._numbers) + _SPARE_NUMBERS:
            self._sweep()

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(place for place in self._numbers if _BELOW not in place)

    @property
    def num_blocks(self) -> int:
        """Blocks in the index, announced or routed; one that is both counts twice. Blocks that only replicas have had
        that are gone are swept out now and then."""
        return len(self._stored) + len(self._routed) + len(self._routed_before)

    @property
    def num_bytes(self) -> int:
        """Memory of the index, at most: blocks that one replica alone has share one mask."""
        tables = (self._stored, self._routed, self._routed_before)
        mask_bytes = getsizeof(1 << self.num_numbers)
        blocks = sum(getsizeof(table) + len(table) * (_KEY_BYTES + mask_bytes) for table in tables)
        return blocks + getsizeof(self._used) + len(self._used) * _KEY_BYTES

    def number(self, replica: str) -> int | None:
        """The replica's bit in a mask; None if nothing is known of it. May change when a replica is cleared."""
        return self._numbers.get(replica)

    def matched_masks(self, block_hashes: Sequence[int], resolution: int = 1) -> list[tuple[int, int]]:
        """How many leading blocks are matched, and the mask of the replicas that have so many at least; the fewest
        blocks first. Looks at every `resolution`-th block, or the last one before it that is kept: of what a replica
        has the part after the last block that was looked at is not told.

        Where events were lost, a replica may have a block and not those before it: then it may count as having them.
        """
        tables, alive, num_blocks = self._tables(), self._alive, len(block_hashes)
        if not tables or not alive or not num_blocks:
            return []
        find, others, unsampled = tables[0], tables[1:], self.sample_every - 1
        matches: list[tuple[int, int]] = []
        last, end = alive, 0
        for number in (*range(resolution - 1, num_blocks - 1, resolution), num_blocks - 1):
            block_hash = block_hashes[number]
            while block_hash & unsampled and number > end:
                number -= 1
                block_hash = block_hashes[number]
            if block_hash & unsampled:
                continue
            block_mask = find(block_hash, 0)
            for find_other in others:
                block_mask |= find_other(block_hash, 0)
            mask = last & block_mask
            if mask != last:
                if end:
                    matches.append((end, last))
                if not mask:
                    return matches
                last = mask
            end = number + 1
        if end:
            matches.append((end, last))
        return matches

    def matched_by(self, replica: str, block_hashes: Sequence[int]) -> int:
        """How many leading blocks this replica has."""
        number = self._numbers.get(replica)
        if number is None:
            return 0
        tables, unsampled = self._tables(), self.sample_every - 1

        def lacks(place: int) -> bool:
            return not any(find(block_hashes[place], 0) >> number & 1 for find in tables)

        places: Sequence[int] = range(len(block_hashes))
        if unsampled:
            places = [place for place in places if not block_hashes[place] & unsampled]
        num_places = bisect_left(places, True, key=lacks)
        return places[num_places - 1] + 1 if num_places else 0

    # -- inside --------------------------------------------------------------------------------------------------

    def _number(self, replica: str) -> int:
        number = self._numbers.get(replica)
        if number is None:
            if not self._free_numbers:
                self._free_numbers.append(self.num_numbers)
                self.num_numbers += 1
            number = self._numbers[replica] = self._free_numbers.pop()
            self._alive |= 1 << number
            self.num_changes += 1
        return number

    def _sampled(self, block_hashes: Sequence[int]) -> Sequence[int]:
        unsampled = self.sample_every - 1
        return [block_hash for block_hash in block_hashes if not block_hash & unsampled] if unsampled else block_hashes

    def _sample_fewer(self) -> bool:
        """Keep half of the blocks from now on; returns whether that may be: O(all blocks)."""
        if self.sample_every == self._max_sample_every:
            return False
        self.sample_every *= 2
        unsampled = self.sample_every - 1
        self._stored, self._routed, self._routed_before = (
            {block_hash: mask for block_hash, mask in masks.items() if not block_hash & unsampled}
            for masks in (self._stored, self._routed, self._routed_before)
        )
        self._used = {block_hash for block_hash in self._used if not block_hash & unsampled}
        return True

    def _store(self, bit: int, block_hashes: Sequence[int]) -> None:
        masks = self._stored
        for block_hash in block_hashes:
            mask = masks.get(block_hash)
            # the same object for all blocks that this replica alone has
            masks[block_hash] = bit if mask is None else mask | bit
            if len(masks) > self._max_blocks:
                if self._sample_fewer():
                    # those of before that are not kept any more are gone already
                    self._store(bit, self._sampled(block_hashes))
                    return
                self._evict()

    def _evict(self) -> None:
        """The second-chance algorithm: of the oldest blocks those go that no prompt has used since the last time."""
        masks, used = self._stored, self._used
        goal = self._max_blocks - self._max_blocks // _EVICTED_SHARE
        for block_hash in list(masks):
            if len(masks) <= goal:
                break
            mask = masks.pop(block_hash)
            if block_hash in used:
                used.discard(block_hash)
                masks[block_hash] = mask
        # everything was used: then the oldest go
        for block_hash in list(islice(masks, max(0, len(masks) - goal))):
            del masks[block_hash]

    def _age(self, now: float) -> None:
        if now - self._routed_since >= self._routed_seconds:
            if now - self._routed_since >= 2 * self._routed_seconds:
                self._routed = {}
            self._start_generation(now)

    def _start_generation(self, now: float) -> None:
        self._routed, self._routed_before, self._routed_since = {}, self._routed, now

    def _sweep(self) -> None:
        """Drop the bits of replicas that are gone, so that their numbers can be given again: O(all blocks)."""
        alive = self._alive
        self._stored = _masked(self._stored, alive)
        self._routed = _masked(self._routed, alive)
        self._routed_before = _masked(self._routed_before, alive)
        self._free_numbers = [number for number in range(self.num_numbers) if not alive >> number & 1]

    def _tables(self) -> list[Callable[[int, int], int]]:
        """Finds the mask of a block, or the second argument: those of tables that are not empty."""
        return [table.get for table in (self._stored, self._routed, self._routed_before) if table]


def places_below(replica: str) -> tuple[str, ...]:
    """What the index calls the tiers of a replica; each is as a replica of its own."""
    return tuple(replica + _BELOW + name for name in _TIERS)


def _place(replica: str, medium: str) -> str:
    """What the index calls a medium of a replica. All that it does not know are one."""
    if medium.upper() == POOL_MEDIUM:
        return replica
    cpu, other = places_below(replica)
    return cpu if medium.upper() == _TIERS[0] else other


def _remove_bit(masks: dict[int, int], bit: int, block_hashes: Sequence[int]) -> None:
    for block_hash in block_hashes:
        mask = masks.get(block_hash, 0)
        if mask & bit:
            mask ^= bit
            if mask:
                masks[block_hash] = mask
            else:
                del masks[block_hash]


def _masked(masks: dict[int, int], alive: int) -> dict[int, int]:
    # a mask that stays as it is stays the same object
    kept = ((block_hash, mask, mask & alive) for block_hash, mask in masks.items())
    return {block_hash: mask if mask == alone else alone for block_hash, mask, alone in kept if alone}


def count_masks(masks: Sequence[int], num_numbers: int) -> NDArray[np.unsignedinteger]:
    """In how many of the masks each number is, shape [num_numbers]; no mask has a number beyond. Quick for fewer than
    256 masks."""
    num_bytes = -(-num_numbers // 8)
    octets = np.frombuffer(b"".join([mask.to_bytes(num_bytes, "little") for mask in masks]), np.uint8)
    bits = np.unpackbits(octets.reshape(len(masks), num_bytes), axis=1, count=num_numbers, bitorder="little")
    counts: NDArray[np.unsignedinteger] = np.add.reduce(bits, axis=0, dtype=np.uint8 if len(masks) < 256 else np.uint64)
    return counts
