"""Log entries as lines of JSON, with what requests share but not what they are.

Two requests share tokens iff their sequences (prompt and answer) begin with the same tokens in the same namespace. All
that a line says of a token is taken from one BLAKE2b hash over the namespace and all tokens up to this one:

    "prefix": [hash, tokens]    the first `tokens` tokens are those of an earlier line with this block hash at their end
    "block_hashes": [hash, ...] 52 bits of the hash at the end of each further full block of `unit` tokens
    "token_hashes": "..."       16 bits of the hash at each token after `prefix`, little-endian, base64

Equal hashes are equal beginnings, so sharing is known to the token: with a chance of 1 in 65,536, two sequences that
diverge seem to share one token more. The block hashes in the file are remembered for a bounded number of tokens; the
token hashes of a forgotten block are written again.

The key of the hash is drawn for each file and never written: nobody can test whether a guessed text is in the log.
"""

import json
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from cairn.cache.sequence_blocks import Namespace
from cairn.types import Keys

BLOCK_HASH_BITS = 52
"""Every reader of JSON keeps them."""

HASH_BYTES, KEY_BYTES = 2, 8


@dataclass(frozen=True, slots=True, eq=False)
class LogEntry:
    """One request that has ended: its tokens, which the line says in hashes, and the rest of the line by its names.
    `names`: of its session and its client, which the line says in hashes, too; nothing of empty ones."""

    namespace: Namespace
    prompt: Keys
    output: tuple[int, ...]
    fields: Mapping[str, object]
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class LogLines:
    """The lines of one file. `header`: what the first one says; `unit`: tokens of a block; `key`: 16 to 64 random
    bytes; `max_written_tokens`: for how many tokens the block hashes that are in the file are remembered."""

    def __init__(self, header: Mapping[str, object], unit: int, key: bytes, max_written_tokens: int) -> None:
        self._header = header
        self._unit = unit
        self._key = key
        self._max_written = max_written_tokens // unit
        self._written: OrderedDict[int, None] = OrderedDict()

    def header(self) -> bytes:
        return _line(self._header)

    def line(self, entry: LogEntry) -> bytes:
        """The next line."""
        names = {key: self._hash(name.encode()) for key, name in entry.names.items() if name}
        return _line({**entry.fields, **names, "namespace": self._namespace(entry.namespace), **self._sequence(entry)})

    def lost(self) -> None:
        """The last line will not be in the file, so none may refer to it."""
        self._written.clear()

    def _namespace(self, namespace: Namespace) -> int:
        if namespace == Namespace():
            return 0
        return self._hash(_encode(namespace))

    def _hash(self, text: bytes) -> int:
        """Never 0, which says that there is none."""
        return 1 | _block_hash(blake2b(text, digest_size=KEY_BYTES, key=self._key).digest())

    def _sequence(self, entry: LogEntry) -> dict[str, object]:
        """`prefix`, `block_hashes` and `token_hashes`, in O(tokens)."""
        keys = np.concatenate([entry.prompt, np.array(entry.output, np.int64)])
        raw = memoryview(np.ascontiguousarray(keys, "<i8").tobytes())
        state = blake2b(_encode(entry.namespace), digest_size=KEY_BYTES, key=self._key)
        block_bytes, start, blocks = self._unit * KEY_BYTES, 0, list[int]()
        while start + block_bytes <= len(raw):
            next_state = state.copy()
            next_state.update(raw[start : start + block_bytes])
            block_hash = _block_hash(next_state.digest())
            if block_hash not in self._written:
                break
            blocks.append(block_hash)
            state, start = next_state, start + block_bytes
        num_written, token_hashes = len(blocks), bytearray()
        for at in range(start, len(raw), KEY_BYTES):
            state.update(raw[at : at + KEY_BYTES])
            digest = state.digest()
            token_hashes += digest[:HASH_BYTES]
            if (at + KEY_BYTES) % block_bytes == 0:
                blocks.append(_block_hash(digest))
        self._remember(blocks)
        hashes: dict[str, object] = {
            "block_hashes": blocks[num_written:],
            "token_hashes": b64encode(token_hashes).decode(),
        }
        return {"prefix": [blocks[num_written - 1], num_written * self._unit], **hashes} if num_written else hashes

    def _remember(self, blocks: list[int]) -> None:
        for block_hash in reversed(blocks):
            self._written[block_hash] = None
            self._written.move_to_end(block_hash)  # a block is newer than those after it, so it is forgotten later
        while len(self._written) > self._max_written:
            self._written.popitem(last=False)


def _block_hash(digest: bytes) -> int:
    return int.from_bytes(digest) & ((1 << BLOCK_HASH_BITS) - 1)


def _encode(namespace: Namespace) -> bytes:
    return json.dumps([namespace.adapter, namespace.cache_salt]).encode() + b"\0"


def _line(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
