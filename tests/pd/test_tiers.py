"""Tiers on both sides of a hand-over: P reads up what lies below its pool and leases it, D asks its own tiers first;
what another server asks for by content is read up as well."""

import json
import threading
import time

import numpy as np
import pytest
from real_servers import DEADLINE, REMOTE_DECODE, RealServer, finish, hand_over, settle

from cairn.engine.transfers.kv_transfer import nixl_link
from cairn.scheduler import tier_lookup
from cairn.scheduler.transfers import PrefillSpeed
from doubles.memory_link import MemoryFabric
from tiers import first

TEXT = np.random.default_rng(11).integers(20, 4000, 600).tolist()


@pytest.fixture
def serve(tiny_model, monkeypatch):
    """Makes servers for which computing takes a second a token."""
    made, fabric = [], MemoryFabric()
    monkeypatch.setattr(PrefillSpeed, "learn", lambda self, stats: None)

    def make(name, joined=True, **config):
        made.append(RealServer(tiny_model, fabric if joined else None, name, **config))
        made[-1].core._scheduler.state.transfers.prefill_speed.seconds_per_token = 1.0
        return made[-1]

    yield make
    for server in made:
        server.close()


def write_all(server) -> None:
    """Turn until the tiers have all that they are going to have, and empty the pool."""
    until = time.monotonic() + DEADLINE
    while not server.core._tiers.demoter.is_idle:
        assert time.monotonic() < until, "something is never written"
        server.turn()
        time.sleep(0.0005)
    assert server.core.reset_cache() == 0


@pytest.mark.parametrize("length", first(1, (401, 400, 64)))
def test_a_prefill_server_leases_what_it_reads_up(serve, tmp_path, length):
    prompt, tier = TEXT[:length], {"disk_cache": tmp_path}
    before, alone = serve("before", joined=False, **tier), serve("alone", joined=False, enable_prefix_caching=False)
    finish(before, before.submit(prompt, 1))
    before.core.write_back()
    before.close()
    p, d = serve("p", **tier), serve("d")
    tokens, last, _ = hand_over(p, d, prompt)
    assert tokens == finish(alone, alone.submit(prompt))[0]
    assert p.core.stats().tiers.hit_tokens["disk"] == length and p.core.stats().tokens.computed_prompt == 0
    assert last.cache.received_tokens == length and d.core.stats().tokens.computed_prompt == 0
    for found, wanted in zip(d.logits[d.count], alone.logits[alone.count], strict=True):
        assert np.array_equal(found, wanted)
    settle(p, d)


def test_a_decode_server_asks_its_own_tiers_first(serve):
    p, d = serve("p"), serve("d", host_cache_bytes=16 << 20)
    expected, _ = finish(d, d.submit(TEXT))
    write_all(d)
    tokens, last, _ = hand_over(p, d, TEXT)
    assert tokens == expected
    assert last.cache.tier_tokens == len(TEXT) and d.core.stats().tokens.computed_prompt == len(TEXT)
    assert last.cache.received_tokens == 0 and d.core.stats().transfers.received_tokens == 0
    settle(p, d)


@pytest.mark.more
def test_ranks_lease_what_they_read_up_and_take_what_their_own_tiers_have(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(PrefillSpeed, "learn", lambda self, stats: None)
    servers = []

    def start(name, link=nixl_link, **config):
        config = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 16 << 20} | config
        servers.append(RealServer(tiny_model, link, name, **config))
        servers[-1].core._scheduler.state.transfers.prefill_speed.seconds_per_token = 1.0
        return servers[-1]

    try:
        before = start("before", None, disk_cache=tmp_path)
        expected, _ = finish(before, before.submit(TEXT))
        before.core.write_back()
        before.close()
        p, d = start("p", disk_cache=tmp_path), start("d", host_cache_bytes=16 << 20)
        tokens, last, _ = hand_over(p, d, TEXT)
        assert tokens == expected and last.cache.received_tokens == len(TEXT)
        assert p.core.stats().tiers.hit_tokens["disk"] == len(TEXT) and p.core.stats().tokens.computed_prompt == 0
        settle(p, d)
        write_all(d)
        again, last = finish(d, d.submit(TEXT))
        assert again == expected and last.cache.tier_tokens == len(TEXT)
        for found, wanted in zip(d.logits[d.count], before.logits[before.count], strict=True):
            assert np.array_equal(found, wanted)
        settle(p, d)
    finally:
        for server in servers:
            server.close()


@pytest.fixture
def left_below(serve):
    """A server that has decoded an answer whose prompt and state lie in its tier alone, another one that has nothing of
    it, and the parameters by which that one finds the first."""
    p, d = serve("p"), serve("d", host_cache_bytes=16 << 20)
    _, last, _ = hand_over(p, d, TEXT[:320], 1)
    settle(p, d)
    write_all(d)
    assert p.core.reset_cache() == 0
    return p, d, json.loads(last.kv_transfer_params)


@pytest.mark.parametrize("longer", first(1, (80, 0)))
def test_what_is_asked_for_by_content_is_read_up(serve, left_below, longer):
    p, d, hint = left_below
    alone, turn = serve("alone", joined=False, enable_prefix_caching=False), TEXT[: 320 + longer]
    number = p.submit(turn, 2, REMOTE_DECODE | hint)
    tokens, last = finish(p, number, d)
    assert tokens == finish(alone, alone.submit(turn, 2))[0]
    assert last.cache.received_tokens == 320 and d.core.stats().tiers.hit_tokens["host"] == 320
    for found, wanted in zip(p.logits[number], alone.logits[alone.count], strict=True):
        assert np.array_equal(found, wanted)
    assert finish(d, d.submit(TEXT[:320], 1))[1].cache.cached_tokens == 320
    assert d.core.stats().tiers.hits["host"] == 1, "the second time the pool has it"
    finish(d, d.submit(turn, 1, json.loads(last.kv_transfer_params)), p)
    settle(p, d)


@pytest.mark.parametrize("how", first(2, ("slow", "damaged", "busy", "worthless")))
def test_what_cannot_be_read_up_is_computed(serve, left_below, monkeypatch, how):
    p, d, hint = left_below
    (store,) = d.core._tiers._stores
    go_on = threading.Event()
    match how:
        case "slow":
            monkeypatch.setattr(tier_lookup, "READ_SECONDS", 0.05)
            monkeypatch.setattr(store, "read", lambda reads, deadline: go_on.wait(DEADLINE) and False)
        case "damaged":
            monkeypatch.setattr(store, "read", lambda reads, deadline: False)
        case "busy":
            monkeypatch.setattr(tier_lookup, "MAX_READS", 0)
        case "worthless":
            d.core._scheduler.state.transfers.prefill_speed.seconds_per_token = 0.0
    tokens, last = finish(p, p.submit(TEXT[:320], 2), d)
    assert p.core.reset_cache() == 0
    found, last = finish(p, p.submit(TEXT[:320], 2, REMOTE_DECODE | hint), d)
    assert found == tokens and last.cache.received_tokens == 0
    assert d.core.stats().transfers.leased_pages == 0
    assert (d.core.stats().transfers.quarantined_pages > 0) == (how == "slow")
    go_on.set()
    finish(d, d.submit(TEXT[:320], 1, json.loads(last.kv_transfer_params)), p)
    settle(p, d)
