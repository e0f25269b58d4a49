"""`cairn serve` and `cairn proxy` from their settings to their exit codes."""

import asyncio
import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cairn.cpu_isa import max_cpu_isa
from cairn.errors import ConfigError, ModelError
from cairn.http.tls import check_tls
from cairn.paths import read_secret_file
from cairn.setting_types import SERVED_DTYPES
from cairn.settings.images import image_limit, media_domains
from cairn.settings.sources import warn_of_service_links

if TYPE_CHECKING:
    from cairn.check.report import CheckReport
    from cairn.engine.client import CoreClient
    from cairn.engine.contract import (
        EngineConfig,
        KvEventsConfig,
        KvTransferConfig,
        RequestLogConfig,
        TemplateValue,
        TextTokenizer,
    )
    from cairn.proxy.app import ProxyServer
    from cairn.server.options import ImageOptions, ServerLimits
    from cairn.server.run import HttpServer
    from cairn.settings.proxy import ProxySettings
    from cairn.settings.serve import ServeSettings

LoadTokenizer: TypeAlias = "Callable[[str, str | None, str | None], TextTokenizer]"
"""By the checkpoint's folder, another tokenizer's folder, and a chat template instead of its own."""

_SHOWN = 80

logger = logging.getLogger("cairn.cli")


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """What a server is built from: `create_engine` makes the client of an engine that has not been started."""

    create_engine: "Callable[[], CoreClient]"
    limits: "ServerLimits"
    default_sampling: Mapping[str, float]
    default_template_kwargs: "Mapping[str, TemplateValue]"
    secret: bytes | None


def prepare_server(
    settings: "ServeSettings",
    core: str,
    load_tokenizer: LoadTokenizer,
    find_model: "Callable[[ServeSettings], str]",
) -> ServerSetup:
    """Check the settings, and find the checkpoint, which may download it. Raises ConfigError or DownloadError."""
    from cairn.engine.client import CoreClient, EngineDeadlines
    from cairn.engine.cpu_threads import choose_cpu_threads
    from cairn.engine.process import ProcessTransport
    from cairn.models.checkpoint_dtypes import check_checkpoint_dtype
    from cairn.models.state_dtypes import check_state_dtype
    from cairn.server.generation_config import check_default_sampling, load_default_sampling
    from cairn.server.openai.prompts import parse_template_kwargs
    from cairn.server.options import ServerLimits

    # what is wrong is said before anything is downloaded
    chat_template = read_chat_template(settings.chat_template)
    template_kwargs = parse_template_kwargs(settings.default_chat_template_kwargs)
    asked, images = engine_config(settings), image_options(settings)
    secret = None if settings.kv_secret_file is None else read_secret_file(settings.kv_secret_file)
    check_checkpoint_dtype(asked.checkpoint_dtype, asked.exact)
    check_state_dtype(asked.mamba_ssm_cache_dtype, asked.exact)
    max_cpu_isa(os.environ)
    source, overrides = settings.generation_config, settings.override_generation_config
    check_default_sampling(source, overrides)
    check_outlets(asked)
    num_threads = choose_cpu_threads(settings.cpu_threads, settings.tensor_parallel_size, os.environ)
    # huggingface_hub's, a line per request
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    config = asked.model_copy(update={"model": find_model(settings), "tokenizer": _find_tokenizer(settings)})
    defaults = load_default_sampling(source, overrides, Path(config.model))

    def create_engine() -> CoreClient:
        return CoreClient(
            ProcessTransport(config, core=core, threads=num_threads),
            lambda: load_tokenizer(config.model, config.tokenizer, chat_template),
            EngineDeadlines(start=settings.start_timeout),
        )

    return ServerSetup(create_engine, ServerLimits(images=images), defaults, template_kwargs, secret)


def run_server(
    settings: "ServeSettings",
    core: str,
    load_tokenizer: LoadTokenizer,
    find_model: "Callable[[ServeSettings], str]",
) -> int:
    from cairn.http.web_server import create_server_socket, parse_trusted_proxies, raise_descriptor_limit
    from cairn.server.run import HttpServer, tls_options

    start_log(settings.log_level)
    raise_descriptor_limit()
    warn(settings)
    warn_of_service_links(settings)
    parse_trusted_proxies(settings.forwarded_allow_ips)
    create_server_socket(settings.host, settings.port).close()
    check_tls(tls_options(settings))
    setup = prepare_server(settings, core, load_tokenizer, find_model)

    async def run() -> int:
        server = HttpServer(
            setup.create_engine(),
            settings,
            setup.limits,
            default_sampling=setup.default_sampling,
            default_template_kwargs=setup.default_template_kwargs,
            secret=setup.secret,
        )
        return await _until_drained(server)

    return asyncio.run(run())


def run_proxy(settings: "ProxySettings") -> int:
    from cairn.http.web_server import raise_descriptor_limit
    from cairn.proxy.app import ProxyServer

    start_log(settings.log_level)
    raise_descriptor_limit()
    warn_of_service_links(settings)
    # Two lines per forwarded request are the proxy's own metrics, told worse.
    logging.getLogger("httpx").setLevel(logging.WARNING)

    async def run() -> int:
        return await _until_drained(ProxyServer(settings))

    return asyncio.run(run())


def run_generation_check(report: "CheckReport", output: Path | None, core: str, load_tokenizer: LoadTokenizer) -> int:
    """Answer prompts with the checkpoint that was looked at, compare with transformers, show it, and write it to
    `output` as JSON. Returns 0 if it is the same model, else 1. Raises as `check_generation`."""
    from rich.console import Console

    from cairn.check.generation import MAX_TEXT_TOKENS, MAX_TOKENS, check_generation, render_generation
    from cairn.engine.client import CoreClient
    from cairn.engine.contract import EngineConfig
    from cairn.engine.cpu_threads import choose_cpu_threads
    from cairn.engine.process import ProcessTransport

    asked = report.settings
    sizes: dict[str, Any] = {
        "model": str(report.folder),
        "dtype": asked.dtype,
        "quantization": asked.quantization,
        "block_size": asked.block_size,
        "kv_cache_memory_bytes": asked.kv_cache_memory_bytes,
        "max_model_len": min(report.max_model_len, 2 * (MAX_TEXT_TOKENS + MAX_TOKENS)),
        "max_num_seqs": 1,
        "language_model_only": True,
        "device": "cpu",
    }
    config = EngineConfig(**sizes)
    transport = ProcessTransport(config, core=core, threads=choose_cpu_threads(None, 1, os.environ))
    engine = CoreClient(transport, lambda: load_tokenizer(config.model, None, None))
    console = Console()
    generation_report = check_generation(report.folder, report.dtype, asked.quantization, engine, console)
    console.print(render_generation(generation_report))
    if output is not None:
        text = json.dumps(generation_report.as_json(), indent=2, ensure_ascii=False) + "\n"
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error
    return 1 if generation_report.problems else 0


def start_log(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


async def _until_drained(server: "HttpServer | ProxyServer") -> int:
    """Serve until a signal asks for the end; returns the exit code."""
    from cairn.engine.child_process import freeze_heap

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.drain)
    return await server.run(lambda port: freeze_heap())


def warn(settings: "ServeSettings") -> None:
    """Say what was asked for and has no effect."""
    if settings.without_effect:
        logger.info("without effect here (docs/flags.md says why): %s", ", ".join(settings.without_effect))
    if settings.dtype in ("half", "float16"):
        logger.warning(
            "--dtype %s is served as bfloat16: as many bytes, nothing overflows, 3 bits less", settings.dtype
        )
    if settings.kv_transfer_config is None and "kv_peer_allowlist" in settings.model_fields_set:
        logger.warning("--kv-peer-allowlist has no effect without --kv-transfer-config")
    if settings.kv_transfer_config is not None and settings.kv_peer_allowlist and settings.kv_secret_file is None:
        logger.warning("--kv-peer-allowlist has no effect without --kv-secret-file: only loopback peers are allowed")


def find_served_model(settings: "ServeSettings") -> str:
    """The checkpoint's folder. Raises ConfigError or DownloadError."""
    from cairn.models.weights.hub import ModelSource, find_checkpoint

    return str(find_checkpoint(ModelSource(settings.model, settings.revision, settings.download_dir)))


def _find_tokenizer(settings: "ServeSettings") -> str | None:
    """The folder of --tokenizer; None without one. Raises as `find_served_model`."""
    if settings.tokenizer is None:
        return None
    from cairn.models.weights.hub import ModelSource, find_tokenizer

    source = ModelSource(settings.tokenizer, settings.tokenizer_revision, settings.download_dir, "--tokenizer")
    path = find_tokenizer(source)
    return str(path.parent if path.is_file() else path)


def check_outlets(config: "EngineConfig") -> None:
    """Raises ConfigError for a file that the engine could not write, and for an address that it could not listen on:
    it would find out only when the model is loaded. Nothing there is changed."""
    if config.request_log is not None:
        from cairn.engine.request_log.file import check_log_file

        check_log_file(Path(config.request_log.path))
    if config.kv_events is not None:
        from cairn.engine.event_publisher import check_endpoints

        check_endpoints(config.kv_events)
    if config.disk_cache is not None:
        from cairn.engine.tiers import check_disk_cache

        check_disk_cache(config)
    if config.kv_transfer is not None:
        from cairn.engine.transfers.side_channel import create_listener

        create_listener(config.kv_transfer.host, config.kv_transfer.port).close()


def read_chat_template(given: str | None) -> str | None:
    """The template that --chat-template names or is. Raises ConfigError for a file that is none, and for what is no
    template."""
    from jinja2 import TemplateError

    from cairn.engine.text.chat_template import find_variables

    if given is None:
        return None
    try:
        template = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if not any(sign in given for sign in "{}\n"):
            reason = error.strerror if isinstance(error, OSError) else "no text"
            raise ConfigError(f"--chat-template {given[:_SHOWN]}: this file cannot be read: {reason}") from None
        template = given
    try:
        find_variables(template)
    except (TemplateError, RecursionError) as error:
        raise ConfigError(f"--chat-template: is no Jinja template: {error}") from None
    return template


def load_model_tokenizer(folder: str, tokenizer: str | None, chat_template: str | None) -> "TextTokenizer":
    """A checkpoint's own, or what stands in for it. Raises ModelError."""
    from cairn.engine.text.tokenizer import ModelTokenizer
    from cairn.models.weights.gguf.header import is_gguf

    # The tokenizer is loaded before the model has been looked at, and would complain of a file too deep.
    if not is_gguf(Path(folder)) and not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{folder}: no checkpoint's folder: there is no config.json in it")
    return ModelTokenizer(Path(folder), None if tokenizer is None else Path(tokenizer), chat_template)


# -- from settings to what each room takes -----------------------------------------------------------------------------


def engine_config(settings: "ServeSettings") -> "EngineConfig":
    """The settings that the engine is built with, under the same names; those that are JSON are read."""
    from cairn.engine.contract import EngineConfig, EngineOptions
    from cairn.settings.speculation import speculative_config

    more: dict[str, Any] = {
        "model": settings.model,
        "dtype": SERVED_DTYPES.get(settings.dtype, settings.dtype),
        "language_model_only": image_options(settings).limit == 0,
        "kv_events": _kv_events(settings),
        "kv_transfer": _kv_transfer(settings),
        "request_log": _request_log(settings),
        # the core's process may have another working directory
        "disk_cache": None if settings.disk_cache is None else settings.disk_cache.absolute(),
        "speculative": speculative_config(settings.speculative_config),
    }
    return EngineConfig(**{name: getattr(settings, name) for name in EngineOptions.model_fields} | more)


def _kv_events(settings: "ServeSettings") -> "KvEventsConfig | None":
    from cairn.engine.contract import KvEventsConfig
    from cairn.settings.kv import kv_events_settings

    asked = kv_events_settings(settings.kv_events_config)
    if asked is None:
        return None
    return KvEventsConfig(**asked.model_dump(exclude={"enable_kv_cache_events", "publisher"}))


def _request_log(settings: "ServeSettings") -> "RequestLogConfig | None":
    from cairn.engine.contract import RequestLogConfig

    if settings.request_log is None:
        return None
    return RequestLogConfig(path=str(settings.request_log.absolute()), max_bytes=int(settings.request_log_bytes))


def _kv_transfer(settings: "ServeSettings") -> "KvTransferConfig | None":
    from cairn.engine.contract import KvTransferConfig
    from cairn.settings.kv import kv_transfer_settings, peer_names, side_channel
    from cairn.transfer.peers import PeerPolicy

    asked = kv_transfer_settings(settings.kv_transfer_config)
    secret, peers = settings.kv_secret_file, peer_names(settings.kv_peer_allowlist)
    # looked at without transfers, too: a mistake is found where it is made, not when they are switched on
    PeerPolicy(peers, has_secret=secret is not None)
    if secret is not None:
        read_secret_file(secret)
    if asked is None:
        return None
    host, port = side_channel()
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError("--kv-transfer-config: needs NIXL, which is not installed: pip install 'cairn-serve[nixl]'")
    return KvTransferConfig(
        host=host,
        port=port,
        secret_file=None if secret is None else str(secret),
        peers=peers,
        on_failure=asked.kv_load_failure_policy,
        **asked.kv_connector_extra_config.model_dump(exclude={"backends"}),
    )


def image_options(settings: "ServeSettings") -> "ImageOptions":
    from cairn.server.options import ImageOptions

    limit = image_limit(settings.limit_mm_per_prompt)
    return ImageOptions(
        limit=0 if settings.language_model_only else limit,
        domains=media_domains(settings.allowed_media_domains),
        max_bytes=int(settings.max_image_bytes),
        max_pixels=settings.max_image_pixels,
        fetch_seconds=settings.image_fetch_timeout,
    )
