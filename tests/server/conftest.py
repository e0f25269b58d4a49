"""A real server on a free loopback port, around the real core with a runner that echoes."""

import asyncio
import contextlib
import threading
import time
from types import MappingProxyType

import httpx
import openai
import pytest
import uvicorn

from cairn.engine.contract import EngineConfig, KvTransferConfig
from cairn.server.images import MediaConnector
from cairn.server.options import ServerLimits, ServerOptions
from cairn.server.run import HttpServer
from doubles.api_contract import ApiContract
from doubles.byte_tokenizer import ByteTokenizer
from doubles.echo_core import build_echo_core
from doubles.local_engine import LocalEngine
from server.asking import XML

START_SECONDS = 240
"""A real core's kernels are compiled first where no cache has them, beside all that else runs."""

CONTRACTS = {}
"""By the settings of a server, what its document says."""


class RunningServer:
    """HttpServer in a thread of its own. `core` is the EchoCore inside, `code` the exit code once it has ended.

    `requests`: all that the core has been asked, in order.
    """

    def __init__(
        self,
        options=None,
        tokenizer=None,
        images=MediaConnector,
        deadlines=None,
        build=build_echo_core,
        default_sampling=MappingProxyType({}),
        default_template_kwargs=MappingProxyType({}),
        **config,
    ):
        self.core = None
        self.requests = []
        self.code = None
        self.port = None
        self.contract = None
        self._config = EngineConfig(**({"model": "echo", "kv_cache_memory_bytes": 128 << 20} | config))
        limits = {name: value for name, value in (options or {}).items() if name in ServerLimits.__dataclass_fields__}
        options = {name: value for name, value in (options or {}).items() if name not in limits}
        self._options = ServerOptions(**{"model": "echo", "port": 0} | options)
        self._limits = ServerLimits(**limits)
        self._tokenizer = tokenizer or ByteTokenizer()
        self._images = images
        self._defaults = {"default_sampling": default_sampling, "default_template_kwargs": default_template_kwargs}
        self._deadlines = deadlines
        self._build = build
        self._http = httpx.Client(timeout=10, verify=False)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(START_SECONDS), "the server did not start"

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options):
        options = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 10} | options
        return openai.OpenAI(**options)

    def async_client(self, **options):
        options = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 10} | options
        return openai.AsyncOpenAI(**options)

    def post(self, path, json=None, **options):
        return self._request("POST", path, json=json, **options)

    def get(self, path, **options):
        return self._request("GET", path, **options)

    def _request(self, method, path, **options):
        """Whatever a test asks and is told, the server's own document has foreseen it."""
        if self.contract is None:  # asked before: afterwards the server may have ended
            key = self._options.model_dump_json(exclude={"port", "shutdown_timeout", "request_timeout"})
            if key not in CONTRACTS:  # a third of a second each
                document = self._http.get(self.url + "/openapi.json")
                CONTRACTS[key] = ApiContract(document.json()) if document.status_code == 200 else None
            self.contract = CONTRACTS[key]
        response = self._http.request(method, self.url + path, **options)
        if self.contract is not None:
            self.contract.check(response)
        return response

    def metric(self, line_start):
        """The sum of all samples whose line starts like this; None when there are none."""
        lines = self.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start)]
        return sum(values) if values else None

    def until(self, condition):
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it did not happen within 10 s"
            time.sleep(0.01)

    def assert_nothing_is_held(self):
        """Once no step is left to be made: the end of an answer may still be being cached when the client has it."""
        self.until(lambda: not self.core.has_work)
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.pool.held_pages, stats.pool.open_sequences) == (0, 0, 0, 0)

    def drain(self):
        if self.code is None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself meanwhile
                self._loop.call_soon_threadsafe(self._server.drain)

    def join(self):
        self._thread.join(15)
        self._http.close()
        assert not self._thread.is_alive(), "the server did not end"
        return self.code

    async def _run(self):
        def build(config):
            self.core = self._build(config)
            take = self.core.submit
            self.core.submit = lambda *requests: (self.requests.extend(requests), take(*requests))[1]
            return self.core

        self._loop = asyncio.get_running_loop()
        engine = LocalEngine(self._config, build, self._tokenizer, deadlines=self._deadlines)
        self._server = HttpServer(engine, self._options, self._limits, self._images, **self._defaults)
        self.code = await self._server.run(self._on_ready)

    def _on_ready(self, port):
        self.port = port
        self._ready.set()


@pytest.fixture
def serve():
    """Start servers with settings of their own; they are ended with the test."""
    servers = []

    def start(options=None, **config):
        servers.append(RunningServer(options, **config))
        return servers[-1]

    yield start
    for server in servers:
        server.core.resume()
        server.drain()
        server.join()


@pytest.fixture(scope="session")
def server():
    """One plain server for all tests that leave it as it is."""
    running = RunningServer()
    yield running
    running.drain()
    assert running.join() == 0


@pytest.fixture(scope="session")
def transfer_server():
    """One server that takes part in transfers. Its tests speak HTTP only, so any engine may be behind it."""
    running = RunningServer(kv_transfer=KvTransferConfig(port=0))
    yield running
    running.drain()
    assert running.join() == 0


class RunningApp:
    """Any ASGI application on a free loopback port, in a thread of its own."""

    def __init__(self, app):
        config = uvicorn.Config(app, port=0, log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline and self._thread.is_alive(), "the application did not start"
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=10, verify=False)

    def end(self):
        self.http.close()
        self._server.should_exit = True
        self._thread.join(15)
        assert not self._thread.is_alive(), "the application did not end"


@pytest.fixture
def run_app():
    """Run applications in front of servers; they are ended with the test."""
    running = []

    def start(app):
        running.append(RunningApp(app))
        return running[-1]

    yield start
    for app in running:
        app.end()


@pytest.fixture(scope="session")
def running_server():
    """The class, for fixtures that live longer than one test."""
    return RunningServer


@pytest.fixture(scope="session")
def running_app():
    """The class, for fixtures that live longer than one test."""
    return RunningApp


@pytest.fixture(scope="module")
def xml(running_server):
    """A server whose model writes reasoning and calls as XML."""
    running = running_server(tokenizer=ByteTokenizer(chat_template=XML))
    yield running
    running.drain()
    running.join()
