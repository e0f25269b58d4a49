"""Where settings come from: a flag wins over an environment variable, that over a file, and that over the default."""

import json
import logging
import os
import re
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from cairn.errors import ConfigError
from cairn.paths import check_encoding

_KEYS = "api_key"
_SIZES = "cudagraph_capture_sizes"
_SEVERAL: Mapping[str, str] = MappingProxyType({_KEYS: "KEY", "served_model_name": "NAME", _SIZES: "ROWS"})
"""Settings that take all words up to the next flag, with what the help calls one."""

_SHOWN = 80
_SHORT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"quantization": ("-q",), "tensor_parallel_size": ("-tp",), "speculative_config": ("-sc",)}
)

_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://(\d{1,3}(\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\]):\d{1,5}")

Settings = TypeVar("Settings", bound=BaseSettings)

logger = logging.getLogger(__name__)


class VariablesSource(EnvSettingsSource):
    """The environment, less what Kubernetes sets in it for a Service whose name looks like a setting's."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        value, key, is_complex = super().get_field_value(field, field_name)
        return (None if _is_port(field_name) and is_service_link(value) else value), key, is_complex


class CommandSettings(BaseSettings):
    """What the settings of all commands have in common. The constructor's keyword arguments are a file's, or with
    `reads_variables` False all that there is."""

    reads_variables: ClassVar[bool] = True

    @field_validator("*", mode="before")
    @classmethod
    def _check_encoding(cls, value: Any) -> Any:
        check_encoding(value)
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (VariablesSource(settings_cls), init_settings) if cls.reads_variables else (init_settings,)


def is_service_link(value: str | None) -> bool:
    """Whether a variable NAME_PORT has what Kubernetes sets in pods for a Service NAME, as Docker's links did:
    tcp://10.0.0.1:8000."""
    return value is not None and _SERVICE_LINK.fullmatch(value) is not None


def warn_of_service_link(variable: str, value: str, remedy: str) -> None:
    """Say why a variable for which `is_service_link` is true has no effect. `remedy`: how to say the port."""
    service = variable.removesuffix("_PORT").lower().replace("_", "-")
    logger.warning(
        "%s=%s has no effect: it is no port, but what Kubernetes sets in every pod for a Service named %s. %s; another "
        "name of the Service, or enableServiceLinks: false in the pod's spec, ends this warning",
        variable,
        value,
        service,
        remedy,
    )


def warn_of_service_links(settings: BaseSettings) -> None:
    """One warning for each setting that a Service's variable would have set, and that nothing else has."""
    for name in type(settings).model_fields:
        variable = settings.model_config["env_prefix"] + name.upper()
        value = os.environ.get(variable, "")
        if _is_port(name) and name not in settings.model_fields_set and is_service_link(value):
            warn_of_service_link(variable, value, f"{flag_name(name)} says the port")


def _is_port(setting: str) -> bool:
    return setting == "port" or setting.endswith("_port")


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
    """argparse's method of this name, but for flags that take several words, and for those that have a short form in
    vLLM, too."""
    dest = how.get("dest", "")
    if dest in _SEVERAL:
        how |= {"nargs": "+", "action": "append", "metavar": _SEVERAL[dest]}
    parser.add_argument(*_SHORT.get(dest, ()), *names, **how)


def last_words(parsed: Namespace) -> dict[str, str]:
    """By setting that takes several words: what stands last among several words of its last flag. MODEL may stand
    there: argparse cannot know where they end."""
    groups = {name: getattr(parsed, name, [[]])[-1] for name in _SEVERAL}
    return {
        name: words[-1]
        for name, words in groups.items()
        if len(words) > 1 and not (name == _SIZES and words[-1].isdecimal())
    }


def flatten_words(parsed: Namespace, *, without_last: str | None = None) -> Namespace:
    """`parsed` with all words of each flag that takes several in one list, in their order, perhaps without the last
    one of a setting."""
    flat: dict[str, Any] = {}
    for name in _SEVERAL:
        if (groups := getattr(parsed, name, None)) is not None:
            words = [word for group in groups for word in group]
            flat[name] = words[:-1] if name == without_last else words
    return Namespace(**vars(parsed) | flat)


def flag_name(setting: str) -> str:
    return "MODEL" if setting == "model" else "--" + setting.replace("_", "-")


def read_settings(
    source: "CliSettingsSource[Settings]",
    model: type[Settings],
    parsed: Namespace,
    file: str | None = None,
    from_file: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from parsed flags (with `flatten_words`), the environment, and what `file` has said.

    Raises ConfigError with one line that names the flag, variable or key that is wrong and says what it takes.
    """
    given = {name: value for name, value in vars(parsed).items() if value is not PydanticUndefined}
    flags = {name: value for name, value in given.items() if name in model.model_fields}
    for name, value in flags.items():
        # An empty --api-key must not mean "no key"; the settings library would take the default.
        if value in ("", [""]) or (name in _SEVERAL and "" in value):
            raise ConfigError(f"{flag_name(name)}: must not be empty; leave it out for the default, not ''")
    # The settings library joins lists with commas, which a key has never, and a name may have.
    lists = {name: json.dumps(flags[name]) for name in _SEVERAL if name != _KEYS and name in flags}
    parsed = Namespace(**vars(parsed) | lists)
    try:
        # mypy takes the constructor for a plain model's, which has fields alone.
        return model(_cli_settings_source=source(parsed_args=parsed), **from_file or {})
    except SettingsError as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        raise ConfigError(describe_error(error, model.model_config["env_prefix"], flags, file)) from None


def describe_error(error: ValidationError, env_prefix: str, flags: Mapping[str, Any], file: str | None) -> str:
    """One line that names the flag, variable or key of `file` that is wrong and says what it takes."""
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
