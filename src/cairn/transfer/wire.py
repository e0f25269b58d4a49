"""The side channel: msgpack records between a consumer (D: reads pages) and a producer (P: holds them).

    Hello                                          -> Welcome, or Denied
    Question: Claim                                -> Answer: Granted, or Refused
              Heartbeat, Confirm, Release, Decline ->         Done, or Refused

Both ends have proved that they hold the same secret before the first record (`credentials`). Hello is the first on a
connection, and its answer the first that comes back; what follows is numbered. A claim is known by the number of its
question, on its connection alone: all that is said of it later comes by the same one.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.transfer.contract import Peer, Tokens
from cairn.types import Keys, Pages

VERSION = 9
"""Both sides must speak the same one. History: 1, the first; 2, claims without a lease are granted; 3, TLS below them;
4, one record for all claims; 5, every claim names prefixes by marks and an end; 6, questions and answers
with numbers; 7, pages by attention group; 8, a Welcome has a record of its sender, and what is confirmed is done;
9, a server says of its pages what its cache knows.
Every version reads the Hello and the Denied of all others."""

NONCE_BYTES = 16
"""Random bytes that name a handshake or a lease."""

MAX_FRAME_BYTES = 4 << 20
"""No frame is larger. Room for the pages of eight million tokens."""

MAX_MARK_BYTES = 32 * (1 << 15)
"""No claim has more marks: those of two million tokens."""

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
QuestionNumber = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]

Record = TypeVar("Record")

_DTYPES: Mapping[object, np.dtype[Any]] = MappingProxyType(
    {Keys: np.dtype("<i8"), Pages: np.dtype("<i4"), NDArray[np.bool_]: np.dtype(np.bool_)}
)
"""The wire format of each kind of array."""


class RefusalReason(Enum):
    """Why a producer refuses."""

    UNKNOWN = "unknown"
    """No lease has this nonce: forged, ended long ago, or from before a restart."""
    FORGED = "forged"
    """The nonce is that of another request."""
    EXPIRED = "expired"
    USED = "used"
    """Claimed before by another transfer, or ended."""
    OTHER_CONTENT = "other_content"
    """The digest differs: another prompt, image, adapter or salt."""
    OUT_OF_RANGE = "out_of_range"
    """Tokens or a checkpoint are claimed that were not offered."""
    NOT_CACHED = "not_cached"
    """A claim without a lease names nothing that is still cached."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens a handshake. `engine_id`: the consumer's, new at every start. `geometry`: its `CacheLayout`, of another
    version whatever that says of it."""

    version: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    engine_id: Name
    nonce: Nonce
    layout: Hash
    geometry: msgspec.Raw


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answers Hello, whose nonce is `answers`."""

    answers: Nonce
    peer: Peer


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """Answers Hello with its nonce."""

    answers: Nonce
    text: Text


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """I want the pages of this content from token `start` on, as far as you have it, and its deepest checkpoint if
    `checkpoint`.

    The content is named by digests of its prefixes (`digest`): `marks` of the first 64, 128, ... tokens, 32 bytes each;
    `end` of the first `position` tokens, None and 0 if there is no such prefix. `request_id` and `nonce` are those of
    the lease, which delivers all of `position`; None if there is no lease.
    """

    adapter: Text
    marks: Annotated[bytes, msgspec.Meta(max_length=MAX_MARK_BYTES)]
    start: Tokens
    checkpoint: bool
    end: Hash | None = None
    position: Tokens = 0
    request_id: Name | None = None
    nonce: Nonce | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """I still read: extend the lease of this claim."""

    claim: QuestionNumber


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """All is read: confirm that the lease of this claim never lapsed, and end it."""

    claim: QuestionNumber


class Release(msgspec.Struct, frozen=True, tag="release"):
    """I need nothing more of this claim, whether it has been granted or not."""

    claim: QuestionNumber


class Decline(msgspec.Struct, frozen=True, tag="decline"):
    """I shall not claim this lease."""

    request_id: Name
    nonce: Nonce


Request: TypeAlias = Claim | Heartbeat | Confirm | Release | Decline


class Granted(msgspec.Struct, frozen=True, tag="granted", eq=False):
    """Answers Claim: by attention group the pages of the tokens from its first one on, pinned until the lease ends; no
    group where nothing is needed but the checkpoint. The first token is `position` where none of a group is within
    reach.

    `position`: tokens that may be used, at the claim's end or at one of its marks. `checkpoint_position` and
    `checkpoint` (its pages) if one was claimed and there is one.
    """

    position: Tokens
    first_tokens: tuple[Tokens, ...]
    pages: tuple[Pages, ...]
    checkpoint_position: Tokens | None
    checkpoint: Pages


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Answers any question. A refused Confirm means that the lease has ended."""

    reason: RefusalReason


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Answers all but Claim. A Confirm: the lease never lapsed while you read."""


Reply: TypeAlias = Granted | Refused | Done


class Question(msgspec.Struct, frozen=True, array_like=True):
    """`number`: never used before on this connection."""

    number: QuestionNumber
    record: Request


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """`number`: that of the question."""

    number: QuestionNumber
    record: Reply


def encode(record: msgspec.Struct | CacheLayout) -> bytes:
    """Our own records always fit: what goes into them is bounded where it comes from."""
    frame = msgspec.msgpack.encode(record, enc_hook=encode_array)
    if len(frame) > MAX_FRAME_BYTES:
        raise AssertionError(f"a record of {len(frame)} bytes; at most {MAX_FRAME_BYTES} can be sent")
    return frame


class FrameReader:
    """Reads what comes to one side. `dropped`: frames that were no record, or none that was waited for."""

    def __init__(self) -> None:
        self.dropped = 0

    def decode(self, frame: bytes, decoder: "msgspec.msgpack.Decoder[Record]") -> Record | None:
        """None for everything that is not exactly one record of the schema."""
        try:
            if len(frame) <= MAX_FRAME_BYTES:
                return decoder.decode(frame)
        # A frame nested a thousand levels deep ends in RecursionError; text that is no UTF-8 in UnicodeDecodeError.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        self.dropped += 1
        return None


def encode_array(value: object) -> bytes:
    """An array as raw little-endian bytes, where records carry arrays."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a record has a {type(value).__name__}")
    return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


def decode_array(kind: object, data: object) -> NDArray[Any]:
    """The array of type `kind` in `data`, read-only. Raises ValueError where bytes are no such numbers."""
    dtype = _DTYPES[kind]
    if not isinstance(data, bytes):
        raise ValueError(f"{type(data).__name__} where bytes of {dtype} belong")
    numbers = np.frombuffer(data, dtype=dtype)
    if dtype == np.int32 and len(numbers) and numbers.min() < 0:
        raise ValueError(f"{numbers.min()} among slots, pages or positions")
    return numbers


HELLO: Final = msgspec.msgpack.Decoder(Hello)
GEOMETRY: Final = msgspec.msgpack.Decoder(CacheLayout)
HELLO_ANSWER: Final = msgspec.msgpack.Decoder(Welcome | Denied)
QUESTION: Final = msgspec.msgpack.Decoder(Question)
ANSWER: Final = msgspec.msgpack.Decoder(Answer, dec_hook=decode_array)
