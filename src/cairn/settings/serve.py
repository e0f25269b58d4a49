"""The settings of `cairn serve`: one model for flags, environment variables (CAIRN_...) and a YAML file.

A flag wins over an environment variable, that over the file, and that over the default. Flag names are vLLM's where
the meaning is the same.
"""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ByteSize, Field
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from cairn.engine.contract import EngineOptions
from cairn.errors import ConfigError
from cairn.server.options import ServerOptions
from cairn.setting_types import Bytes, JsonText, ListText
from cairn.settings.sources import add_setting_flags, flatten_keys, last_key_word, read_settings

__all__ = ["ENV_PREFIX", "ServeSettings", "add_flags", "load_settings"]

ENV_PREFIX = "CAIRN_"


class ServeSettings(BaseSettings, EngineOptions, ServerOptions):
    """Everything `cairn serve` can be told. The constructor's keyword arguments are the YAML file's: they come last."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=())

    revision: str | None = Field(
        None, description="branch, tag or commit of a MODEL on the Hugging Face Hub; main unless given", min_length=1
    )
    download_dir: Path | None = Field(
        None, description="cache that MODEL is looked for in and downloaded to; the Hugging Face cache unless given"
    )
    cpu_threads: int | None = Field(
        None,
        description="threads of each rank's computation; unless given all cores that this process may use, less one "
        "for HTTP where there are more than two, divided among the ranks; OMP_NUM_THREADS can make them fewer",
        ge=1,
        le=1024,
    )
    start_timeout: float = Field(1800.0, description="seconds loading the model may take", gt=0, le=86400)
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    config: Path | None = Field(None, description="YAML file with settings, named like the flags")
    kv_transfer_config: str | None = Field(
        None, description='JSON, as vLLM\'s: {"kv_connector": "NixlConnector", "kv_role": "kv_both", ...}'
    )
    kv_secret_file: Path | None = Field(
        None, description="file with a secret that servers must share to exchange pages; without it only on loopback"
    )
    kv_peer_allowlist: ListText | None = Field(
        None,
        description="hosts, addresses and networks that pages may be fetched from: a,b or a JSON list",
    )
    kv_events_config: str | None = Field(
        None, description='JSON, as vLLM\'s: {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557", ...}'
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
    allowed_local_media_path: str | None = Field(None, description="refused: images are never read from files")
    image_fetch_timeout: float = Field(5.0, description="seconds that fetching one image may take", gt=0, le=3600)
    max_image_bytes: Bytes = Field(ByteSize(16 << 20), description="largest image as it comes", validate_default=False)
    max_image_pixels: int = Field(16 << 20, description="most pixels of one image", ge=1, le=20 << 20)
    trust_remote_code: bool = Field(False, description="accepted and ignored: code of a checkpoint is never run")
    gpu_memory_utilization: float = Field(
        0.9, description="accepted and ignored: the pool is sized by --kv-cache-memory-bytes", gt=0, le=1
    )
    enforce_eager: bool = Field(False, description="accepted and ignored: there are no captured graphs")
    disable_hybrid_kv_cache_manager: bool = Field(
        False, description="the --no- form is accepted and ignored: the cache is always a hybrid one"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings


def add_flags(parser: ArgumentParser) -> "CliSettingsSource[ServeSettings]":
    """Give the parser a flag for every setting. The result reads what was parsed: see `load_settings`."""
    return add_setting_flags(parser, ServeSettings)


def load_settings(parsed: Namespace, source: "CliSettingsSource[ServeSettings]") -> ServeSettings:
    """Settings from parsed flags, the environment, and the YAML file that either of them names.

    Raises ConfigError with one line that names the flag, variable or key that is wrong and says what it takes.
    """
    path = vars(parsed).get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    from_file = _read_file(Path(path)) if path else {}
    settings = read_settings(source, ServeSettings, _with_model_and_keys(parsed, from_file), path, from_file)
    _refuse_what_is_missing(settings)
    return settings


def _with_model_and_keys(parsed: Namespace, from_file: Mapping[str, Any]) -> Namespace:
    """Keys in one list; a folder behind them is MODEL where nothing else is."""
    word = last_key_word(parsed)
    has_model = isinstance(getattr(parsed, "model", None), str) or os.environ.get(f"{ENV_PREFIX}MODEL")
    if word is None or has_model or from_file.get("model"):
        return flatten_keys(parsed)
    if not Path(word).is_dir():
        raise ConfigError(
            "MODEL is missing: all words behind --api-key are keys; name MODEL before it, as in "
            "`cairn serve ./my-model --api-key KEY KEY`"
        )
    return Namespace(**vars(flatten_keys(parsed, without_last=True)) | {"model": word})


def _refuse_what_is_missing(settings: ServeSettings) -> None:
    if not settings.model:
        raise ConfigError(
            "MODEL is missing: name a checkpoint's folder, or its name on the Hugging Face Hub, as in "
            "`cairn serve Qwen/Qwen3.5-4B`"
        )
    if settings.disable_hybrid_kv_cache_manager:
        raise ConfigError("--disable-hybrid-kv-cache-manager: the cache is always a hybrid one; leave it out")
    if settings.allowed_local_media_path is not None:
        raise ConfigError("--allowed-local-media-path: images are never read from files; leave it out, send data URIs")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: not a YAML file: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold `name: value` lines, not {type(content).__name__}")
    settings = {str(key).replace("-", "_"): value for key, value in content.items()}
    for name in settings:
        if name not in ServeSettings.model_fields or name == "config":
            raise ConfigError(f"--config {path}: there is no setting {name!r}; see `cairn serve --help`")
    return settings
