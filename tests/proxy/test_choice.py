"""Which server a prompt goes to."""

import json
from contextlib import ExitStack

import pytest

from cairn.proxy.prefixes import prefix_digests, routed_request
from cairn.proxy.protocol import parse_body
from cairn.proxy.upstream import UpstreamPool
from cairn.types import ManualClock

URLS = [f"http://s{number}" for number in range(5)]


def routed(**body):
    parsed = parse_body(json.dumps(body).encode())
    return routed_request(parsed, prefix_digests(parsed))


def chat(*contents, **more):
    roles = ("system", *("user", "assistant") * len(contents))
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return routed(messages=messages, **more)


def pool(count=3, **options):
    servers = UpstreamPool("decode", URLS[:count], ManualClock(), **options)
    for upstream in servers.upstreams.values():
        upstream.up = True
    return servers


def serve(servers, request):
    """The server that answers this request, which is over then."""
    upstream = servers.choose(request)
    with servers.count_open(upstream, request):
        servers.rule.record_prefilled(request, upstream.url)
    return upstream


# -- what the rule is told of a request ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [("a" * 300 + "b", "a" * 300 + "c", 256 / 4), (list(range(300)), [*range(299), 77], 256)],
)
def test_prompts_share_the_blocks_that_they_begin_with(one, other, shared):
    one, same, other = routed(prompt=one), routed(prompt=[one]), routed(prompt=other)
    assert one.block_hashes == same.block_hashes and len(one.block_hashes) == 5
    common = [a == b for a, b in zip(one.block_hashes, other.block_hashes, strict=True)]
    assert common == [True] * 4 + [False]
    assert one.tokens_in(4) == shared and one.tokens_in(5) == one.num_tokens


def test_a_chat_has_a_block_for_each_message():
    first = chat("s" * 400, "hi")
    second = chat("s" * 400, "hi", "hello", "and?", temperature=1)
    assert first.block_hashes == second.block_hashes[:2] and len(second.block_hashes) == 4
    assert 100 <= first.tokens_in(1) <= 115 and first.num_tokens == first.tokens_in(2) < second.num_tokens
    assert chat("s", "hi").block_hashes[0] == chat("s", "ho").block_hashes[0] != chat("t", "ho").block_hashes[0]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": parts}]
    assert routed(messages=messages).block_hashes == chat("s", "hi").block_hashes


def test_an_image_does_not_count_by_its_bytes():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    request = routed(messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 400}, image]}])
    assert 100 < request.num_tokens < 1500


def test_other_models_and_salts_have_other_blocks_and_sessions():
    for name in ("model", "cache_salt"):
        one = routed(prompt="a" * 80, prompt_cache_key="k", **{name: "x"})
        other = routed(prompt="a" * 80, prompt_cache_key="k", **{name: "y"})
        assert not set(one.block_hashes) & set(other.block_hashes) and one.session != other.session
    assert routed(prompt="a", prompt_cache_key="k").session == routed(prompt="b", prompt_cache_key="k").session
    assert routed(prompt="a", prompt_cache_key="k").session != routed(prompt="a", prompt_cache_key="l").session
    assert routed(prompt="a").session is None


SESSIONS = [
    ({"prompt_cache_key": "s"}, ()),
    ({"session_id": "s"}, ()),
    ({"vllm_xargs": {"session_id": "s"}}, ()),
    ({"vllm_xargs": {"prompt_cache_key": "s"}}, ()),
    *(
        ({}, [(b"accept", b"*/*"), (name, b"s")])
        for name in (b"x-session-affinity", b"x-claude-code-session-id", b"session-id", b"session_id", b"x-session-id")
    ),
    ({"metadata": {"user_id": "s"}}, ()),
]


@pytest.mark.parametrize(("fields", "headers"), SESSIONS)
def test_a_session_is_what_a_field_or_a_header_names(fields, headers):
    def name(fields, headers=()):
        body = json.dumps({"prompt": "a", "model": "m"} | fields).encode()
        return routed_request(parse_body(body), None, headers).session

    assert name(fields, headers) == name({"prompt_cache_key": "s"}) is not None
    assert name(fields | {"cache_salt": "t"}, headers) != name(fields, headers)
    # the first in the list counts
    for others, other_headers in SESSIONS[SESSIONS.index((fields, headers)) + 1 :]:
        changed = json.loads(json.dumps(others).replace('"s"', '"other"'))
        arguments = changed.pop("vllm_xargs", {}) | fields.get("vllm_xargs", {})
        mixed = {**changed, **fields, "vllm_xargs": arguments}
        assert name(mixed, [*headers, *((key, b"other") for key, _ in other_headers)]) == name(fields, headers)


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"prompt_cache_key": 7, "session_id": ["s"], "vllm_xargs": "s", "metadata": ["s"]}, ()),
        ({"prompt_cache_key": "", "metadata": {"user_id": {"id": "s"}}}, [(b"session-id", b"")]),
    ],
)
def test_what_is_no_text_names_no_session(fields, headers):
    body = json.dumps({"prompt": "a"} | fields).encode()
    assert routed_request(parse_body(body), None, headers).session is None


def test_a_name_may_be_long_and_is_not_kept():
    for field in ({"prompt_cache_key": "s" * 100_000}, {"prompt_cache_key": "s"}):
        name = routed(prompt="a", **field).session
        assert name is not None and len(name) == 32


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": ""},
        {"prompt": {"a": 1}},
        {"prompt": [1, "a"]},
        {"prompt": [1 << 70]},
        {"prompt": [[1], [2]]},
        {"prompt": [True]},
        {"messages": "x"},
        {"messages": [1]},
        {"prompt": None, "prompt_cache_key": 7},
    ],
)
def test_prompts_that_are_none_are_spread(body):
    request, servers = routed(**body), pool()
    assert request.block_hashes in ((), []) and request.session is None
    chosen = [servers.choose(request).url for _ in range(60)]
    assert all(chosen.count(url) > 5 for url in URLS[:3])


# -- which server gets it --------------------------------------------------------------------------------------------


def test_prompts_that_begin_alike_meet_at_the_same_server():
    servers = pool()
    for number in range(20):
        first = serve(servers, routed(prompt=f"{number} " + "a" * 8000))
        assert serve(servers, routed(prompt=f"{number} " + "a" * 8000 + "another end")) is first
        assert serve(servers, chat(f"{number} " + "s" * 8000, "hi")) is serve(
            servers, chat(f"{number} " + "s" * 8000, "ho")
        )


def test_a_cache_key_keeps_prompts_together_that_have_nothing_in_common():
    servers = pool()
    for number in range(30):
        first = serve(servers, routed(prompt=f"{number}", prompt_cache_key=f"k {number}"))
        assert serve(servers, routed(prompt=f"other {number}", prompt_cache_key=f"k {number}")) is first
        again = pool().choose(routed(prompt="any", prompt_cache_key=f"k {number}"))
        assert again.url == pool().choose(routed(prompt="more", prompt_cache_key=f"k {number}")).url


def test_growing_conversations_find_what_they_have_said():
    """All but the new messages of a turn is cached where it goes, save for a few that move, and the servers share."""
    servers, turns = pool(), {number: ["You help.", f"question {number} " + "q" * 4000] for number in range(24)}
    where, num_moved, num_cached, num_known = {}, 0, 0, 0
    for turn in range(6):
        for number, contents in turns.items():
            servers._clock.advance(1)
            request = chat(*contents)
            upstream = servers.choose(request)
            with servers.count_open(upstream, request) as cached:
                servers.rule.record_prefilled(request, upstream.url)
            if turn:
                num_moved += where[number] is not upstream
                num_cached += cached
                num_known += chat(*contents[:-2]).num_tokens
            where[number] = upstream
            contents += ["a" * 800, "and " + "q" * 200]
    served = [list(where.values()).count(upstream) for upstream in servers.upstreams.values()]
    assert min(served) >= 4, served
    assert num_known > 100_000 and num_cached >= 0.95 * num_known and num_moved <= 6, (num_cached, num_moved)


def test_when_a_server_goes_only_its_own_prompts_move():
    prompts = [routed(prompt=f"{number} " + "x" * 100) for number in range(1000)]
    full, left = pool(5), pool(5)
    left.upstreams[URLS[0]].up = False
    before = [full.choose(prompt).url for prompt in prompts]
    after = [left.choose(prompt).url for prompt in prompts]
    assert all(120 < before.count(url) < 280 for url in URLS)
    assert all(new == old for new, old in zip(after, before, strict=True) if old != URLS[0])
    moved = [new for new, old in zip(after, before, strict=True) if old == URLS[0]]
    assert all(moved.count(url) > len(moved) / 8 for url in URLS[1:])


def test_a_server_that_is_down_is_passed_over_and_gets_its_prompts_back():
    servers, request = pool(), routed(prompt="x" * 400)
    first = serve(servers, request)
    first.up = False
    second = servers.choose(request)
    assert second is not first
    third = servers.choose(request, [second.url])
    assert len({first, second, third}) == 3
    assert servers.choose(request, servers.upstreams) is None
    first.up = True
    assert servers.choose(request) is first
    for upstream in servers.upstreams.values():
        upstream.up = False
    assert servers.choose(request) is None and not servers.untried()


def test_a_server_that_is_gone_has_nothing_cached_when_it_comes_back():
    servers, request = pool(), routed(prompt="x" * 4000)
    first = serve(servers, request)
    second = next(each for each in servers.upstreams.values() if each is not first)
    with servers.count_open(second, request):
        servers.rule.remove(first.url)
        with servers.count_open(first, request) as cached:
            assert cached == 0
    assert servers.rule.index.matched_by(second.url, request.block_hashes) > 0


def test_a_far_more_loaded_server_is_passed_over():
    servers, request = pool(running_tokens=64), routed(prompt="x" * 4 * 1000)
    first = serve(servers, request)
    others = [upstream for upstream in servers.upstreams.values() if upstream is not first]
    servers._clock.advance(1000)
    first.num_open = 10
    assert servers.choose(request) is first, "to wait costs less than to compute it again"
    first.num_open = 50
    assert servers.choose(request) in others
    others[0].num_open = 1
    assert servers.choose(request) is others[1]
    assert servers.choose(request, [one.url for one in others]) is first
    for upstream in others:
        upstream.num_open = 50
    assert servers.choose(request) is first


def test_many_requests_of_one_prefix_spread():
    servers, request = pool(), routed(prompt="x" * 400)
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(servers.count_open(servers.choose(request), request))
        loads = sorted(upstream.num_open for upstream in servers.upstreams.values())
    assert sum(loads) == 300 and loads[0] > 80


def test_an_open_request_is_counted_until_it_ends():
    servers, request = pool(), routed(prompt="x" * 400)
    upstream = servers.choose(request)
    with pytest.raises(KeyError), servers.count_open(upstream, request):
        assert upstream.num_open == 1
        raise KeyError
    assert upstream.num_open == 0
