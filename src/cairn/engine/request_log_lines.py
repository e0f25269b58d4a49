"""Entries as lines of JSON, and how they say what requests share without saying what they are.

Two requests share tokens iff their sequences (prompt and answer) begin with the same ones in the same namespace. A line
says so twice:

    "shares": [n, tokens]       the sequence begins with the first `tokens` tokens of that of request n, some lines up
    "h": [hash, ...]            of each full unit that is not within these: unit tokens // unit, the one behind it, ...

`shares` is exact to the token, which unit hashes cannot be: sharing that ends within a unit would end at its beginning.
It is one pair whatever the length, since sequences are the paths of a tree, and the deepest place where a new one
leaves that tree says how it relates to all that came before. It takes a memory of the tokens, which is bounded: what
has not been shared for the longest time is forgotten. `h` is for what was forgotten and comes again: equal hashes are
equal beginnings, up to that unit's end.

A hash is 52 bits of BLAKE2b over namespace and all tokens up to the unit's end, under a key that is drawn for each file
and never written: nobody can find out whether a text that he guesses is in the log.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b

import numpy as np

from cairn.cache.key_run import WIDE, Sought
from cairn.cache.lease import Namespace
from cairn.cache.tree import Node, split, walk
from cairn.engine.request_log import Entry, reported
from cairn.types import Boundary, Keys

__all__ = ["LogLines", "Shares"]

HASH_BYTES = 7
UNUSED_BITS = 4
"""52 bits are left: every reader of JSON keeps them."""


class Shares:
    """Which earlier sequence a new one goes with, and for how many tokens. Remembers `limit` distinct tokens."""

    def __init__(self, limit: int) -> None:
        self.num_tokens = 0
        self._limit = limit
        self._roots: dict[int, Node] = {}
        self._owners: OrderedDict[Node, int] = OrderedDict()

    def add(self, namespace: int, keys: Keys, owner: int) -> tuple[int, int]:
        """(owner of an earlier sequence, the number of tokens that it shares with this one); (owner, 0) for none.

        `keys`: the sequence's key tokens. O(length).
        """
        root, sought = self._roots.setdefault(namespace, Node(None, b"", 0, 0)), Sought(keys)
        found = walk(root, sought)
        shared, nodes = found.seen, list(found.beyond)
        other = self._owners[nodes[-1]] if nodes else owner
        if nodes and shared < nodes[-1].end:
            upper = split(nodes[-1], shared, ())[0]
            self._owners[upper] = other
            nodes[-1] = upper
        if shared < len(keys):
            parent = nodes[-1] if nodes else root
            child = Node(parent, sought.run(shared, len(keys)), shared, len(keys))
            parent.adopt(child)
            self._owners[child] = owner
            self.num_tokens += child.num_tokens
            nodes.append(child)
        for node in reversed(nodes):
            self._owners.move_to_end(node)  # a node is newer than all below it, so the oldest is a leaf
        self._forget()
        return other, shared

    def _forget(self) -> None:
        while self.num_tokens > self._limit:
            oldest, _ = self._owners.popitem(last=False)
            assert oldest.parent is not None and not oldest.children
            oldest.parent.disown(oldest)
            self.num_tokens -= oldest.num_tokens
            self._roots = {name: root for name, root in self._roots.items() if root.children}


class LogLines:
    """The lines of one file. `header`: what the first one says; `unit`: tokens of a hash; `key`: 16 to 64 random bytes;
    `shared_tokens`: how many tokens are remembered for `shares`, 4 bytes each, or 8."""

    def __init__(self, header: Mapping[str, object], unit: int, key: bytes, shared_tokens: int) -> None:
        self._header = header
        self._unit = unit
        self._key = key
        self._shared_tokens = shared_tokens
        self._shares = Shares(shared_tokens)

    def header(self) -> bytes:
        return _line(self._header)

    def line(self, entry: Entry, gap: bool = False) -> bytes:
        """The next line. `gap`: there was one before it that could not be written."""
        keys = np.concatenate([entry.prompt, np.array(entry.output, np.int64)])
        raw = np.ascontiguousarray(keys, "<i8").tobytes()
        namespace = 0 if entry.namespace == Namespace() else self._hash(_named(entry.namespace))
        other, shared = self._shares.add(namespace, keys, entry.number)
        told: dict[str, object] = {
            "n": entry.number,
            "id": entry.request_id,
            "t": round(entry.arrived, 6),
            "in": len(entry.prompt),
            "out": len(entry.output),
            "finish": entry.finish,
            "timings": entry.timings,
            **reported(entry.report),
            "ns": namespace,
            "shares": [other, shared] if shared else [],
            "h": self._hashes(entry.namespace, raw, shared // self._unit),
            **_boundaries(entry.boundaries),
        }
        if entry.dropped:
            told["dropped"] = entry.dropped
        if gap or entry.gap:
            told["gap"] = True
        return _line({**told, "ops": entry.ops})

    def lost(self) -> None:
        """The last line will not be in the file, so none may refer to it: from here on the hashes alone tie what comes
        to what was there."""
        self._shares = Shares(self._shared_tokens)

    def _hashes(self, namespace: Namespace, raw: bytes, first: int) -> list[int]:
        size = self._unit * WIDE
        state = blake2b(_named(namespace), digest_size=HASH_BYTES, key=self._key)
        state.update(raw[: first * size])
        hashes = []
        for at in range(first * size, len(raw) // size * size, size):
            state.update(raw[at : at + size])
            hashes.append(_number(state.copy().digest()))
        return hashes

    def _hash(self, data: bytes) -> int:
        return 1 | _number(blake2b(data, digest_size=HASH_BYTES, key=self._key).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest) >> UNUSED_BITS


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
