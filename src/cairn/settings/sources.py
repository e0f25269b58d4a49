"""Where settings come from: a flag wins over an environment variable, that over a file, and that over the default."""

import os
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from cairn.errors import ConfigError

_KEYS = "api_key"
_SHOWN = 80
_SHORT: Mapping[str, tuple[str, ...]] = MappingProxyType({"quantization": ("-q",)})

Settings = TypeVar("Settings", bound=BaseSettings)


def add_setting_flags(parser: ArgumentParser, model: type[Settings]) -> "CliSettingsSource[Settings]":
    """Give the parser a flag for every setting. The result reads what was parsed: see `read_settings`."""
    return CliSettingsSource(
        model,
        cli_parse_args=False,
        root_parser=parser,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        add_argument_method=_add_argument,
    )


def _add_argument(parser: "ArgumentParser | _ArgumentGroup", *names: str, **how: Any) -> None:
    """argparse's method of this name, but for `--api-key`, which takes all words up to the next flag, and for a flag
    that has a short form in vLLM, too."""
    names = (*_SHORT.get(how.get("dest", ""), ()), *names)
    if how.get("dest") == _KEYS:
        how |= {"nargs": "+", "action": "append", "metavar": "KEY"}
    parser.add_argument(*names, **how)


def last_key_word(parsed: Namespace) -> str | None:
    """What stands last among several words of the last `--api-key`; None where it has one word or is not there.

    MODEL may stand there: argparse cannot know where the keys end.
    """
    words = getattr(parsed, _KEYS, [[]])[-1]
    return words[-1] if len(words) > 1 else None


def flatten_keys(parsed: Namespace, *, without_last: bool = False) -> Namespace:
    """`parsed` with all words of all `--api-key` in one list, in their order, perhaps without the last word."""
    groups = getattr(parsed, _KEYS, None)
    if groups is None:
        return parsed
    words = [word for group in groups for word in group]
    return Namespace(**vars(parsed) | {_KEYS: words[:-1] if without_last else words})


def flag_name(setting: str) -> str:
    return "MODEL" if setting == "model" else "--" + setting.replace("_", "-")


def read_settings(
    source: "CliSettingsSource[Settings]",
    model: type[Settings],
    parsed: Namespace,
    file: str | None = None,
    from_file: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from parsed flags (with `flatten_keys`), the environment, and what `file` has said.

    Raises ConfigError with one line that names the flag, variable or key that is wrong and says what it takes.
    """
    flags = {name: value for name, value in vars(parsed).items() if name in model.model_fields}
    for name, value in flags.items():
        # An empty --api-key must not mean "no key"; the settings library would take the default.
        if value in ("", [""]) or (name == _KEYS and "" in value):
            raise ConfigError(f"{flag_name(name)}: must not be empty; leave it out for the default, not ''")
    try:
        # mypy takes the constructor for a plain model's, which has fields alone.
        return model(_cli_settings_source=source(parsed_args=parsed), **from_file or {})
    except SettingsError as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        raise ConfigError(_describe(error, model.model_config["env_prefix"], flags, file)) from None


def _describe(error: ValidationError, env_prefix: str, flags: Mapping[str, Any], file: str | None) -> str:
    first = error.errors()[0]
    name = str(first["loc"][0])
    variable = env_prefix + name.upper()
    where = flag_name(name)
    if name not in flags:
        where = f"{variable} ({where})" if variable in os.environ else f"{file}: {name} ({where})"
    message = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    given = first.get("input")
    if len(first["loc"]) == 1:
        given = flags.get(name, os.environ.get(variable, given))
    # A key must not end in a log, nor what somebody took for a place for one.
    if name == _KEYS or "@" in str(given):
        return f"{where}: {message}"
    return f"{where}: {message}, not {str(given)[:_SHOWN]!r}"
