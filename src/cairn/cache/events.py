"""KV cache events for routers: the full blocks of every path that a resident checkpoint makes worth routing to.

    path     | block 0 | block 1 | block 2 | blo     a checkpoint at the end: blocks 0 to 2 are announced
                                 ^ another            when the last one goes: blocks 0 and 1 stay, and so on

A block is announced exactly while a checkpoint that can be hit hangs at or beyond its end on some path through it, so
a router never hears of a prefix that cannot hit. All blocks that end within one node share that fate: the node is
*live* while it has such a checkpoint itself or a live child. A model without recurrent state can be resumed anywhere;
there, the keys and values of a node are enough.

Blocks are named by digests chained along a path, the same on every server that has the same tokens. Negative key tokens
are numbers of one process alone: what they stand for goes into the digests, and consumers see the placeholder's
vocabulary id instead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from json import dumps
from typing import Protocol

import numpy as np

from cairn.cache.checkpoint import Origin
from cairn.cache.sequence_blocks import Namespace
from cairn.cache.tree import WIDE, Node, last_keys
from cairn.cache.tree_store import TreeObserver

POOL_MEDIUM = "GPU"
"""What routers call the memory that the engine computes in, whatever it is made of."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow each other on one path, the first after `parent_block_hash` (None: at the path's start).

    `token_ids`: block_size for each of `block_hashes`. `extra_keys`: for each block the digests, in hex, of the images
    in it, or None. `medium`: where they are.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str
    extra_keys: tuple[tuple[str, ...] | None, ...] = ()
    medium: str = POOL_MEDIUM


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that can be hit no more where they were, in `medium`; the deepest first."""

    block_hashes: tuple[int, ...]
    medium: str = POOL_MEDIUM


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is announced any more. Follows the removal of the last block, for routers that missed some before."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


# -- block hashes ----------------------------------------------------------------------------------------------------

DIGEST_BYTES = 32


class KeyNames(Protocol):
    """The images behind negative key tokens."""

    def name(self, key: int) -> "KeyName | None":
        """The name of a key token; None if its image is not known (any more)."""


@dataclass(frozen=True, slots=True)
class KeyName:
    """One key token of an image: the image's digest, the token's place in it, and the vocabulary id of the placeholder
    that consumers see there."""

    digest: bytes
    place: int
    token: int


def root_digest(namespace: Namespace) -> bytes:
    """The digest that the chain of a namespace's blocks begins with: sha256 of adapter and salt."""
    return sha256(dumps(["cairn block chain 1", namespace.adapter, namespace.cache_salt]).encode()).digest()


def next_digest(parent: bytes, tokens: bytes) -> bytes:
    """sha256(digest of the block before, or of the root | the block's tokens, int64 little-endian)."""
    return sha256(parent + tokens).digest()


def block_hash(digest: bytes) -> int:
    """The block hash that consumers see: the first 8 bytes of a digest as a big-endian signed integer."""
    return int.from_bytes(digest[:8], "big", signed=True)


class BlockNames:
    """Names blocks of `block_size` tokens. `contents`: None where there are no images."""

    def __init__(self, block_size: int, contents: KeyNames | None = None) -> None:
        """Raises ValueError for a block without tokens."""
        if block_size < 1:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self._contents = contents

    def chain(self, digest: bytes, run: bytes) -> list[bytes]:
        """The digests, continued from `digest`, of the full blocks of `run` (int64 key tokens) before its first token
        without a name."""
        size = self.block_size * WIDE
        run = run[: len(run) // size * size]
        whole = (run[at : at + size] for at in range(0, len(run), size))
        # one look at all tokens instead of one a block: seldom is there an image
        has_images = bool(run) and np.frombuffer(run, np.int64).min() < 0
        blocks: Iterable[bytes | None] = map(self._portable_bytes, whole) if has_images else whole
        chain: list[bytes] = []
        for block in blocks:
            if block is None:
                break
            digest = next_digest(digest, block)
            chain.append(digest)
        return chain

    def token_ids(self, keys: Sequence[int]) -> tuple[int, ...]:
        """The vocabulary ids that consumers see for key tokens, at least one."""
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

    def _portable_bytes(self, block: bytes) -> bytes | None:
        """The block's tokens as bytes that are the same on every server (see `cairn.transfer.digest`); None for a token
        without a name."""
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


# -- announcements -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LiveNode:
    """A live node: the digests of the blocks that end in it, and how many reasons there are to announce them (its
    own checkpoint and each live child; a root has one reason more, so that it stays)."""

    digests: bytes
    reasons: int = 1
    anchored: bool = False


class BlockEvents(TreeObserver):
    """Observes a tree and publishes events, O(blocks changed) each time. Single-threaded, as the tree is.

    `exact`: what decode steps have built serves nobody but its maker, so it is not announced. `resumes_anywhere`: the
    model has no recurrent state. `publish` is called from within the cache and must neither block nor call back.

    Namespaces with a `cache_salt` are not announced at all: consumers match `token_ids` without the salt, and what a
    salt separates is nobody else's to read. Negative key tokens are numbers of this process alone: they are hashed
    under the names that `contents` gives, and a path is announced up to the first block that has one without a name.

    `num_below`: blocks that others have announced for other media, as long as they say.
    """

    def __init__(
        self,
        block_size: int,
        publish: Callable[[Event], None],
        exact: bool = False,
        resumes_anywhere: bool = False,
        contents: KeyNames | None = None,
    ) -> None:
        """Raises ValueError for a block without tokens."""
        self.num_blocks = self.num_below = 0
        self._names = BlockNames(block_size, contents)
        self._publish = publish
        self._exact = exact
        self._resumes_anywhere = resumes_anywhere
        self._live: dict[Node, _LiveNode] = {}
        self._adapters: dict[Node, str] = {}

    # -- events of the tree --------------------------------------------------------------------------------------

    def root_added(self, root: Node, namespace: Namespace) -> None:
        if namespace.cache_salt is None:
            self._live[root] = _LiveNode(root_digest(namespace))
            self._adapters[root] = namespace.adapter

    def root_forgotten(self, root: Node) -> None:
        self._live.pop(root, None)
        self._adapters.pop(root, None)

    def node_changed(self, node: Node) -> None:
        live = self._live.get(node)
        anchored = self._is_anchor(node)
        if anchored == (live is not None and live.anchored):
            return
        if anchored:
            self._add_anchor(node)
        else:
            self._remove_anchor(node)

    def node_split(self, upper: Node, lower: Node) -> None:
        live = self._live.get(lower)
        if live is not None:
            at = self._blocks_in(upper) * DIGEST_BYTES
            anchored = self._is_anchor(upper)
            self._live[upper] = _LiveNode(live.digests[:at], 1 + anchored, anchored)
            live.digests = live.digests[at:]

    def path_digests(self, path: Sequence[Node]) -> bytes:
        """The digests of the first blocks of a path, as they are announced; `path`: its nodes from the root's child
        on."""
        parts: list[bytes] = []
        for node in path:
            live = self._live.get(node)
            if live is None:
                break
            parts.append(live.digests)
            if len(live.digests) < self._blocks_in(node) * DIGEST_BYTES:
                break
        return b"".join(parts)

    # -- live nodes ----------------------------------------------------------------------------------------------

    def _is_anchor(self, node: Node) -> bool:
        """Whether a prompt that goes through this node can resume at its end."""
        if self._resumes_anywhere:
            return node.pages is not None and not (self._exact and node.decode_by is not None)
        checkpoint = node.checkpoint
        return checkpoint is not None and not (self._exact and checkpoint.origin is Origin.DECODE)

    def _blocks_in(self, node: Node) -> int:
        """How many blocks end in (node.start, node.end]."""
        return node.end // self._names.block_size - node.start // self._names.block_size

    def _add_anchor(self, node: Node) -> None:
        fresh: list[Node] = []
        step = node
        while step not in self._live:
            if step.parent is None:
                return  # a root that is not announced
            fresh.append(step)
            step = step.parent
        self._live[step].reasons += 1
        if fresh:
            self._announce(fresh[::-1])
        self._live[node].anchored = True

    def _remove_anchor(self, node: Node) -> None:
        self._live[node].anchored = False
        hashes: list[int] = []
        step: Node | None = node
        while step is not None:
            live = self._live[step]
            live.reasons -= 1
            if live.reasons:
                break
            hashes += _hashes(live.digests)[::-1]
            del self._live[step]
            step = step.parent
        if hashes:
            self.num_blocks -= len(hashes)
            self._publish(BlockRemoved(tuple(hashes)))
            if self.num_blocks == self.num_below == 0:
                self._publish(AllBlocksCleared())

    def _announce(self, path: list[Node]) -> None:
        """Make the nodes of `path` live, each the parent of the next, and publish their blocks."""
        top, size = path[0], self._names.block_size * WIDE
        before = self._chain_before(top)
        assert top.parent is not None
        digest, unfinished = before, last_keys(top.parent, top.start % self._names.block_size)
        stored: list[bytes] = []
        digests: list[bytes] = []
        for node in path:
            run = unfinished + node.keys().tobytes()
            count = len(run) // size
            node_digests = self._names.chain(digest, run) if digest is not None else []
            self._live[node] = _LiveNode(b"".join(node_digests))
            stored.append(run[: len(node_digests) * size])
            digests += node_digests
            digest = None if len(node_digests) < count else (node_digests[-1] if node_digests else digest)
            unfinished = run[count * size :]
        if digests:
            assert before is not None
            self.num_blocks += len(digests)
            keys = np.frombuffer(b"".join(stored), np.int64).tolist()
            self._publish(
                BlockStored(
                    block_hashes=tuple(block_hash(each) for each in digests),
                    parent_block_hash=block_hash(before) if top.start >= self._names.block_size else None,
                    token_ids=self._names.token_ids(keys),
                    block_size=self._names.block_size,
                    adapter=self._adapter(top),
                    extra_keys=self._names.extra_keys(keys),
                )
            )

    def _chain_before(self, node: Node) -> bytes | None:
        """The digest of the last block that ends at or before `node.start`, or that of the root; None: the path is
        not announced so far."""
        step = node.parent
        assert step is not None
        while step.parent is not None and self._blocks_in(step) == 0:
            step = step.parent
        digests = self._live[step].digests
        complete = step.parent is None or len(digests) == self._blocks_in(step) * DIGEST_BYTES
        return digests[-DIGEST_BYTES:] if complete else None

    def _adapter(self, node: Node) -> str:
        while node.parent is not None:
            node = node.parent
        return self._adapters[node]


def _hashes(digests: bytes) -> list[int]:
    return [block_hash(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES)]
