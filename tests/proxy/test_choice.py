"""Which server a prompt goes to."""

import json

import pytest

from cairn.proxy.prefixes import affinity_key, rank_by_affinity
from cairn.proxy.protocol import parse_body
from cairn.proxy.upstream import UpstreamPool

KEYS = [number.to_bytes(16, "little") for number in range(2000)]
URLS = [f"http://s{number}" for number in range(5)]


def key(limit=64, **body):
    return affinity_key(parse_body(json.dumps(body).encode()), limit)


def chat(*contents, **more):
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return key(messages=messages, **more)


@pytest.mark.parametrize(("one", "other"), [("a" * 64 + "b", "a" * 64 + "c"), (list(range(9)), [*range(8), 77])])
def test_the_beginning_decides_for_text_and_tokens(one, other):
    assert key(prompt=one) == key(prompt=other) == key(prompt=[one])
    assert key(prompt=one) != key(prompt=one[1:])
    assert key(limit=65 * 8, prompt=one) != key(limit=65 * 8, prompt=other)


def test_a_chat_keeps_its_key_from_turn_to_turn():
    assert chat("s", "hi") == chat("s", "hi", "hello", "and?") == chat("s", "hi", "hello", "and?", "so", temperature=1)
    assert chat("s", "hi") != chat("s", "ho") != chat("t", "ho")
    assert chat("s" * 99, "hi") == chat("s" * 99, "ho")
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": parts}]
    assert key(messages=messages) == chat("s", "hi")


def test_the_cache_key_wins():
    assert key(prompt="a", prompt_cache_key="k") == key(prompt="b", prompt_cache_key="k")
    assert key(prompt="a", prompt_cache_key="k") != key(prompt="a", prompt_cache_key="l") != key(prompt="a")
    assert chat("s", "hi", prompt_cache_key="k") == key(prompt="b", prompt_cache_key="k")


@pytest.mark.parametrize("name", ["model", "cache_salt"])
def test_other_models_and_salts_are_other_keys(name):
    assert key(prompt="a", **{name: "x"}) != key(prompt="a", **{name: "y"}) != key(prompt="a")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": {"a": 1}},
        {"prompt": [1, "a"]},
        {"prompt": [1 << 70]},
        {"prompt": [[1], [2]]},
        {"prompt": [[]]},
        {"prompt": [True]},
        {"messages": "x"},
        {"messages": [1]},
        {"messages": [{"role": 1, "content": {"x": [1]}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}, 4]}]},
        {"prompt": "a", "prompt_cache_key": 7},
        {"prompt": "a", "model": ["m"]},
    ],
)
def test_prompts_that_are_none_have_a_key_too(body):
    assert len(key(**body)) == 16


def test_when_a_server_goes_only_its_own_keys_move():
    before = {k: rank_by_affinity(k, URLS)[0] for k in KEYS}
    assert all(250 < list(before.values()).count(url) < 550 for url in URLS)
    left = URLS[1:]
    after = {k: rank_by_affinity(k, left)[0] for k in KEYS}
    assert all(after[k] == before[k] for k in KEYS if before[k] != URLS[0])
    moved = [after[k] for k in KEYS if before[k] == URLS[0]]
    assert all(moved.count(url) > len(moved) / 8 for url in left)
    assert {k: rank_by_affinity(k, URLS[::-1])[0] for k in KEYS} == before


def pool(count=3, **options):
    servers = UpstreamPool("decode", URLS[:count], **options)
    for upstream in servers.upstreams.values():
        upstream.up = True
    return servers


def test_a_server_that_is_down_is_passed_over_and_gets_its_keys_back():
    servers = pool()
    first = servers.choose(b"k")
    first.up = False
    second = servers.choose(b"k")
    assert second is not first
    assert servers.choose(b"k", [second]).url == rank_by_affinity(b"k", URLS[:3])[2]
    assert servers.choose(b"k", servers.upstreams.values()) is None
    first.up = True
    assert servers.choose(b"k") is first
    for upstream in servers.upstreams.values():
        upstream.up = False
    assert servers.choose(b"k") is servers.least_loaded() is None


def test_a_far_more_loaded_server_is_passed_over():
    servers = pool(load_factor=1.5, load_slack=4)
    first, second, third = (servers.upstreams[url] for url in rank_by_affinity(b"k", URLS[:3]))
    first.num_open = 3
    assert servers.choose(b"k") is first
    first.num_open = 4
    assert servers.choose(b"k") is second
    second.num_open, third.num_open = 3, 3
    assert servers.choose(b"k") is first
    second.num_open, third.num_open = 9, 0
    assert servers.choose(b"k", [first]) is third
    assert servers.least_loaded() is third


def test_many_requests_of_one_prefix_spread_within_the_bound():
    servers = pool(load_factor=1.25, load_slack=1)
    for _ in range(300):
        servers.choose(b"k").num_open += 1
    loads = sorted(upstream.num_open for upstream in servers.upstreams.values())
    assert sum(loads) == 300 and loads[-1] <= 126 and loads[0] > 0


def test_an_open_request_is_counted_until_it_ends():
    upstream = pool().choose(b"k")
    with pytest.raises(KeyError), upstream.count_open():
        assert upstream.num_open == 1
        raise KeyError
    assert upstream.num_open == 0
