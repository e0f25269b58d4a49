"""Conversations that grow, over plain servers with caches of their own: the proxy finds what they have cached."""

import json

import pytest
from starlette.responses import JSONResponse

NUM_CONVERSATIONS = 9
NUM_TURNS = 5


class Cache:
    """What a server has computed: every message of every prompt, behind those before it. Counts bytes."""

    def __init__(self):
        self.prefixes = set()
        self.num_cached = 0
        self.num_computed = 0

    async def answer(self, server, seen):
        path, cold = (), False
        for message in seen.json["messages"]:
            path = (*path, json.dumps(message))
            cold = cold or path not in self.prefixes
            if cold:
                self.num_computed += len(path[-1])
            else:
                self.num_cached += len(path[-1])
            self.prefixes.add(path)
        # the answer is cached, too, but a chat template may render it otherwise
        return JSONResponse({"choices": [{"index": 0, "message": {"role": "assistant", "content": "a" * 2000}}]})


def first_messages(number):
    question = {"role": "user", "content": f"question {number} " + "q" * 4000}
    return [{"role": "system", "content": "You help."}, question]


@pytest.mark.parametrize("handed_over", [False, True], ids=["plain servers", "P and D"])
def test_a_conversation_stays_where_it_is_cached(setting, handed_over):
    servers, caches = [setting.decode() for _ in range(3)], [Cache() for _ in range(3)]
    for server, cache in zip(servers, caches, strict=True):
        server.default = cache.answer
    proxy = setting.proxy([setting.prefill()] if handed_over else [], servers)
    conversations = [first_messages(number) for number in range(NUM_CONVERSATIONS)]
    for _ in range(NUM_TURNS):
        for messages in conversations:
            response = proxy.ask("/v1/chat/completions", model="m", messages=messages)
            messages.append(response.json()["choices"][0]["message"])
            messages.append({"role": "user", "content": "and then? " + "x" * 500})
    # all that a single cache would have found
    most = sum(
        len(json.dumps(message))
        for messages in conversations
        for turn in range(1, NUM_TURNS)
        for message in messages[: 2 * turn]
    )
    cached = sum(cache.num_cached for cache in caches)
    assert cached >= 0.95 * most, (cached, most)
    computed = [cache.num_computed for cache in caches]
    assert max(computed) <= 1.7 * sum(computed) / 3, computed
    expected = proxy.metric("expected_cached_tokens_total", pool="decode")
    assert 0.9 * cached <= 4 * expected <= 1.1 * cached
    assert proxy.metric("routed_tokens_total", pool="decode") > expected
    assert proxy.metric("prefixes", pool="decode") > NUM_CONVERSATIONS * NUM_TURNS


def test_a_second_proxy_sends_conversations_to_the_same_servers(setting):
    """As long as nothing is known: then each learns for itself."""
    servers = [setting.decode() for _ in range(3)]
    for _ in range(2):
        proxy = setting.proxy([], servers)
        for number in range(6):
            proxy.ask(prompt=f"{number} " + "x" * 100)
    assert all(len(server.seen) % 2 == 0 for server in servers)
    for server in servers:
        prompts = [seen.json["prompt"] for seen in server.seen]
        assert len(prompts) == 2 * len(set(prompts))
