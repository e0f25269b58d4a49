"""Frames of one kind of record, by themselves: a test says which kind it is about once."""

from functools import partial

from cairn.transfer.ranks import FROM_RANK, TO_RANK
from cairn.transfer.wire import ANSWER, GEOMETRY, HELLO, HELLO_ANSWER, QUESTION, FrameReader, encode


class Frames:
    """`dropped`: how many were none of this kind."""

    def __init__(self, decoder) -> None:
        self._decoder = decoder
        self._reader = FrameReader()

    @property
    def dropped(self) -> int:
        return self._reader.dropped

    def encode(self, record) -> bytes:
        return encode(record)

    def decode(self, frame: bytes):
        return self._reader.decode(frame, self._decoder)


greetings, greeting_answers = partial(Frames, HELLO), partial(Frames, HELLO_ANSWER)
geometries = partial(Frames, GEOMETRY)
questions, answers = partial(Frames, QUESTION), partial(Frames, ANSWER)
to_rank, from_rank = partial(Frames, TO_RANK), partial(Frames, FROM_RANK)
