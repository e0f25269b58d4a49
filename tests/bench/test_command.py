"""`cairn bench` as a person runs it, against a real cairn server with the echoing engine behind it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from bench.conftest import KEY, SECONDS
from cairn.cli import main


@pytest.fixture(autouse=True)
def no_key_of_a_person(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def bench(url, *words):
    return main(["bench", "serve", "--base-url", url, "--vocab-size", "120", "--disable-tqdm", *words])


def keyed(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def test_a_load_on_completions(echo_server, tmp_path, monkeypatch, capsys):
    keyed(monkeypatch)
    shape = ["--prefix-repetition-prefix-len", "40", "--prefix-repetition-suffix-len", "8"]
    shape += ["--prefix-repetition-num-prefixes", "4", "--prefix-repetition-output-len", "6"]
    files = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    words = [
        "--num-prompts",
        "24",
        "--max-concurrency",
        "3",
        "--ignore-eos",
        "--num-warmups",
        "2",
        "--metadata",
        "tp=1",
    ]
    code = bench(echo_server, "--dataset-name", "prefix_repetition", *words, *shape, *files, "--goodput", "ttft:60000")
    said = capsys.readouterr()
    assert code == 0, said.err
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["requests_without_usage"]) == (24, 0, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (24 * 48, 24 * 6)
    assert (result["model_id"], result["backend"], result["tp"]) == ("echo", "openai", "1")
    assert result["dataset"]["num_prefixes"] == 4 and result["max_concurrent_requests"] <= 3
    assert all(len(gaps) <= 5 for gaps in result["itls"]) and len(result["generated_texts"]) == 24
    # the echoing engine has the first sending of a prefix to compute, three at a time
    assert result["total_cached_tokens"] >= 40 * (24 - 4 * 3)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert re.search(r"Successful requests: +24\n", said.out) and "Total cached tokens:" in said.out
    assert KEY not in said.out + said.err + (tmp_path / "r.json").read_text()
    with contextlib.suppress(ImportError):
        import matplotlib  # noqa: F401

        assert {path.name for path in tmp_path.iterdir()} == {"r.json", "r.ttft.png", "r.cached.png"}


@pytest.mark.parametrize("folder", ["/proc/results", "/dev/null/results"])
def test_a_result_that_could_not_be_written_is_told_before_the_load(folder, capsys):
    """No server is there either, and it would have been asked first."""
    assert bench("http://127.0.0.1:9", "--save-result", "--result-dir", folder) == 2
    assert f"--result-dir {folder} cannot be made" in capsys.readouterr().err


def test_a_chat_that_grows(echo_server, tmp_path, capsys):
    words = ["--endpoint", "/v1/chat/completions", "--dataset-name", "chat", "--num-prompts", "9", "--chat-turns", "3"]
    sizes = ["--chat-system-len", "8", "--chat-user-len", "4", "--chat-output-len", "300", "--max-concurrency", "2"]
    out = ["--append-result", "--result-dir", str(tmp_path), "--result-filename", "c.json", "--save-detailed"]
    assert bench(echo_server + "/v1", *words, *sizes, *out, "--api-key", KEY) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "c.json").read_text())
    assert (result["completed"], result["backend"]) == (9, "openai-chat")
    lengths, cached = result["input_lens"], result["cached_tokens"]
    for first in (0, 3, 6):
        # each turn has the whole one before it, and the answer, in its prompt
        assert lengths[first] < lengths[first + 1] < lengths[first + 2]
        assert cached[first + 1] >= lengths[first] * 0.8 and cached[first + 2] >= lengths[first + 1] * 0.8


def test_a_trace_and_text_prompts(echo_server, tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 10 * n, "input_length": 2048, "output_length": 64, "hash_ids": [1, 2, 3, n]} for n in (4, 5)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    words = ["--dataset-name", "trace", "--dataset-path", str(trace), "--trace-length-divisor", "16"]
    out = ["--save-result", "--result-filename", str(tmp_path / "x.json"), "--api-key", KEY, "--model", "echo"]
    assert bench(echo_server, *words, *out) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["input_lens"] == [128, 128] and result["output_lens"] == [4, 4]
    assert result["dataset"]["length_divisor"] == 16


def test_a_wrong_key_is_a_failure_of_every_request(echo_server, capsys):
    words = ["--model", "echo", "--num-prompts", "3", "--random-input-len", "4", "--num-warmups", "1"]
    assert bench(echo_server, *words, "--api-key", "sk-wrong-key") == 1
    said = capsys.readouterr()
    assert re.search(r"HTTP 401: +3\n", said.out) and re.search(r"Mean TTFT \(ms\): +n/a\n", said.out)
    assert "1 warm-ups failed: HTTP 401" in said.err and "sk-wrong-key" not in said.out + said.err


def test_no_server_is_said(capsys):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert bench(url) == 1
        assert "names no model" in capsys.readouterr().err
        assert bench(url, "--ready-check-timeout-sec", "0.1") == 1
        assert "was not ready within 0.1 s" in capsys.readouterr().err
        assert bench(url, "--model", "m", "--num-prompts", "2", "--random-input-len", "4") == 1
        assert re.search(r"connection failed: +2\n", capsys.readouterr().out)


def test_comparing_two_files(tmp_path, capsys):
    result = {"completed": 3, "mean_ttft_ms": 8.0, "ttfts": [0.001, 0.015], "errors": ["", ""], "seed": 0}
    for name, factor in (("a.json", 1), ("b.json", 2)):
        changed = result | {"mean_ttft_ms": result["mean_ttft_ms"] / factor, "seed": factor}
        (tmp_path / name).write_text(json.dumps(changed))
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    said = capsys.readouterr().out
    assert "not the same: seed is 1 and 2" in said and re.search(r"Mean TTFT \(ms\) .*8\.000 .*4\.000 .*0\.500", said)
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 2


def test_comparing_with_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path, plot = tmp_path / "a.json", tmp_path / "both.svg"
    path.write_text(json.dumps({"completed": 2, "ttfts": [0.001, 0.015], "errors": ["", ""]}))
    assert main(["bench", "compare", str(path), str(path), "--plot", str(plot)]) == 0
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-prompts", "0"], "--num-prompts: must be a whole number from 1"),
        (["--max-concurrency", "1000000"], "--max-concurrency 1000000 is more than"),
        (["--request-rate", "0"], "--request-rate: must be a number"),
        (["--request-rate", "nan"], "--request-rate: must be a number"),
        (["--burstiness", "-1"], "--burstiness: must be a number"),
        (["--random-range-ratio", "1"], "--random-range-ratio: must be"),
        (["--temperature", "nan"], "--temperature: must be"),
        (["--seed", "-1"], "--seed: must be"),
        (["--dataset-name", "trace"], "needs --dataset-path"),
        (["--dataset-path", "x"], "--dataset-path has no place"),
        (["--dataset-name", "trace", "--dataset-path", "x", "--request-rate", "2"], "--request-rate has no place"),
        (["--dataset-name", "sharegpt", "--dataset-path", "nowhere"], "--dataset-path nowhere cannot be read"),
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], "do not belong together"),
        (["--endpoint", "v1/completions"], "must begin with a slash"),
        (["--base-url", "ftp://x"], "--base-url must be"),
        (["--base-url", "http://user:pw@x"], "--base-url must be"),
        (["--header", "novalue"], "--header takes KEY=VALUE"),
        (["--header", "a b=c"], "--header or --api-key"),
        (["--api-key", "sk-\n"], "--header or --api-key"),
        (["--goodput", "itl:5"], "--goodput 'itl:5'"),
        (["--goodput", "ttft:soon"], "--goodput 'ttft:soon'"),
        (["--percentile-metrics", "ttft,rtt"], "'rtt' is none of"),
        (["--metric-percentiles", "50,101"], "must be a number from 0 to 100"),
        (["--extra-body", "[]"], "must be a JSON object"),
        (["--extra-body", "{"], "must be a JSON object"),
        (["--metadata", "x"], "--metadata takes KEY=VALUE"),
        (["--tokenizer", "./nowhere"], "--tokenizer ./nowhere: there is no such folder"),
    ],
)
def test_what_cannot_be_asked_for(words, said, capsys):
    assert main(["bench", "serve", "--model", "m", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and "pw" not in error and "sk-" not in error


def test_ctrl_c_prints_what_there_is():
    """A server that has no metrics, answers one request and then no other, in this process; the load in one of its
    own."""
    body = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SECONDS)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "cairn", "bench", "serve", "--base-url", url, "--model", "m"]
        command += ["--num-prompts", "5", "--max-concurrency", "1", "--random-input-len", "4"]
        environ = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        deadline = threading.Timer(SECONDS, process.kill)
        deadline.start()
        try:
            metrics, _ = listener.accept()
            with metrics:
                metrics.settimeout(SECONDS)
                assert metrics.recv(1 << 16).startswith(b"GET /metrics ")
                metrics.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            first, _ = listener.accept()
            with first:
                first.settimeout(SECONDS)
                first.recv(1 << 16)
                first.sendall(head + body)
            second, _ = listener.accept()
            with second:
                process.send_signal(signal.SIGINT)
                out, error = process.communicate()
        finally:
            deadline.cancel()
            process.kill()
            process.communicate()
    assert process.returncode == 130, error
    for line in (r"Successful requests: +1\n", r"Interrupted requests: +1\n", r"Unsent requests: +3\n"):
        assert re.search(line, out), out
