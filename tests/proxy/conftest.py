"""Prefill and decode servers that record what they got, and a proxy in front of them, all on loopback ports."""

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import dataclass

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cairn.proxy.app import ProxyServer
from cairn.proxy.options import ProxyOptions

SECONDS = 10


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {SECONDS} s"
        time.sleep(0.005)


@dataclass(frozen=True)
class Seen:
    """A request as a server got it."""

    path: str
    headers: dict
    content: bytes

    @property
    def json(self):
        return json.loads(self.content)


def handover(number):
    """What a prefill server hands over: the published keys, and one of its own."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[12, 13], [7]],
        "remote_engine_id": "p",
        "remote_request_id": f"cmpl-{number}",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_blocks_expiry_time": None,
        "a_key_of_its_own": {"nonce": "ü", "big": 123456789012345678901234567890, "x": 1.50},
    }


class FakeServer:
    """Answers `script` one by one, then always with `default`. Each is an async function of (server, seen). `health` is
    the status of /health, None while that is never answered: with answers that do not come, a frozen server."""

    def __init__(self, loop):
        self.stopped = False
        self.reset(None)
        config = uvicorn.Config(
            self._app(), host="127.0.0.1", port=0, log_config=None, lifespan="off", access_log=False
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext
        self._serving = asyncio.run_coroutine_threadsafe(self._server.serve(), loop)
        until(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def reset(self, default):
        """As new, for another test."""
        self.seen = []
        self.script = []
        self.default = default
        self.health = 200
        self.hold = threading.Event()
        self.num_cancelled = 0

    def stop(self):
        self.hold.set()
        self._server.should_exit = True
        self._server.force_exit = True
        self.stopped = True

    def join(self):
        self._serving.result(SECONDS)

    def _app(self):
        async def health(request):
            while self.health is None:
                await asyncio.sleep(0.005)
            return Response(status_code=self.health)

        async def models(request):
            self.seen.append(Seen("/v1/models", dict(request.headers), b""))
            return JSONResponse({"object": "list", "data": [{"id": "m"}]})

        async def generate(request):
            self.seen.append(Seen(request.url.path, dict(request.headers), await request.body()))
            answer = self.script.pop(0) if self.script else self.default
            work = asyncio.ensure_future(answer(self, self.seen[-1]))
            while not work.done():
                await asyncio.wait({work}, timeout=0.01)
                if not work.done() and await request.is_disconnected():
                    work.cancel()
                    self.num_cancelled += 1
                    return Response(status_code=499)
            return work.result()

        paths = ("/v1/completions", "/v1/chat/completions")
        return Starlette(
            routes=[
                Route("/health", health),
                Route("/v1/models", models),
                *(Route(path, generate, methods=["POST"]) for path in paths),
            ]
        )

    async def held(self):
        hold = self.hold
        while not hold.is_set():
            await asyncio.sleep(0.005)


# -- answers ---------------------------------------------------------------------------------------------------------


async def prefilled(server, seen):
    return JSONResponse({"choices": [{"text": "h"}], "kv_transfer_params": handover(len(server.seen))})


def decoded(*texts, hint=None, cut=False, hold_after=None):
    """An answer in these pieces, streamed when asked to; `cut`: the connection ends before the answer does."""

    async def answer(server, seen):
        params = None if hint is None else {"cairn_decode_hint": hint}
        if not seen.json.get("stream"):
            body = {"choices": [_choice(seen, "".join(texts), whole=True)], "kv_transfer_params": params}
            return JSONResponse(body)
        return StreamingResponse(_events(server, seen, texts, params, cut, hold_after), media_type="text/event-stream")

    return answer


async def _events(server, seen, texts, params, cut, hold_after):
    try:
        for number, text in enumerate(texts):
            if number == hold_after:
                await server.held()
            yield _event({"choices": [_choice(seen, text, whole=False)]})
        if cut:
            yield b'data: {"choi'
            raise ConnectionError("told to break")
        if params is not None:
            yield _event({"choices": [], "kv_transfer_params": params})
        yield b"data: [DONE]\n\n"
    except asyncio.CancelledError:
        server.num_cancelled += 1
        raise


def _choice(seen, text, whole):
    if seen.path == "/v1/completions":
        return {"index": 0, "text": text}
    return {"index": 0, "message" if whole else "delta": {"role": "assistant", "content": text}}


def _event(body):
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def status(code, body=None, headers=None):
    async def answer(server, seen):
        return JSONResponse({"error": {"message": f"told to say {code}"}} if body is None else body, code, headers)

    return answer


def held_back(answer):
    """This answer, once the server is told to go on."""

    async def later(server, seen):
        await server.held()
        return await answer(server, seen)

    return later


async def never(server, seen):
    await server.held()
    return Response(status_code=500)


async def headers_only(server, seen):
    """A 200 and its headers, and then the connection ends."""

    async def nothing():
        raise ConnectionError("told to break")
        yield b""

    return StreamingResponse(nothing(), media_type="text/event-stream")


# -- the proxy -------------------------------------------------------------------------------------------------------


class RunningProxy:
    """ProxyServer in a thread of its own; `code` is its exit code once it has ended."""

    def __init__(self, prefill, decode, **options):
        self.code = None
        self.port = None
        self._body_seconds = options.pop("body_seconds", 60.0)
        options = {"port": 0, "health_interval": 60.0} | options
        self._options = ProxyOptions(prefill=list(prefill), decode=list(decode), **options)
        self.http = httpx.Client(timeout=SECONDS, verify=False, trust_env=False)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(SECONDS), "the proxy did not start"
        self.url = f"http://127.0.0.1:{self.port}"

    async def _run(self):
        self._loop = asyncio.get_running_loop()
        self._server = ProxyServer(self._options, body_seconds=self._body_seconds)
        self.code = await self._server.run(self._on_ready)

    def _on_ready(self, port):
        self.port = port
        self._ready.set()

    def ask(self, path="/v1/completions", headers=None, **body):
        body = {"model": "m", "prompt": "hello"} | body if path == "/v1/completions" else body
        return self.http.post(self.url + path, json=body, headers=headers)

    def get(self, path, **options):
        return self.http.get(self.url + path, **options)

    def metric(self, name, **labels):
        """The sum of all samples of a metric with these labels."""
        values = []
        for line in self.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.split("{")[0] == f"cairn_proxy:{name}":
                if all(f'{key}="{text}"' in sample for key, text in labels.items()):
                    values.append(float(value))
        return sum(values)

    def drain(self):
        if self.code is None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._server.drain)

    def join(self):
        self._thread.join(SECONDS)
        self.http.close()
        assert not self._thread.is_alive(), "the proxy did not end"
        return self.code


class Setting:
    """Servers and proxies for one test. Servers are lent by `stable`, proxies are left to it when the test is over."""

    def __init__(self, stable):
        self._stable = stable
        self._servers = []
        self._proxies = []

    def prefill(self, *script):
        return self._server(prefilled, script)

    def decode(self, *script):
        return self._server(decoded("hel", "lo"), script)

    def proxy(self, prefill, decode, **options):
        urls = [[server if isinstance(server, str) else server.url for server in pool] for pool in (prefill, decode)]
        self._proxies.append(RunningProxy(*urls, **options))
        return self._proxies[-1]

    def stop(self, server):
        """Nothing listens there any more."""
        server.stop()
        server.join()

    def _server(self, default, script):
        self._servers.append(self._stable.lend(default))
        self._servers[-1].script += script
        return self._servers[-1]

    def end(self):
        for server in self._servers:
            server.hold.set()
        for proxy in self._proxies:
            proxy.drain()
            proxy.drain()
        self._stable.take_back(self._servers, self._proxies)


class Stable:
    """Starting and ending a server takes a while, so they are kept for all tests."""

    def __init__(self, loop):
        self._loop = loop
        self._idle = []
        self._ending = []

    def lend(self, default):
        server = self._idle.pop() if self._idle else FakeServer(self._loop)
        server.reset(default)
        return server

    def take_back(self, servers, proxies):
        self._idle += [server for server in servers if not server.stopped]
        self._ending += proxies

    def end(self):
        for server in self._idle:
            server.stop()
        for ending in (*self._idle, *self._ending):
            ending.join()
        assert all(proxy.code == 0 for proxy in self._ending)


@pytest.fixture(scope="session")
def stable():
    """One event loop in a thread, and all fake servers in it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers = Stable(loop)
    yield servers
    servers.end()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(SECONDS)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.fixture
def setting(stable):
    running = Setting(stable)
    yield running
    running.end()


@pytest.fixture
def answers():
    """The ways in which a fake server can answer."""

    class Answers:
        decoded = staticmethod(decoded)
        status = staticmethod(status)
        never = staticmethod(never)
        held_back = staticmethod(held_back)
        headers_only = staticmethod(headers_only)
        handover = staticmethod(handover)
        until = staticmethod(until)

    return Answers
