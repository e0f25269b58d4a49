"""Random requests in small pools: every one ends with the answer of a server that does nothing else."""

import os
from functools import cache

import pytest
from driver import PLAIN, Driver, alone, layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.cache.layout import AttentionGroup
from cairn.cache.sequence_blocks import Namespace
from doubles.drafters import KnowingDrafter

SEGMENTS = [tuple(range(100 * i, 100 * i + length)) for i, length in enumerate((1, 5, 16, 40, 64, 65, 90))]
PROMPT = st.lists(st.integers(0, len(SEGMENTS) - 1), min_size=1, max_size=4)


LIMITED = (
    (),
    (),
    (AttentionGroup("window", 8, 20),),
    (AttentionGroup("window", 4, 70), AttentionGroup("chunked", 5, 16, chunked=True)),
)


@cache
def reference(prompt, max_tokens, exact, stop, limited=()):
    return alone(list(prompt), exact, limited, max_tokens=max_tokens, stop=stop)


MIX = {
    "mode": st.sampled_from(["auto", "auto", "align", "all", "granular", "junction"]),
    "exact": st.booleans(),
    "stop": st.sampled_from([(), (3, 17, 31)]),
    "ahead": st.sampled_from([1, 2, 3]),
    "num_pages": st.sampled_from([40, 60, 100, 400]),
    "block_size": st.sampled_from([8, 16, 48]),
    "policy": st.sampled_from(["fcfs", "session"]),
    "limited": st.sampled_from(LIMITED),
    "requests": st.lists(
        st.tuples(PROMPT, st.sampled_from([1, 3, 70]), st.integers(0, 6), st.booleans(), st.integers(-1, 8)),
        min_size=1,
        max_size=9,
    ),
}
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


PATTERNS = {
    "all": lambda proposal: 99,
    "none": lambda proposal: 0,
    "alternating": lambda proposal: 99 * (proposal % 2),
    "rising": lambda proposal: proposal % 6,
}
DRAFTS = {"num_drafts": st.sampled_from([1, 2, 5, 32]), "num_right": st.sampled_from(sorted(PATTERNS))}


def check_mix(
    mode, exact, stop, ahead, num_pages, block_size, requests, num_drafts=0, num_right="all", policy="fcfs", limited=()
):
    answers = {}
    drafter = KnowingDrafter(answers, num_drafts, PATTERNS[num_right], 50) if num_drafts else None
    config = {"exact": exact, "max_in_flight": 1 if drafter else ahead, "max_num_batched_tokens": 100, "policy": policy}
    # what the longest sequence takes of these besides
    num_in_flight = config["max_in_flight"] * config["max_num_batched_tokens"]
    num_pages += layout(block_size, 1, limited, unlimited=False).running_pages_for(310, num_in_flight) + len(limited)
    driver = Driver(mode, num_pages, block_size, drafter=drafter, limited=limited, **config)
    expected, ended = {}, []
    for parts, max_tokens, pause, salted, fate in requests:
        prompt = tuple(token for part in parts for token in SEGMENTS[part])[:240]
        if ended and fate == 0:
            last = driver.requests[ended[-1]]
            prompt = (*last.spec.prompt.tolist(), *last.output)[:200]
        namespace = Namespace(cache_salt="s") if salted else PLAIN
        sender = {"session": f"s{len(parts)}", "client": "ab"[salted]}
        ends = (max(1, len(prompt) - 3),)
        name = driver.submit(prompt, max_tokens, namespace=namespace, boundaries=ends, stop=stop, **sender)
        expected[name] = (prompt, max_tokens)
        answers[name] = reference(prompt, max_tokens, exact, stop, limited) if drafter else []
        ended.append(name)
        for _ in range(pause):
            if driver.scheduler.has_work:
                driver.step()
        if fate == 1:
            driver.scheduler.abort(name)
            expected.pop(name)
    driver.run()
    counted = driver.cache.counters
    assert counted.queries == counted.hits + counted.lost.total(), "a prompt token has no reason"
    for name, (prompt, max_tokens) in expected.items():
        first = driver.requests[name].stats.first_sequence
        assert first.hit + sum(first.lost.values()) == len(prompt)
        assert driver.output(name) == reference(prompt, max_tokens, exact, stop, limited), name
    assert driver.cache.clear(), "a page leaked"
    counters = driver.scheduler.state.counters
    if drafter is not None:
        assert set(drafter.ended) == set(driver.requests)
        drafted = [sum(column) for column in zip(*(numbers for _, *numbers in drafter.records), strict=True)] or [0, 0]
        counted = counters.spec_decode
        assert [counted.num_draft_tokens, counted.num_accepted_tokens] == drafted
    assert counters.generation_tokens == sum(len(request.output) for request in driver.requests.values())


@settings(max_examples=20, **COMMON)
@given(**MIX)
def test_every_answer_is_right_whatever_happens(**mix):
    check_mix(**mix)


@settings(max_examples=30, **COMMON)
@given(**MIX, **DRAFTS)
def test_drafts_change_no_answer(**mix):
    check_mix(**mix)


@pytest.mark.more
@settings(max_examples=300, **COMMON)
@given(**MIX, **DRAFTS)
def test_drafts_change_no_answer_of_more_mixes(**mix):
    check_mix(**mix)


@pytest.mark.more
@settings(max_examples=300, **COMMON)
@given(**MIX)
def test_every_answer_of_more_mixes_is_right(**mix):
    check_mix(**mix)


@pytest.mark.parametrize("mode", ["auto", "junction", "align"])
@pytest.mark.parametrize("num_pages", [38, 39, 40, 41, 42])
def test_the_same_again_in_a_pool_that_holds_its_answer_once(num_pages, mode):
    same = ([6, 0, 3, 6], 70, 0, False, -1)
    check_mix(mode, False, (), 1, num_pages, 8, [same, same])


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=int(os.environ.get("CAIRN_LONG_EXAMPLES", "5000")), **COMMON)
@given(**MIX)
def test_many_more_mixes(**mix):
    check_mix(**mix)
