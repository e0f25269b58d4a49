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


def test_the_next_turn_has_its_answer_from_where_it_was_made(deploy):
    pytest.importorskip("nixl", reason="transfers need NIXL")
    # with --exact what was decoded is not kept where this turn could go on from
    pools = deploy("turns", "/turns", num_replicas=1, num_prefill_replicas=1, exact=False)
    prompt = ids(85, 400)
    answer = pools.complete(prompt, **ASKED | {"max_tokens": 100})["choices"][0]["token_ids"]
    second = pools.complete([*prompt, *answer, *ids(86, 21)], **ASKED)
    # the prefill replica has fetched what was decoded: all but the last token, which nobody has computed
    assert second["cairn"]["cache"]["prefill_cached_tokens"] == 499
    assert sum(pools.metric("cairn:computed_prompt_tokens_total").values()) == 400 + 22
    pools.delete()
