"""Reasoning that a client keeps for the server: encrypted and authenticated, so that nobody else has written it.

AES-256-GCM under a key derived from a secret by HKDF (RFC 5869).
"""

import base64
import binascii
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_PREFIX = "cairn1."
_NONCE_BYTES = 12


class ReasoningSeal:
    """`secret`: what servers share that are to read each other's; None for a key that ends with the process."""

    def __init__(self, secret: bytes | None = None) -> None:
        key = HKDF(SHA256(), 32, None, b"cairn/reasoning/1").derive(secret) if secret else os.urandom(32)
        self._cipher = AESGCM(key)

    def close(self, text: str, owner: tuple[str, str]) -> str:
        """The text, readable for nobody but a server with this key. `owner`: for whose requests alone."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, text.encode(), _bound(owner))
        return _PREFIX + base64.urlsafe_b64encode(sealed).decode()

    def open(self, sealed: str, owner: tuple[str, str]) -> str | None:
        """The text; None for what no server with this key has closed for this owner."""
        if not sealed.startswith(_PREFIX):
            return None
        try:
            data = base64.urlsafe_b64decode(sealed[len(_PREFIX) :].encode())
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _bound(owner)).decode()
        except (InvalidTag, binascii.Error, ValueError):
            return None


def _bound(owner: tuple[str, str]) -> bytes:
    return "\0".join(owner).encode()
