"""A proxy that strangers leave no open files: it goes on, and takes no server for down."""

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from cairn.http.connections import ConnectionLimit
from cairn.http.web_server import raise_descriptor_limit

NUM_FILES = 256
NUM_STRANGERS = 400
WITH_FEW_FILES = (
    f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({NUM_FILES // 2}, {NUM_FILES})); "
    "from cairn.cli import main; sys.exit(main(sys.argv[1:]))"
)
LACKING = """
import asyncio, resource, sys
from contextlib import aclosing
from cairn.proxy.options import ProxyOptions
from cairn.proxy.server_pool import UpstreamError
from cairn.proxy.upstream import UpstreamClient

async def ask(client):
    try:
        await client.fetch("GET", sys.argv[1], b"", [], 5.0, 1000)
    except UpstreamError as error:
        return error.kind
    return "answered"

async def main():
    async with aclosing(UpstreamClient(ProxyOptions(decode=["http://d:1"]))) as client:
        before, files = await ask(client), []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
        try:
            while True:
                files.append(open("/dev/null"))
        except OSError:
            during = await ask(client)
        for file in files:
            file.close()
        print(before, during, await ask(client))

asyncio.run(main())
"""


@contextlib.contextmanager
def small_proxy(decode):
    """`cairn proxy` as a process that may have few open files, and its URL."""
    command = [sys.executable, "-c", WITH_FEW_FILES, "proxy", "--port", "0", "--decode", decode.url]
    process = subprocess.Popen([*command, "--health-interval", "60"], stderr=subprocess.PIPE, text=True)
    lines, ready = [], threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            if "decode servers:" in line:
                ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(30), "".join(lines)
        yield process, re.search(r"proxy on (\S+)", "".join(lines)).group(1), lines
    finally:
        process.terminate()
        process.wait(10)
        reader.join(10)
        process.stderr.close()


def num_open_files(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_idle_connections_of_strangers_keep_nobody_out(setting, answers):
    """More of them than open files: an answer that has begun goes on, others are answered, and no server is down."""
    d = setting.decode(answers.decoded("one", "two", hold_after=1))
    body = {"prompt": "x", "stream": True}
    with small_proxy(d) as (process, url, lines), httpx.Client(timeout=10, trust_env=False) as http:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        before = num_open_files(process)
        with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            chunks = response.iter_raw()
            assert b"one" in next(chunks)
            strangers = [socket.create_connection(address, timeout=10) for _ in range(NUM_STRANGERS)]
            d.default = answers.decoded("later")
            for _ in range(3):
                answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=10, trust_env=False)
                assert answer.status_code == 200, answer.text
            assert num_open_files(process) <= NUM_FILES // 2
            d.hold.set()
            assert b"two" in b"".join(chunks)
        up = f'cairn_proxy:upstream_up{{pool="decode",server="{d.url}"}} 1.0'
        assert up in http.get(f"{url}/metrics").text
        for stranger in strangers:
            stranger.close()
        http.close()
        answers.until(lambda: num_open_files(process) <= before + 2)
    assert "Too many open files" not in "".join(lines) and len(lines) < 30


def test_open_files_that_are_lacking_are_no_servers_fault(setting):
    d = setting.decode()
    script = [sys.executable, "-c", LACKING, f"{d.url}/v1/models"]
    said = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True).stdout
    # The kept connection of the first call does for the next ones, unless there is none.
    gone = "http://127.0.0.1:1/health"
    said_of_gone = subprocess.run([*script[:-1], gone], capture_output=True, text=True, timeout=60, check=True).stdout
    assert (said.split(), said_of_gone.split()) == (
        ["answered", "answered", "answered"],
        ["unreached", "local", "unreached"],
    )


class Wire:
    """A connection that knows whether it has been closed."""

    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


def test_the_one_without_a_request_for_the_longest_goes():
    limit, wires = ConnectionLimit(3), [Wire() for _ in range(6)]
    for wire in wires[:3]:
        limit.add(wire)
    limit.mark_busy(wires[0])
    limit.mark_busy(wires[1])
    limit.mark_idle(wires[0])
    limit.add(wires[3])
    assert [wire.closed for wire in wires] == [False, False, True, False, False, False]
    limit.remove(wires[2])
    limit.add(wires[4])
    assert wires[0].closed and not wires[1].closed
    limit.remove(wires[0])
    limit.mark_busy(wires[3])
    limit.mark_busy(wires[4])
    limit.add(wires[5])
    assert [wire.closed for wire in wires] == [True, False, True, False, False, True], "nobody who is answered goes"
    limit.remove(wires[5])
    limit.remove(wires[1])
    late = Wire()
    limit.add(late)
    assert not late.closed


def test_the_limit_of_open_files_is_raised():
    script = (
        "import resource; from cairn.http.web_server import raise_descriptor_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200)); raise_descriptor_limit(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).split() == ["200", "200"]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[0] == before[1]:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
