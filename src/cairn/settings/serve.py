"""The settings of `cairn serve`: one model for flags, environment variables (CAIRN_...) and a YAML file.

A flag wins over an environment variable, that over the file, and that over the default. Flag names are vLLM's where
the meaning is the same.
"""

import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ByteSize, Field, PrivateAttr
from pydantic_settings import CliSettingsSource, SettingsConfigDict

from cairn.engine.contract import EngineOptions
from cairn.errors import ConfigError
from cairn.server.options import ServerOptions
from cairn.setting_types import Bytes, JsonText, ListText, LogLevel
from cairn.settings.sources import CommandSettings, add_setting_flags, flatten_words, last_words, read_settings
from cairn.settings.vllm_flags import add_vllm_flags, check_vllm_line, ignored_flags

ENV_PREFIX = "CAIRN_"
_MODEL_FLAG = "model_flag"


class ServeSettings(CommandSettings, EngineOptions, ServerOptions):
    """Everything `cairn serve` can be told. The constructor's keyword arguments are the YAML file's: they come last."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=())

    revision: str | None = Field(
        None, description="branch, tag or commit of a MODEL on the Hugging Face Hub; main unless given", min_length=1
    )
    download_dir: Path | None = Field(
        None, description="cache that MODEL is looked for in and downloaded to; the Hugging Face cache unless given"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float", "half", "float16"] = Field(  # type: ignore[assignment]
        "auto", description="type of the weights and of the cache; half and float16 are served as bfloat16"
    )
    tokenizer_revision: str | None = Field(
        None, description="branch, tag or commit of a --tokenizer on the Hugging Face Hub", min_length=1
    )
    cpu_threads: int | None = Field(
        None,
        description="threads of each rank's computation; unless given all cores that this process may use, less one "
        "for HTTP where there are more than two, divided among the ranks; OMP_NUM_THREADS can make them fewer",
        ge=1,
        le=1024,
    )
    start_timeout: float = Field(1800.0, description="seconds loading the model may take", gt=0, le=86400)
    log_level: LogLevel = Field("info", description="least severity that is logged")
    config: Path | None = Field(None, description="YAML file with settings, named like the flags")
    kv_transfer_config: str | None = Field(
        None, description='JSON, as vLLM\'s: {"kv_connector": "NixlConnector", "kv_role": "kv_both", ...}'
    )
    kv_secret_file: Path | None = Field(
        None,
        description="file with a secret that servers must share to exchange pages and encrypted reasoning; without it "
        "pages are exchanged only on loopback",
    )
    kv_peer_allowlist: ListText | None = Field(
        None,
        description="hosts, addresses and networks that pages may be fetched from: a,b or a JSON list",
    )
    kv_events_config: str | None = Field(
        None, description='JSON, as vLLM\'s: {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557", ...}'
    )
    speculative_config: str | None = Field(
        None,
        description='JSON, as vLLM\'s: {"method": "suffix", "num_speculative_tokens": 31, ...}; drafts where that pays '
        "unless given",
    )
    request_log: Path | None = Field(
        None, description="file for a line of JSON per request, without texts, that `cairn replay` reads"
    )
    request_log_bytes: Bytes = Field(
        ByteSize(256 << 20),
        description="largest request log; then it becomes FILE.1 and a new one is begun",
        validate_default=False,
    )
    limit_mm_per_prompt: JsonText | None = Field(
        None, description='most images in one prompt, as vLLM\'s: {"image": 16}; 0 switches them off'
    )
    allowed_media_domains: ListText | None = Field(
        None,
        description="hosts that images may be fetched from: a,b or a JSON list; all that are public unless given",
    )
    image_fetch_timeout: float = Field(5.0, description="seconds that fetching one image may take", gt=0, le=3600)
    max_image_bytes: Bytes = Field(ByteSize(16 << 20), description="largest image as it comes", validate_default=False)
    max_image_pixels: int = Field(16 << 20, description="most pixels of one image", ge=1, le=20 << 20)
    _without_effect: tuple[str, ...] = PrivateAttr(())

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Flags of vLLM's that were given and change nothing here."""
        return self._without_effect


def add_flags(parser: ArgumentParser) -> "CliSettingsSource[ServeSettings]":
    """Give the parser a flag for every setting, and those of vLLM's that have none here. The result reads what was
    parsed: see `load_settings`."""
    source = add_setting_flags(parser, ServeSettings)
    parser.add_argument("--model", dest=_MODEL_FLAG, metavar="MODEL", default=SUPPRESS, help="MODEL, as a flag")
    add_vllm_flags(parser)
    return source


def load_settings(parsed: Namespace, source: "CliSettingsSource[ServeSettings]") -> ServeSettings:
    """Settings from parsed flags, the environment, and the YAML file that either of them names.

    Raises ConfigError with one line that names the flag, variable or key that is wrong and says what it takes.
    """
    path = vars(parsed).get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    from_file, ignored = read_settings_file(Path(path)) if path else ({}, [])
    settings = read_settings(source, ServeSettings, _with_model(parsed, from_file), path, from_file)
    if not settings.model:
        raise ConfigError(
            "MODEL is missing: name a checkpoint's folder, or its name on the Hugging Face Hub, as in "
            "`cairn serve Qwen/Qwen3.5-4B`"
        )
    settings._without_effect = tuple(dict.fromkeys([*ignored, *ignored_flags(parsed)]))
    return settings


def _with_model(parsed: Namespace, from_file: Mapping[str, Any]) -> Namespace:
    """Several words of a flag in one list. Where nothing else is MODEL, it is a folder after keys, or whatever stands
    after the model's names."""
    named = {model for name in ("model", _MODEL_FLAG) if isinstance(model := getattr(parsed, name, None), str)}
    if len(named) > 1:
        raise ConfigError("--model: MODEL is there already, and another one: name it once")
    if named:
        return Namespace(**vars(flatten_words(parsed)) | {"model": named.pop()})
    words = last_words(parsed)
    if not words or os.environ.get(f"{ENV_PREFIX}MODEL") or from_file.get("model"):
        return flatten_words(parsed)
    for setting, word in words.items():
        if setting != "api_key" or os.path.isdir(word):
            return Namespace(**vars(flatten_words(parsed, without_last=setting)) | {"model": word})
    raise ConfigError(
        "MODEL is missing: all words after --api-key are keys; name MODEL before it, as in "
        "`cairn serve ./my-model --api-key KEY KEY`"
    )


def read_settings_file(path: Path, model: type[ServeSettings] = ServeSettings) -> tuple[dict[str, Any], list[str]]:
    """The settings of `model`, and the flags of vLLM's that change nothing."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: not a YAML file: {reason}") from error
    if content is None:
        return {}, []
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold `name: value` lines, not {type(content).__name__}")
    return sort_settings(content, model, f"--config {path}")


def sort_settings(
    content: Mapping[Any, Any], model: type[ServeSettings], where: str
) -> tuple[dict[str, Any], list[str]]:
    """The settings of `model` among `content`, and the flags of vLLM's that change nothing. Raises ConfigError, which
    begins with `where`, for anything else."""
    settings: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in model.model_fields and name != "config":
            settings[name] = value
        elif (flag := check_vllm_line(name, value, f"{where}: ")) is not None:
            ignored.append(flag)
        else:
            raise ConfigError(f"{where}: there is no setting {name!r}; see `cairn serve --help`")
    return settings, ignored
