"""The command `cairn`. Exit codes: 0 done, 1 it went wrong while running, 2 it was asked for something wrong.

Heavy imports wait until their command is chosen: `cairn --help` needs neither torch nor the web framework.
"""

import argparse
import asyncio
import importlib.util
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cairn import __version__
from cairn.errors import CairnError, ConfigError, ModelError

if TYPE_CHECKING:
    from pydantic_settings import CliSettingsSource

    from cairn.engine.contract import EngineConfig, KvEventsConfig, KvTransferConfig, RequestLogConfig, TextTokenizer
    from cairn.proxy.options import ProxyOptions
    from cairn.proxy.run import ProxyServer
    from cairn.proxy_settings import ProxySettings
    from cairn.server.options import ImageOptions, ServerOptions
    from cairn.server.run import HttpServer
    from cairn.settings import ServeSettings

__all__ = ["engine_config", "main", "proxy_options", "server_options"]

# Written out: to import them would load torch for every --help.
_MADE_FAMILIES = "nemotron_h, qwen3_5, qwen3_5_moe, qwen3_5_vl, granitemoehybrid, falcon_h1, lfm2, qwen3"

logger = logging.getLogger("cairn.cli")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without repeating all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def main(
    arguments: Sequence[str] | None = None,
    *,
    core: str = "cairn.engine.build:build_core",
    load_tokenizer: "Callable[[str], TextTokenizer] | None" = None,
) -> int:
    """Run one command and return its exit code. `core` and `load_tokenizer` replace the engine that `serve` runs."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser, serve, proxy, replay, bench = _parser()
    source: CliSettingsSource[ServeSettings] | None = None
    proxy_source: CliSettingsSource[ProxySettings] | None = None
    if arguments[:1] == ["serve"]:
        from cairn.settings import add_flags

        source = add_flags(serve)
    if arguments[:1] == ["proxy"]:
        from cairn.proxy_settings import add_proxy_flags

        proxy_source = add_proxy_flags(proxy)
    if arguments[:1] == ["replay"]:
        from cairn.replay.command import add_replay_flags

        add_replay_flags(replay)
    if arguments[:1] == ["bench"]:
        from cairn.bench.command import add_bench_flags

        add_bench_flags(bench)
    try:
        parsed = parser.parse_args(arguments)
        if parsed.command == "make-model":
            return _make_model(parsed)
        if parsed.command == "check":
            return _check(parsed)
        if parsed.command == "replay":
            from cairn.replay.command import run_replay

            return run_replay(parsed)
        if parsed.command == "bench":
            from cairn.bench.command import run_bench

            return run_bench(parsed)
        if parsed.command == "proxy":
            assert proxy_source is not None
            from cairn.proxy_settings import load_proxy_settings

            return _proxy(load_proxy_settings(parsed, proxy_source))
        assert source is not None
        from cairn.settings import load_settings

        return _serve(load_settings(parsed, source), core, load_tokenizer or _load_tokenizer)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except ConfigError as error:
        print(f"cairn: {error}", file=sys.stderr)
        return 2
    except CairnError as error:
        print(f"cairn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> tuple[argparse.ArgumentParser, ...]:
    """The whole one, and those of serve, proxy, replay and bench, which get their flags only when asked for."""
    parser = _Parser(prog="cairn", description="A serving engine for hybrid language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cairn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a checkpoint over HTTP",
        description="Serve a checkpoint over HTTP, with OpenAI's API. Every flag can also be an environment variable "
        "(CAIRN_MAX_NUM_SEQS=8) or a line of the --config file (max-num-seqs: 8); a flag wins over a variable, and a "
        "variable over the file.",
        allow_abbrev=False,
    )
    proxy = commands.add_parser(
        "proxy",
        help="put prefill and decode servers behind one address",
        description="Have prompts computed by prefill servers and answered by decode servers, behind one address. "
        "Every flag can also be an environment variable (CAIRN_PROXY_DECODE=http://a:8200,http://b:8200).",
        allow_abbrev=False,
    )
    make = commands.add_parser("make-model", help="write a random-weight checkpoint", allow_abbrev=False)
    make.add_argument("family", metavar="FAMILY", help=f"model family: {_MADE_FAMILIES}")
    make.add_argument("out", metavar="OUT", type=Path, help="folder to write, new or empty")
    make.add_argument("--size", choices=("tiny", "small"), default="tiny", help="default: %(default)s")
    make.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes; default: %(default)s")
    make.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    check = commands.add_parser(
        "check", help="account for a checkpoint's tensors and say what serving it takes", allow_abbrev=False
    )
    check.add_argument("model", metavar="MODEL", type=Path, help="folder of the checkpoint")
    check.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: %(default)s")
    check.add_argument("--block-size", type=_count, default=16, help="tokens per page; default: %(default)s")
    check.add_argument("--kv-cache-memory-bytes", type=_size, default="1GiB", help="the pool; default: %(default)s")
    check.add_argument("--max-model-len", type=_count, help="longest prompt and answer; default: the model's")
    check.add_argument("--max-num-seqs", type=_count, default=8, help="requests at once; default: %(default)s")
    replay = commands.add_parser("replay", help="run a request trace through the cache", allow_abbrev=False)
    bench = commands.add_parser("bench", help="measure a server, or compare two measurements", allow_abbrev=False)
    return parser, serve, proxy, replay, bench


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1 << 24:
        raise argparse.ArgumentTypeError(f"must be between 1 and {1 << 24}, not {text}")
    return number


def _size(text: str) -> int:
    from cairn.settings import parse_size

    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _make_model(parsed: argparse.Namespace) -> int:
    from cairn.models.make_model import make_model

    make_model(parsed.family, parsed.out, size=parsed.size, seed=parsed.seed, dtype=parsed.dtype, show=True)
    return 0


def _check(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from cairn.models.check import CheckSettings, check, render

    settings = CheckSettings(
        dtype=parsed.dtype,
        block_size=parsed.block_size,
        kv_cache_memory_bytes=parsed.kv_cache_memory_bytes,
        max_model_len=parsed.max_model_len,
        max_num_seqs=parsed.max_num_seqs,
    )
    report = check(parsed.model, settings)
    Console().print(render(report))
    return 0 if report.ok else 1


def engine_config(settings: "ServeSettings") -> "EngineConfig":
    from cairn.engine.contract import EngineConfig

    return EngineConfig(
        model=settings.model,
        dtype=settings.dtype,
        block_size=settings.block_size,
        kv_cache_memory_bytes=int(settings.kv_cache_memory_bytes),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_waiting=settings.max_waiting,
        enable_prefix_caching=settings.enable_prefix_caching,
        in_flight_sharing=settings.in_flight_sharing,
        mamba_cache_mode=settings.mamba_cache_mode,
        eviction=settings.eviction,
        exact=settings.exact,
        seed=settings.seed,
        kv_events=_kv_events(settings),
        kv_transfer=_kv_transfer(settings),
        request_log=_request_log(settings),
        tensor_parallel_size=settings.tensor_parallel_size,
        language_model_only=_image_options(settings).limit == 0,
        mm_encoder_cache_bytes=int(settings.mm_encoder_cache_bytes),
    )


def _kv_events(settings: "ServeSettings") -> "KvEventsConfig | None":
    from cairn.engine.contract import KvEventsConfig
    from cairn.kv_settings import kv_events_settings

    asked = kv_events_settings(settings.kv_events_config)
    if asked is None:
        return None
    return KvEventsConfig(**asked.model_dump(exclude={"enable_kv_cache_events", "publisher"}))


def _request_log(settings: "ServeSettings") -> "RequestLogConfig | None":
    from cairn.engine.contract import RequestLogConfig

    if settings.request_log is None:
        return None
    # the core's process may have another working directory
    return RequestLogConfig(path=str(settings.request_log.absolute()), max_bytes=int(settings.request_log_bytes))


def _kv_transfer(settings: "ServeSettings") -> "KvTransferConfig | None":
    from cairn.engine.contract import KvTransferConfig
    from cairn.kv_settings import check_secret_file, kv_transfer_settings, peer_names, side_channel
    from cairn.transfer.peers import PeerPolicy, is_loopback

    asked = kv_transfer_settings(settings.kv_transfer_config)
    if asked is None:
        return None
    channel, secret, peers = side_channel(), settings.kv_secret_file, peer_names(settings.kv_peer_allowlist)
    PeerPolicy(peers, has_secret=secret is not None)
    if secret is not None:
        check_secret_file(secret)
    elif not is_loopback(channel.host):
        raise ConfigError(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST: {channel.host} is not loopback, and whoever may connect can read and write "
            "this server's memory: give all servers the same --kv-secret-file"
        )
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError("--kv-transfer-config: needs NIXL, which is not installed: pip install 'cairn-serve[nixl]'")
    return KvTransferConfig(
        host=channel.host,
        port=channel.port,
        secret_file=None if secret is None else str(secret),
        peers=peers,
        on_failure=asked.kv_load_failure_policy,
        lease_seconds=asked.kv_connector_extra_config.lease_seconds,
        lease_share=asked.kv_connector_extra_config.lease_share,
    )


def _image_options(settings: "ServeSettings") -> "ImageOptions":
    from cairn.image_settings import image_limit, media_domains
    from cairn.server.options import ImageOptions

    limit = image_limit(settings.limit_mm_per_prompt)
    return ImageOptions(
        limit=0 if settings.language_model_only else limit,
        domains=media_domains(settings.allowed_media_domains),
        max_bytes=int(settings.max_image_bytes),
        max_pixels=settings.max_image_pixels,
        fetch_seconds=settings.image_fetch_timeout,
    )


def server_options(settings: "ServeSettings") -> "ServerOptions":
    from cairn.server.options import ServerOptions

    return ServerOptions(
        model_name=settings.served_model_name or settings.model,
        version=__version__,
        host=settings.host,
        port=settings.port,
        api_keys=tuple(settings.api_key or ()),
        max_open=settings.max_num_seqs + settings.max_waiting,
        max_body_bytes=int(settings.max_body_bytes),
        request_seconds=settings.request_timeout,
        shutdown_seconds=settings.shutdown_timeout,
        images=_image_options(settings),
        enable_auto_tool_choice=settings.enable_auto_tool_choice,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )


def _serve(settings: "ServeSettings", core: str, load_tokenizer: "Callable[[str], TextTokenizer]") -> int:
    from cairn.engine.client import EngineDeadlines
    from cairn.engine.process import ProcessEngine
    from cairn.server.run import HttpServer

    _start_log(settings.log_level)
    _warn(settings)

    async def run() -> int:
        engine = ProcessEngine(
            engine_config(settings),
            load_tokenizer,
            core=core,
            threads=settings.cpu_threads,
            deadlines=EngineDeadlines(start=settings.start_timeout),
        )
        return await _until_drained(HttpServer(engine, server_options(settings)))

    return asyncio.run(run())


def proxy_options(settings: "ProxySettings") -> "ProxyOptions":
    from cairn.proxy.options import ProxyOptions

    return ProxyOptions(
        prefill=tuple(settings.prefill),
        decode=tuple(settings.decode),
        version=__version__,
        host=settings.host,
        port=settings.port,
        api_key=settings.api_key,
        max_open=settings.max_open,
        max_body_bytes=int(settings.max_body_bytes),
        max_attempts=settings.max_attempts,
        connect_seconds=settings.connect_timeout,
        prefill_seconds=settings.prefill_timeout,
        stall_seconds=settings.stall_timeout,
        request_seconds=settings.request_timeout,
        shutdown_seconds=settings.shutdown_timeout,
        health_seconds=settings.health_interval,
        health_timeout_seconds=settings.health_timeout,
        affinity_bytes=settings.affinity_bytes,
        load_factor=settings.load_factor,
        load_slack=settings.load_slack,
        max_hints=settings.max_hints,
        hint_seconds=settings.hint_timeout,
    )


def _proxy(settings: "ProxySettings") -> int:
    from cairn.proxy.run import ProxyServer

    _start_log(settings.log_level)
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


def _warn(settings: "ServeSettings") -> None:
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


def _load_tokenizer(folder: str) -> "TextTokenizer":
    from cairn.engine.tokenizer import ModelTokenizer

    # The tokenizer is loaded before the model has been looked at, and would complain of a file too deep.
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{folder}: no checkpoint's folder: there is no config.json in it; models are not downloaded")
    return ModelTokenizer(Path(folder))
