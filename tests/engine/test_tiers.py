"""Real models over tiers: what comes back from memory or from a disk, also after a restart, is what was computed."""

import re
import time
from pathlib import Path

import pytest
import torch
from tiered_engine import OTHER, TEXT, cached, tiered_engines
from turned_engine import Engine, answer

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.engine.contract import EngineConfig
from cairn.engine.tiers import RESTS, allocate_arena, check_tiers, least_bytes
from cairn.errors import ConfigError
from cairn.machine import Machine
from models.covered import TIERS
from tiers import first


@pytest.fixture
def engine(monkeypatch):
    """See `tiered_engines`."""
    yield from tiered_engines(monkeypatch)


@pytest.mark.parametrize("family", first(1, TIERS.families))
def test_exact_logits_are_those_without_a_cache(family, made_model, tmp_path, engine):
    folder = made_model(family)
    turns = [TEXT[:300], TEXT[:300] + OTHER[:50], TEXT[:128] + OTHER[:70], TEXT]
    alone = []
    for prompt in turns:
        plain = Engine(folder, enable_prefix_caching=False)
        alone.append((answer(plain.ask(prompt)), dict(plain.logits)))
    first_one = engine(folder, exact=True, disk_cache=tmp_path, host_cache_bytes=4 << 20)
    for prompt, (expected, _) in zip(turns, alone, strict=True):
        assert answer(first_one.ask(prompt)) == expected
    first_one.end()
    second = engine(folder, exact=True, disk_cache=tmp_path)
    hits = []
    for prompt, (expected, logits) in zip(turns, alone, strict=True):
        second.core.reset_cache()
        second.logits.clear()
        outputs = second.ask(prompt)
        assert answer(outputs) == expected
        for place, values in second.logits.items():
            assert torch.equal(values, logits[place]), place
        assert cached(outputs)[0] == cached(outputs)[1]
        hits.append(cached(outputs)[1])
    assert hits[0] == 300 and hits[2] >= 64 and hits[3] == 400, hits


@pytest.mark.parametrize("checkpoint_dtype", ["float32", "float16", "int8"])
def test_a_state_comes_back_in_the_form_in_which_it_is_stored(checkpoint_dtype, tiny_model, tmp_path, engine):
    config = {"disk_cache": tmp_path, "checkpoint_dtype": checkpoint_dtype}
    first_one = engine(tiny_model, **config)
    first_one.ask(TEXT)
    hit = answer(first_one.ask(TEXT))
    first_one.end()
    second = engine(tiny_model, **config)
    outputs = second.ask(TEXT)
    assert answer(outputs) == hit and cached(outputs) == (400, 400)


def test_the_host_tier_has_what_the_pool_has_dropped(tiny_model, engine):
    one = engine(tiny_model, host_cache_bytes=16 << 20, kv_cache_memory_bytes=4 << 20)
    expected = answer(one.ask(TEXT))
    for start in range(6):
        one.ask(OTHER[start * 10 :])
    one.core.reset_cache()
    outputs = one.ask(TEXT)
    assert answer(outputs) == expected and cached(outputs) == (400, 400)
    stats = one.core.stats()
    assert stats.tiers.hits["host"] == 1 and stats.tiers.hit_tokens["host"] == 400
    assert stats.tokens.prompt_by_source["local_cache_hit"] >= 400
    assert sum(stats.tokens.prompt_by_source.values()) == stats.tokens.prompt
    (view,) = [view for view in one.core.cache_view(10) if view is not None]
    assert [(tier.name, tier.hits) for tier in view.tiers] == [("host", 1)]
    assert one.core.info.tiers == ("host",)


def test_a_reset_does_not_wait_for_copies(tiny_model, engine):
    one = engine(tiny_model, host_cache_bytes=16 << 20)
    one.submit("r", TEXT)
    while one.core.has_work:
        one.step()
    until = time.monotonic() + 60
    while not one.state.cache.pinned.pins and time.monotonic() < until:
        one.core.poll()
    assert one.tiers.demoter.num_pins == 1
    assert one.core.reset_cache() == 0
    one.run()
    assert one.state.cache.pool.num_free == one.state.cache.pool.num_pages


@pytest.mark.parametrize(("more_cores", "rests"), [(0, RESTS), (1, 0.0)])
def test_threads_that_move_bytes_rest_beside_steps_where_no_core_is_spare(
    more_cores, rests, tiny_model, engine, monkeypatch
):
    monkeypatch.setattr(Machine, "num_cores", lambda machine: torch.get_num_threads() + more_cores)
    one = engine(tiny_model, host_cache_bytes=16 << 20)

    def pace() -> list[float]:
        one.core.poll()
        lanes = one.tiers.lanes
        return [each.rests for each in (lanes.names, lanes.copies, lanes.reads, lanes.writes)]

    assert pace() == [0.0] * 4
    one.submit("r", TEXT)
    assert pace() == [0.0, rests, rests, rests]
    one.tiers.write_back()
    assert not one.tiers.lanes.writes.rests, "at the end there are no steps"
    assert pace() == [0.0, rests, rests, rests]
    while one.core.has_work:
        one.step()
    assert pace() == [0.0] * 4, "nobody computes"


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="/proc does not tell")
def test_memory_of_the_host_tier_comes_in_huge_pages():
    arena = allocate_arena(64 << 20, 1000)
    address, advised = arena.ctypes.data, None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (region := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            here = int(region[1], 16) <= address < int(region[2], 16)
        elif here and line.startswith("VmFlags:"):
            advised = "hg" in line.split()
    assert advised


def test_without_tiers_nothing_of_them_is_there(tiny_model):
    plain = Engine(tiny_model)
    assert plain.core.info.tiers == () and plain.core.stats().tiers.num_bytes == {}
    assert [view.tiers for view in plain.core.cache_view(10) if view is not None] == [[]]


def test_another_block_size_or_numerics_is_another_folder(tiny_model, tmp_path, engine, caplog):
    engine(tiny_model, disk_cache=tmp_path).ask(TEXT)
    for number, config in enumerate(({"block_size": 32}, {"exact": True}, {"checkpoint_dtype": "float16"})):
        caplog.clear()
        other = engine(tiny_model, disk_cache=tmp_path, **config)
        assert cached(other.ask(TEXT)) == (0, 0)
        assert caplog.text.count("is ignored") == 1 + number


def test_a_reader_hits_what_a_writer_wrote(tiny_model, tmp_path, engine, monkeypatch):
    monkeypatch.setattr("cairn.tiers.files.LOCK_SECONDS", 0.2)
    writer = engine(tiny_model, disk_cache=tmp_path)
    expected = answer(writer.ask(TEXT))
    reader = engine(tiny_model, disk_cache=tmp_path, disk_cache_read_only=True)
    outputs = reader.ask(TEXT)
    assert answer(outputs) == expected and cached(outputs) == (400, 400)
    with pytest.raises(ConfigError, match=r"another server writes there.*--disk-cache-read-only"):
        engine(tiny_model, disk_cache=tmp_path)


LAYOUT = CacheLayout(16, 1000, 1, (AttentionGroup("full", 16),), 100, 5000, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"host_cache_bytes": 9999}, r"--host-cache-bytes 9999: one entry takes 10000: set more, or 0"),
        ({"disk_cache": "x", "disk_cache_bytes": 1 << 16}, r"--disk-cache-bytes 65536: the least is 112768"),
        ({"disk_cache_bytes": 1 << 30}, r"--disk-cache-bytes: there is no folder: name one with --disk-cache"),
        ({"disk_cache_read_only": True}, r"--disk-cache-read-only: there is no folder"),
        ({"host_cache_bytes": 1 << 20, "enable_prefix_caching": False}, r"--host-cache-bytes: nothing is cached"),
        ({"disk_cache": "x", "mamba_cache_mode": "none"}, r"--disk-cache: nothing is cached"),
        ({"host_cache_bytes": 19_999, "tensor_parallel_size": 2}, r"--host-cache-bytes 19999: one entry takes 20000"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(config, message):
    with pytest.raises(ConfigError, match=message):
        check_tiers(EngineConfig(model="m", **config), LAYOUT)


def test_the_largest_entry_is_a_state_with_its_tail():
    assert least_bytes(LAYOUT) == (6 + 4) * 1000


def test_the_layout_of_all_ranks_has_the_pages_of_one():
    """Each as large as those of all together, also where a checkpoint ends within a page."""
    layout = CacheLayout(16, 1000, 2, (AttentionGroup("full", 16),), 101, 5000, 4)
    three = layout.of_ranks(3)
    assert (three.page_bytes, three.checkpoint_bytes) == (3000, 3 * 5101)
    assert (three.pages_per_checkpoint, three.pages_for(100)) == (layout.pages_per_checkpoint, layout.pages_for(100))
    assert three.bytes_per_token == 3 * layout.bytes_per_token and layout.of_ranks(1) == layout
