"""The ingress without Ray: replicas are doubles that answer what a test gives them."""

import asyncio
from contextlib import suppress
from functools import partial

import pytest

from cairn.deploy.ray.exchange import AnswerHead
from cairn.deploy.ray.relay import RequestRelay
from cairn.deploy.ray.replica_calls import RelayLimits
from cairn.http.middleware import ApiKey
from cairn.routing.rule import RoutedRequest
from doubles.replica_calls import DEATH, JSON, STREAM, Call, Client


def ask(*calls, **options):
    async def run():
        return await Client(*calls, **options).ask()

    return asyncio.run(run())


def test_an_answer_goes_through_as_it_is():
    headers = [*JSON, (b"retry-after", b"3"), (b"content-length", b"5")]
    client = ask(Call("a", [AnswerHead(422, headers, b"wrong", True)]), body=b'{"a": 1}')
    assert (client.status, client.sent[0]["headers"], client.body) == (422, headers, b"wrong")
    request, destination = client.requests[0]
    assert (request.method, request.path, request.body, request.client) == (
        "POST",
        "/v1/x",
        b'{"a": 1}',
        ("10.0.0.9", 5),
    )
    assert (destination.tried, destination.owner) == ((), None)


def test_a_stream_goes_through_chunk_by_chunk_and_the_id_that_ray_adds_is_left_out():
    client = ask(Call("a", [AnswerHead(200, STREAM, b"data: 1\n\n", False), b"data: 2\n\n", b"data: [DONE]\n\n"]))
    assert client.sent[0]["headers"] == STREAM[:1]
    assert [message["body"] for message in client.sent[1:]] == [
        b"data: 1\n\n",
        b"data: 2\n\n",
        b"data: [DONE]\n\n",
        b"",
    ]
    assert [message["more_body"] for message in client.sent[1:]] == [True, True, True, False]


@pytest.mark.parametrize(("path", "key", "status"), [("/v1/x", b"k2", 200), ("/v1/x", b"k3", 401), ("/load", b"", 200)])
def test_a_stranger_is_refused_before_the_prompt_is_read_or_a_replica_is_asked(path, key, status):
    read = []

    async def read_prompt(path, content, headers):
        read.append(path)
        return RoutedRequest()

    guard = partial(ApiKey, api_keys=["k1", "k2"], open_paths={"/load"})
    headers = [(b"x-request-id", b"r1"), (b"authorization", b"Bearer " + key)]
    answered = Call("a", [AnswerHead(200, JSON, b"ok", True)])
    client = ask(answered, headers=headers, path=path, read_prompt=read_prompt, guard=guard)
    assert client.status == status
    assert len(read) == len(client.requests) == (status == 200)
    if status == 401:
        assert client.headers[b"www-authenticate"] == b"Bearer" and b"Authorization: Bearer KEY" in client.body


def test_an_id_that_nobody_in_front_adds_stays():
    client = ask(Call("a", [AnswerHead(200, STREAM, b"", True)]), headers=())
    assert client.headers[b"x-request-id"] == b"r1"


@pytest.mark.parametrize(
    "first", [[DEATH], [AnswerHead(429, JSON, b"full", True)], [AnswerHead(503, JSON, b"ends", True)]]
)
def test_before_the_first_byte_another_replica_is_tried(first):
    client = ask(Call("a", first), Call("b", [AnswerHead(200, JSON, b"ok", True)]))
    assert (client.status, client.body) == (200, b"ok")
    assert [destination.tried for _, destination in client.requests] == [(), ("a",)]


def test_the_last_refusal_is_shown_when_nobody_can_do_better():
    client = ask(
        Call("a", [AnswerHead(429, [*JSON, (b"retry-after", b"1")], b"full", True)]),
        Call("b", [DEATH]),
        Call("c", [DEATH]),
    )
    assert (client.status, client.body, client.headers[b"retry-after"]) == (429, b"full", b"1")


def test_a_replica_that_comes_up_again_was_the_only_one():
    refusal = AnswerHead(429, JSON, b"full", True)
    client = ask(Call("a", [refusal]), Call("a", [refusal]))
    assert (client.status, client.body, len(client.requests)) == (429, b"full", 2)


def test_a_bad_request_is_not_tried_twice():
    client = ask(Call("a", [AnswerHead(400, JSON, b"bad", True)]))
    assert (client.status, len(client.requests)) == (400, 1)


def test_replicas_that_die_are_a_503_with_retry_after():
    client = ask(*(Call(name, [DEATH]) for name in "abc"))
    assert client.status == 503 and client.headers[b"retry-after"]
    assert b"no replica could answer" in client.body and b"the actor has died" in client.body


def test_no_replica_is_a_503_with_retry_after_and_the_call_is_cancelled():
    call = Call(None, [])
    client = ask(call, limits=RelayLimits(3, 1 << 20, 0.01))
    assert client.status == 503 and client.headers[b"retry-after"]
    assert b"no replica has taken the request within 0.01 s" in client.body
    assert call.cancelled


def test_what_keeps_replicas_from_starting_is_told():
    client = ask(Call(None, [], "m: no weights"), limits=RelayLimits(3, 1 << 20, 0.01))
    assert client.status == 503 and client.headers[b"retry-after"]
    assert b"within 0.01 s: one could not be started: m: no weights" in client.body


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        ("/v1/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b'"request_id":"r1"}\n\n'),
        ("/v1/responses", b'"param":null}\n\n'),
    ],
)
def test_a_stream_whose_replica_dies_ends_with_an_error_event(path, ending):
    client = ask(Call("a", [AnswerHead(200, STREAM, b"data: 1\n\n", False), DEATH]), path=path)
    assert client.status == 200 and len(client.requests) == 1
    assert b"the replica failed in mid-answer" in client.body and client.body.endswith(ending)
    assert client.sent[-1]["more_body"] is False


@pytest.mark.parametrize("begun", [False, True])
def test_a_replica_that_is_silent_is_waited_for_as_long_as_an_answer_may_take(begun):
    items = [AnswerHead(200, STREAM, b"data: 1\n\n", False)] if begun else []
    call = Call("a", [*items, asyncio.Event()])
    client = ask(call, limits=RelayLimits(3, 1 << 20, 0.01, answer_seconds=0.05))
    assert client.status == (200 if begun else 504) and call.closed and len(client.requests) == 1
    assert b"the answer was not there within 0.05 s" in client.body


def test_a_client_that_goes_ends_the_call():
    async def run():
        call = Call("a", [AnswerHead(200, STREAM, b"data: 1\n\n", False), asyncio.Event()])
        client = Client(call)
        asking = asyncio.create_task(client.ask())
        while len(client.sent) < 2:
            await asyncio.sleep(0)
        client.gone.set()
        await asking
        return call

    assert asyncio.run(run()).closed


def test_a_client_that_goes_while_it_waits_ends_the_call():
    async def run():
        call = Call(None, [])
        client = Client(call)
        client.gone.set()
        with suppress(asyncio.CancelledError):
            await client.ask()
        return call, client

    call, client = asyncio.run(run())
    assert call.cancelled and not client.sent


def test_no_more_of_a_body_is_read_than_the_replica_needs_to_refuse_it():
    client = ask(Call("a", [AnswerHead(413, JSON, b"", True)]), limits=RelayLimits(3, 8, 5.0), body=b"x" * 100)
    assert len(client.requests[0][0].body) == 9


def test_lifespan_events_are_answered():
    async def run():
        messages, sent = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}], []

        async def receive():
            return messages.pop()

        async def send(message):
            sent.append(message["type"])

        await RequestRelay(lambda request, tried: None, RelayLimits(1, 1, 1.0))({"type": "lifespan"}, receive, send)
        return sent

    assert asyncio.run(run()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# -- stored responses --------------------------------------------------------------------------------------------------

STORED = b'{"id": "resp_1", "object": "response", "status": "completed", "output": []}'
UNKNOWN = AnswerHead(404, JSON, b"unknown", True)


def test_what_goes_on_from_a_stored_response_goes_to_its_replica():
    async def run():
        made = Client(Call("b", [AnswerHead(200, JSON, STORED, True)]), path="/v1/responses")
        await made.ask()
        later = []
        for method, path, body in (
            ("POST", "/v1/responses", b'{"previous_response_id": "resp_1"}'),
            ("GET", "/v1/responses/resp_1", b""),
            ("POST", "/v1/responses/resp_1/cancel", b""),
        ):
            client = Client(Call("b", [AnswerHead(200, JSON, b"ok", True)]), path=path, body=body)
            client._relay, client._scope["method"] = made._relay, method
            client._relay._send_to_replica = client.send_to_replica
            later.append((await client.ask()).requests[0][1].owner)
        return made.requests[0][1].owner, later

    assert asyncio.run(run()) == (None, ["b", "b", "b"])


def test_a_stored_response_of_an_unknown_replica_is_asked_for_everywhere():
    found = AnswerHead(200, JSON, STORED, True)
    client = ask(Call("a", [UNKNOWN]), Call("b", [UNKNOWN]), Call("c", [found]), path="/v1/responses/resp_1")
    assert (client.status, client.body) == (200, STORED)
    assert [destination.tried for _, destination in client.requests] == [(), ("a",), ("a", "b")]


def test_a_stored_response_that_nobody_has_is_a_404():
    client = ask(Call("a", [UNKNOWN]), Call("b", [UNKNOWN]), Call("a", [UNKNOWN]), path="/v1/responses/resp_1")
    assert (client.status, client.body, len(client.requests)) == (404, b"unknown", 3)


def test_any_other_404_is_final():
    assert len(ask(Call("a", [UNKNOWN]), path="/v1/nowhere").requests) == 1
