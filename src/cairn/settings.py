"""The settings of `cairn serve`: one model for flags, environment variables (CAIRN_...) and a YAML file.

A flag wins over an environment variable, that over the file, and that over the default. Flag names are vLLM's where
the meaning is the same.
"""

import json
import os
import re
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from cairn.api_key_settings import ApiKeys, add_argument, flatten_keys, last_key_word
from cairn.errors import ConfigError

__all__ = [
    "ENV_PREFIX",
    "ServeSettings",
    "add_flags",
    "load_settings",
    "parse_size",
    "size_in_bytes",
]

ENV_PREFIX = "CAIRN_"

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*")
_MAX_COUNT = 1 << 24
_MAX_BYTES = 1 << 50
_MAX_PEERS_TEXT = 1 << 16


def size_in_bytes(value: Any) -> Any:
    """`512MiB`, `1.5 GB`, `1e9`, `4096` -> a number of bytes. Other things are left for the type check to refuse."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    number, unit = match.groups()
    return f"{float(number):.0f}" if not unit else f"{float(number):f}{unit}"


def parse_size(text: str) -> int:
    """The number of bytes that `text` names. Raises ConfigError."""
    try:
        return int(TypeAdapter(Bytes).validate_python(text))
    except ValidationError as error:
        raise ConfigError(f"{text!r} is no size: write it as 512MiB, 1.5GB, 1e9 or plain bytes") from error


def _list_as_text(value: Any) -> Any:
    """What YAML gives as a list, as a flag would have it."""
    return json.dumps(value) if isinstance(value, list) else value


def _object_as_text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


Bytes = Annotated[ByteSize, BeforeValidator(size_in_bytes), Field(ge=1, le=_MAX_BYTES)]


class ServeSettings(BaseSettings):
    """Everything `cairn serve` can be told. The constructor's keyword arguments are the YAML file's: they come last."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    model: CliPositionalArg[str] = Field(
        "", description="folder of the checkpoint: config.json, safetensors, tokenizer"
    )
    host: str = Field(
        "127.0.0.1",
        description="address to listen on; vLLM listens on all (0.0.0.0), cairn on this machine only unless told",
        max_length=255,
    )
    port: int = Field(8000, description="port to listen on; 0 takes a free one", ge=0, le=65535)
    served_model_name: str | None = Field(
        None, description="the model's name in the API; MODEL unless given", min_length=1, max_length=512
    )
    api_key: ApiKeys = Field(
        None,
        description="key that clients must send, or several: a b or a,b; better as CAIRN_API_KEY: others cannot see it",
    )
    forwarded_allow_ips: Annotated[str, BeforeValidator(_list_as_text)] | None = Field(
        None,
        description="proxies whose X-Forwarded-For is believed: addresses and networks as a,b, or *; "
        "FORWARDED_ALLOW_IPS or loopback unless given",
        max_length=_MAX_PEERS_TEXT,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="type of the weights and of the cache")
    quantization: Literal["int8"] | None = Field(
        None, description="weights of matrix products in int8, activations per token: faster, less memory, less precise"
    )
    seed: int = Field(0, description="source that requests without a seed have theirs drawn from", ge=0, lt=1 << 63)
    block_size: int = Field(16, description="tokens per page of keys and values", ge=1, le=4096)
    max_model_len: int | None = Field(
        None, description="longest prompt and answer together; the model's own limit unless given", ge=1, le=_MAX_COUNT
    )
    max_num_batched_tokens: int = Field(2048, description="most tokens computed in one step", ge=1, le=_MAX_COUNT)
    max_num_seqs: int | None = Field(
        None, description="most requests computed at once; 64 unless given, fewer where memory is short", ge=1, le=65536
    )
    max_waiting: int = Field(1024, description="most requests waiting; more are answered with 429", ge=1, le=_MAX_COUNT)
    kv_cache_memory_bytes: Bytes | None = Field(
        None,
        description="size of the cache's pool, on each rank: 1GiB, 512MiB, 1e9; unless given 40 percent of the memory "
        "that is available besides the weights, at most 8GiB, divided among the ranks",
    )
    enable_prefix_caching: bool = Field(True, description="reuse what earlier requests have computed")
    in_flight_sharing: bool = Field(True, description="a request waits for one in prefill that computes its beginning")
    mamba_cache_mode: Literal["none", "align", "all", "granular", "junction", "auto"] = Field(
        "auto", description="where state checkpoints are kept"
    )
    eviction: Literal["lru", "value"] = Field("value", description="what is dropped when the pool is full")
    exact: bool = Field(
        False, description="answers are bit for bit the same with and without the cache, alone and batched; slower"
    )
    check_plans: bool = Field(
        False, description="for finding bugs: look at every step's plan before it is carried out; slower"
    )
    cpu_threads: int | None = Field(
        None,
        description="threads of each rank's computation; unless given all cores that this process may use, less one "
        "for HTTP where there are more than two, divided among the ranks; OMP_NUM_THREADS can make them fewer",
        ge=1,
        le=1024,
    )
    shutdown_timeout: float = Field(30.0, description="seconds open requests have after SIGTERM", ge=0, le=86400)
    request_timeout: float = Field(3600.0, description="seconds an answer may take", gt=0, le=86400)
    start_timeout: float = Field(1800.0, description="seconds loading the model may take", gt=0, le=86400)
    max_body_bytes: Bytes = Field(ByteSize(16 << 20), description="largest request body", validate_default=False)
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    config: Path | None = Field(None, description="YAML file with settings, named like the flags")
    tensor_parallel_size: int = Field(
        1, description="processes that the model's heads are divided among; must divide them", ge=1, le=1024
    )
    kv_transfer_config: str | None = Field(
        None, description='JSON, as vLLM\'s: {"kv_connector": "NixlConnector", "kv_role": "kv_both", ...}'
    )
    kv_secret_file: Path | None = Field(
        None, description="file with a secret that servers must share to exchange pages; without it only on loopback"
    )
    kv_peer_allowlist: Annotated[str, BeforeValidator(_list_as_text)] | None = Field(
        None,
        description="hosts, addresses and networks that pages may be fetched from: a,b or a JSON list",
        max_length=_MAX_PEERS_TEXT,
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
    enable_auto_tool_choice: bool = Field(True, description="look for tool calls in answers when the model may choose")
    tool_call_parser: Literal["hermes", "json", "none", "qwen3_coder", "qwen3_xml", "xml"] | None = Field(
        None, description="how tool calls are written; as in the chat template unless given"
    )
    reasoning_parser: Literal["deepseek_r1", "nano_v3", "nemotron_v3", "none", "qwen3", "think"] | None = Field(
        None, description="how reasoning is written; as in the chat template unless given"
    )
    limit_mm_per_prompt: Annotated[str, BeforeValidator(_object_as_text)] | None = Field(
        None, description='most images in one prompt, as vLLM\'s: {"image": 16}; 0 switches them off', max_length=4096
    )
    language_model_only: bool = Field(
        False, description="leave the checkpoint's vision model unloaded: images are refused"
    )
    allowed_media_domains: Annotated[str, BeforeValidator(_list_as_text)] | None = Field(
        None,
        description="hosts that images may be fetched from: a,b or a JSON list; all that are public unless given",
        max_length=_MAX_PEERS_TEXT,
    )
    allowed_local_media_path: str | None = Field(None, description="refused: images are never read from files")
    image_fetch_timeout: float = Field(5.0, description="seconds that fetching one image may take", gt=0, le=3600)
    max_image_bytes: Bytes = Field(ByteSize(16 << 20), description="largest image as it comes", validate_default=False)
    max_image_pixels: int = Field(16 << 20, description="most pixels of one image", ge=1, le=20 << 20)
    mm_encoder_cache_bytes: Annotated[ByteSize, BeforeValidator(size_in_bytes), Field(ge=0, le=_MAX_BYTES)] = Field(
        ByteSize(256 << 20), description="most bytes of encoded images that are kept", validate_default=False
    )
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
    return CliSettingsSource(
        ServeSettings,
        cli_parse_args=False,
        root_parser=parser,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        add_argument_method=_add_argument,
    )


def _add_argument(parser: "ArgumentParser | _ArgumentGroup", *names: str, **how: Any) -> None:
    """vLLM has a short form for one of its flags that cairn has, too."""
    add_argument(parser, *(("-q", *names) if how.get("dest") == "quantization" else names), **how)


def load_settings(parsed: Namespace, source: "CliSettingsSource[ServeSettings]") -> ServeSettings:
    """Settings from parsed flags, the environment, and the YAML file that either of them names.

    Raises ConfigError with one line that names the flag, variable or key that is wrong and says what it takes.
    """
    path = vars(parsed).get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    from_file = _read_file(Path(path)) if path else {}
    parsed = _with_model_and_keys(parsed, from_file)
    flags = {name: value for name, value in vars(parsed).items() if name in ServeSettings.model_fields}
    for name, value in flags.items():
        # An empty --api-key must not mean "no key"; the settings library would take the default.
        if value == "" or (name == "api_key" and "" in value):
            raise ConfigError(f"--{name.replace('_', '-')}: must not be empty; leave it out for the default, not ''")
    try:
        # mypy takes the constructor for a plain model's, which has fields alone.
        settings = ServeSettings(_cli_settings_source=source(parsed_args=parsed), **from_file)  # type: ignore[call-arg]
    except (ValidationError, SettingsError) as error:
        raise ConfigError(_describe(error, flags, path)) from None
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
            "MODEL is missing: all words behind --api-key are keys; name the checkpoint's folder before it, as in "
            "`cairn serve ./my-model --api-key KEY KEY`"
        )
    return Namespace(**vars(flatten_keys(parsed, without_last=True)) | {"model": word})


def _refuse_what_is_missing(settings: ServeSettings) -> None:
    if not settings.model:
        raise ConfigError("MODEL is missing: name the checkpoint's folder, as in `cairn serve ./my-model`")
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


def _describe(error: ValidationError | SettingsError, flags: Mapping[str, Any], path: str | None) -> str:
    if isinstance(error, SettingsError):
        return str(error)
    first = error.errors()[0]
    name = str(first["loc"][0])
    flag = "MODEL" if name == "model" else "--" + name.replace("_", "-")
    variable = ENV_PREFIX + name.upper()
    if name in flags:
        where = flag
    elif variable in os.environ:
        where = f"{variable} ({flag})"
    else:
        where = f"{path}: {name} ({flag})"
    message = first["msg"].removeprefix("Input ")
    given = flags.get(name, os.environ.get(variable, first.get("input")))
    return f"{where}: {message}" if name == "api_key" else f"{where}: {message}, not {str(given)[:80]!r}"
