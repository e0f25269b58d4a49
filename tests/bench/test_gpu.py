"""benchmarks.gpu to its end on the CPU, with tiny models: nothing that it measures there means anything."""

import json
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from benchmarks import gpu, hand_turned, pd_servers
from benchmarks.gpu_model import SHAPES, open_random, write_folder
from demo.server import Child

from cairn.errors import ConfigError
from tiers import long, more


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def run(tmp_path, models):
    def run(*words):
        code = gpu.main(["--dry-run", "--json", str(tmp_path / "gpu.json"), "--keep", str(models), *words])
        return code, json.loads((tmp_path / "gpu.json").read_text())["rows"]

    return run


@pytest.mark.more
def test_the_engine_part_and_where_it_goes_on(run, tmp_path, monkeypatch):
    words = ("--models", "tiny-qwen", "--parts", "engine")
    plot = tmp_path / "gpu.svg"
    code, rows = run(*words, "--plot", str(plot))
    found = rows["tiny-qwen"]
    names = {f"prefill {n} {mode}" for n in (64, 192) for mode in ("none", "auto")} | {"decode 1", "decode 2"}
    assert code == 0 and found.keys() == names and plot.stat().st_size > 1000
    assert all(row["tokens_per_s"] > 0 and row["layers"] == 4 for row in found.values())
    assert "checkpoints_percent" in found["prefill 192 auto"]
    assert found["decode 2"]["bytes"] > found["decode 1"]["bytes"] > 1e6

    # what is there is not measured again, and a row with an error is
    content = json.loads((tmp_path / "gpu.json").read_text())
    content["rows"]["tiny-qwen"]["decode 2"] = "OutOfMemoryError: none left"
    (tmp_path / "gpu.json").write_text(json.dumps(content))
    measured = []
    monkeypatch.setattr(gpu, "decode", lambda engine, count, *sizes: measured.append(count) or {"step_us": 1.0})
    monkeypatch.setattr(gpu, "prefill", lambda *sizes: pytest.fail("it was there already"))
    assert run(*words)[0] == 0 and measured == [2]


def test_what_has_no_time_is_left_and_what_fails_is_said(run, monkeypatch):
    def refuse(config):
        raise ConfigError("--flag: no")

    code, rows = run("--models", "tiny-qwen", "--parts", "server", "--seconds", "0")
    assert code == 1 and rows == {"tiny-qwen": {}}
    monkeypatch.setattr(gpu, "build_core", refuse)
    code, rows = run("--models", "tiny-qwen", "--parts", "engine")
    assert code == 1 and set(rows["tiny-qwen"].values()) == {"ConfigError: --flag: no"}


def test_servers_find_the_memory_that_the_engine_part_had(run, monkeypatch):
    order = []
    monkeypatch.setattr(gpu, "engine_part", lambda *asked: order.append("engine"))
    monkeypatch.setattr(gpu, "open_random", SimpleNamespace(cache_clear=lambda: order.append("let go")))
    monkeypatch.setattr(gpu, "repetition", lambda *asked: order.append("servers") or {"seconds": 1.0})
    monkeypatch.setattr(gpu, "device_facts", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("given back"))
    assert run("--device", "cuda", "--models", "tiny-qwen", "--parts", "engine", "server")[0] == 0
    assert order == ["engine", "let go", "given back", "servers", "servers"]


def test_two_servers_on_one_gpu_take_it_one_after_the_other(run, monkeypatch):
    """The second one's share is of what all have taken."""
    commands, healthy = [], []

    @contextmanager
    def running(command, log, *asked, **named):
        shares = [value for name, value in pairwise(command) if name == "--gpu-memory-utilization"]
        commands.append((log.name, shares, [*healthy]))
        healthy.append(log.name)
        yield Child("http://127.0.0.1", None)

    monkeypatch.setattr(pd_servers, "running", running)
    monkeypatch.setattr(
        gpu.subprocess, "run", lambda *asked, **named: SimpleNamespace(returncode=1, stdout="", stderr="")
    )
    code, rows = run("--models", "tiny-qwen", "--parts", "pd")
    assert code == 1 and "cairn bench ended with 1" in rows["tiny-qwen"]["pd cached"]
    assert commands[:2] == [("p.log", ["0.45"], []), ("d.log", ["0.9"], ["p.log"])]


def test_servers_that_would_not_be_done_in_time_are_not_started(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    rows = gpu.Rows(tmp_path / "gpu.json", 400)

    def measure(case, seconds):
        def figures():
            now[0] += seconds
            return {"seconds": seconds}

        rows.measure("model", case, figures, rows.slowest("server"))

    measure("server cached", 500.0)  # longer than there is, but the first
    assert rows.found["model"] == {"server cached": {"seconds": 500.0}} and rows.num_left == 0
    now[0] = 390.0
    rows.found["model"]["server cached"]["seconds"] = 20.0
    measure("server uncached", 20.0)
    assert "server uncached" not in rows.found["model"] and rows.num_left == 1
    now[0] = 370.0
    measure("server uncached", 20.0)
    assert "server uncached" in rows.found["model"]


@pytest.mark.parametrize("part", [more("server"), long("pd")])
def test_the_parts_with_servers(run, part):
    code, rows = run("--models", "tiny-nemotron", "--parts", part)
    assert code == 0 and rows["tiny-nemotron"].keys() == {f"{part} cached", f"{part} uncached"}
    cached, uncached = rows["tiny-nemotron"].values()
    assert cached["failed"] == uncached["failed"] == 0
    assert cached["computed_prompt_tokens"] < uncached["computed_prompt_tokens"]


def test_device_time_is_between_events_around_a_step(monkeypatch):
    """On a GPU that takes 3 ms a step and was held up before each."""
    order, times = [], iter(range(0, 1000, 3))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("event")
            self.at = next(times)

        def elapsed_time(self, other):
            return other.at - self.at

    class Runner:
        def launch(self, plan):
            order.append("launch")

        def sample(self, step, masks):
            order.append("sample")

    class Engine:
        core = SimpleNamespace(_runner=Runner())

        def step(self):
            self.core._runner.launch(None)
            self.core._runner.sample(0, {})

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("held"), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("waited"))
    assert hand_turned.device_us(Engine(), 2) == 3000
    assert order == [*["held", "event", "launch", "sample", "event"] * 2, "waited"]
    Engine().step()
    assert order[-2:] == ["launch", "sample"]


@pytest.mark.parametrize(("name", "billions"), [more("nemotron-3-nano-30b-a3b", 31.6), more("qwen3.5-35b-a3b", 34.7)])
def test_published_shapes(tmp_path, name, billions):
    """As large as they are called, and cut by whole periods of layers where less fits."""
    whole = write_folder(tmp_path, name)
    opened = open_random(tmp_path)
    assert opened.weight_bytes(opened.stored_tensors()) / 2e9 == pytest.approx(billions, abs=0.1)
    few = write_folder(tmp_path, name, 30e9)
    assert 0 < few < whole and few % SHAPES[name].layers[1] == 0
    with pytest.raises(ValueError, match="take more than"):
        write_folder(tmp_path, name, 1e9)
