"""Tiers below the pools of several processes: what comes back is what they computed, and a rank that does not copy
costs a hit and nothing else."""

import os
import signal
import time
from contextlib import contextmanager

import pytest
import torch
from tiered_engine import OTHER, TEXT, cached, tiered_engines
from turned_engine import answer

from cairn.cache.reasons import Reason
from cairn.models.registry import open_model
from cairn.scheduler.preempt import preempt
from cairn.tiers import promotion
from engine.test_ranks_exactness import LoadedRanks

RANKS = {"tensor_parallel_size": 2, "exact": True}
TURNS = [TEXT[:300], TEXT[:300] + OTHER[:50], TEXT[:128] + OTHER[:70], TEXT]


@pytest.fixture(scope="module")
def alone(tiny_model):
    """Answers and logits of two ranks without a cache, by prompt. The ranks are threads: that takes less to start."""
    ranks, answers = LoadedRanks(open_model(tiny_model), 2), {}
    for prompt in TURNS:
        engine = ranks.engine(None)
        engine.logits[1] = []
        number = engine.submit(prompt, 8, temperature=1.0, seed=1)
        engine.run()
        places = {(1, position): each for position, each in enumerate(engine.logits[1], len(prompt))}
        answers[prompt] = engine.requests[number].output, places
    for engine in ranks.engines:
        engine.runner.close()
    return answers


@pytest.fixture
def engine(monkeypatch):
    """See `tiered_engines`."""
    yield from tiered_engines(monkeypatch)


def assert_same(engine, prompt, alone) -> tuple[int, int]:
    """Ask again, with nothing in the pool; what was cached, and came from below."""
    engine.core.reset_cache()
    engine.logits.clear()
    outputs, (expected, logits) = engine.ask(prompt), alone[prompt]
    assert answer(outputs) == expected
    assert all(torch.equal(values, logits[place]) for place, values in engine.logits.items())
    return cached(outputs)


def test_exact_logits_are_those_without_a_cache(tiny_model, tmp_path, engine, alone, caplog):
    first_one = engine(tiny_model, disk_cache=tmp_path, host_cache_bytes=8 << 20, **RANKS)
    for prompt in TURNS:
        assert answer(first_one.ask(prompt)) == alone[prompt][0]
    assert assert_same(first_one, TURNS[0], alone) == (300, 300)
    assert first_one.core.stats().tiers.hits == {"host": 1, "disk": 0}
    page_bytes = first_one.core.info.cache.page_bytes
    (view,) = [view for view in first_one.core.cache_view(10) if view is not None]
    assert [(tier.name, tier.hit_tokens) for tier in view.tiers] == [("host", 300), ("disk", 0)]
    assert view.tiers[0].capacity == (8 << 20) // (2 * page_bytes) * 2 * page_bytes, "of all ranks together"
    first_one.end()
    second = engine(tiny_model, disk_cache=tmp_path, **RANKS)
    hits = [assert_same(second, prompt, alone) for prompt in TURNS]
    assert all(tokens == below for tokens, below in hits)
    assert hits[0] == (300, 300) and hits[2][0] >= 64 and hits[3] == (400, 400), hits
    assert second.core.stats().tiers.hits["disk"] == 4
    second.end()
    one_rank = engine(tiny_model, disk_cache=tmp_path, exact=True)
    assert cached(one_rank.ask(TEXT)) == (0, 0) and caplog.text.count("is ignored") == 1


@pytest.fixture(scope="module")
def started(tiny_model):
    """Two ranks with a host tier, for all tests: to start them takes longest."""
    with pytest.MonkeyPatch.context() as patch, contextmanager(tiered_engines)(patch) as make:
        yield make(tiny_model, host_cache_bytes=8 << 20, **RANKS)


@pytest.fixture
def with_host(started, alone):
    """Two ranks whose host tier has TEXT, and whose pool has nothing."""
    assert answer(started.ask(TEXT)) == alone[TEXT][0]
    assert started.core.reset_cache() == 0
    started.logits.clear()
    return started


def test_a_request_that_is_preempted_goes_on_as_it_would_have(with_host, alone):
    with_host.submit("r", TEXT)
    state, until = with_host.state, time.monotonic() + 60
    while not state.running or not with_host.outputs["r"]:
        assert time.monotonic() < until
        with_host.core.poll()
        if with_host.core.has_work:
            with_host.step()
    (request,) = state.requests.values()
    preempt(state, request, request, 0)
    # what it has computed is gone from the pool, too
    assert with_host.core.reset_cache() == 0
    with_host.run()
    assert answer(with_host.outputs["r"]) == alone[TEXT][0] and cached(with_host.outputs["r"])[1] == 400
    assert all(torch.equal(values, alone[TEXT][1][place]) for place, values in with_host.logits.items())


def test_a_rank_that_stands_still_costs_a_hit_and_keeps_the_pages_until_it_goes_on(with_host, alone):
    with_host.state.transfers.prefill_speed.seconds_per_token = 0.003
    # what a busy machine has made of the copies before: it might rather compute
    with_host.tiers.source._rates.update(promotion._FIRST_RATES)
    (pid,) = with_host.core._runner.pids
    quarantine = with_host.state.transfers.quarantine
    os.kill(pid, signal.SIGSTOP)
    try:
        with_host.submit("r", TEXT)
        until = time.monotonic() + 60
        while not quarantine:
            assert time.monotonic() < until
            with_host.core.poll()
            time.sleep(0.001)
        for _ in range(100):
            with_host.core.poll()
            assert quarantine, "the rank may write to these pages"
            time.sleep(0.001)
    finally:
        os.kill(pid, signal.SIGCONT)
    with_host.run()
    outputs = with_host.outputs["r"]
    assert answer(outputs) == alone[TEXT][0] and cached(outputs) == (0, 0)
    assert with_host.core.stats().prefix_cache.miss_reasons[Reason.TIER_FAILED] == 1
    until = time.monotonic() + 60
    while quarantine:
        assert time.monotonic() < until
        with_host.core.poll()
        time.sleep(0.001)
    with_host.state.transfers.prefill_speed.seconds_per_token = 1.0
    assert assert_same(with_host, TEXT, alone) == (400, 400)


def test_a_rank_that_copies_no_more_costs_hits(with_host, alone):
    """The last one of these: it never will again."""
    before = with_host.core.stats().prefix_cache.miss_reasons[Reason.TIER_FAILED]
    with_host.tiers.source._context.memory._followers[0].close()
    assert assert_same(with_host, TEXT, alone) == (0, 0)
    assert not with_host.state.transfers.quarantine
    with_host.ask(OTHER)
    stats = with_host.core.stats()
    assert stats.tiers.skipped["failed"] > 0
    assert stats.prefix_cache.miss_reasons[Reason.TIER_FAILED] == before + 1
