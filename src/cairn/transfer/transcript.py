"""What both sides of a handshake have seen, field by field, for the session's key."""

import msgspec

from cairn.transfer.contract import Peer
from cairn.transfer.wire import VERSION, Hello

__all__ = ["framed_ranks", "transcript"]


def transcript(hello: Hello, nonce: bytes, producer: Peer, layout: bytes) -> tuple[bytes, ...]:
    """Everything that was said before a proof: the Hello, and what the Challenge says besides its proof."""
    return (
        VERSION.to_bytes(4, "little"),
        msgspec.msgpack.encode(hello),
        nonce,
        producer.engine_id.encode(),
        layout,
        msgspec.msgpack.encode(producer.geometry),
    )


def framed_ranks(ranks: list[bytes]) -> bytes:
    """What the mark of a Welcome is over."""
    return b"".join(len(rank).to_bytes(8, "little") + rank for rank in ranks)
