"""Many decode servers at once at one prefill server, over sockets."""

import numpy as np
import pytest
from pd_world import World, alone, prefill

from pd.test_hops import SocketNetwork

NUM_PEERS = 64
TEXT = np.random.default_rng(7).integers(0, 50, 300).tolist()


@pytest.mark.more  # it makes 65 servers
def test_64_servers_pull_the_same_prompt_at_once():
    """Each by its own connection and lease; the prompt's pages are leased once however many read them."""
    world = World()
    world.network = SocketNetwork()
    p, peers = world.server(1), [world.server(2 + number) for number in range(NUM_PEERS)]
    try:
        names = [d.submit(TEXT, params=prefill(p, TEXT) | {"remote_port": p.channel.port}) for d in peers]
        assert p.producer.leases.num_pages == p.layout.pages_for(len(TEXT)) + p.layout.pages_per_checkpoint
        for _ in range(2000):
            if all(name in d.ended for name, d in zip(names, peers, strict=True)):
                break
            for server in (p, *peers):
                server.turn()
        assert len(p.channel._streams) == NUM_PEERS
        for name, d in zip(names, peers, strict=True):
            assert d.answers[name] == alone(TEXT) and d.scheduler.state.counters.external_hits == len(TEXT)
        p.turn()
        assert p.producer.leases.num_pages == p.scheduler.state.counters.expired_offers == 0
    finally:
        for server in (p, *peers):
            server.channel.close()
            server.event_loop.spin()
            server.event_loop.close()
