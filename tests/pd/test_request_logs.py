"""The request logs of a prefill and a decode server, replayed each by itself."""

import numpy as np
import pytest
from logged import hits_by_name, logged_hits, replayed
from real_servers import RealServer, finish, hand_over, settle

from cairn.engine.contract import RequestLogConfig
from cairn.replay.traces import read_trace
from cairn.scheduler.speculation import SpeculativeConfig
from doubles.memory_link import MemoryFabric


@pytest.mark.parametrize("method", ["none", "auto"])
def test_both_hit_what_they_hit_and_what_came_from_the_other_is_no_hit(tiny_model, tmp_path, method):
    """With drafts an answer takes fewer steps than its replay, so what arrives as it ends may find more there."""
    fabric = MemoryFabric()
    options = {"exact": False, "speculative": SpeculativeConfig(method=method)}
    p, d = (
        RealServer(tiny_model, fabric, name, request_log=RequestLogConfig(path=str(tmp_path / name)), **options)
        for name in ("p", "d")
    )
    tokens = np.random.default_rng(1).integers(20, 4000, 2000).tolist()
    for chat in range(3):
        prompt = tokens[500 * chat :][:150]
        for turn in range(3):
            answer, _, _ = hand_over(p, d, prompt, max_tokens=6)
            finish(d, d.submit([*prompt, *answer], 2))
            prompt = [*prompt, *answer, *tokens[100 * turn :][:30]]
    settle(p, d)
    stats = {name: server.core.stats() for name, server in (("p", p), ("d", d))}
    for server in (p, d):
        server.close()
    assert stats["d"].transfers.received_tokens > 0
    for name in ("p", "d"):
        trace = read_trace(tmp_path / name)
        assert {request.timeline.kv_export for request in trace.requests} == {name == "p"}
        replay = replayed(trace)
        hits, logged = hits_by_name(trace, replay), logged_hits(trace)
        num_hits = stats[name].prefix_cache.hits
        assert num_hits > 0 and replay.outcome.hit_tokens == pytest.approx(num_hits, rel=0.01)
        assert method == "auto" or hits == logged
        assert replay.cache.counters.received == stats[name].transfers.received_tokens
