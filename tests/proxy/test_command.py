"""`cairn proxy` as a person runs it: flags, variables, messages, signals."""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from cairn.cli import main
from cairn.errors import ConfigError
from cairn.http.web_server import parse_trusted_proxies
from cairn.proxy.options import ProxyOptions
from cairn.settings.proxy import add_proxy_flags, load_proxy_settings
from cairn.settings.sources import warn_of_service_links

SERVERS = ("--prefill", "http://p:1", "--decode", "http://d:2")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("CAIRN_", "FORWARDED_")):
            monkeypatch.delenv(name)


def load(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    source = add_proxy_flags(parser)
    return load_proxy_settings(parser.parse_args(list(arguments)), source)


def test_defaults_are_the_options_own():
    options = load(*SERVERS)
    assert (options.prefill, options.decode) == (["http://p:1"], ["http://d:2"])
    own = ProxyOptions(prefill=options.prefill, decode=options.decode)
    assert own.model_dump() == options.model_dump(exclude={"log_level"})


EVERY_FLAG = """
    --prefill http://a:1 --prefill https://b:2/deep/ --decode http://a:1 --decode http://[::1]:8 --host 0.0.0.0 --port 9
    --api-key k --max-open 2 --max-body-bytes 3e6 --max-attempts 4 --connect-timeout 5.5 --prefill-timeout 6
    --stall-timeout 7 --request-timeout 8 --shutdown-timeout 9 --health-interval 10 --health-timeout 11
    --running-tokens 12 --max-hints 15 --hint-timeout 16 --log-level error
    --forwarded-allow-ips 10.0.0.0/8,::1
"""


def test_every_flag():
    options = load(*EVERY_FLAG.split())
    assert options.prefill == ["http://a:1", "https://b:2/deep"]
    assert options.decode == ["http://a:1", "http://[::1]:8"]
    assert (options.host, options.port, options.api_key) == ("0.0.0.0", 9, ["k"])
    assert (options.max_open, options.max_body_bytes, options.max_attempts) == (2, 3_000_000, 4)
    assert (options.connect_timeout, options.prefill_timeout, options.stall_timeout) == (5.5, 6, 7)
    assert (options.request_timeout, options.shutdown_timeout) == (8, 9)
    assert (options.health_interval, options.health_timeout) == (10, 11)
    assert options.running_tokens == 12
    assert (options.max_hints, options.hint_timeout) == (15, 16)
    assert parse_trusted_proxies(options.forwarded_allow_ips) == ("10.0.0.0/8", "::1")


def test_variables(monkeypatch):
    monkeypatch.setenv("CAIRN_PROXY_PREFILL", "http://a:1,http://b:2")
    monkeypatch.setenv("CAIRN_PROXY_DECODE", "http://c:3")
    monkeypatch.setenv("CAIRN_PROXY_API_KEY", "k")
    options = load("--decode", "http://d:4")
    assert (options.prefill, options.decode) == (["http://a:1", "http://b:2"], ["http://d:4"])
    assert options.api_key == ["k"]


def test_what_kubernetes_sets_for_a_service_is_no_port(monkeypatch, caplog):
    monkeypatch.setenv("CAIRN_PROXY_PORT", "tcp://10.0.0.1:8000")
    options = load(*SERVERS)
    warn_of_service_links(options)
    assert options.port == 8000
    (record,) = caplog.records
    assert "CAIRN_PROXY_PORT=tcp://10.0.0.1:8000 has no effect" in record.getMessage()
    assert "a Service named cairn-proxy." in record.getMessage()
    monkeypatch.setenv("CAIRN_PROXY_PORT", "tcp:8000")
    with pytest.raises(ConfigError, match=r"^CAIRN_PROXY_PORT \(--port\): "):
        load(*SERVERS)


def test_several_api_keys(monkeypatch):
    def keys(*words):
        return load(*SERVERS, *words).api_key

    assert keys() is None
    assert keys("--api-key", "a", "b,c", "--port", "1", "--api-key", "d") == ["a", "b", "c", "d"]
    monkeypatch.setenv("CAIRN_PROXY_API_KEY", "e,f")
    assert keys() == ["e", "f"] and keys("--api-key", "g") == ["g"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--decode is missing: name at least one decode server"),
        (SERVERS[:2], "--decode is missing"),
        ((*SERVERS, "--decode", "d:2"), "--decode: must look like http://host:port, not 'd:2'"),
        ((*SERVERS, "--decode", "ftp://d"), "must look like http://host:port"),
        ((*SERVERS, "--decode", "http://d:2"), "--decode: names the same server twice"),
        ((*SERVERS, "--decode", "http://d:99999"), "--decode: must look like http://host:port, not 'http://d:99999'"),
        ((*SERVERS, "--decode", "http://d/?q=1"), "without user, query"),
        ((*SERVERS, "--decode", "http://d:0"), "must be a plain http://host:port"),
        ((*SERVERS, "--decode", "http://d d"), "must look like http://host:port"),
        ((*SERVERS, "--decode", "HTTP://D:2/"), "--decode: names the same server twice"),
        ((*SERVERS, "--decode", ""), "--decode"),
        ((*SERVERS, "--port", "70000"), "--port: should be less than or equal to 65535, not '70000'"),
        ((*SERVERS, "--api-key", ""), "--api-key: must not be empty"),
        ((*SERVERS, "--api-key", "a", ""), "--api-key: must not be empty"),
        ((*SERVERS, "--api-key", "a", "b d"), "--api-key: "),
        ((*SERVERS, "--running-tokens", "nan"), "--running-tokens"),
        ((*SERVERS, "--max-attempts", "0"), "--max-attempts: should be greater than or equal to 1"),
    ],
)
def test_wrong_settings(arguments, said):
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_variable_is_named_and_passwords_are_not_shown(monkeypatch):
    monkeypatch.setenv("CAIRN_PROXY_DECODE", "http://user:secret@d:2")
    with pytest.raises(ConfigError, match=r"^CAIRN_PROXY_DECODE \(--decode\): must be a plain") as caught:
        load(*SERVERS[:2])
    assert "secret" not in str(caught.value)


def test_wrong_command_lines_are_one_line_and_exit_code_2(capsys):
    for arguments in ([], [*SERVERS, "--frobnicate"], [*SERVERS, "--api-key"], [*SERVERS, "--host", "no.host.invalid"]):
        assert main(["proxy", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_help_needs_no_heavy_imports():
    script = (
        "import sys; from cairn.cli import main; assert main(['proxy', '--help']) == 0; "
        "print([name for name in ('torch', 'transformers', 'fastapi', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "--prefill" in done.stdout


def test_a_process_that_serves_and_drains(setting, answers):
    d = setting.decode(answers.decoded("one", "two", hold_after=1))
    command = [sys.executable, "-m", "cairn", "proxy", "--port", "0", "--decode", d.url]
    command += ["--prefill", setting.prefill().url]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")))
    reader.start()
    try:
        answers.until(lambda: "decode servers: 1 of 1 are up" in "".join(lines))
        url = re.search(r"proxy on (\S+)", "".join(lines)).group(1)
        with (
            httpx.Client(timeout=10, verify=False, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response,
        ):
            chunks = response.iter_raw()
            assert b"one" in next(chunks)
            process.send_signal(signal.SIGTERM)
            answers.until(lambda: "draining: 1 requests are open" in "".join(lines))
            d.hold.set()
            assert b"two" in b"".join(chunks)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        process.stderr.close()
    assert "Traceback" not in "".join(lines) and "HTTP Request" not in "".join(lines)
