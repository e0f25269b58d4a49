"""Certificates of a server that speaks HTTPS."""

import ssl
from dataclasses import dataclass

from cairn.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Files as uvicorn takes them. `cert_reqs`: of clients' certificates, as in `ssl.VerifyMode`."""

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    ciphers: str | None = None


def check_tls(options: TlsOptions | None) -> None:
    """Raises ConfigError naming the flag of a file that cannot be used."""
    if options is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # without a password, OpenSSL would ask for one
        context.load_cert_chain(options.certfile, options.keyfile, password="")
    except (OSError, ValueError) as error:
        named = f"--ssl-certfile {options.certfile}"
        if options.keyfile is not None:
            named += f" --ssl-keyfile {options.keyfile}"
        raise ConfigError(f"{named}: no certificate with its key, which must not be encrypted: {error}") from None
    if options.cert_reqs and options.ca_certs is None:
        raise ConfigError("--ssl-cert-reqs: name what clients' certificates are checked by, with --ssl-ca-certs")
    if options.ca_certs is not None:
        try:
            context.load_verify_locations(options.ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--ssl-ca-certs {options.ca_certs}: cannot be used: {error}") from None
    if options.ciphers is not None:
        try:
            context.set_ciphers(options.ciphers)
        except ssl.SSLError:
            raise ConfigError(f"--ssl-ciphers: OpenSSL knows none of {options.ciphers[:80]!r}") from None
