"""One replica's KV events: how a batch is written, and what its number says of those before it."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from cairn.cache.events import POOL_MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Event
from cairn.routing.index import PrefixIndex

logger = logging.getLogger(__name__)


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None = None
    token_ids: msgspec.Raw = msgspec.Raw()
    block_size: msgspec.Raw = msgspec.Raw()
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: str | None = None


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _StoredArray(_StoredMap, array_like=True, tag_field="type", tag="BlockStored"):
    pass


class _RemovedArray(_RemovedMap, array_like=True, tag_field="type", tag="BlockRemoved"):
    pass


class _ClearedArray(_ClearedMap, array_like=True, tag_field="type", tag="AllBlocksCleared"):
    pass


class _MapBatch(msgspec.Struct, array_like=True):
    time: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]


class _ArrayBatch(msgspec.Struct, array_like=True):
    time: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


_DECODE_MAP = msgspec.msgpack.Decoder(_MapBatch).decode
_DECODE_ARRAY = msgspec.msgpack.Decoder(_ArrayBatch).decode


class MalformedBatch(Exception):
    """A batch or an answer that is not as a publisher sends it."""


class EventSequence:
    """Brings a replica's batches into the index in the order of their numbers.

    `numbered`: whether batches that are missing can be asked for, so that the first one has to be number 0; if not, the
    sequence begins with whatever comes.
    """

    def __init__(self, replica: str, index: PrefixIndex, numbered: bool) -> None:
        self.replica = replica
        self.next_number: int | None = None
        """Of the batch that is due; None for any."""
        self.num_batches = 0
        self.num_resets = 0
        """How often the replica had to start anew in the index, the first time included."""
        self._index = index
        self._numbered = numbered

    def is_old(self, number: int) -> bool:
        """Whether this batch is in the index, or lost."""
        return self.next_number is not None and number < self.next_number

    def is_ahead(self, number: int) -> bool:
        """Whether batches before this one are missing."""
        return self.next_number is not None and number > self.next_number

    def apply(self, number: int, batch: bytes) -> None:
        """Raises MalformedBatch for one that cannot be read; the next one is due then, too."""
        self.next_number = number + 1
        for event in _decode_events(batch):
            self._index.apply(self.replica, event)
        self.num_batches += 1

    def skip_to(self, number: int) -> None:
        """The batches before this one are lost for good."""
        if self.next_number:
            logger.warning("KV events of %s: batches %d to %d are lost", self.replica, self.next_number, number - 1)
            self.reset(number)

    def reset(self, number: int) -> None:
        """The replica starts anew in the index, with this batch."""
        self._index.clear(self.replica)
        self.num_resets += 1
        self.next_number = number if self._numbered else None


def parse_frames(frames: list[bytes]) -> tuple[int, bytes]:
    """Number and batch, after a frame with the topic, or an empty one. Raises MalformedBatch."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise MalformedBatch(f"{len(frames)} frames of {[len(frame) for frame in frames[:4]]} bytes")
    return int.from_bytes(frames[1], "big", signed=True), frames[2]


def _decode_events(batch: bytes) -> list[Event]:
    decode: Callable[[bytes], Any]
    for decode in (_DECODE_MAP, _DECODE_ARRAY):
        try:
            return [_event(event) for event in decode(batch).events]
        except (msgspec.DecodeError, RecursionError) as error:
            failure = error
    raise MalformedBatch(str(failure))


def _event(event: _StoredMap | _RemovedMap | _ClearedMap) -> Event:
    # the index asks for no tokens
    match event:
        case _StoredMap():
            hashes, medium = tuple(event.block_hashes), event.medium or POOL_MEDIUM
            return BlockStored(hashes, event.parent_block_hash, (), 0, "", medium=medium)
        case _RemovedMap():
            return BlockRemoved(tuple(event.block_hashes), event.medium or POOL_MEDIUM)
        case _:
            return AllBlocksCleared()
