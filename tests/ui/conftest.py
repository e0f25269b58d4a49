"""A headless Chromium of the system's, and servers for it to look at. Run by `make test-ui` only."""

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest
from tree_core import TreeCore

from cairn.engine.contract import EngineConfig
from cairn.server.options import ServerOptions
from cairn.server.run import HttpServer
from doubles.byte_tokenizer import ByteTokenizer
from doubles.local_engine import LocalEngine

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Watched:
    """A server in a thread, around a core whose cache has so many nodes."""

    def __init__(self, num_nodes=2000, **options):
        self.core = None
        self._ready = threading.Event()
        self._nodes = num_nodes
        self._options = ServerOptions(**{"model": "nemotron-3-nano", "port": 0} | options)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60), "the server did not start"
        self.url = f"http://127.0.0.1:{self.port}"

    async def _run(self):
        def build(config):
            self.core = TreeCore(config, self._nodes)
            return self.core

        self._loop = asyncio.get_running_loop()
        self._server = HttpServer(LocalEngine(EngineConfig(model="echo"), build, ByteTokenizer()), self._options)
        await self._server.run(self._on_ready)

    def _on_ready(self, port):
        self.port = port
        self._ready.set()

    def end(self):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.drain)
            self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not end"


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "no Chromium here: install Debian's chromium, or name one in $CHROMIUM"
    with sync_playwright() as playwright:
        # a browser that root starts has no sandbox of its own
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=list(FLAGS), chromium_sandbox=os.geteuid() != 0
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def watched():
    """One server for the tests that leave it as it is."""
    server = Watched()
    yield server
    server.end()


@pytest.fixture
def watch():
    servers = []

    def start(**options):
        servers.append(Watched(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


class Visitor:
    """A page, with all that its console said and all that it asked for."""

    def __init__(self, context, url):
        self.errors, self.asked = [], []
        self.page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on(
            "console", lambda line: self.errors.append(line.text) if line.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.url = url
        self.page.goto(f"{url}/cache/ui")

    def _hear(self, line):
        if line.type in ("error", "warning"):
            self.errors.append(line.text)

    def strangers(self):
        """What was asked of anybody but the server."""
        return [url for url in self.asked if not url.startswith((self.url + "/cache", "data:"))]


@pytest.fixture
def visit(browser):
    contexts = []

    def open_page(server, width=1180, height=900, scheme="light", **options):
        contexts.append(
            browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
        )
        return Visitor(contexts[-1], server.url)

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def picture():
    """Where screenshots go."""
    folder = Path("build/ui")
    folder.mkdir(parents=True, exist_ok=True)
    return lambda name: str(folder / f"{name}.png")
