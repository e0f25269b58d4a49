"""The settings of `cairn proxy`: one model for flags and environment variables (CAIRN_PROXY_...). A flag wins."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, HttpUrl, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, NoDecode, SettingsConfigDict, SettingsError

from cairn.api_key_settings import ApiKeys, add_argument, flatten_keys
from cairn.errors import ConfigError
from cairn.settings import size_in_bytes

__all__ = ["PROXY_ENV_PREFIX", "ProxySettings", "add_proxy_flags", "load_proxy_settings"]

PROXY_ENV_PREFIX = "CAIRN_PROXY_"

_MAX_BYTES = 1 << 50
_MAX_SERVERS = 1024


def _split(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


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


Urls = Annotated[
    list[Annotated[str, AfterValidator(_base_url)]],
    NoDecode,
    BeforeValidator(_split),
    AfterValidator(_all_different),
    Field(max_length=_MAX_SERVERS),
]


class ProxySettings(BaseSettings):
    """Everything `cairn proxy` can be told."""

    model_config = SettingsConfigDict(
        env_prefix=PROXY_ENV_PREFIX, env_ignore_empty=True, extra="forbid", allow_inf_nan=False
    )

    prefill: Urls = Field(
        [], description="a prefill server, as http://host:port, once per server; without any, decode servers do it all"
    )
    decode: Urls = Field(
        description="a decode server, as http://host:port; give the flag once per server", min_length=1
    )
    host: str = Field("127.0.0.1", description="address to listen on: this machine only unless told", max_length=255)
    port: int = Field(8000, description="port to listen on; 0 takes a free one", ge=0, le=65535)
    api_key: ApiKeys = Field(
        None,
        description="key that clients must send, or several: a b or a,b; goes on to the servers, so all take the same; "
        "better as CAIRN_PROXY_API_KEY",
    )
    forwarded_allow_ips: str | None = Field(
        None,
        description="proxies in front whose X-Forwarded-For is believed: addresses and networks as a,b, or *; "
        "FORWARDED_ALLOW_IPS or loopback unless given",
        max_length=1 << 16,
    )
    max_open: int = Field(1024, description="most requests at once; more are answered with 429", ge=1, le=65536)
    max_body_bytes: Annotated[ByteSize, BeforeValidator(size_in_bytes)] = Field(
        ByteSize(16 << 20),
        description="largest request body: 16MiB, 1e6",
        ge=1,
        le=_MAX_BYTES,
        validate_default=False,
    )
    max_attempts: int = Field(3, description="servers asked for one prefill, and for one answer", ge=1, le=64)
    connect_timeout: float = Field(5.0, description="seconds until a server has to take a connection", gt=0, le=3600)
    prefill_timeout: float = Field(600.0, description="seconds one prefill may take", gt=0, le=86400)
    stall_timeout: float = Field(600.0, description="longest silence of a decode server in seconds", gt=0, le=86400)
    request_timeout: float = Field(3600.0, description="seconds an answer may take", gt=0, le=86400)
    shutdown_timeout: float = Field(30.0, description="seconds open requests have after SIGTERM", ge=0, le=86400)
    health_interval: float = Field(5.0, description="seconds between two health checks", ge=0.05, le=3600)
    health_timeout: float = Field(5.0, description="seconds a health check may take", gt=0, le=3600)
    affinity_bytes: int = Field(
        512, description="how much of a prompt's beginning decides which servers it goes to", ge=1, le=1 << 20
    )
    load_factor: float = Field(
        1.5, description="a server with more than this times the mean load is passed over", ge=1, le=1000
    )
    load_slack: int = Field(4, description="as long as it has at least so many requests", ge=1, le=65536)
    max_hints: int = Field(65536, description="most second-turn hints that are remembered", ge=1, le=1 << 24)
    hint_timeout: float = Field(1800.0, description="seconds a second-turn hint is remembered", gt=0, le=86400)
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")


def add_proxy_flags(parser: ArgumentParser) -> "CliSettingsSource[ProxySettings]":
    """Give the parser a flag for every setting. The result reads what was parsed: see `load_proxy_settings`."""
    return CliSettingsSource(
        ProxySettings,
        cli_parse_args=False,
        root_parser=parser,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        add_argument_method=add_argument,
    )


def load_proxy_settings(parsed: Namespace, source: "CliSettingsSource[ProxySettings]") -> ProxySettings:
    """Settings from parsed flags and the environment.

    Raises ConfigError with one line that names the flag or variable that is wrong and says what it takes.
    """
    parsed = flatten_keys(parsed)
    flags = {name: value for name, value in vars(parsed).items() if name in ProxySettings.model_fields}
    for name, value in flags.items():
        # An empty --api-key must not mean "no key"; the settings library would take the default.
        if value in ("", [""]) or (name == "api_key" and "" in value):
            raise ConfigError(f"{_flag(name)}: must not be empty; leave it out for the default, not ''")
    try:
        # mypy takes the constructor for a plain model's, which has fields alone.
        return ProxySettings(_cli_settings_source=source(parsed_args=parsed))  # type: ignore[call-arg]
    except (ValidationError, SettingsError) as error:
        raise ConfigError(_describe(error, flags)) from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _describe(error: ValidationError | SettingsError, flags: Mapping[str, Any]) -> str:
    if isinstance(error, SettingsError):
        return str(error)
    first = error.errors()[0]
    name = str(first["loc"][0])
    variable = PROXY_ENV_PREFIX + name.upper()
    if first["type"] == "missing":
        return f"{_flag(name)} is missing: name at least one {name} server, as {_flag(name)} http://host:port"
    where = _flag(name) if name in flags or variable not in os.environ else f"{variable} ({_flag(name)})"
    message = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    given = str(first.get("input"))
    # A key must not end in a log, nor what somebody took for a place for one.
    return f"{where}: {message}" if name == "api_key" or "@" in given else f"{where}: {message}, not {given[:80]!r}"
