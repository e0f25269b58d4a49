"""The command `cairn` as a person runs it: exit codes, messages, signals."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from cairn.cli import main
from cairn.machine import Machine
from cairn.models.random_weights.make_model import MADE_FAMILIES
from tiers import more

ECHO_CAIRN = (
    "import sys; from cairn.cli import main; from doubles.byte_tokenizer import load_byte_tokenizer; "
    "sys.exit(main(core='doubles.echo_core:build_echo_core', load_tokenizer=load_byte_tokenizer, "
    "find_model=lambda settings: settings.model))"
)

NUM_CORES = Machine().num_cores()
NO_VARIABLES: dict[str, str] = {}


class Serving:
    """`cairn serve` around a EchoCore, in a process of its own."""

    def __init__(self, model, *flags, wait=True, variables=NO_VARIABLES):
        command = [sys.executable, "-c", ECHO_CAIRN, "serve", model, "--port", "0", *flags]
        own = ("CAIRN_", "VLLM_", "OMP_", "GOMP_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(own)} | variables
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self._lines = []
        self._reader = threading.Thread(target=lambda: self._lines.extend(iter(self.process.stderr.readline, "")))
        self._reader.start()
        if wait:
            self.url = "http://127.0.0.1:" + self.wait_for(r"serving .* on http://127\.0\.0\.1:(\d+)")

    def wait_for(self, pattern):
        deadline = time.monotonic() + 60
        while not (found := re.search(pattern, self.log)):
            assert time.monotonic() < deadline and self.process.poll() is None, self.log
            time.sleep(0.01)
        return found.group(found.re.groups)

    @property
    def log(self):
        return "".join(self._lines)

    def ask(self, **body):
        return httpx.post(self.url + "/v1/completions", json={"prompt": "hello"} | body, timeout=10, verify=False)

    def core(self):
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def end(self):
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(10)
            self.process.stdout.close()
            self.process.stderr.close()


@pytest.fixture
def serving():
    started = []

    def start(*arguments, **options):
        started.append(Serving(*arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.end()


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", ECHO_CAIRN, *arguments], capture_output=True, text=True, timeout=20, check=False
    )


def test_what_fits_the_machine_is_chosen_logged_and_shown(serving):
    server = serving("echo", variables={"OMP_NUM_THREADS": "1"})
    assert "--cpu-threads 1" in server.log
    told = httpx.get(server.url + "/server_info", timeout=10).json()
    assert (told["engine"]["max_num_seqs"], told["engine"]["max_waiting"]) == (64, 1024)
    assert told["limits"]["max_open"] == 64 + 1024
    variables = server.core().environ()
    assert [variables[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")] == [
        "1",
        "1",
        "passive",
    ]


@pytest.mark.more
def test_the_environment_says_how_threads_wait(serving):
    server = serving("echo", "--cpu-threads", "1", variables={"GOMP_SPINCOUNT": "77"})
    variables = server.core().environ()
    assert variables["GOMP_SPINCOUNT"] == "77" and "OMP_WAIT_POLICY" not in variables


@pytest.mark.parametrize(
    ("flags", "most"), [((), NUM_CORES), (("--tensor-parallel-size", "64"), max(1, NUM_CORES // 64))]
)
def test_more_threads_than_cores(flags, most, capsys):
    assert main(["serve", "echo", "--port", "0", "--cpu-threads", "1024", *flags]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"there are {NUM_CORES} cores" in said and said.endswith(f"set at most {most}")


@pytest.mark.more
def test_a_pool_that_the_machine_has_no_memory_for(tiny_model):
    done = subprocess.run(
        [sys.executable, "-m", "cairn", "serve", str(tiny_model), "--port", "0", "--kv-cache-memory-bytes", "900TiB"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert re.fullmatch(r"cairn: --kv-cache-memory-bytes \d+: .*lower it to at most \d+ \(.* available, .*\)", said)


def test_serving_and_draining(serving):
    flags = (
        "--trust_remote_code",
        "--cudagraph-metrics",
        "--uvicorn-log-level",
        "error",
        "--served_model_name",
        "echo",
        "b",
    )
    server = serving("echo", *flags)
    core = server.core()
    answer = server.ask(model="echo").json()
    assert answer["choices"][0]["text"] == "hello"
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert not core.is_running()
    assert "INFO serving echo, b on http://" in server.log and "Shutting down" not in server.log
    assert re.search("INFO without effect here .*: --trust-remote-code, --cudagraph-metrics$", server.log, re.MULTILINE)
    assert "bytes per token" in server.log and "the smallest prefix that can be hit" in server.log


@pytest.mark.more
def test_a_server_that_takes_part_in_transfers_says_where(serving):
    config = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
    flags = ("--kv-transfer-config", config, "--tensor-parallel-size", "2", "--block-size", "128")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = serving("echo", *flags, variables={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)})
    answer = server.ask(kv_transfer_params={"do_remote_decode": True}).json()
    assert answer["kv_transfer_params"]["remote_port"] == port
    assert f"other servers ask for pages at localhost:{port}" in server.log
    assert "tensor parallel over 2 processes" in server.log
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


def test_the_cores_death_is_exit_code_1(serving):
    server = serving("echo:pause_after=1")
    with (
        httpx.Client(timeout=10, verify=False) as client,
        client.stream("POST", server.url + "/v1/completions", json={"prompt": "hello", "stream": True}) as response,
    ):
        lines = response.iter_lines()
        assert '"text":"h"' in next(lines)
        server.core().kill()
        rest = [line for line in lines if line]
    assert "SIGKILL" in rest[0] and '"error"' in rest[0] and rest[-1] == "data: [DONE]"
    assert server.end() == 1


def test_a_killed_server_takes_its_core_with_it(serving):
    server = serving("echo")
    core = server.core()
    server.process.kill()
    server.end()
    assert core.wait(10) is None


@pytest.mark.more
def test_a_signal_while_the_model_loads(serving):
    server = serving("echo:build_seconds=30", "--log-level", "debug", wait=False)
    deadline = time.monotonic() + 60
    while not psutil.Process(server.process.pid).children():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("echo:refuse=true", 2, "echo:refuse=true: the echoing model was told to refuse"),
        more("echo:crash=true", 1, "the echoing core's build was told to crash"),
        more("echo:nonsense=1,stall_seconds=x", 2, "cannot be read"),
    ],
)
def test_a_model_that_cannot_be_served(model, code, said):
    done = run("serve", model, "--port", "0", "--log-level", "error")
    assert done.returncode == code
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("cairn: ") and said in last


def test_a_folder_that_is_no_checkpoint(tmp_path, capsys):
    assert main(["serve", str(tmp_path), "--port", "0"], core="doubles.echo_core:build_echo_core") == 2
    assert f"cairn: {tmp_path}: no checkpoint's folder" in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.parametrize("made", ["int4", "int8"])
def test_quantization_and_exact_exclude_each_other(made, tiny_model, capsys):
    given = ["serve", str(tiny_model), "--port", "0", "--exact", "--quantization", made]
    assert main(given) == 2
    assert f"--exact cannot be had with --quantization {made}: leave one of them out" in capsys.readouterr().err


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "echo", "--port", str(port))
    assert done.returncode == 2 and f"--port {port}" in done.stderr and "choose another" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "MODEL is missing"),
        (["serve", "m", "--port", "http"], "--port: should be a valid integer"),
        (["serve", "m", "--host", "no.such.host.invalid"], "--host no.such.host.invalid cannot be used"),
        (["serve", "m", "--tensor-parallel", "2"], "unrecognized arguments: --tensor-parallel"),
        (["serve", "m", "--port"], "--port: expected one argument"),
        (["serve", "m", "--api-key", "k", ""], "--api-key: must not be empty"),
        (["serve", "m", "--api-key"], "--api-key: expected at least one argument"),
        (["serve", "m", "--kv-peer-allowlist", ""], "--kv-peer-allowlist: must not be empty"),
        (["serve", "m", "--tensor-parallel-size", "0"], "--tensor-parallel-size: should be greater"),
        (
            ["serve", "m", "--quantization", "int2"],
            "should be 'int4', 'int8', 'fp8', 'modelopt', 'compressed-tensors', 'awq', ",
        ),
        (["serve", "m", "-q", "aqlm"], "'auto-round', 'mxfp4' or 'gguf', not 'aqlm'"),
        (["bake"], "invalid choice: 'bake'"),
        ([], "required: COMMAND"),
        (["make-model", "nemotron_h", "out", "--size", "huge"], "--size: invalid choice: 'huge'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(arguments, said, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


NO_UTF_8 = os.fsdecode(b"/no/such/m\xff")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", NO_UTF_8], "MODEL"),
        (["serve", "--model", NO_UTF_8], "--model"),
        (["serve", "m", "--tokenizer", NO_UTF_8], "--tokenizer"),
        (["serve", "m", "--request-log", NO_UTF_8], "--request-log"),
        (["serve", "m", "--config", NO_UTF_8], "--config"),
        (["serve", "m", "--served-model-name", "a", NO_UTF_8], "--served-model-name"),
        (["serve", "m", "--api-key", NO_UTF_8], "--api-key"),
        (["proxy", "--decode", NO_UTF_8], "--decode"),
        (["proxy", "--decode", "http://d:1", "--host", NO_UTF_8], "--host"),
        (["check", NO_UTF_8], "MODEL"),
        (["check", "m", "--generate", "--output", NO_UTF_8], "--output"),
        (["make-model", "nemotron_h", NO_UTF_8], "OUT"),
        (["replay", NO_UTF_8], "TRACE"),
        (["replay", "t", "--json", NO_UTF_8], "--json"),
        (["bench", "serve", "--tokenizer", NO_UTF_8], "--tokenizer"),
        (["bench", "serve", "--result-dir", NO_UTF_8], "--result-dir"),
        (["bench", "compare", "a", NO_UTF_8], "B.json"),
    ],
)
def test_words_whose_bytes_are_no_text(arguments, named, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f": {named}: must be valid UTF-8" in error and error.count("\n") == 1
    error.encode()


COMMANDS = (
    ["serve", "m"],
    ["proxy", "--decode", "http://d:1"],
    ["check", "m"],
    ["make-model", "nemotron_h", "out"],
    ["replay", "t"],
    ["bench", "serve"],
)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_working_directory_that_is_gone(arguments, tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("cairn: the working directory cannot be used: ")


class Loaded(Exception):
    """The model would have been looked for."""


def find_nothing(settings):
    raise Loaded


TRANSFERS = '{"kv_connector": "NixlConnector"}'


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--request-log", "/no/such/folder/log"], "--request-log /no/such/folder/log: cannot be written"),
        (["--checkpoint-dtype", "float16", "--exact"], "--checkpoint-dtype float16: not with --exact"),
        (["--checkpoint-dtype", "fp8"], "--checkpoint-dtype"),
        (["--kv-events-config", '{"endpoint": "tcp://nowhere"}'], "--kv-events-config: cannot bind tcp://nowhere"),
        (["--generation-config", "/no/such/folder"], "--generation-config: there is no /no/such/folder"),
        (["--override-generation-config", '{"temperature": -1}'], "--override-generation-config: temperature"),
    ],
)
def test_what_cannot_be_had_is_told_before_anything_is_loaded(flags, said, capsys):
    assert main(["serve", "m", "--port", "0", *flags], find_model=find_nothing) == 2
    assert f"cairn: {said}" in capsys.readouterr().err


def test_a_side_channel_that_is_taken_is_told_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        given = ["serve", "m", "--port", "0", "--kv-transfer-config", TRANSFERS]
        assert main(given, find_model=find_nothing) == 2
    assert f"VLLM_NIXL_SIDE_CHANNEL_PORT {port}: cannot be listened on" in capsys.readouterr().err
    with pytest.raises(Loaded):
        main(given, find_model=find_nothing)


def test_making_and_checking_a_model(tmp_path, capsys):
    out = tmp_path / "model"
    assert main(["make-model", "nemotron_h", str(out), "--seed", "3"]) == 0
    assert (out / "config.json").is_file() and (out / "tokenizer.json").is_file()
    assert main(["check", str(out)]) == 0
    assert "nemotron_h" in capsys.readouterr().out
    assert main(["make-model", "nemotron_h", str(out)]) == 2
    assert main(["make-model", "gpt", str(tmp_path / "other")]) == 2
    assert (
        main(["check", str(out), "--block-size", "64", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "3"]) == 0
    )
    shown = capsys.readouterr().out
    assert "64 tokens" in shown and "64.00 MiB" in shown and "3 sequences" in shown
    assert main(["check", str(out), "--gpu", "H100", "--gpu-memory-utilization", "0.5"]) == 0
    assert "50% of 79.65 GiB" in capsys.readouterr().out
    assert main(["check", str(out), "--gpu", "2MiB"]) == 1
    assert "too little for" in capsys.readouterr().out
    sizes = (["--block-size", "0"], ["--kv-cache-memory-bytes", "much"], ["--max-num-seqs", "x"])
    for wrong in (*sizes, ["--gpu", "h99"], ["--gpu-memory-utilization", "1.1"]):
        assert main(["check", str(out), *wrong]) == 2
        assert wrong[0] in capsys.readouterr().err
    assert main(["check", str(tmp_path / "missing")]) == 2
    assert str(tmp_path / "missing") in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["serve", "--help"], *map(more, (["--help"], ["--version"]))])
def test_help_needs_no_heavy_imports(arguments):
    script = (
        f"import sys; from cairn.cli import main; assert main({arguments!r}) == 0; "
        "print([name for name in ('torch', 'transformers', 'fastapi', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "cairn", "--version"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and done.stdout.startswith("cairn ")


def test_make_model_names_every_family_that_it_can_make(capsys):
    assert main(["make-model", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ", ".join(MADE_FAMILIES) in said
