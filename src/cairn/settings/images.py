"""The settings of `cairn serve` about images that are more than one word, in vLLM's forms.

Everything wrong ends in a ConfigError of one line that names the flag.
"""

import json
import re

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cairn.errors import ConfigError
from cairn.setting_types import list_entries

MAX_IMAGES = 1024

_DEFAULT_LIMIT = 16
_HOST = re.compile(r"[0-9a-z_-]{1,63}(\.[0-9a-z_-]{1,63}){0,32}|[0-9a-f]{0,4}(:[0-9a-f.]{0,15}){2,8}")
_MAX_DOMAINS = 1024
_SHOWN = 80


class _Limits(BaseModel):
    """What --limit-mm-per-prompt may say. Videos and audio are not served, so only 0 of them can be asked for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image: int = Field(_DEFAULT_LIMIT, ge=0, le=MAX_IMAGES)
    video: int = Field(0, ge=0, le=0)
    audio: int = Field(0, ge=0, le=0)


def image_limit(text: str | None) -> int:
    """How many images a prompt may have, from `{"image": N}` or `image=N`; 16 unless it is said. Raises ConfigError."""
    if text is None:
        return _DEFAULT_LIMIT
    try:
        return _Limits.model_validate(_object(text)).image
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        what = f"{key}: {first['msg']}" if key else 'must be a JSON object as {"image": 4}'
        raise ConfigError(f"--limit-mm-per-prompt: {what}, not {text[:_SHOWN]!r}") from None


def _object(text: str) -> object:
    if re.fullmatch(r"\w+=\d{1,9}(,\w+=\d{1,9})*", text):
        return {name: int(count) for name, _, count in (entry.partition("=") for entry in text.split(","))}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def media_domains(text: str | None) -> tuple[str, ...] | None:
    """The hosts of --allowed-media-domains, `a,b` or `["a", "b"]`, in lower case; None when it is not given. `[]`
    allows none, so that images come as data URIs alone. Raises ConfigError."""
    if text is None:
        return None
    entries = list_entries(text)
    if entries is None:
        shown = text[:_SHOWN]
        raise ConfigError(f"--allowed-media-domains: must be hosts as a,b or a JSON list of texts, not {shown!r}")
    if len(entries) > _MAX_DOMAINS:
        raise ConfigError(f"--allowed-media-domains: has {len(entries)} hosts; at most {_MAX_DOMAINS} are taken")
    hosts = tuple(entry.lower().rstrip(".") for entry in entries)
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"--allowed-media-domains: {host[:_SHOWN]!r} is no host; name hosts as images.example.com, without "
                "scheme, port or wildcard"
            )
    return hosts
