"""The pool of pages: there when it has been made, or refused."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from cairn.errors import ConfigError
from cairn.machine import Machine
from cairn.runner import memory
from cairn.runner.memory import new_pool

MIB = 1 << 20


def resident_bytes():
    """Of this process: its own memory, without mapped files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def test_a_pool_is_memory_that_has_been_written_to():
    before = resident_bytes()
    pool = new_pool(2048, 100_000)
    assert pool.shape == (2048, 100_000) and not pool.any()
    assert resident_bytes() - before >= 2048 * 100_000 * 0.95


def test_a_pool_beyond_the_memory_that_the_weights_have_left(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 100 kB\n")
    machine = Machine(tmp_path)
    assert len(new_pool(25, 4096, machine=machine)) == 25
    before = resident_bytes()
    with pytest.raises(ConfigError, match=r"^--kv-cache-memory-bytes: .* does not fit into memory: .* 102400$"):
        new_pool(1 << 20, 4096, machine=machine)
    assert resident_bytes() - before < MIB


@pytest.mark.parametrize(
    ("is_terminal", "least_shown", "shown"), [(True, 0, True), (False, 0, False), (True, MIB, False)]
)
def test_a_terminal_shows_how_far_a_large_pool_is(monkeypatch, is_terminal, least_shown, shown):
    monkeypatch.setattr(memory, "_SHOWN_BYTES", least_shown)
    output = io.StringIO()
    new_pool(10, 4096, Console(file=output, force_terminal=is_terminal))
    assert ("setting memory aside" in output.getvalue()) == shown
