"""Records as msgpack frames, and page numbers as the bytes in them.

A frame that is no record of its kind, too long or cut short is dropped and counted by whoever reads it; nothing here
raises on what a peer sent.
"""

from typing import Generic, TypeVar

import msgspec
import numpy as np

from cairn.transfer.wire import MAX_FRAME_BYTES, FromProducer, ToProducer
from cairn.types import Pages

Message = TypeVar("Message")


class Frames(Generic[Message]):
    """Messages of one kind as msgpack bytes. `dropped` counts what could not be read."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[Message]") -> None:
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self.dropped = 0

    def encode(self, message: Message) -> bytes:
        """Our own records always fit: what goes into them is bounded where it comes from."""
        frame = self._encoder.encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise AssertionError(f"a record of {len(frame)} bytes; at most {MAX_FRAME_BYTES} can be sent")
        return frame

    def decode(self, frame: bytes) -> Message | None:
        """None for everything that is not exactly one record of the schema."""
        try:
            if len(frame) <= MAX_FRAME_BYTES:
                return self._decoder.decode(frame)
        # A frame nested a thousand levels deep ends in RecursionError; text that is no UTF-8 in UnicodeDecodeError.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        self.dropped += 1
        return None


def requests() -> Frames[ToProducer]:
    return Frames(msgspec.msgpack.Decoder(ToProducer))


def replies() -> Frames[FromProducer]:
    return Frames(msgspec.msgpack.Decoder(FromProducer))


def pack_pages(pages: Pages) -> bytes:
    return np.ascontiguousarray(pages, dtype="<i4").tobytes()


def unpack_pages(packed: bytes) -> Pages | None:
    """Page numbers, or None when they are no int32 numbers >= 0."""
    if len(packed) % 4:
        return None
    pages = np.frombuffer(packed, dtype="<i4").astype(np.int32)
    return pages if not len(pages) or pages.min() >= 0 else None
