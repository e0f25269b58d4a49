"""Answers to a prompt that another server has computed: several, with penalties, with what is told of the prompt."""

from itertools import pairwise

import numpy as np
import pytest
from pd_world import World, alone, prefill

from cairn.scheduler.scheduler import Progress
from cairn.types import RequestId, SamplingParams

TEXT = np.random.default_rng(4).integers(0, 50, 400).tolist()


def pair(**arguments):
    world = World()
    return world, world.server(1, **arguments), world.server(2, **arguments)


def names(name: str, n: int) -> list[str]:
    return [name, *(f"{name}/{i}" for i in range(1, n))]


@pytest.mark.parametrize("mode", ["auto", None])
@pytest.mark.parametrize("length", [1, 64, 100, 300])
def test_several_answers_start_from_what_was_fetched_once(mode, length):
    world, p, d = pair(mode=mode)
    prompt = TEXT[:length]
    name = d.submit(prompt, params=prefill(p, prompt), n=6, max_tokens=5, logprobs=1)
    world.run()
    for i, own in enumerate(names(name, 6)):
        assert d.answers[own] == alone(prompt, 5, seed=i)
    counters = d.scheduler.state.counters
    assert counters.computed_prompt_tokens == 0 and counters.external_hits == length
    assert p.scheduler.state.counters.computed_prompt_tokens == length
    for server in (p, d):
        server.assert_clean()


def test_a_prompt_that_does_not_come_is_computed_once_for_all_of_them():
    world, p, d = pair()
    params = prefill(p, TEXT)
    p.die()
    name = d.submit(TEXT, params=params, n=3)
    world.run(d)
    world.pass_time(60, d)
    for i, own in enumerate(names(name, 3)):
        assert d.answers[own] == alone(TEXT, seed=i)
    assert d.scheduler.state.counters.computed_prompt_tokens == len(TEXT)


@pytest.mark.parametrize("turns", [0, 1, 3, 6, 10])
def test_the_one_that_fetches_is_aborted_and_the_others_get_their_answers(turns):
    world, p, d = pair()
    params = prefill(p, TEXT)
    name = d.submit(TEXT, params=params, n=3)
    for _ in range(turns):
        d.turn()
        p.turn()
    d.scheduler.abort(RequestId(name))
    world.run()
    world.pass_time(60)
    for i, own in enumerate(names(name, 3)[1:], 1):
        assert d.answers[own] == alone(TEXT, seed=i)
    for server in (p, d):
        server.assert_clean()


def test_a_prompt_whose_tokens_are_told_of_is_computed_here_and_let_go_there():
    world, p, d = pair()
    prompt = TEXT[:200]
    params = prefill(p, prompt)
    told = []
    apply = d.scheduler.apply

    def noted(result) -> list[Progress]:
        told.extend(scored.logprobs for scored in result.scored)
        return apply(result)

    d.scheduler.apply = noted
    name = d.submit(prompt, params=params, prompt_logprobs=0)
    world.run()
    assert d.answers[name] == alone(prompt)
    assert [int(one.token_ids[0, 0]) for one in told] == prompt[1:]
    assert d.scheduler.state.counters.computed_prompt_tokens == len(prompt)
    assert d.scheduler.state.counters.external_hits == 0
    for server in (p, d):
        server.assert_clean()


def test_what_is_drawn_with_penalties_is_that_of_one_server():
    world, p, d = pair()
    prompt = TEXT[:150]
    penalty = SamplingParams(seed=3, presence_penalty=1.0, repetition_penalty=2.0)
    name = d.submit(prompt, 12, params=prefill(p, prompt), sampling=penalty)
    world.run()
    lone = World().server(9, mode=None, num_pages=2000)
    other = lone.submit(prompt, 12, sampling=penalty)
    lone.world.run()
    assert d.answers[name] == lone.answers[other] != alone(prompt, 12, seed=3)


@pytest.mark.parametrize(
    "rules",
    [
        {"allowed_token_ids": (3, 7, 11)},
        {"bad_words": ((3,), (7, 11), (11, 11, 7)), "allowed_token_ids": (3, 7, 11)},
    ],
)
def test_rules_behind_a_prefill_server_are_those_of_one_server(rules):
    world, p, d = pair()
    prompt = TEXT[:150]
    sampling = SamplingParams(seed=3, **rules)
    name = d.submit(prompt, 12, params=prefill(p, prompt), sampling=sampling)
    world.run()
    lone = World().server(9, mode=None, num_pages=2000)
    other = lone.submit(prompt, 12, sampling=sampling)
    lone.world.run()
    answer = d.answers[name]
    assert answer == lone.answers[other] and set(answer) <= {3, 7, 11}
    words = {*((token,) for token in answer), *pairwise(answer)}
    assert not words & set(rules.get("bad_words", ()))
    for server in (p, d):
        server.assert_clean()
