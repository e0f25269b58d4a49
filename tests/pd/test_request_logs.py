"""The request logs of a prefill and a decode server, replayed each by itself."""

import numpy as np
from logged import hits_by_name, logged_hits, replayed
from real_servers import RealServer, finish, hand_over, settle

from cairn.engine.contract import RequestLogConfig
from cairn.replay.traces import read_trace
from doubles.memory_link import MemoryFabric


def test_both_hit_what_they_hit_and_what_came_from_the_other_is_no_hit(tiny_model, tmp_path):
    fabric = MemoryFabric()
    p, d = (
        RealServer(tiny_model, fabric, name, exact=False, request_log=RequestLogConfig(path=str(tmp_path / name)))
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
        assert hits_by_name(trace, replay) == logged_hits(trace)
        assert replay.outcome.hit_tokens == stats[name].prefix_cache.hits > 0
        assert replay.cache.counters.received == stats[name].transfers.received_tokens
