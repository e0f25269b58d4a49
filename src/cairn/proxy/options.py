"""The settings of the proxy: one declaration for its flags, its environment variables and its parts."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, HttpUrl, ValidationError
from pydantic_settings import NoDecode

from cairn.setting_types import ApiKeys, Bytes, ListText, split_commas

MAX_HINTS = 1 << 16
"""Conversations whose last answer may be cached in a fleet: with a state of some 60 MB each these are 4 TB of decode
servers' pools. A hint takes half a kilobyte here."""
HINT_SECONDS = 1800.0
"""No lease bounds a hint: a prefill server's ends after seconds, but a hint leads to a decode server's cache, which
keeps an answer until it is evicted. Few turns come later; a hint that outlives its answer costs one refused claim."""

_MAX_SERVERS = 1024


def _base_url(text: str) -> str:
    """`http://host:port` in its normal form, without a slash at the end. Raises ValueError."""
    try:
        url = HttpUrl(text)
    except ValidationError:
        raise ValueError("must look like http://host:port") from None
    if url.port == 0 or any(part is not None for part in (url.username, url.password, url.query, url.fragment)):
        raise ValueError("must be a plain http://host:port, without user, query or fragment")
    return str(url).rstrip("/")


def _all_different(urls: list[str]) -> list[str]:
    if len(set(urls)) < len(urls):
        raise ValueError("names the same server twice")
    return urls


_Urls = Annotated[
    list[Annotated[str, AfterValidator(_base_url)]],
    NoDecode,
    BeforeValidator(split_commas),
    AfterValidator(_all_different),
    Field(max_length=_MAX_SERVERS),
]


class ProxyOptions(BaseModel):
    """The settings of `cairn proxy`. Sizes in bytes, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prefill: _Urls = Field(
        [], description="a prefill server, as http://host:port, once per server; without any, decode servers do it all"
    )
    decode: _Urls = Field(
        description="a decode server, as http://host:port; give the flag once per server", min_length=1
    )
    host: str = Field("127.0.0.1", description="address to listen on: this machine only unless told", max_length=255)
    port: int = Field(8000, description="port to listen on; 0 takes a free one", ge=0, le=65535)
    api_key: ApiKeys = Field(
        None,
        description="key that clients must send, or several: a b or a,b; goes on to the servers, so all take the same; "
        "better as CAIRN_PROXY_API_KEY",
    )
    forwarded_allow_ips: ListText | None = Field(
        None,
        description="proxies in front whose X-Forwarded-For is believed: addresses and networks as a,b, or *; "
        "FORWARDED_ALLOW_IPS or loopback unless given",
    )
    max_open: int = Field(1024, description="most requests at once; more are answered with 429", ge=1, le=65536)
    max_body_bytes: Bytes = Field(
        ByteSize(16 << 20), description="largest request body: 16MiB, 1e6", validate_default=False
    )
    max_attempts: int = Field(3, description="servers asked for one prefill, and for one answer", ge=1, le=64)
    connect_timeout: float = Field(5.0, description="seconds until a server has to take a connection", gt=0, le=3600)
    prefill_timeout: float = Field(600.0, description="seconds one prefill may take", gt=0, le=86400)
    stall_timeout: float = Field(600.0, description="longest silence of a decode server in seconds", gt=0, le=86400)
    request_timeout: float = Field(3600.0, description="seconds an answer may take", gt=0, le=86400)
    shutdown_timeout: float = Field(30.0, description="seconds open requests have after SIGTERM", ge=0, le=86400)
    health_interval: float = Field(5.0, description="seconds between two health checks", ge=0.05, le=3600)
    health_timeout: float = Field(5.0, description="seconds a health check may take", gt=0, le=3600)
    running_tokens: float = Field(
        64.0, description="what an open request makes a server less attractive by, in tokens of prefill", ge=0, le=1e6
    )
    max_hints: int = Field(MAX_HINTS, description="most second-turn hints that are remembered", ge=1, le=1 << 24)
    hint_timeout: float = Field(HINT_SECONDS, description="seconds a second-turn hint is remembered", gt=0, le=86400)
