"""Prompts are computed by one pool of replicas, and answered by another."""

import psutil
import pytest
from exchanges import KEY
from fleet import until
from test_routing import ids

ASKED = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def pools(deploy):
    pytest.importorskip("nixl", reason="transfers need NIXL")
    fleet = deploy("pools", "/pools", num_replicas=1, num_prefill_replicas=1)
    yield fleet
    fleet.delete()


def test_a_prompt_is_handed_over_and_answered_as_by_one_server(pools, alone):
    prompt = ids(81, 400)
    answer = pools.complete(prompt, **ASKED)
    expected = alone.post(
        "/v1/completions", json={"prompt": prompt, **ASKED}, headers={"Authorization": f"Bearer {KEY}"}
    ).json()
    assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    cache = answer["cairn"]["cache"]
    assert cache["received_tokens"] == 400 and cache["computed_tokens"] == 0
    computed = pools.metric("cairn:computed_prompt_tokens_total")
    assert sorted(computed.values()) == [0, 400]


def test_a_client_that_leaves_leaves_nothing_in_either_pool(pools):
    with pools.stream(ids(82, 300)):
        pass
    pools.assert_nothing_is_held()


def test_without_the_prefill_pool_prompts_are_computed_where_they_are_answered(pools):
    (prefill,) = pools.replicas("prefill")
    prefill.kill()
    answer = pools.complete(ids(83, 300), **ASKED)
    assert answer["usage"]["completion_tokens"] == 12
    until(lambda: not psutil.pid_exists(prefill.pid), "the killed one gone")
    until(lambda: len(pools.replicas("prefill")) == 1 and pools.num_ready() == 2, "another one in its place")
    assert pools.complete(ids(84, 300), **ASKED)["cairn"]["cache"]["received_tokens"] == 300
