"""Rounds of every fault on the memory link, with a clock that stands still unless told."""

from collections import Counter

import pytest
from faults import EFFECTS, FAULTS, effects, play
from pd_world import World, alone, prefill

from tiers import long, more

ROUNDS = (range(5), more(range(5, 50)), long(range(50, 300)))


@pytest.mark.parametrize("rounds", ROUNDS, ids=lambda rounds: f"{len(rounds)} rounds")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_hangs_and_nothing_is_wrong(fault, rounds):
    seen = Counter()
    for seed in rounds:
        try:
            seen.update(effects(play(fault, seed)))
        except Exception as error:
            raise AssertionError(f"{fault.__name__}, seed {seed}: {error}") from error
    few = len(rounds) / 10 if len(rounds) > 50 else 1
    assert seen[EFFECTS[fault]] >= few, f"the fault struck in few of {len(rounds)} rounds: {seen}"


@pytest.mark.parametrize("rounds", (range(5), more(range(5, 20))), ids=lambda rounds: f"{len(rounds)} rounds")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_failure_is_a_clear_error_where_the_policy_says_so(fault, rounds):
    failed = 0
    for seed in rounds:
        r = play(fault, seed, "fail")
        failed += sum(request.outcome.finish_reason == "error" for request in r.d.ended.values())
    assert failed or EFFECTS[fault] != "failed"


def test_an_error_with_one_peer_is_nobody_elses(monkeypatch, caplog):
    world = World()
    p, d, other = (world.server(port) for port in (1, 2, 3))
    greet = p.producer._greet

    async def fail_for_one(stream):
        if stream.far.channel is other.channel:
            raise ZeroDivisionError("a peer that nobody thought of")
        return await greet(stream)

    monkeypatch.setattr(p.producer, "_greet", fail_for_one)
    prompt = list(range(100))
    for server, received in ((other, 0), (d, 100)):
        name = server.submit(prompt, params=prefill(p, prompt))
        world.pass_time(6.0)
        assert server.answers[name] == alone(prompt) and server.scheduler.state.counters.external_hits == received
    assert p.kv.loop.failure is None and "a peer that nobody thought of" in caplog.text
