"""`cairn serve` and `cairn proxy` as child processes: started, waited for, and always stopped."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx

from cairn.cpu_isa import VARIABLE as MAX_CPU_ISA

__all__ = ["Child", "DemoError", "own_environment", "running", "serve_command", "serving"]

START_SECONDS = 180.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.05
ADDRESS = re.compile(r"(?:serving .*|proxy) on (http://\S+:\d+)")
LOG_TAIL = 2_000
POOL = "1GiB"
NOTHING: Mapping[str, str] = MappingProxyType({})


class DemoError(Exception):
    """The demo cannot go on: a server did not start or refused a request, or sources are missing."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process that answers at `url`."""

    url: str
    process: "subprocess.Popen[bytes]"

    def kill(self) -> None:
        """End it without a word, as a machine that fails does."""
        self.process.kill()
        self.process.wait()


def serve_command(model: Path, *flags: str) -> list[str]:
    """The command line of a server on a free port of the loopback, with the same pool on every machine."""
    command = [sys.executable, "-m", "cairn", "serve", str(model), "--host", "127.0.0.1", "--port", "0"]
    return [*command, "--kv-cache-memory-bytes", POOL, *flags]


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the settings that a person may have made for servers of their own. What the processor may use
    stays: the variables of libraries that follow from it are inherited as well."""
    return {name: value for name, value in environ.items() if name == MAX_CPU_ISA or not name.startswith("CAIRN_")}


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def serving(command: Sequence[str], log: Path, start_seconds: float = START_SECONDS) -> Iterator[str]:
    """`running`, of which only the URL is needed."""
    with running(command, log, start_seconds=start_seconds) as child:
        yield child.url


@contextmanager
def running(
    command: Sequence[str], log: Path, variables: Mapping[str, str] = NOTHING, start_seconds: float = START_SECONDS
) -> Iterator[Child]:
    """Run `command` with `variables` set, and give it once it is healthy; what it says goes to the file `log`.

    Raises DemoError that names the log when it ends or is not healthy within `start_seconds`.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**own_environment(os.environ), **variables},
        )
    try:
        yield Child(_when_healthy(process, log, time.monotonic() + start_seconds), process)
    finally:
        _stop(process)


def _when_healthy(process: "subprocess.Popen[bytes]", log: Path, deadline: float) -> str:
    while True:
        if process.poll() is not None:
            raise DemoError(f"the server ended with exit code {process.returncode}:\n{_tail(log)}\n(log: {log})")
        address = ADDRESS.search(log.read_text(errors="replace"))
        if address is not None and _healthy(address.group(1)):
            return address.group(1)
        if time.monotonic() > deadline:
            raise DemoError(f"the server was not healthy in time:\n{_tail(log)}\n(log: {log})")
        time.sleep(POLL_SECONDS)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:].strip()
