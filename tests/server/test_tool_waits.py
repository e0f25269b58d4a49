"""Answers that are calls, through every API: the cache is told that their sessions wait for their tools."""

import pytest

from server.asking import CALL, SCHEMA

TOOLS = {
    "chat": {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    "messages": {"name": "weather", "input_schema": SCHEMA},
    "responses": {"type": "function", "name": "weather", "parameters": SCHEMA},
}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
LIMITS = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}


def said(api, text):
    return {"input" if api == "responses" else "messages": [{"role": "user", "content": text}]}


def post(server, api, text, **fields):
    """The engine's name of the request. The engine echoes: what the user says is what the model answers."""
    body = {"model": "echo", LIMITS[api]: 900, "tools": [TOOLS[api]], **said(api, text)} | fields
    response = server.post(PATHS[api], body)
    assert response.status_code == 200, response.text
    return server.requests[-1].request_id


def cache_of(server):
    return server.core._scheduler.state.cache


def waits(server, name):
    """Whether the cache takes the session of a request that has ended to wait for its tools."""
    end = cache_of(server).answer_ends.get(name)
    if end is None:
        return False
    record = cache_of(server).policy.eviction._records.get(end[0])
    return record is not None and record.awaits_tools


def settled(server):
    """What was sent before a question has been read when it is answered; the last states are saved in later steps."""
    assert server.get("/metrics").status_code == 200
    server.until(lambda: not server.core.has_work)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", PATHS)
def test_an_answer_that_is_a_call(xml, api, stream):
    called = post(xml, api, f"Call it, {api} {stream}: {CALL}", stream=stream)
    answered = post(xml, api, f"Do not, {api} {stream}.", stream=stream)
    settled(xml)
    assert waits(xml, called) and not waits(xml, answered)
    assert cache_of(xml).answer_ends.get(answered) is not None, "it is known, and was none"


def test_the_wait_is_over_when_the_session_is_back(xml):
    called = post(xml, "chat", f"Back soon: {CALL}")
    settled(xml)
    node, _ = cache_of(xml).answer_ends.get(called)
    assert waits(xml, called)
    prompt, checkpoint = xml.requests[-1].prompt, node.checkpoint
    assert checkpoint.hits == 0
    xml.post("/v1/completions", {"model": "echo", "prompt": tokens_of(prompt, node), "max_tokens": 1})
    settled(xml)
    assert checkpoint.hits == 1 and not waits(xml, called)


def tokens_of(prompt, node):
    """The key tokens of a path, with one more."""
    parts = []
    while node.parent is not None:
        parts.insert(0, node.keys().tolist())
        node = node.parent
    tokens = [token for part in parts for token in part]
    assert prompt.startswith(b"".join(token.to_bytes(8, "little") for token in tokens[: len(prompt) // 8]))
    return [*tokens, 65]


def test_a_response_in_the_background(xml):
    num_before = len(xml.requests)
    post(xml, "responses", f"In the background: {CALL}", background=True)
    xml.until(lambda: len(xml.requests) > num_before and waits(xml, xml.requests[-1].request_id))


def test_each_of_several_answers(xml):
    name = post(xml, "chat", f"Twice: {CALL}", n=2)
    settled(xml)
    # both end with the same text, at one place: the one that has ended last is known
    assert waits(xml, name) or waits(xml, f"{name}/1")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_complete_call(xml, stream):
    """Cut off, without tools, in quotes."""
    cut = post(xml, "chat", f"Cut: {CALL}", max_tokens=40, stream=stream)
    bare = post(xml, "chat", f"Bare: {CALL}", tools=None, stream=stream)
    quoted = post(xml, "chat", f"Quoted: `{CALL}`", stream=stream)
    settled(xml)
    assert not any(waits(xml, name) for name in (cut, bare, quoted))


def test_a_server_without_a_parser(server):
    name = post(server, "chat", f"Nobody sees it: {CALL}", tools=None)
    settled(server)
    assert cache_of(server).answer_ends.get(name) is not None and not waits(server, name)


def test_of_an_unknown_request_nothing_changes(xml):
    called = post(xml, "chat", f"Known: {CALL}")
    settled(xml)
    before = waiting(xml)
    assert waits(xml, called)
    xml.core.await_tools("nobody", 0)
    xml.core.await_tools(called, 7)
    assert waiting(xml) == before


def waiting(server):
    records = cache_of(server).policy.eviction._records
    return [node for node, record in records.items() if record.awaits_tools]
