"""Prompts that several requests hand over at once, and requests that are fetched beside some that wait."""

import pytest
from pd_world import REMOTE_DECODE, alone

from pd.test_hand_over import TEXT, pair


def computed(server) -> int:
    return server.scheduler.state.counters.computed_prompt_tokens


@pytest.mark.parametrize("mode", ["auto", "junction"])
@pytest.mark.parametrize("length", [64, 300, 601])
@pytest.mark.parametrize("slots", [2, 4])
def test_a_prompt_that_is_handed_over_several_times_is_computed_once(mode, length, slots):
    world, p, d = pair(mode=mode, num_pages=800, max_num_seqs=slots)
    prompt = TEXT[:length]
    names = [p.submit(prompt, max_tokens=1, params=REMOTE_DECODE) for _ in range(5)]
    world.run()
    assert computed(p) == length
    assert p.scheduler.state.counters.shared.requests >= slots - 1
    answers = [d.submit(prompt, params=p.params(name), seed=i) for i, name in enumerate(names)]
    world.run()
    for i, name in enumerate(answers):
        assert d.answers[name] == alone(prompt, seed=i)
    for server in (p, d):
        server.assert_clean()


def test_prompts_that_share_a_part_are_handed_over():
    world, p, d = pair(num_pages=800)
    prompts = [TEXT[:450] + TEXT[1000 + 50 * i : 1050 + 50 * i] for i in range(4)]
    names = [p.submit(prompt, max_tokens=1, params=REMOTE_DECODE) for prompt in prompts]
    world.run()
    assert computed(p) == 450 + 4 * 50
    answers = [d.submit(prompt, params=p.params(name)) for prompt, name in zip(prompts, names, strict=True)]
    world.run()
    for name, prompt in zip(answers, prompts, strict=True):
        assert d.answers[name] == alone(prompt)
    for server in (p, d):
        server.assert_clean()


@pytest.mark.parametrize("num_pages", [70, 800])
def test_one_that_is_fetched_comes_behind_one_that_waits(num_pages):
    world, p, d = pair(num_pages=num_pages, budget=100)
    handed = p.submit(TEXT[1000:1100], max_tokens=1, params=REMOTE_DECODE)
    world.run()
    first, held = d.submit(TEXT[:400]), d.submit(TEXT[:400], seed=1)
    fetched = d.submit(TEXT[1000:1100], params=p.params(handed))
    world.run()
    assert computed(d) == 400
    assert d.answers[first] == alone(TEXT[:400]) and d.answers[held] == alone(TEXT[:400], seed=1)
    assert d.answers[fetched] == alone(TEXT[1000:1100])
    assert d.scheduler.state.counters.external_hits == 100
    for server in (p, d):
        server.assert_clean()
