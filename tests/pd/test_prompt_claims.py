"""A claim that comes so soon that the transfer thread has not turned since the offer it is about."""

import numpy as np
from pd_world import REMOTE_DECODE, World, alone, prefill

from transfer.parts import num_active

TEXT = np.random.default_rng(3).integers(0, 50, 500).tolist()
TURNS = 100


def test_a_claim_finds_an_offer_that_the_transfer_thread_has_not_been_told_of():
    world = World()
    p, d = world.server(1), world.server(2)
    d.submit(TEXT[:100], params=prefill(p, TEXT[:100]))
    world.run()
    assert d.scheduler.state.counters.external_hits == 100

    prompt = TEXT[100:500]
    asked = p.submit(prompt, max_tokens=1, params=REMOTE_DECODE)
    for _ in range(TURNS):
        p.turn()
        if asked in p.ended:
            break
    # P has answered, and its transfer thread sleeps from now on until D's claim is there
    name = d.submit(prompt, params=p.params(asked))
    for _ in range(TURNS):
        d.turn()
        if len(d.channel.sent) == 3 + 1:
            break
    assert p.channel.num_waiting == 1 and num_active(p.producer.leases) == 1
    world.run()
    assert d.answers[name] == alone(prompt)
    assert d.scheduler.state.counters.external_hits == 100 + len(prompt)
    assert d.scheduler.state.counters.failed_pulls == 0
    for server in (p, d):
        server.assert_clean()
