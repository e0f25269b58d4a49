"""The pool of pages: there when it has been made, or refused."""

from pathlib import Path

import pytest
import torch

from cairn.engine.profile_plans import SLOTS, num_profile_pages, profile_plans
from cairn.errors import ConfigError, EngineDead
from cairn.layers.model import Model
from cairn.machine import Machine
from cairn.runner import memory
from cairn.runner.memory import ALIGNMENT, allocate_pool, populate
from cairn.runner.runner import Runner
from runner.harness import build_tiny, parse, random_weights, raw_config

MIB = 1 << 20
CPU = torch.device("cpu")


def resident_bytes():
    """Of this process: its own memory, without mapped files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def test_a_pool_takes_memory_when_it_is_set_aside():
    before = resident_bytes()
    pool = allocate_pool(400, 100_000, CPU)
    assert pool.shape == (400, 100_000) and pool.data_ptr() % ALIGNMENT == 0
    assert resident_bytes() - before < MIB
    pool[7] = 5
    populate(pool)
    assert resident_bytes() - before >= 400 * 100_000 * 0.95
    assert (pool[7] == 5).all() and pool.sum() == 500_000


def test_a_pool_is_as_good_where_it_cannot_be_set_aside(monkeypatch, caplog):
    monkeypatch.setattr(memory, "_POPULATE_WRITE", 9999)
    pool = allocate_pool(3, 100, CPU)
    with caplog.at_level("INFO"):
        populate(pool)
    assert "cannot be had before: Invalid argument" in caplog.text
    assert not pool.any()


def test_a_pool_beyond_the_memory_that_the_weights_have_left(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 100 kB\n")
    machine = Machine(tmp_path)
    assert len(allocate_pool(25, 4096, CPU, machine=machine)) == 25
    before = resident_bytes()
    with pytest.raises(ConfigError, match=r"^--kv-cache-memory-bytes: .* does not fit into memory: .* 102400$"):
        allocate_pool(1 << 20, 4096, CPU, machine=machine)
    assert resident_bytes() - before < MIB


@pytest.mark.parametrize("part", ["launch", "draw"])
def test_a_step_that_finds_no_memory_says_what_to_lower(monkeypatch, part):
    """On a GPU, whose allocator raises this."""
    config = parse(raw_config("M*"))
    model = build_tiny(config, random_weights(config, 0), False, backend="reference")
    layout = config.layout(16, 4)

    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...")

    monkeypatch.setattr(Model if part == "launch" else Runner, "forward" if part == "launch" else "_sample", refuse)
    runner = Runner(model, layout, num_profile_pages(layout, 20), SLOTS, exact=False)
    with pytest.raises(EngineDead, match=r"^step 0 of 1 sequences .*\(CUDA out of memory\).*--gpu-memory-utilization"):
        runner.run(profile_plans(layout, 20, None)[0])
