"""A server that is really a few lines of Python: what matters here is that it is waited for and stopped."""

import re
import signal
import sys
import time

import psutil
import pytest
from demo.server import DemoError, own_environment, running, serve_command, serving

HEALTHY = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print("pid", os.getpid(), file=sys.stderr)
print("INFO serving tiny on http://127.0.0.1:%d" % server.server_port, file=sys.stderr, flush=True)
server.serve_forever()
"""
SILENT = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"


def python(program):
    return [sys.executable, "-c", program]


def is_gone(log):
    pid = int(re.search(r"pid (\d+)", log.read_text()).group(1))
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not psutil.pid_exists(pid)


def test_a_server_is_there_and_then_gone(tmp_path):
    log = tmp_path / "log"
    with serving(python(HEALTHY), log) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
    assert is_gone(log)


def test_a_proxy_is_waited_for_as_a_server_is_and_gets_its_variables(tmp_path):
    log = tmp_path / "log"
    program = "import os, sys; print(os.environ['OF_ITS_OWN'], file=sys.stderr)" + HEALTHY.replace(
        "serving tiny", "proxy"
    )
    with running(python(program), log, {"OF_ITS_OWN": "word"}) as child:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", child.url)
    assert log.read_text().startswith("word\n") and is_gone(log)


def test_a_server_can_be_killed_before_its_time(tmp_path):
    log = tmp_path / "log"
    with running(python(HEALTHY), log) as child:
        child.kill()
        assert is_gone(log) and child.process.returncode == -signal.SIGKILL


def test_a_server_is_stopped_when_its_client_fails(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(ZeroDivisionError), serving(python(HEALTHY), log):
        raise ZeroDivisionError
    assert is_gone(log)


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path):
    log = tmp_path / "log"
    program = "import sys; print('the model is missing'); sys.exit(2)"
    with pytest.raises(DemoError, match=r"(?s)exit code 2.*the model is missing.*log"), serving(python(program), log):
        pytest.fail("it never served")


def test_a_server_that_never_answers_is_given_up_and_stopped(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(DemoError, match="not healthy in time"), serving(python(SILENT), log, start_seconds=1.0):
        pytest.fail("it never served")
    assert is_gone(log)


def test_the_persons_own_settings_do_not_reach_the_server():
    assert own_environment({"CAIRN_API_KEY": "x", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_servers_are_held_to_the_instructions_that_this_process_is_held_to():
    limited = {"CAIRN_MAX_CPU_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2"}
    assert own_environment(limited) == limited


def test_the_command_listens_on_the_loopback_alone(tmp_path):
    command = serve_command(tmp_path, "--exact")
    assert command[1:4] == ["-m", "cairn", "serve"]
    assert command[5:9] == ["--host", "127.0.0.1", "--port", "0"]
    assert command[9:] == ["--kv-cache-memory-bytes", "1GiB", "--exact"]
