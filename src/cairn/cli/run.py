"""`cairn serve` and `cairn proxy` from their settings to their exit codes."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.cli.configure import engine_config, proxy_options, server_options
from cairn.errors import ModelError

if TYPE_CHECKING:
    from cairn.engine.contract import TextTokenizer
    from cairn.proxy.run import ProxyServer
    from cairn.proxy_settings import ProxySettings
    from cairn.server.run import HttpServer
    from cairn.settings import ServeSettings

logger = logging.getLogger("cairn.cli")


def run_server(settings: "ServeSettings", core: str, load_tokenizer: "Callable[[str], TextTokenizer]") -> int:
    from cairn.engine.client import CoreClient, EngineDeadlines
    from cairn.engine.process import ProcessTransport
    from cairn.engine.sizing import choose_cpu_threads
    from cairn.http.listening import raise_descriptor_limit
    from cairn.server.run import HttpServer

    _start_log(settings.log_level)
    raise_descriptor_limit()
    warn(settings)
    num_threads = choose_cpu_threads(settings.cpu_threads, settings.tensor_parallel_size, os.environ)

    async def run() -> int:
        config = engine_config(settings)
        engine = CoreClient(
            ProcessTransport(config, core=core, threads=num_threads),
            lambda: load_tokenizer(config.model),
            EngineDeadlines(start=settings.start_timeout),
        )
        return await _until_drained(HttpServer(engine, server_options(settings)))

    return asyncio.run(run())


def run_proxy(settings: "ProxySettings") -> int:
    from cairn.http.listening import raise_descriptor_limit
    from cairn.proxy.run import ProxyServer

    _start_log(settings.log_level)
    raise_descriptor_limit()
    # Two lines per forwarded request are the proxy's own metrics, told worse.
    logging.getLogger("httpx").setLevel(logging.WARNING)

    async def run() -> int:
        return await _until_drained(ProxyServer(proxy_options(settings)))

    return asyncio.run(run())


def _start_log(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


async def _until_drained(server: "HttpServer | ProxyServer") -> int:
    """Serve until a signal asks for the end; returns the exit code."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.drain)
    return await server.run()


def warn(settings: "ServeSettings") -> None:
    """Say what was asked for and has no effect."""
    if settings.trust_remote_code:
        logger.warning("--trust-remote-code is ignored: code that comes with a checkpoint is never run")
    for name in ("gpu_memory_utilization", "enforce_eager"):
        if name in settings.model_fields_set:
            logger.info("--%s has no effect: see `cairn serve --help`", name.replace("_", "-"))
    for name in ("kv_secret_file", "kv_peer_allowlist"):
        if settings.kv_transfer_config is None and name in settings.model_fields_set:
            logger.warning("--%s has no effect without --kv-transfer-config", name.replace("_", "-"))
    if settings.kv_transfer_config is not None and settings.kv_peer_allowlist and settings.kv_secret_file is None:
        logger.warning("--kv-peer-allowlist has no effect without --kv-secret-file: only loopback peers are allowed")


def load_model_tokenizer(folder: str) -> "TextTokenizer":
    """A checkpoint's own. Raises ModelError."""
    from cairn.engine.text.tokenizer import ModelTokenizer

    # The tokenizer is loaded before the model has been looked at, and would complain of a file too deep.
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{folder}: no checkpoint's folder: there is no config.json in it; models are not downloaded")
    return ModelTokenizer(Path(folder))
