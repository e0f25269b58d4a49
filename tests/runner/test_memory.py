"""The pool of pages: there when it has been made, or refused. Slots: what they are counted as, how wide tables are."""

from dataclasses import fields, is_dataclass, replace
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.engine.profile_plans import SLOTS, num_profile_pages, profile_plans
from cairn.errors import ConfigError, EngineDead
from cairn.layers.model import Model
from cairn.machine import Machine
from cairn.runner import memory
from cairn.runner.batch_builder import MOST_STOP_TOKENS
from cairn.runner.input_batch import block_table_updates, pages_of_table
from cairn.runner.memory import ALIGNMENT, PoolPopulation, allocate_pool
from cairn.runner.runner import Runner, slot_bytes
from cairn.step import Admit, StepPlan, TableUpdate
from cairn.types import SamplingParams
from runner.harness import build_tiny, parse, random_weights, raw_config, tiny

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _populates_at_once(monkeypatch):
    """With the priority of all else: at the least one it would wait for whatever else the machine does."""
    monkeypatch.setattr(memory, "_LEAST_PRIORITY", 0)


def resident_bytes():
    """Of this process: its own memory, without mapped files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def wait(population):
    """For its thread."""
    if (thread := population._thread) is not None:
        thread.join(30)


def settled(population):
    """Its thread has ended."""
    wait(population)
    assert population._thread is None
    return population.populated


def test_a_pool_takes_memory_a_little_before_it_is_used():
    before = resident_bytes()
    pool = allocate_pool(400, 100_000, CPU)
    assert pool.shape == (400, 100_000) and pool.data_ptr() % ALIGNMENT == 0
    assert resident_bytes() - before < MIB
    pool[7] = 5
    population = PoolPopulation(pool, ahead=10_000_000)
    population.reach(-1)
    assert 0 <= settled(population) - 10_000_000 < PAGESIZE
    assert 9 * MIB < resident_bytes() - before < 12 * MIB
    for page in (*range(24), *range(20)):
        population.reach(page)
    assert settled(population) < 10_000_000 + PAGESIZE, "too little to begin anew"
    population.reach(25)
    population.reach(3)
    assert 0 <= settled(population) - 12_600_000 < PAGESIZE
    population.reach(399)
    assert settled(population) == pool.nbytes
    assert resident_bytes() - before >= 400 * 100_000 * 0.95
    assert (pool[7] == 5).all() and pool.sum() == 500_000


def test_a_pool_that_is_smaller_than_what_is_populated_ahead():
    pool = allocate_pool(3, 100, CPU)
    population = PoolPopulation(pool)
    for page in (-1, 0, 2, 1):
        population.reach(page)
        assert settled(population) == 300


def test_a_pool_is_as_good_where_it_cannot_be_populated(monkeypatch, caplog):
    monkeypatch.setattr(memory, "_POPULATE_WRITE", 9999)
    pool = allocate_pool(3, 100, CPU)
    population = PoolPopulation(pool)
    with caplog.at_level("INFO"):
        for page in (-1, 2):
            population.reach(page)
            wait(population)
    assert caplog.text.count("cannot be had before: Invalid argument") == 1
    assert population.populated == 0 and not pool.any()


def test_a_pool_beyond_the_memory_that_the_weights_have_left(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 100 kB\n")
    machine = Machine(tmp_path)
    assert len(allocate_pool(25, 4096, CPU, machine=machine)) == 25
    before = resident_bytes()
    with pytest.raises(ConfigError, match=r"^--kv-cache-memory-bytes: .* does not fit into memory: .* 102400$"):
        allocate_pool(1 << 20, 4096, CPU, machine=machine)
    assert resident_bytes() - before < MIB


@pytest.mark.parametrize("part", ["launch", "sample"])
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


# -- slots -----------------------------------------------------------------------------------------------------------


def storages_of(part) -> dict[int, int]:
    """Bytes by address of all that an object's fields hold in tensors, or in lists and records of them."""
    if isinstance(part, torch.Tensor):
        storage = part.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if is_dataclass(part):
        part = [getattr(part, each.name) for each in fields(part)]
    found: dict[int, int] = {}
    for each in part if isinstance(part, list | tuple) else vars(part).values() if hasattr(part, "__dict__") else ():
        found |= storages_of(each)
    return found


@pytest.mark.parametrize("pattern", ["M*", "*-", "M-"])
def test_a_slot_is_counted_as_it_is_allocated(pattern):
    driver = tiny(pattern, exact=False)
    runner = Runner(driver.model, driver.layout, 300, 6, exact=False, max_model_len=1000)
    runner._slot_tensors.reserve_stop_tokens(MOST_STOP_TOKENS)
    allocated = sum((storages_of(runner._live) | storages_of(runner._slot_tensors)).values())
    assert allocated == 7 * slot_bytes(driver.model.spec, driver.layout, 300, 1000)


def test_block_tables_are_as_wide_as_the_longest_sequence_or_the_pool():
    driver = tiny("M*", exact=False)
    assert [group.tokens_per_page for group in driver.layout.groups] == [16]
    for num_pages, max_model_len, width in ((300, 512, 32), (300, 513, 48), (20, 10_000, 32), (300, None, 304)):
        runner = Runner(driver.model, driver.layout, num_pages, 4, exact=False, max_model_len=max_model_len)
        assert [table.shape for table in runner._slot_tensors.block_tables] == [(5, width)]
    none = tiny("M-", exact=False)
    assert Runner(none.model, none.layout, 9, 4, exact=False, max_model_len=512)._slot_tensors.block_tables == []


def test_entries_of_windows_are_not_bounded_by_the_pool():
    """Pages that a sequence has let go of have theirs, too."""
    layout = CacheLayout(16, 64, 1, (AttentionGroup("full", 92), AttentionGroup("window", 16, 128)), 8, 0, 0)
    for num_pages, max_model_len, width in ((600, 32_000, 2_000), (600, 1_000, 63), (10, None, 58)):
        assert pages_of_table(layout, num_pages, max_model_len) == width


def test_pages_beyond_a_slots_own_are_refused():
    """They would be written into the next one's."""
    pages = np.arange(5, dtype=np.int32)
    admit = Admit(1, (pages[:4],), SamplingParams())
    index, values = block_table_updates(StepPlan(1, admits=(admit,)), 1, 4)[0]
    assert index.tolist() == [4, 5, 6, 7] and values.tolist() == [0, 1, 2, 3]
    for plan in (
        StepPlan(1, admits=(replace(admit, tables=(pages,)),)),
        StepPlan(1, table_updates=(TableUpdate(1, 0, 3, pages[:2]),)),
    ):
        with pytest.raises(ValueError, match=r"^slot 1: 5 pages, and its block table has room for 4$"):
            block_table_updates(plan, 1, 4)
