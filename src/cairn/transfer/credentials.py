"""TLS credentials that servers derive from the secret they share.

Both ends of the side channel speak TLS 1.3 and show the same self-signed certificate. Its Ed25519 key (RFC 8032) is
derived from the secret by scrypt (RFC 7914), and each end accepts that certificate alone: a handshake succeeds between
servers that hold the same secret, and fails for everybody else before a record of ours is sent or parsed.

Without a secret the key is derived from nothing: everybody can make it, so it encrypts and proves nothing.
"""

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_SALT = b"cairn/side-channel/3"
# Fixed, or two servers would not make the same certificate. RFC 5280, 4.1.2.5: the last date means "no end".
_NOT_BEFORE = datetime.datetime(2020, 1, 1)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59)


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """`server`: for connections that are accepted; `client`: for those that are made."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def derive_credentials(secret: bytes) -> TlsCredentials:
    """The credentials of all servers that hold `secret`; takes some 50 ms on purpose, to make guessing dear."""
    seed = hashlib.scrypt(secret, salt=_SALT, n=1 << 14, r=8, p=1, dklen=32)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cairn side channel")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .sign(key, None)
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    der = certificate.public_bytes(Encoding.DER)
    return TlsCredentials(_context(ssl.PROTOCOL_TLS_SERVER, pem, der), _context(ssl.PROTOCOL_TLS_CLIENT, pem, der))


def _context(protocol: int, pem: bytes, certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The peer is known by its key; the address it is reached at says nothing.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # Every connection proves the secret anew.
        context.num_tickets = 0
    # ssl reads keys from files alone; this one is in memory.
    file = os.memfd_create("cairn", os.MFD_CLOEXEC)
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
