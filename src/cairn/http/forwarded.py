"""`--forwarded-allow-ips`: the proxies in front whose X-Forwarded-For is believed, in uvicorn's words and variable."""

import ipaddress
import os
from collections.abc import Mapping

from cairn.errors import ConfigError
from cairn.setting_types import list_entries

_VARIABLE = "FORWARDED_ALLOW_IPS"
_DEFAULT = "127.0.0.1,::1"
_MAX_ENTRIES = 4096
_SHOWN = 80


def trusted_proxies(text: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Addresses and networks, from `a,b` or `["a", "b"]`, or `*` alone: everybody. None: what the variable says, where
    an empty text is nobody, else loopback. Raises ConfigError."""
    where = "--forwarded-allow-ips"
    if text is None:
        where, text = _VARIABLE, environ.get(_VARIABLE, _DEFAULT)
        if not text.strip():
            return ()
    names = list_entries(text)
    if names is None:
        raise ConfigError(f"{where}: must be addresses and networks as a,b or a JSON list, not {text[:_SHOWN]!r}")
    if len(names) > _MAX_ENTRIES:
        raise ConfigError(f"{where}: {len(names)} entries are too many: at most {_MAX_ENTRIES} are taken")
    for name in names if names != ["*"] else ():
        try:
            ipaddress.ip_network(name)
        except ValueError:
            raise ConfigError(
                f"{where}: must hold addresses and networks like 10.0.0.5, 10.0.0.0/8 or fd00::/8, or be * alone, "
                f"not {name[:_SHOWN]!r}"
            ) from None
    return tuple(names)
