"""A prefill server that stands still behind `cairn proxy`: real servers, a real proxy, and SIGSTOP."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from server.test_real_engine import Served

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the extra nixl is not installed")

HOST = "127.0.0.1"
START_SECONDS = 60.0
PREFILL_SECONDS = 600
"""What the proxy allows a prefill: were it waited for, the client below would give up long before."""

CLIENT_SECONDS = 60.0
PROMPT = list(range(100, 160))


@pytest.fixture(scope="module")
def servers(tiny_model, tmp_path_factory):
    """A prefill and a decode server."""
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    flags = ["--exact", "--kv-transfer-config", config, "--kv-cache-memory-bytes", "32MiB"]
    folder = tmp_path_factory.mktemp("frozen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", HOST)
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
        made = [Served(tiny_model, folder / name, *flags) for name in ("p", "d")]
    yield [server.wait_healthy() for server in made]
    for server in made:
        assert server.end() == 0, server.log.read_text()


@pytest.fixture(scope="module")
def proxy(servers):
    """An HTTP client of `cairn proxy` in front of both."""
    p, d = servers
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "cairn", "proxy", "--port", str(port), "--health-interval", "0.1"]
    command += ["--health-timeout", "0.5", "--prefill-timeout", str(PREFILL_SECONDS)]
    command += ["--prefill", str(p.http.base_url), "--decode", str(d.http.base_url)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=CLIENT_SECONDS, trust_env=False) as client:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                if client.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < until, "the proxy does not start"
            time.sleep(0.05)
        yield client
    process.terminate()
    assert process.wait(30) == 0


def processes_of(server: Served) -> list[psutil.Process]:
    own = psutil.Process(server.process.pid)
    return [own, *own.children(recursive=True)]


def ask(proxy: httpx.Client, prompt: list[int]) -> httpx.Response:
    return proxy.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0})


@pytest.mark.more
def test_a_request_that_waits_for_a_frozen_prefill_server_is_decoded_alone(servers, proxy):
    p, d = servers
    handed_over = ask(proxy, PROMPT).json()
    assert d.metric("vllm:external_prefix_cache_hits_total") == len(PROMPT)
    prompt = PROMPT[::-1]
    # what is right, of a salt of its own so that nothing of it is found later
    right = d.complete(prompt, cache_salt="apart")["choices"][0]["text"]
    answers: list[httpx.Response] = []
    for each in processes_of(p):
        each.suspend()
    try:
        waiting = threading.Thread(target=lambda: answers.append(ask(proxy, prompt)))
        waiting.start()
        waiting.join(CLIENT_SECONDS)
        assert not waiting.is_alive() and len(answers) == 1
        assert all(each.status() == psutil.STATUS_STOPPED for each in processes_of(p)), "P has not moved since"
    finally:
        for each in reversed(processes_of(p)):
            each.resume()
    assert answers[0].status_code == 200 and answers[0].json()["choices"][0]["text"] == right
    assert d.metric("vllm:external_prefix_cache_hits_total") == len(PROMPT), "nothing was fetched for it"
    # back again: the next one is handed over
    until = time.monotonic() + START_SECONDS
    while proxy.get("/health").status_code != 200 or p.http.get("/health").status_code != 200:
        assert time.monotonic() < until
    again = [number + 200 for number in PROMPT]
    while d.metric("vllm:external_prefix_cache_hits_total") == len(PROMPT):
        assert time.monotonic() < until, "P is not asked again"
        assert ask(proxy, again).status_code == 200
        again = [number + 1 for number in again]
    assert ask(proxy, PROMPT).json()["choices"] == handed_over["choices"]
