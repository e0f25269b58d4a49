"""Entries as lines of JSON, and how they say what requests share without saying what they are.

Two requests share tokens iff their sequences (prompt and answer) begin with the same ones in the same namespace. All
that a line says of a token is taken from one BLAKE2b hash over namespace and all tokens up to it:

    "prefix": [digest, tokens]  the first `tokens` tokens are those of an earlier line that has this digest at their end
    "h": [digest, ...]          52 bits of the hash at the end of each full unit of tokens behind these
    "codes": "..."              16 bits of the hash at each token behind these, little-endian, base64

Equal codes are equal beginnings, so sharing is known to the token: two sequences that part may seem to have one token
more in common once in 65,536 times. Which digests stand in the file is remembered, for a bounded number of tokens; what
is forgotten has its codes written again.

The key of the hash is drawn for each file and never written: nobody can find out whether a text that he guesses is in
the log.
"""

import json
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b

import numpy as np

from cairn.cache.lease import Namespace
from cairn.engine.request_log import Entry, reported
from cairn.types import Boundary

__all__ = ["LogLines"]

DIGEST_BITS = 52
"""Every reader of JSON keeps them."""

CODE_BYTES, KEY_BYTES = 2, 8


class LogLines:
    """The lines of one file. `header`: what the first one says; `unit`: tokens of a digest; `key`: 16 to 64 random
    bytes; `known_tokens`: for so many tokens it is remembered that their codes stand in the file."""

    def __init__(self, header: Mapping[str, object], unit: int, key: bytes, known_tokens: int) -> None:
        self._header = header
        self._unit = unit
        self._key = key
        self._most_known = known_tokens // unit
        self._known: OrderedDict[int, None] = OrderedDict()

    def header(self) -> bytes:
        return _line(self._header)

    def line(self, entry: Entry) -> bytes:
        """The next line."""
        told: dict[str, object] = {
            "n": entry.number,
            "id": entry.request_id,
            "in": len(entry.prompt),
            "out": len(entry.output),
            "finish": entry.finish,
            "timings": entry.timings,
            **reported(entry.report),
            "ns": self._namespace(entry.namespace),
            **self._sequence(entry),
            **_boundaries(entry.boundaries),
            "chunks": [(_seconds(when), end) for when, end in entry.computed.chunks],
            **{name: _seconds(when) for name, when in entry.times.items()},
        }
        if entry.computed.asked:
            told["asked"] = [(_seconds(when), position) for position, when in entry.computed.asked.items()]
        if not entry.counted:
            told["branch"] = True
        if entry.computed_whole:
            told["computed_whole"] = True
        if entry.dropped:
            told["dropped"] = entry.dropped
        return _line(told)

    def lost(self) -> None:
        """The last line will not be in the file, so none may refer to it."""
        self._known.clear()

    def _namespace(self, namespace: Namespace) -> int:
        if namespace == Namespace():
            return 0
        return 1 | _digest(blake2b(_named(namespace), digest_size=KEY_BYTES, key=self._key).digest())

    def _sequence(self, entry: Entry) -> dict[str, object]:
        """`prefix`, `h` and `codes`, in O(tokens)."""
        keys = np.concatenate([entry.prompt, np.array(entry.output, np.int64)])
        raw = memoryview(np.ascontiguousarray(keys, "<i8").tobytes())
        state = blake2b(_named(entry.namespace), digest_size=KEY_BYTES, key=self._key)
        size, start, digests = self._unit * KEY_BYTES, 0, list[int]()
        while start + size <= len(raw):
            further = state.copy()
            further.update(raw[start : start + size])
            digest = _digest(further.digest())
            if digest not in self._known:
                break
            digests.append(digest)
            state, start = further, start + size
        prefix, codes = len(digests), bytearray()
        for at in range(start, len(raw), KEY_BYTES):
            state.update(raw[at : at + KEY_BYTES])
            value = state.digest()
            codes += value[:CODE_BYTES]
            if (at + KEY_BYTES) % size == 0:
                digests.append(_digest(value))
        self._remember(digests)
        told: dict[str, object] = {"h": digests[prefix:], "codes": b64encode(codes).decode()}
        return {"prefix": [digests[prefix - 1], prefix * self._unit], **told} if prefix else told

    def _remember(self, digests: list[int]) -> None:
        for digest in reversed(digests):
            self._known[digest] = None
            self._known.move_to_end(digest)  # a beginning is newer than what goes on from it, and forgotten later
        while len(self._known) > self._most_known:
            self._known.popitem(last=False)


def _seconds(when: float) -> float:
    """To the nanosecond, for what has happened in one step has an order."""
    return round(when, 9)


def _digest(value: bytes) -> int:
    return int.from_bytes(value) & ((1 << DIGEST_BITS) - 1)


def _named(namespace: Namespace) -> bytes:
    return json.dumps([namespace.adapter, namespace.cache_salt]).encode() + b"\0"


def _boundaries(boundaries: tuple[Boundary, ...]) -> dict[str, object]:
    """`b`: positions; `kinds`: a letter for each; `hold`: seconds for each, where there are any."""
    if not boundaries:
        return {}
    told: dict[str, object] = {
        "b": [boundary.position for boundary in boundaries],
        "kinds": "".join(boundary.kind[0] for boundary in boundaries),
    }
    if any(boundary.hold_seconds for boundary in boundaries):
        told["hold"] = [boundary.hold_seconds for boundary in boundaries]
    return told


def _line(told: Mapping[str, object]) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"
