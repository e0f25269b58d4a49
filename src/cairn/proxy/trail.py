"""The way a prompt takes, as digests that a longer prompt with the same beginning passes too."""

import hashlib
import struct
from typing import Any

import msgspec

from cairn.proxy.affinity import message_bytes, prompt_bytes
from cairn.proxy.protocol import Body, text_field
from cairn.proxy.tap import Findings

_UNITS_PER_MARK = 64
_MAX_MARKS = 16384


class Trail:
    """Digests at marks: after every `_UNITS_PER_MARK` characters or tokens, or (`unit_bytes` 0) after every message."""

    def __init__(self, seed: bytes, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.marks: list[bytes] = []
        self._hasher = hashlib.blake2b(seed, digest_size=16)
        self._rest = b""

    def add_message(self, message: dict[str, Any]) -> None:
        data = message_bytes(message)
        self._hasher.update(struct.pack("<Q", len(data)))
        self._mark(data)

    def add_units(self, data: bytes) -> None:
        data = self._rest + data
        step = _UNITS_PER_MARK * self.unit_bytes
        whole = len(data) - len(data) % step
        for start in range(0, whole, step):
            self._mark(data[start : start + step])
        self._rest = data[whole:]

    def end(self, found: Findings) -> bytes | None:
        """The deepest mark once the answer has been added; nothing more may be added then.

        An answer that is not known, or not in the prompt's own units, is left out: the mark is then the prompt's.
        """
        if self.unit_bytes == 0 and found.text is not None:
            self.add_message({"role": "assistant", "content": found.text})
        elif self.unit_bytes == 1 and found.text is not None:
            self.add_units(found.text.encode(errors="surrogatepass"))
        elif self.unit_bytes == 8 and found.token_ids is not None:
            self.add_units(struct.pack(f"<{len(found.token_ids)}q", *found.token_ids))
        return self.marks[-1] if self.marks else None

    def _mark(self, data: bytes) -> None:
        if len(self.marks) < _MAX_MARKS:
            self._hasher.update(data)
            self.marks.append(self._hasher.digest())


def trail_of(body: Body) -> Trail | None:
    """The trail of a request's prompt; None when it is of a kind that the proxy does not know."""
    kind = "chat" if "messages" in body else "text"
    seed = msgspec.json.encode([kind, text_field(body, "model"), text_field(body, "cache_salt")])
    try:
        if "messages" in body:
            trail = Trail(seed, 0)
            for message in msgspec.json.decode(body["messages"], type=list[dict[str, Any]]):
                trail.add_message(message)
        else:
            data, unit_bytes = prompt_bytes(body)
            trail = Trail(seed + bytes([unit_bytes]), unit_bytes)
            trail.add_units(data)
    except (ValueError, RecursionError):
        return None
    return trail
