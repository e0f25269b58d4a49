"""The client against answers that are written down here, chunk by chunk."""

import json

import httpx
import pytest
from demo.client import Client, StreamedAnswer, counter_total
from demo.server import DemoError

USAGE = {
    "choices": [],
    "usage": {"prompt_tokens_details": {"cached_tokens": 2}},
    "cairn": {"cache": {"reason": "none"}},
}
COMPLETION = [
    {"choices": [{"text": "", "token_ids": [7], "prompt_token_ids": [1, 2, 3]}]},
    {"choices": [{"text": "ab", "token_ids": [8, 9]}]},
    USAGE,
]
CHAT = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2, 3]},
    {"choices": [{"delta": {"content": "a"}, "token_ids": [7]}]},
    {"choices": [{"delta": {"content": "b"}, "token_ids": [8, 9]}]},
    USAGE,
]


@pytest.mark.parametrize(("chunks", "first"), [(COMPLETION, 0.0), (CHAT, 1.0)])
def test_a_stream_becomes_a_reply(chunks, first):
    answer = StreamedAnswer()
    for seconds, chunk in enumerate(chunks):
        answer.add(chunk, float(seconds))
    reply = answer.reply()
    assert (reply.prompt_ids, reply.answer_ids, reply.text) == ((1, 2, 3), (7, 8, 9), "ab")
    assert (reply.cached_tokens, reply.reason, reply.first_token_seconds) == (2, "none", first)


@pytest.mark.parametrize("chunks", [COMPLETION[:2], COMPLETION[1:], []])
def test_a_stream_that_breaks_off_is_no_reply(chunks):
    answer = StreamedAnswer()
    for chunk in chunks:
        answer.add(chunk, 0.0)
    with pytest.raises(DemoError, match="ended before"):
        answer.reply()


def test_an_error_in_a_stream_is_told():
    with pytest.raises(DemoError, match="the engine has ended"):
        StreamedAnswer().add({"error": {"message": "the engine has ended"}}, 0.0)


class Server:
    """Answers with a stream, counts three forward passes for each, and keeps the bodies."""

    def __init__(self, status=200):
        self.status = status
        self.passes = 40
        self.bodies = []

    def __call__(self, request):
        if request.url.path == "/metrics":
            text = f'# TYPE passes counter\ncairn:forward_passes_total{{engine="0"}} {self.passes}.0\n'
            return httpx.Response(200, text=text)
        self.bodies.append((request.url.path, json.loads(request.content)))
        if self.status != 200:
            return httpx.Response(self.status, text="no room")
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [4, 5]})
        self.passes += 3
        chunks = CHAT if "chat" in request.url.path else COMPLETION
        events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
        return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in events))


def client_of(server):
    return Client("http://server", transport=httpx.MockTransport(server))


def test_requests_ask_for_what_is_read_from_the_answer():
    server = Server()
    with client_of(server) as client:
        completion = client.complete([1, 2, 3], max_tokens=3, seed=5)
        chat = client.chat([{"role": "user", "content": "hi"}])
    asked_always = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    assert server.bodies == [
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3, "seed": 5, **asked_always}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **asked_always}),
    ]
    assert completion.forward_passes == chat.forward_passes == 3
    assert completion.answer_ids == chat.answer_ids == (7, 8, 9)


def test_tokenize():
    server = Server()
    with client_of(server) as client:
        assert client.tokenize("text") == client.tokenize_chat([{"role": "user", "content": "hi"}]) == [4, 5]
    assert [sorted(body) for _, body in server.bodies] == [
        ["add_special_tokens", "prompt"],
        ["add_generation_prompt", "messages"],
    ]


@pytest.mark.parametrize("ask", [lambda client: client.complete("x"), lambda client: client.tokenize("x")])
def test_a_refusal_is_told(ask):
    with client_of(Server(status=503)) as client, pytest.raises(DemoError, match="503: no room"):
        ask(client)


def test_counters_are_summed_over_their_labels():
    text = '# TYPE a counter\na_total{kind="x"} 2.0\na_total{kind="y"} 3.0\n# TYPE ab counter\nab_total 7.0\n'
    assert counter_total(text, "a_total") == 5
    with pytest.raises(DemoError, match="has no b_total"):
        counter_total(text, "b_total")
