"""Prompts go where their beginning is cached, and otherwise to whoever is least busy."""

import itertools

import numpy as np
from exchanges import KEY
from fleet import Fleet

TURNS = 4


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(20, 4_000, length).tolist()


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def converse(ask, seed: int) -> list[int]:
    """The cached tokens of each turn of a conversation, of which every turn begins with all before it."""
    prompt, found = ids(seed, 300), []
    for turn in range(TURNS):
        answer = ask(prompt)
        found.append(cached(answer))
        prompt = [*prompt, *answer["choices"][0]["token_ids"], *ids(1_000 * seed + turn, 50)]
    return found


def asker(http):
    def ask(prompt):
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        response = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
        assert response.status_code == 200, response.text
        return response.json()

    return ask


def test_every_turn_of_a_conversation_hits_as_if_there_were_one_server(fleet, alone):
    before = fleet.metric("cairn:computed_prompt_tokens_total")
    for seed in range(1, 5):
        found = converse(asker(fleet.http), seed)
        assert found == converse(asker(alone), seed)
        assert found[0] == 0 and all(earlier < later for earlier, later in itertools.pairwise(found))
    after = fleet.metric("cairn:computed_prompt_tokens_total")
    assert sum(after.values()) - sum(before.values()) < 4 * (300 + TURNS * (50 + 12 + 64))


def test_a_salted_conversation_stays_where_it_was(fleet, alone):
    """Events never announce what a salt separates: the router knows it from its own choices alone."""
    salted = {"cache_salt": "mine", "max_tokens": 4, "temperature": 0}
    prompt = ids(11, 400)
    for _ in range(3):
        answers = [asked.json() for asked in (
            http.post("/v1/completions", json={"prompt": prompt} | salted, headers={"Authorization": f"Bearer {KEY}"})
            for http in (fleet.http, alone)
        )]  # fmt: skip
        assert cached(answers[0]) == cached(answers[1])
    assert cached(answers[0]) == 400


def test_new_conversations_of_an_idle_fleet_are_on_both_replicas(fleet: Fleet):
    before = fleet.metric("vllm:prompt_tokens_total")
    for seed in range(31, 47):
        fleet.complete(ids(seed, 64), max_tokens=1)
    after = fleet.metric("vllm:prompt_tokens_total")
    assert len(after) == 2 and all(after[name] > before[name] for name in before)


def test_what_a_killed_replica_had_cached_is_computed_elsewhere_and_then_hit_there(fleet: Fleet):
    prompts = [ids(seed, 200) for seed in range(61, 69)]
    for prompt in prompts:
        fleet.complete(prompt)
    fleet.replicas()[0].kill()
    again = [cached(fleet.complete(prompt)) for prompt in prompts]
    assert set(again) == {0, 200}
    assert [cached(fleet.complete(prompt)) for prompt in prompts] == [200] * len(prompts)
