"""Prompts that cannot be held for other servers, in a whole engine core: what the client is told, what is counted."""

from dataclasses import replace

import numpy as np
import pytest
from real_servers import REMOTE_DECODE, RealServer, finish, settle

from cairn.errors import QueueFull
from doubles.memory_link import MemoryFabric

PROMPTS = [np.random.default_rng(seed).integers(20, 4000, 200).tolist() for seed in range(5)]


@pytest.fixture(scope="module")
def server(tiny_model):
    transfer = {"lease_seconds": 2.0, "lease_share": 1e-6, "max_leases": 3, "max_leases_per_client": 2}
    made = RealServer(tiny_model, MemoryFabric(), "p", transfer)
    yield made
    made.close()


def test_what_finds_no_room_in_time_is_refused_as_the_queue_refuses(server):
    transfers = server.core._scheduler.state.transfers
    assert transfers.quota.wait_seconds == 2.0
    transfers.quota = replace(transfers.quota, wait_seconds=0.05)
    _, first = finish(server, server.submit(PROMPTS[0], 1, REMOTE_DECODE))
    assert first.kv_transfer_params is not None and first.error is None
    tokens, refused = finish(server, server.submit(PROMPTS[1], 1, REMOTE_DECODE))
    assert not tokens and refused.finish_reason == "error" and refused.status == QueueFull.status
    assert "no room" in refused.error and refused.kv_transfer_params is None
    _, plain = finish(server, server.submit(PROMPTS[1], 1))
    assert plain.finish_reason == "length"
    assert server.core.stats().transfers.refused_kv_exports == {"total": 0, "client": 0, "timeout": 1}
    settle(server)


def test_more_than_the_bounds_are_refused_at_once(server):
    before = dict(server.core.stats().transfers.refused_kv_exports)
    numbers = [server.submit(prompt, 1, REMOTE_DECODE, client="a") for prompt in PROMPTS[:2]]
    with pytest.raises(QueueFull, match="max_leases_per_client 2") as raised:
        server.submit(PROMPTS[2], 1, REMOTE_DECODE, client="a")
    assert raised.value.retry_after
    numbers.append(server.submit(PROMPTS[3], 1, REMOTE_DECODE, client="b"))
    with pytest.raises(QueueFull, match=r"max_leases 3"):
        server.submit(PROMPTS[4], 1, REMOTE_DECODE, client="b")
    assert server.core.stats().transfers.refused_kv_exports == before | {"total": before["total"] + 1, "client": 1}
    for number in numbers:
        server.core.abort(f"r{number}")
    settle(server)
