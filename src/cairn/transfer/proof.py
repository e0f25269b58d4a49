"""How two servers prove to each other that they hold the same secret, without sending it.

    D -> P   nonce_d                               P -> D   nonce_p, proof_p
    D -> P   proof_d                               P -> D   what D needs to read P's memory

    key      HMAC-SHA256(secret, "cairn/session/1" | transcript)
    proof    HMAC-SHA256(key, role)                role: "producer" or "consumer", so that neither can be reflected
    seal     HMAC-SHA256(key, role | body)         on every later frame, so that a session is more than an address

The transcript holds all fields of the first two messages, both nonces included: a proof that was recorded is worth
nothing against a new nonce. Without a secret the same code runs with an empty one, between loopback peers only.
RFC 2104 and the mutual challenge of ISO/IEC 9798-4.
"""

import hashlib
import hmac
from collections.abc import Iterable
from enum import Enum

__all__ = ["NONCE_BYTES", "PROOF_BYTES", "Role", "Seal", "check_secret"]

NONCE_BYTES = 16
PROOF_BYTES = 32
_MIN_SECRET = 16


class Role(Enum):
    """Who speaks: the one that holds pages, or the one that reads them."""

    PRODUCER = b"producer"
    CONSUMER = b"consumer"


class Seal:
    """The key of one session."""

    def __init__(self, secret: bytes, transcript: Iterable[bytes]) -> None:
        whole = b"".join(len(part).to_bytes(8, "little") + part for part in transcript)
        self._key = hmac.digest(secret, b"cairn/session/1" + hashlib.sha256(whole).digest(), "sha256")

    def proof(self, role: Role) -> bytes:
        """That the holder of `role` knows the secret, 32 bytes."""
        return hmac.digest(self._key, b"proof|" + role.value, "sha256")

    def proves(self, role: Role, proof: bytes) -> bool:
        """Whether `proof` is right; takes the same time either way."""
        return hmac.compare_digest(self.proof(role), proof)

    def mark(self, role: Role, body: bytes) -> bytes:
        """The mark of a frame that `role` sends, 32 bytes."""
        return hmac.digest(self._key, b"frame|" + role.value + b"|" + body, "sha256")

    def marks(self, role: Role, body: bytes, mark: bytes) -> bool:
        """Whether a frame is from `role` and unchanged; takes the same time either way."""
        return hmac.compare_digest(self.mark(role, body), mark)


def check_secret(secret: bytes) -> str | None:
    """What is wrong with a secret, or None. An empty one means that there is none."""
    if secret and len(secret) < _MIN_SECRET:
        return f"the secret has {len(secret)} bytes; at least {_MIN_SECRET} are needed"
    return None
