"""Starts of `cairn serve` with NIXL, one after another, as a stranger makes them. `make soak` plays them."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

_FLAGS = ("--dtype", "float32", "--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}')
_POOL = ("--kv-cache-memory-bytes", "3GiB")
"""It lies between libc and what is loaded later, which so is more than 2 GiB away, as beside any larger pool."""
_START_SECONDS = 300.0
_END_SECONDS = 60.0
_LOOK_SECONDS = 0.1


class StartFailed(Exception):
    """A server did not become healthy, or did not end well; the text has its log."""


class ServerStarts:
    """Starts servers of `model`, whose logs are in `folder`. They run in pairs: the second starts beside the first,
    then both are ended."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._running: list[_Server] = []

    def play(self, count: int, advance: Callable[[], object]) -> int:
        """`advance` is called after each start. Returns their number. Raises StartFailed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            for number in range(count):
                self._running.append(_Server(self._model, self._folder / f"start-{number}.log"))
                self._running[-1].wait_healthy()
                if number % 2 or number == count - 1:
                    while self._running:
                        self._running.pop(0).end()
                advance()
        finally:
            for server in self._running:
                server.kill()
            self._running.clear()
        return count


class _Server:
    def __init__(self, model: Path, log: Path) -> None:
        self._log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._health = f"http://127.0.0.1:{port}/health"
        command = [sys.executable, "-m", "cairn", "serve", str(model), "--port", str(port), *_FLAGS, *_POOL]
        environ = os.environ | {"VLLM_NIXL_SIDE_CHANNEL_PORT": "0"}
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environ)

    def wait_healthy(self) -> None:
        """Raises StartFailed."""
        until = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self._health, timeout=30).status_code == 200:
                    return
            time.sleep(_LOOK_SECONDS)
        code = self._process.poll()
        raise StartFailed(self._describe("is not healthy" if code is None else f"ended with {code}"))

    def end(self) -> None:
        """Raises StartFailed where it does not end, or not with 0."""
        self._process.terminate()
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise StartFailed(self._describe("did not end at SIGTERM")) from None
        if code:
            raise StartFailed(self._describe(f"ended with {code} at SIGTERM"))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _describe(self, what: str) -> str:
        return f"the server of {self._log} {what}:\n{self._log.read_text()[-8000:]}"
