"""The settings of `cairn proxy`: flags and environment variables (CAIRN_PROXY_...). A flag wins."""

import os
from argparse import ArgumentParser, Namespace

from pydantic import Field
from pydantic_settings import CliSettingsSource, SettingsConfigDict

from cairn.errors import ConfigError
from cairn.proxy.options import ProxyOptions
from cairn.setting_types import LogLevel
from cairn.settings.sources import CommandSettings, add_setting_flags, flatten_words, read_settings

PROXY_ENV_PREFIX = "CAIRN_PROXY_"


class ProxySettings(CommandSettings, ProxyOptions):
    """Everything `cairn proxy` can be told."""

    model_config = SettingsConfigDict(env_prefix=PROXY_ENV_PREFIX, env_ignore_empty=True)

    log_level: LogLevel = Field("info", description="least severity that is logged")


def add_proxy_flags(parser: ArgumentParser) -> "CliSettingsSource[ProxySettings]":
    """Give the parser a flag for every setting. The result reads what was parsed: see `load_proxy_settings`."""
    return add_setting_flags(parser, ProxySettings)


def load_proxy_settings(parsed: Namespace, source: "CliSettingsSource[ProxySettings]") -> ProxySettings:
    """Settings from parsed flags and the environment. Raises ConfigError as `read_settings` does."""
    if "decode" not in parsed and not os.environ.get(f"{PROXY_ENV_PREFIX}DECODE"):
        raise ConfigError("--decode is missing: name at least one decode server, as --decode http://host:port")
    return read_settings(source, ProxySettings, flatten_words(parsed))
