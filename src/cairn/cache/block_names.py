"""What blocks are called: digests chained along a path, the same on every server that has the same tokens.

Negative key tokens are numbers of one process alone. What they stand for goes into the digests, and consumers see the
placeholder's vocabulary id instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from json import dumps
from typing import Protocol

import numpy as np

from cairn.cache.key_run import WIDE
from cairn.cache.lease import Namespace

DIGEST_BYTES = 32


class Contents(Protocol):
    """What stands behind negative key tokens."""

    def name(self, key: int) -> "KeyName | None":
        """None when it is not known (any more)."""
        ...


@dataclass(frozen=True, slots=True)
class KeyName:
    """One key token of an image: the image's digest, the token's place in it, and the vocabulary id of the placeholder
    that consumers see there."""

    digest: bytes
    place: int
    token: int


def root_digest(namespace: Namespace) -> bytes:
    """Where the chain of a namespace's blocks begins: sha256 of adapter and salt."""
    return sha256(dumps(["cairn block chain 1", namespace.adapter, namespace.cache_salt]).encode()).digest()


def next_digest(parent: bytes, tokens: bytes) -> bytes:
    """sha256(digest of the block before, or of the root | the block's tokens, int64 little-endian)."""
    return sha256(parent + tokens).digest()


def block_hash(digest: bytes) -> int:
    """What consumers take of a digest: its first 8 bytes as a big-endian signed integer."""
    return int.from_bytes(digest[:8], "big", signed=True)


class BlockNames:
    """Names blocks of `block_size` tokens. `contents`: None where there are no images."""

    def __init__(self, block_size: int, contents: Contents | None = None) -> None:
        """Raises ValueError for a block without tokens."""
        if block_size < 1:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self._contents = contents

    def chain(self, digest: bytes, run: bytes) -> list[bytes]:
        """The digests, continued from `digest`, of the full blocks of `run` (int64 key tokens) before its first token
        without a name."""
        size = self.block_size * WIDE
        chain: list[bytes] = []
        for at in range(0, len(run) // size * size, size):
            spelled = self._spelled(run[at : at + size])
            if spelled is None:
                break
            digest = next_digest(digest, spelled)
            chain.append(digest)
        return chain

    def token_ids(self, keys: Sequence[int]) -> tuple[int, ...]:
        """What consumers see for key tokens, of which there is at least one."""
        if self._contents is None or min(keys) >= 0:
            return tuple(keys)
        names = map(self._name, keys)
        return tuple(key if name is None else name.token for key, name in zip(keys, names, strict=True))

    def extra_keys(self, keys: Sequence[int]) -> tuple[tuple[str, ...] | None, ...]:
        """For each of the full blocks `keys` the digests, in hex, of the images in it, or None; empty when there are
        none at all."""
        if self._contents is None or min(keys) >= 0:
            return ()
        extra: list[tuple[str, ...] | None] = []
        for at in range(0, len(keys), self.block_size):
            names = [self._name(key) for key in keys[at : at + self.block_size] if key < 0]
            digests = dict.fromkeys(name.digest.hex() for name in names if name is not None)
            extra.append(tuple(digests) or None)
        return tuple(extra)

    def _spelled(self, block: bytes) -> bytes | None:
        """The block's tokens as every server would write them (see `cairn.transfer.digest`), or None."""
        keys = np.frombuffer(block, np.int64)
        if not len(keys) or keys.min() >= 0:
            return block
        if self._contents is None:
            return None
        parts: list[bytes] = []
        for key in keys.tolist():
            name = self._name(key)
            if key < 0 and name is None:
                return None
            place = key if name is None else -1 - name.place
            parts.append(place.to_bytes(8, "little", signed=True) + (b"" if name is None else name.digest))
        return b"".join(parts)

    def _name(self, key: int) -> KeyName | None:
        return self._contents.name(key) if key < 0 and self._contents is not None else None
