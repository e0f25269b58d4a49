"""Tiers on both sides of a hand-over: P reads up what lies below its pool and leases it, D asks its own tiers first."""

import time

import numpy as np
import pytest
from real_servers import DEADLINE, RealServer, finish, hand_over, settle

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
