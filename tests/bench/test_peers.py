"""The comparison with other servers: commands, counts of what is sent, processes that end, and its arithmetic."""

import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from benchmarks import peer_vllm
from benchmarks.made_model import PEER_SHAPES, make_peer_model
from benchmarks.peer_loads import (
    FULL,
    LOADS,
    QUICK,
    SAMPLED,
    LoadClient,
    check_answers,
    decode_rate,
)
from benchmarks.peer_report import Turn, medians_of, plot, ratios_of, shown, table_of, times_better
from benchmarks.peer_servers import (
    PEERS,
    LearnedFlag,
    Peer,
    PeerError,
    Place,
    command_of,
    environment_of,
    started,
)
from benchmarks.peer_setup import mark_finished
from benchmarks.peers import order_of, parse, peers_of
from demo.server import free_port
from rich.console import Console

from bench.scripted import DONE, Answer, Server, answer_at, run, token, usage, virtually
from cairn.bench.client import RequestRecord
from cairn.bench.work import Conversation, TokenizerSpeller, Vocabulary
from cairn.bench.work import Turn as Request
from cairn.check.report import check
from cairn.models.families import family_of, qwen3_5
from cairn.models.random_weights.recipe import CheckpointOptions

HEALTHY = """
import http.server, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        time.sleep(600)
print("block size 256 found", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PLACE = Place(Path("model folder"), 8123, 1, 3, peers=Path("peers"))
SECONDS = 60.0


# -- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PEERS)
def test_a_command_line_has_no_placeholder_left(name):
    place = replace(PLACE, gguf=Path("model.gguf"))
    variables, command = command_of(PEERS[name], place, ("--more", "1"))
    assert not any("{" in word for word in (*command, *variables.values()))
    assert command[-2:] == ["--more", "1"] and command[command.index("--port") + 1] == "8123"
    assert ("model.gguf" if name == "llama-server" else "model folder") in command


def test_every_server_has_the_same_limits_and_threads(tmp_path):
    _, cairn = command_of(PEERS["cairn"], PLACE)
    variables, vllm = command_of(PEERS["vllm"], PLACE)
    for flag in ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--dtype", "--served-model-name"):
        assert cairn[cairn.index(flag) + 1] == vllm[vllm.index(flag) + 1]
    assert cairn[cairn.index("--cpu-threads") + 1] == "1" and "," not in variables["VLLM_CPU_OMP_THREADS_BIND"]
    assert cairn[cairn.index("--kv-cache-memory-bytes") + 1] == "3GiB" and variables["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert variables["LD_PRELOAD"] == ""
    assert command_of(PEERS["vllm-auto"], PLACE)[0] == variables | {"VLLM_CPU_OMP_THREADS_BIND": "auto"}
    openmp = tmp_path / "vllm" / "lib" / "libiomp5.so"
    openmp.parent.mkdir(parents=True)
    openmp.touch()
    assert command_of(PEERS["vllm"], replace(PLACE, peers=tmp_path))[0]["LD_PRELOAD"] == str(openmp)


def test_no_server_has_threads_and_settings_that_a_person_has_set():
    mine = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CAIRN_SEED": "3",
        "VLLM_X": "1",
        "LD_PRELOAD": "a",
        "B": "2",
    }
    assert environment_of({"LD_PRELOAD": "", "VLLM_Y": "4"}, mine) == {"VLLM_Y": "4", "B": "2"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve {nothing}", "placeholder"),
        ("serve {", "placeholder"),
        ("serve {gguf}", "--gguf"),
        ("A=1 B=2", "no program"),
    ],
)
def test_a_command_line_that_cannot_be_run_is_refused(line, said):
    with pytest.raises(PeerError, match=said):
        command_of(Peer("mine", line), PLACE)


def test_the_servers_that_are_asked_for():
    assert [peer.name for peer in peers_of(parse([]))] == ["cairn", "vllm"]
    assert [peer.name for peer in peers_of(parse(["--server", "mine=serve {model}"]))] == ["mine"]
    both = peers_of(parse(["--servers", "cairn", "mine", "--server", "mine=A=1 serve {model}"]))
    assert [peer.name for peer in both] == ["cairn", "mine"] and both[1].line == "A=1 serve {model}"
    assert peers_of(parse(["--server", "vllm=other {model}"]))[0].line == "other {model}"
    for words in (["--servers", "mine"], ["--server", "mine"], ["--server", "mine="], ["--server", "=serve"]):
        with pytest.raises(PeerError, match="--server"):
            peers_of(parse(words))


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--threads", "0"], ["--gguf", "f"], ["--loads", "none"]])
def test_bad_flags_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        parse(words)
    assert words[0] in capsys.readouterr().err


# -- processes -------------------------------------------------------------------------------------------------------


def gone(pids):
    deadline = time.monotonic() + SECONDS
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture
def healthy(tmp_path):
    script = tmp_path / "healthy.py"
    script.write_text(HEALTHY)
    return Peer("healthy", f"{{python}} {script} {{port}}", LearnedFlag("--block-size", r"block size (\d+) found"))


def test_a_server_is_waited_for_measured_and_ended_with_all_it_has_started(healthy, tmp_path):
    log = tmp_path / "log"
    with started(healthy, replace(PLACE, port=free_port()), log, SECONDS) as server:
        pids = [one.pid for one in server.tree()]
        assert server.process.pid == pids[0] and len(pids) == 2 and server.healthy_seconds > 0
        assert server.rss_bytes() > 2 << 20 and server.cpu_seconds() > 0
        assert healthy.learned.of(log.read_text()) == ("--block-size", "256")
    assert gone(pids)
    assert healthy.learned.of("nothing") == ()


def test_a_server_is_ended_when_a_load_fails(healthy, tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        started(healthy, replace(PLACE, port=free_port()), tmp_path / "log", SECONDS) as server,
    ):
        pids = [one.pid for one in server.tree()]
        raise ZeroDivisionError
    assert gone(pids)


@pytest.mark.more
def test_ctrl_c_ends_the_servers(healthy, tiny_model):
    """The script as a process of its own, interrupted while its server owes it an answer."""
    flags = ["--server", f"mine={healthy.line}", "--model", str(tiny_model)]
    # A shell may have switched off Ctrl-C for what it runs.
    program = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", program + "runpy.run_module('benchmarks.peers', run_name='__main__')", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert any("healthy after" in line for line in iter(process.stdout.readline, ""))
        pids = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
        assert len(pids) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
    finally:
        process.kill()
        process.stdout.close()
    assert gone(pids)


@pytest.mark.parametrize(
    ("program", "seconds", "said"),
    [
        ("print('no room', flush=True); raise SystemExit(7)", SECONDS, "exit code 7:\nno room"),
        ("import time; print('slow', flush=True); time.sleep(600)", 0.5, "not healthy in time:"),
    ],
)
def test_what_a_server_said_that_does_not_start_is_shown(tmp_path, program, seconds, said):
    script = tmp_path / "script.py"
    script.write_text(program)
    peer = Peer("mine", f"{{python}} {script}")
    with (
        pytest.raises(PeerError, match=said),
        started(peer, replace(PLACE, port=free_port()), tmp_path / "log", seconds),
    ):
        pass


def test_a_program_that_is_not_there_is_named(tmp_path):
    with (
        pytest.raises(PeerError, match="bench-vllm"),
        started(PEERS["vllm"], replace(PLACE, peers=tmp_path), tmp_path / "log", SECONDS),
    ):
        pass


# -- loads -----------------------------------------------------------------------------------------------------------


def answer_to(body):
    """As many tokens as were asked for, each with its id; half of the prompt was cached."""
    assert body["stream"] and body["ignore_eos"] and body["return_token_ids"]
    count = body["max_tokens"]
    pieces = [(1.0 + 0.5 * i, token("x", "length" if i == count - 1 else None, token_ids=[5])) for i in range(count)]
    end = pieces[-1][0]
    prompt = len(body["prompt"])
    return Answer((*pieces, (end, usage(prompt, count, prompt // 2)), (end, DONE)))


def sent_by(name, scale, seed=0):
    """Figures of a load, and the server it went to."""
    server = Server(answer_to=answer_to)

    async def send():
        async with httpx.AsyncClient(transport=server) as http:
            client = LoadClient(http, "http://server.test", Vocabulary.of_size(4096), np.random.default_rng(seed))
            return await LOADS[name](client, scale)

    return virtually(send()), server


def test_prefixes_that_repeat_are_a_tenth_of_the_published_load():
    figures, server = sent_by("prefix_repetition", FULL)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) == 100 and {len(prompt) for prompt in prompts} == {800}
    assert len({prompt[:600] for prompt in prompts}) == 10 and len({prompt[600:] for prompt in prompts}) == 100
    assert {body["max_tokens"] for body in server.bodies} == {100} and server.most_open == 10
    assert figures == {
        "prefix_repetition_duration_s": pytest.approx(10 * (1 + 99 * 0.5)),
        "prefix_repetition_tpot_ms": pytest.approx(500),
        "prefix_repetition_ttft_ms": pytest.approx(1000),
        "prefix_repetition_cached_share": pytest.approx(0.5),
    }


def test_decode_is_measured_at_1_4_8_and_16_sequences():
    figures, server = sent_by("decode", FULL)
    assert len(server.bodies) == 3 * (1 + 4 + 8 + 16) and server.most_open == 16
    assert {(len(body["prompt"]), body["max_tokens"], body["temperature"]) for body in server.bodies} == {(16, 128, 0)}
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies)
    assert figures == {f"decode_{count}_tokens_per_s": pytest.approx(count * 128 / 64.5) for count in (1, 4, 8, 16)}


def test_sampling_is_measured_at_8_sequences_beside_greedy():
    figures, server = sent_by("sampled", FULL)
    assert [*figures] == ["greedy_decode_8_tokens_per_s", "sampled_decode_8_tokens_per_s"]
    sampled = [body for body in server.bodies if body["temperature"]]
    assert len(sampled) == 24 and len(server.bodies) == 48
    assert all({name: body[name] for name in SAMPLED} == SAMPLED for body in sampled)
    assert SAMPLED == {"temperature": 0.8, "top_p": 0.95, "top_k": 20}


def test_cold_repeated_and_shared_prompts():
    figures, server = sent_by("cold", FULL)
    assert server.most_open == 1 and {body["max_tokens"] for body in server.bodies} == {1}
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert [len(prompt) for prompt in prompts] == 3 * [1200, 1200, 4800, 4800, 4800, 4800, 4800]
    for start in range(0, len(prompts), 7):
        a, a_again, b, b_again, first, second, third = prompts[start : start + 7]
        assert a == a_again and b == b_again and a[:1] + a[1:] != b[:1200]
        assert first[:3200] == second[:3200] == third[:3200]
        assert len({prompt[3200:] for prompt in (first, second, third)}) == 3
        assert len({prompt[:64] for prompt in (a, b, first)}) == 3
    assert len(set(prompts)) == len(prompts) - 6
    assert figures["cold_4800_ms"] == figures["shared_again_4800_ms"] == pytest.approx(1000)
    assert figures["repeat_1200_cached_tokens"] == 600 and "cold_1200_cached_tokens" not in figures
    assert len(figures) == 6 + 4


@pytest.mark.parametrize("name", LOADS)
def test_the_same_seed_sends_the_same(name):
    first, again, other = (sent_by(name, QUICK, seed)[1].bodies for seed in (3, 3, 4))
    assert first == again != other


def test_decode_rate_counts_all_tokens_until_the_last():
    slow = RequestRecord(0.5, 9, 4, token_times=(1.0, 3.0, 5.0, 7.0, 9.0), output_tokens=5)
    late = RequestRecord(1, 6, 4, token_times=(3.0, 4.0, 5.0, 6.0), output_tokens=8)
    assert decode_rate([slow, late]) == pytest.approx(13 / 8.5)
    assert decode_rate([late]) == pytest.approx(8 / 5)


def test_an_answer_that_is_missing_or_short_ends_the_comparison():
    one = Conversation((Request((1, 2), 2, 2),))
    check_answers([one], virtually(run(Server([answer_at(1.0, 2.0)]), [one])))
    for answers, said in (([answer_at(1.0)], "1 tokens, and 2"), ([Answer(((0.0, b"full"),), 503)], "HTTP 503: full")):
        with pytest.raises(PeerError, match=said):
            check_answers([one], virtually(run(Server(answers), [one])))


# -- the report ------------------------------------------------------------------------------------------------------


def turns():
    cairn = [{"x_ms": 10.0, "decode_tokens_per_s": 30.0, "own_mib": 3.0}, {"x_ms": 30.0, "decode_tokens_per_s": 10.0}]
    other = [{"x_ms": 20.0, "decode_tokens_per_s": 10.0}, {"x_ms": 15.0, "decode_tokens_per_s": 40.0}]
    cairn.append({"x_ms": 20.0, "decode_tokens_per_s": 20.0})
    other.append({"x_ms": 100.0, "decode_tokens_per_s": 20.0})
    made = [Turn("cairn", "tiny", i, 0.5, figures) for i, figures in enumerate(cairn)]
    return made + [Turn("other", "tiny", i, 0.5, figures) for i, figures in enumerate(other)]


def test_every_second_round_goes_backwards():
    assert order_of(["A", "B"], 3) == [(0, "A"), (0, "B"), (1, "B"), (1, "A"), (2, "A"), (2, "B")]


def test_medians_and_ratios():
    assert medians_of(turns())["tiny"] == {
        "x_ms": {"cairn": 20.0, "other": 20.0},
        "decode_tokens_per_s": {"cairn": 20.0, "other": 20.0},
        "own_mib": {"cairn": 3.0},
    }
    ratios = ratios_of(turns(), ["cairn", "other"])["tiny"]
    assert ratios["x_ms"]["other"] == {"medians": 1.0, "rounds": [2.0, 0.5, 5.0]}
    assert ratios["decode_tokens_per_s"]["other"] == {"medians": 1.0, "rounds": [3.0, 0.25, 1.0]}
    assert ratios["own_mib"]["other"] == {"medians": None, "rounds": [None, None, None]}


def test_less_time_and_more_tokens_are_better():
    assert times_better("cold_4800_ms", 50.0, 100.0) == times_better("decode_8_tokens_per_s", 100.0, 50.0) == 2.0
    assert times_better("rss_mib", 4.0, 1.0) == times_better("prefix_repetition_cached_share", 0.1, 0.4) == 0.25
    assert times_better("idle_core_share", 0.0, 0.1) is times_better("x_ms", None, 1.0) is None


def test_table_and_plot(tmp_path):
    console = Console(width=100, record=True, file=(tmp_path / "table").open("w"))
    console.print(table_of(turns(), ["cairn", "other"], "tiny"))
    console.file.close()
    text = (tmp_path / "table").read_text()
    assert "1.00 (0.50 to 5.00)" in text and "n/a" in text and "medians of 3" in text
    plot(turns(), ["cairn", "other"], tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("x_ms") == 1
    assert [shown(name, 0.5) for name in ("a_share", "a_mib", "a_ms")] == ["50.0%", "0", "0.50"]


# -- checkpoints and the peer's environment --------------------------------------------------------------------------


@pytest.mark.more
def test_the_peers_checkpoint_has_the_vocabulary_that_is_asked_for(tmp_path):
    folder = tmp_path / "model"
    make_peer_model(folder, size="tiny", vocab_size=5000, seed=0)
    spell = TokenizerSpeller(folder)
    assert spell.regular_token_ids().max() == 4999 and spell.text([4998, 4999]) == " x4998 x4999"
    report = check(folder)
    assert report.ok and report.dtype == "bfloat16" and report.parameters == parameters("tiny", vocab_size=5000)
    with pytest.raises(ValueError, match="too small"):
        make_peer_model(tmp_path / "other", size="tiny", vocab_size=100, seed=0)


def parameters(size, **fields):
    recipe = CheckpointOptions("bfloat16", 4096, 32768, 2, 0, {})
    raw = qwen3_5.DENSE_RECIPE.config("tiny", recipe) | PEER_SHAPES[size] | fields
    family = family_of(raw)
    return sum(math.prod(shape) for shape in family.tensors(family.parse(raw)).values())


def test_the_peers_checkpoints_have_as_many_parameters_as_they_are_said_to():
    assert (parameters("tiny"), parameters("small")) == (7_769_008, 332_968_992)


def test_the_build_is_named_as_the_command_line_asks(tmp_path):
    made = tmp_path / f"vllm_cpu-{peer_vllm.VERSION}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 1\n\nName: vllm-cpu\n")
    (made / "RECORD").write_text("")
    peer_vllm.name_as_vllm(tmp_path)
    named = tmp_path / f"vllm-{peer_vllm.VERSION}+cpu.dist-info"
    head = (named / "METADATA").read_text().split("\n\n")[0]
    assert head == f"Metadata-Version: 2.4\nName: vllm\nVersion: {peer_vllm.VERSION}+cpu"
    assert not (named / "RECORD").exists()


def test_operators_are_declared_once():
    text = peer_vllm.declare_operators("import functools\nimport torch.library\n\nx = 1\n")
    assert text.count("import torch.library\n") == 1 and text.index("torch.library.define") < text.index("x = 1")
    with pytest.raises(peer_vllm.PeerError, match="_meta_registrations"):
        peer_vllm.declare_operators("import torch\n")


def test_an_environment_that_cannot_be_made_says_why(tmp_path):
    maker = tmp_path / "python"
    maker.write_text("#!/bin/sh\necho no ensurepip here >&2\nexit 1\n")
    maker.chmod(0o700)
    with pytest.raises(peer_vllm.PeerError, match=r"virtual environment cannot be made\.\nno ensurepip here"):
        peer_vllm.set_up(tmp_path / "peer", str(maker))
    (tmp_path / "ready").mkdir()
    mark_finished(tmp_path / "ready", peer_vllm.VERSION)
    peer_vllm.set_up(tmp_path / "ready", str(maker))
