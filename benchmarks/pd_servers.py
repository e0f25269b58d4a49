"""A prefill server, a decode server and a proxy as processes of their own: what the P/D benchmarks share.

They are started as anybody would start them, and spoken to over HTTP.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from benchmarks.reporting import as_json, circumstances, make_console
from demo.client import counter_total
from demo.server import START_SECONDS, Child, running, serve_command

__all__ = [
    "SECONDS",
    "TRANSFER_FLAGS",
    "Pair",
    "as_json",
    "circumstances",
    "make_console",
    "metric",
    "pair",
    "random_prompt",
]

TRANSFER_FLAGS = ("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}')
ANY_PORT = {"VLLM_NIXL_SIDE_CHANNEL_PORT": "0"}
SECONDS = 300.0
FIRST_TOKEN = 20


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill server, decode server, and the proxy in front of both, if there is one."""

    prefill: Child
    decode: Child
    proxy: Child | None = None


@contextmanager
def pair(
    model: Path,
    flags: Sequence[str],
    logs: Path,
    *,
    with_proxy: bool,
    command_of: Callable[..., list[str]] = serve_command,
    decode_flags: Sequence[str] | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[Pair]:
    """Two servers on `model` with the same flags; all are stopped at the end. Raises DemoError that names the log.
    `command_of`: makes a server's command line of model and flags. `decode_flags`: instead of `flags`, for a decode
    server that starts when the prefill server has what it wants of the GPU that they share."""
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        own = {"p": flags, "d": flags if decode_flags is None else decode_flags}
        starting = [
            running(command_of(model, *each), logs / f"{name}.log", ANY_PORT, start_seconds)
            for name, each in own.items()
        ]
        if decode_flags is None:
            with ThreadPoolExecutor() as both:
                servers = list(both.map(stack.enter_context, starting))
        else:
            servers = [stack.enter_context(each) for each in starting]
        proxy = None
        if with_proxy:
            command = [sys.executable, "-m", "cairn", "proxy", "--port", "0"]
            command += ["--prefill", servers[0].url, "--decode", servers[1].url]
            proxy = stack.enter_context(running(command, logs / "proxy.log"))
        yield Pair(servers[0], servers[1], proxy)


def metric(http: httpx.Client, server: Child, name: str) -> float:
    """A counter or gauge of the server's /metrics, summed over its labels."""
    return counter_total(http.get(f"{server.url}/metrics").raise_for_status().text, name)


def random_prompt(rng: random.Random, length: int, vocabulary: int = 4_000) -> list[int]:
    """Token ids that share nothing with any other prompt's."""
    return [rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(length)]
