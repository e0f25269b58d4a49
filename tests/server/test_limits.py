"""What comes before any route: headers and bodies that are too long or never end, clients that read nothing, keys."""

import asyncio
import contextlib
import json
import select
import socket
import threading
import time

import httpx
import psutil
import pytest

from cairn import __version__
from cairn.engine.client import EngineDeadlines
from cairn.engine.contract import EngineConfig
from cairn.errors import QueueFull
from cairn.server.options import ServerOptions
from cairn.server.run import HttpServer
from doubles.byte_tokenizer import ByteTokenizer
from doubles.echo_core import build_echo_core
from doubles.local_engine import LocalEngine

TEXT = b'{"prompt": "x"}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=15)


def answer(connection):
    """The status and the error of the answer, to its end."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += connection.recv(1 << 16)
    return int(head.split()[1]), head.lower(), json.loads(body)["error"] if length else None


def closed(connection):
    """Whether the other side ends the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def lives(server):
    assert server.post("/v1/completions", {"prompt": "still there", "max_tokens": 2}).status_code == 200
    server.until(lambda: server.get("/load").json() == {"server_load": 0})
    server.assert_nothing_is_held()


# -- headers -----------------------------------------------------------------------------------------------------------


def test_clients_that_send_their_headers_for_ever_are_given_up(serve):
    server = serve(options={"head_seconds": 0.3})
    slow = [connect(server) for _ in range(20)]
    for i, connection in enumerate(slow):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "[: 10 + 2 * i])
    for connection in slow:
        status, head, error = answer(connection)
        assert status == 408 and "headers did not come within 0.3 s" in error["message"]
        assert b"connection: close" in head and closed(connection)
        connection.close()
    lives(server)


def test_a_client_that_drips_its_headers_is_given_up(serve):
    server = serve(options={"head_seconds": 0.3})
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        until = time.monotonic() + 10
        while not select.select([connection], [], [], 0.02)[0]:
            assert time.monotonic() < until, "every byte gave it new time"
            connection.sendall(b"a")
        assert answer(connection)[0] == 408
    lives(server)


def test_a_client_that_says_nothing_is_given_up(serve):
    server = serve(options={"head_seconds": 0.2})
    with connect(server) as connection:
        assert closed(connection)


def test_the_next_request_of_a_connection_has_its_own_time(serve):
    server = serve(options={"head_seconds": 2.0})
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(TEXT) + TEXT)
            head = b""
            while not head.endswith(b"}"):
                head += connection.recv(1 << 16)
            assert head.startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /hea")
        assert answer(connection)[0] == 408 and closed(connection)
    lives(server)


@pytest.mark.parametrize("size", [300_000, 1_000_000])
def test_headers_that_are_too_long(server, size):
    for head in (
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * size,
        b"GET /" + b"x" * size + b" HTTP/1.1\r\nHost: x",
    ):
        with connect(server) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(head + b"\r\n\r\n")
            status, _, error = answer(connection)
            assert (status, error["code"], error["type"]) == (431, 431, "Request Header Fields Too Large")
    lives(server)


@pytest.mark.parametrize(
    "request_line",
    [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET  /\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA\r\n\r\n"],
)
def test_what_is_no_http(server, request_line):
    with connect(server) as connection:
        connection.sendall(request_line)
        status, _, error = answer(connection)
        assert status == error["code"] == 400 and error["type"] == "BadRequestError" and closed(connection)
    lives(server)


def test_a_chunk_that_is_none_ends_its_request_alone(server):
    with connect(server) as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n")
        assert answer(connection)[0] == 400
    lives(server)


# -- bodies ------------------------------------------------------------------------------------------------------------

GIGABYTE = 1 << 30


def sent_before_the_answer(connection, parts):
    """Send on until there is an answer, or nothing more is taken: how many bytes have gone out."""
    sent = 0
    try:
        for part in parts:
            if select.select([connection], [], [], 0)[0]:
                break
            connection.sendall(part)
            sent += len(part)
    except (ConnectionError, TimeoutError):
        pass
    return sent


def test_a_gigabyte_that_is_announced_is_not_read(server):
    with connect(server) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % GIGABYTE)
        status, _, error = answer(connection)
        assert status == 413 and "16777216 bytes" in error["message"]
    lives(server)


@pytest.mark.parametrize("announced", [True, False])
def test_a_gigabyte_that_comes_all_the_same_is_not_read(server, announced):
    part = b"x" * (1 << 20)
    with connect(server) as connection:
        if announced:
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % GIGABYTE)
            parts = (part for _ in range(GIGABYTE >> 20))
        else:
            connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            parts = (b"%x\r\n%b\r\n" % (len(part), part) for _ in range(GIGABYTE >> 20))
        assert sent_before_the_answer(connection, parts) < 64 << 20
        assert answer(connection)[0] == 413
    lives(server)


def test_a_client_that_drips_a_refused_body_is_cut_off(serve):
    server = serve(options={"head_seconds": 0.3})
    with connect(server) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % GIGABYTE)
        assert answer(connection)[0] == 413
        until = time.monotonic() + 10
        while not select.select([connection], [], [], 0.02)[0]:
            assert time.monotonic() < until, "every byte gave it new time"
            connection.sendall(b"a")
        assert closed(connection)
    lives(server)


def test_a_client_that_writes_all_before_it_reads_gets_its_answer(server):
    response = server.post("/v1/completions", content=b"x" * (20 << 20), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    lives(server)


def test_a_body_that_nobody_wants_does_not_keep_the_connection(serve):
    """Neither the missing key nor the unknown path is worth reading on."""
    server = serve(options={"api_key": ["k"]})
    connections = [connect(server) for _ in range(2)]
    lines = (b"POST /v1/completions HTTP/1.1\r\n", b"DELETE /v1/models HTTP/1.1\r\n")
    for connection, line in zip(connections, lines, strict=True):
        connection.sendall(line + b"Host: x\r\nContent-Length: 1000000\r\n\r\n")
    for connection in connections:
        with connection:
            assert answer(connection)[0] == 401 and closed(connection)
    assert server.get("/load").json() == {"server_load": 0}


def test_a_request_that_says_it_has_no_body_keeps_the_connection(server):
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(b"GET /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 00\r\n\r\n")
            status, head, _ = answer(connection)
            assert status == 404 and b"connection: close" not in head


def test_a_client_that_reads_nothing_loses_its_connection(serve):
    server = serve(options={"stall_seconds": 0.3, "max_body_bytes": 64 << 20})
    body = json.dumps({"prompt": "x" * (8 << 20)}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(15)
        connection.connect(("127.0.0.1", server.port))
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        ours = connection.getsockname()[1]
        server.until(lambda: connected(server, ours))
        server.until(lambda: not connected(server, ours))
        length = sum(len(part) for part in iter(lambda: received(connection), b""))
        assert 0 < length < 8 << 20, "the answer is three times as long"
    lives(server)


def received(connection):
    try:
        return connection.recv(1 << 20)
    except ConnectionError:
        return b""


def connected(server, port):
    """Whether the server still has its end of the connection from that port."""
    found = psutil.Process().net_connections("tcp")
    return any(one.laddr.port == server.port and one.raddr and one.raddr.port == port for one in found if one.fd > 0)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b'{"prompt": "a\xff\xfe"}', "prompt"),
        (b'{"prompt": "a\xff", "n": 1, "stop": ["x"]}', "prompt"),
        (b'{"prompt": "x", "a": ["\\"prompt\\": "], "cache_salt": "\xc3\x28"}', "cache_salt"),
        (b'{"prompt": "x", "\xff": 1, "n": 2}', None),
        (b'{"prompt": "x", "stop": ["a", "\xed\xa0\x80"]}', "stop"),
        (b'{"prompt": "x", "n": 1' + b"0" * 5000 + b"}", "n"),
        (b'{"prompt": [1, ' + b"9" * 5000 + b"]}", "prompt"),
        (b"\xff", None),
    ],
)
def test_bytes_that_are_no_text_and_numbers_without_end(server, content, field):
    response = server.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400
    assert field is None or (error["param"].startswith(field) and error["message"].startswith(field)), error
    lives(server)


# -- keys --------------------------------------------------------------------------------------------------------------

ODD_TARGETS = [
    ("//v1/models", "x"),
    ("//health", "x"),
    ("/health/", "x"),
    ("/./health", "x"),
    ("/v1/models/../../health", "x"),
    ("/health%00", "x"),
    ("/health;/v1/models", "x"),
    ("http://x/v1/models", "x"),
    ("http://x/health", "x"),
    ("http://localhost/v1/models?/health", "localhost"),
    ("/v1/models", "x/health?"),
    ("/v1/models", "health"),
    ("/v1/models", "127.0.0.1:1/health#"),
    ("/v1/models?/health", "/health"),
    ("/V1/models", "x"),
    ("*", "x"),
]


@pytest.fixture(scope="module")
def locked(running_server):
    server = running_server(options={"api_key": ["one", "two"]})
    yield server
    server.drain()
    server.join()


@pytest.mark.parametrize("given", ["Bearer one", "Bearer two", "bearer one", "BEARER two"])
def test_each_key_opens(locked, given):
    assert locked.get("/v1/models", headers={"Authorization": given}).status_code == 200


@pytest.mark.parametrize(
    "given",
    ["Bearer", "Bearer ", "Bearer onetwo", "Bearer one,two", "Bearer ONE", "Basic one", "one", "oneBearer"],
)
def test_nothing_else_opens(locked, given):
    with connect(locked) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: %b\r\n\r\n" % given.encode())
        assert answer(connection)[0] == 401


def test_without_one_nothing_changes_and_nothing_is_told(locked):
    document = locked.get("/openapi.json", headers={"Authorization": "Bearer one"}).json()
    open_ones = {"/health", "/ping", "/ready", "/load", "/metrics", "/version", "/cache/ui"}
    assert open_ones < document["paths"].keys() and len(document["paths"]) > len(open_ones) + 8
    for path, operations in document["paths"].items():
        for method in operations:
            response = httpx.request(method, locked.url + path.replace("{name}", "echo"))
            assert (response.status_code == 401) == (path not in open_ones), path
            if response.status_code == 401:
                assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("target", "host"), ODD_TARGETS)
def test_odd_targets_and_hosts_do_not(locked, target, host):
    with connect(locked) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert answer(connection)[0] == 401


# -- start, end, and an empty cache ------------------------------------------------------------------------------------


class Starting:
    """A server whose engine is built when the test says so."""

    def __init__(self):
        self.build, self.ended = threading.Event(), threading.Event()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.code = None
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()

    def _built(self, config):
        assert self.build.wait(30)
        return build_echo_core(config)

    async def _run(self):
        options = ServerOptions(model="echo", port=self.port, api_key=["k"])
        engine = LocalEngine(EngineConfig(model="echo"), self._built, ByteTokenizer())
        self._server, self._loop = HttpServer(engine, options), asyncio.get_running_loop()
        try:
            self.code = await self._server.run()
        finally:
            self.ended.set()

    def drain(self):
        self._loop.call_soon_threadsafe(self._server.drain)

    def until(self, condition):
        until = time.monotonic() + 15
        while True:
            try:
                if condition():
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < until, "it did not happen within 15 s"
            time.sleep(0.01)


def test_a_server_that_starts_says_so_and_then_serves():
    starting = Starting()
    starting.until(lambda: httpx.get(starting.url + "/health").status_code == 503)
    for path in ("/health", "/ping", "/ready"):
        assert "being loaded" in httpx.get(starting.url + path).json()["status"]
    early = httpx.post(starting.url + "/v1/completions", json={"prompt": "x"})
    assert early.status_code == 503 and early.headers["retry-after"] == "1"
    assert early.json()["error"]["type"] == "Service Unavailable"
    starting.build.set()
    starting.until(lambda: httpx.get(starting.url + "/ready").status_code == 200)
    headers = {"Authorization": "Bearer k"}
    assert httpx.post(starting.url + "/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
    starting.drain()
    assert starting.ended.wait(15) and starting.code == 0


def test_a_server_can_be_ended_before_it_serves():
    starting = Starting()
    starting.until(lambda: httpx.get(starting.url + "/health").status_code == 503)
    starting.drain()
    starting.build.set()
    assert starting.ended.wait(15) and starting.code == 0


def test_what_is_told_of_a_server(serve):
    server = serve(model="echo:pause_after=1", max_num_seqs=3)
    told = server.get("/server_info").json()
    assert told["version"] == __version__ and told["engine"]["max_num_seqs"] == 3
    assert told["limits"]["max_body_bytes"] == 16 << 20 and "key" not in json.dumps(told)
    with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "ab", "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines)
        assert server.get("/load").json() == {"server_load": 1}
    server.until(lambda: server.get("/load").json() == {"server_load": 0})


def test_readiness_asks_the_engine(serve):
    server = serve(deadlines=EngineDeadlines(stats=0.2))
    server.until(lambda: server.get("/ready").status_code == 200)
    stats, hold = server.core.stats, threading.Event()
    server.core.stats = lambda: hold.wait(10) and stats()
    response = server.get("/ready")
    assert response.status_code == 503 and "did not tell its counters" in response.json()["status"]
    assert server.get("/health").status_code == 200
    hold.set()
    server.until(lambda: server.get("/ready").status_code == 200)


def test_the_cache_is_emptied_unless_pages_are_held(serve):
    server = serve(model="echo:pause_after=2")
    prompt = {"prompt": "a long enough prompt", "max_tokens": 1}

    def cached():
        return server.post("/v1/completions", prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached()) == (0, 20)
    with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "abcd", "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines)
        refused = server.post("/reset_prefix_cache")
        assert refused.status_code == 409 and refused.json()["error"]["message"].startswith("2 pages are held")
    server.until(lambda: server.core.stats().pool.held_pages == 0)
    assert cached() == 20, "it was refused, and has dropped something"
    emptied = server.post("/reset_prefix_cache")
    assert emptied.status_code == 200 and emptied.content == b""
    assert (cached(), cached()) == (0, 20)


@pytest.mark.parametrize("name", ["reset_running_requests", "reset_external"])
def test_what_resetting_does_not_do_is_refused(server, name):
    assert server.post(f"/reset_prefix_cache?{name}=false").status_code == 200
    refused = server.post(f"/reset_prefix_cache?{name}=true")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == name


def test_a_request_that_finds_no_room_later_is_told_when_to_come_back(serve):
    """Those that waited for their grammar are queued only then."""
    server = serve(model="echo:pause_after=1")

    def full():
        refused = [(request.request_id, QueueFull("full")) for request in server.requests]
        server.requests.clear()
        return refused

    server.core.submit = lambda *requests: server.requests.extend(requests)
    server.core.poll_ready = full
    for stream in (False, True):
        refused = server.post("/v1/completions", {"prompt": "x", "stream": stream})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == 429
    assert server.metric("vllm:request_success_total") == 0  # it has not begun
