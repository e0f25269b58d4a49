"""Prefill replicas before the others, without Ray: what goes to whom, and what is tried when one fails."""

import asyncio
import json

import pytest

from cairn.deploy.ray import relay
from cairn.deploy.ray.exchange import AnswerHead
from cairn.deploy.ray.replica_calls import RelayLimits, ReplicaFailed
from cairn.proxy.prefixes import HintCache
from cairn.types import ManualClock
from doubles.replica_calls import DEATH, JSON, Call, Client

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1], "remote_host": "h"}
HANDED = AnswerHead(200, JSON, json.dumps({"kv_transfer_params": PARAMS}).encode(), True)
REFUSED = AnswerHead(400, JSON, b'{"error": {"message": "no", "param": "kv_transfer_params"}}', True)
JUNK = AnswerHead(200, JSON, b'{"kv_transfer_params": "junk"}', True)
OK = AnswerHead(200, JSON, b"ok", True)
LIMITS = RelayLimits(3, 1 << 20, 0.05)
BODY = {"prompt": "hello", "max_tokens": 9}


def ask(prefill, decode, body=BODY, path="/v1/completions", limits=LIMITS):
    """The client, and the bodies that prefill and decode replicas got."""

    async def run():
        prefiller = Client(*prefill)
        prefill_calls = prefiller.send_to_replica
        client = Client(*decode, body=json.dumps(body).encode(), path=path, limits=limits, prefill=prefill_calls)
        await client.ask()
        bodies = [[json.loads(request.body) for request, _ in one.requests] for one in (prefiller, client)]
        return client, *bodies

    return asyncio.run(run())


def test_the_prompt_is_computed_first_and_handed_over():
    client, prefilled, decoded = ask([Call("p", [HANDED])], [Call("d", [OK])])
    assert (client.status, client.body) == (200, b"ok")
    (first,) = prefilled
    assert (first["prompt"], first["max_tokens"], first["stream"]) == ("hello", 1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert decoded == [BODY | {"kv_transfer_params": PARAMS}]


def test_an_answer_in_pieces_is_read_to_its_end():
    cut = HANDED.body[:20], HANDED.body[20:]
    pieces = [AnswerHead(200, JSON, cut[0], False), cut[1]]
    assert ask([Call("p", pieces)], [Call("d", [OK])])[2] == [BODY | {"kv_transfer_params": PARAMS}]


@pytest.mark.parametrize(
    "prefill",
    [
        [Call("p", [DEATH]), Call("q", [HANDED])],
        [Call("p", [AnswerHead(429, JSON, b"", True)]), Call("q", [HANDED])],
        [Call("p", [AnswerHead(500, JSON, b"", True)]), Call("q", [HANDED])],
        [Call("p", [AnswerHead(200, JSON, b"no JSON", True)]), Call("q", [HANDED])],
    ],
)
def test_another_prefill_replica_is_tried(prefill):
    client, prefilled, decoded = ask(prefill, [Call("d", [OK])])
    assert (client.status, len(prefilled)) == (200, 2)
    assert decoded == [BODY | {"kv_transfer_params": PARAMS}]


@pytest.mark.parametrize(
    ("prefill", "num_asked"),
    [
        ([Call(None, [])], 1),
        ([Call(name, [DEATH]) for name in "pqr"], 3),
        ([Call(name, [REFUSED]) for name in "pqr"], 3),
        ([Call("p", [REFUSED]), Call("p", [REFUSED])], 2),
        ([Call("p", [JUNK])], 1),
    ],
    ids=["none", "dead", "refuse", "the only one", "junk"],
)
def test_without_a_prefill_replica_the_others_do_it_alone(prefill, num_asked):
    """As many are asked as there are, and three at most."""
    client, prefilled, decoded = ask(prefill, [Call("d", [OK])])
    assert (client.status, decoded, len(prefilled)) == (200, [BODY], num_asked)


def test_a_prefill_replica_that_is_not_there_is_not_waited_for_as_long_as_the_others(monkeypatch):
    monkeypatch.setattr(relay, "_MAX_PREFILL_SECONDS", 0.01)
    call = Call(None, [])
    client, _, decoded = ask([call], [Call("d", [OK])], limits=RelayLimits(3, 1 << 20, 3600.0))
    assert (client.status, decoded, call.cancelled) == (200, [BODY], True)


def test_a_bad_request_is_the_clients_to_see():
    client, _, decoded = ask([Call("p", [AnswerHead(422, JSON, b"bad prompt", True)])], [])
    assert (client.status, client.body, decoded) == (422, b"bad prompt", [])


def test_what_a_client_says_of_transfers_goes_to_nobody():
    asked = BODY | {"kv_transfer_params": {"remote_host": "evil"}}
    _, prefilled, decoded = ask([Call("p", [HANDED])], [Call("d", [OK])], asked)
    assert "remote_host" not in json.dumps(prefilled[0]).replace('"remote_host": null', "")
    assert decoded == [BODY | {"kv_transfer_params": PARAMS}]


def test_a_refused_handover_is_left_out_for_the_same_replica():
    client, _, decoded = ask([Call("p", [HANDED])], [Call("d", [REFUSED]), Call("d", [OK])])
    assert (client.status, client.body) == (200, b"ok")
    assert client.requests[1][1].owner == "d" and client.requests[1][1].tried == ()
    assert decoded == [BODY | {"kv_transfer_params": PARAMS}, BODY]


REFUSAL = AnswerHead(400, JSON, b'{"error": {"message": "no", "param": "max_tokens"}}', True)


@pytest.mark.parametrize(
    ("decode", "released"),
    [
        ([Call("d", [OK])], False),
        ([Call("d", [REFUSAL])], True),
        ([Call("d", [REFUSED]), Call("d", [OK])], True),
        ([Call("d", [AnswerHead(429, JSON, b"", True)]) for _ in range(3)], True),
        ([Call(None, [])], True),
    ],
    ids=["taken", "refused", "its parameters refused", "full", "nobody there"],
)
def test_what_no_replica_has_taken_is_let_go_of_where_it_is(decode, released):
    async def run():
        prefiller = Client(Call("p", [HANDED]))
        shared = {"prefill": prefiller.send_to_replica, "limits": LIMITS}
        client = Client(*decode, body=json.dumps(BODY).encode(), path="/v1/completions", **shared)
        await client.ask()
        return prefiller.released

    assert asyncio.run(run()) == [("p", {"kv_transfer_params": PARAMS})] * released


def test_what_a_client_has_left_behind_is_let_go_of():
    """Before a replica has the request, and when it has it."""

    async def run(call):
        prefiller = Client(Call("p", [HANDED]))
        shared = {"prefill": prefiller.send_to_replica, "limits": RelayLimits(3, 1 << 20, 60.0)}
        client = Client(call, body=json.dumps(BODY).encode(), path="/v1/completions", **shared)
        asking = asyncio.create_task(client.ask())
        while not client.requests:
            await asyncio.sleep(0)
        client.gone.set()
        await asking
        return prefiller.released

    for call in (lambda: Call(None, []), lambda: Call("d", [asyncio.Event()])):
        assert asyncio.run(run(call())) == [("p", {"kv_transfer_params": PARAMS})]


def test_what_was_handed_over_is_used_once_unless_the_replica_was_full():
    full = AnswerHead(429, JSON, b"full", True)
    again = AnswerHead(200, JSON, json.dumps({"kv_transfer_params": PARAMS | {"remote_host": "i"}}).encode(), True)
    first, second = (BODY | {"kv_transfer_params": PARAMS | {"remote_host": host}} for host in "hi")
    prefill = [Call("p", [HANDED]), Call("p", [again])]
    assert ask(prefill, [Call("d", [DEATH]), Call("e", [OK])])[2] == [first, second]
    assert ask(prefill, [Call("d", [full]), Call("e", [OK])])[2] == [first, first]
    # no prefill replica takes it the second time
    gone = [Call("p", [HANDED]), Call(None, [])]
    assert ask(gone, [Call("d", [DEATH]), Call("e", [OK])])[2] == [first, BODY]
    # the call never came to a replica, so nobody can have fetched anything
    lost = Call("d", [OK])
    lost.wait_replica = failing
    assert ask(prefill, [lost, Call("e", [OK])])[2] == [first, first]


async def failing():
    raise ReplicaFailed("it cannot be reached")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/messages/count_tokens", {"messages": []}),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_what_is_not_handed_over(path, body):
    client, prefilled, decoded = ask([], [Call("d", [OK])], body, path)
    assert (client.status, prefilled, decoded) == (200, [], [body])


HINT = {"engine": "e", "host": "h", "port": 5600, "num_tokens": 12}
TOLD = {"choices": [{"text": " world"}], "kv_transfer_params": {"cairn_decode_hint": HINT}}
HINTED = AnswerHead(200, JSON, json.dumps(TOLD).encode(), True)
TURN = BODY | {"prompt": "hello " * 20}
"""A second turn has to be a longer prompt by a digest at least: 64 characters."""
NEXT = BODY | {"prompt": TURN["prompt"] + " world" + " again" * 30}


def ask_twice(prefill, decode, clock, seconds=0.0):
    """The bodies that prefill replicas got for two turns of a conversation."""

    async def run():
        prefiller = Client(*prefill)
        shared = {"prefill": prefiller.send_to_replica, "hints": HintCache(clock=clock)}
        for calls, body in zip(decode, (TURN, NEXT), strict=True):
            client = Client(*calls, body=json.dumps(body).encode(), path="/v1/completions", limits=LIMITS, **shared)
            await client.ask()
            assert client.status == 200
            clock.advance(seconds)
        return prefiller, [json.loads(request.body)["kv_transfer_params"] for request, _ in prefiller.requests]

    return asyncio.run(run())


def test_the_next_turn_says_where_the_last_answer_is():
    calls = [Call("p", [HANDED]), Call("p", [HANDED])]
    streamed = [
        AnswerHead(200, [(b"content-type", b"text/event-stream")], b"data: " + json.dumps(TOLD).encode(), False),
        b"\n\ndata: [DONE]\n\n",
    ]
    for answer in ([HINTED], streamed):
        _, (first, second) = ask_twice(calls, [[Call("d", answer)], [Call("d", [OK])]], ManualClock())
        assert "cairn_decode_hint" not in first
        assert second["cairn_decode_hint"] == HINT


def test_without_a_hint_or_when_it_is_old_the_next_turn_says_nothing():
    calls = [Call("p", [HANDED]), Call("p", [HANDED])]
    _, (_, second) = ask_twice(calls, [[Call("d", [OK])], [Call("d", [OK])]], ManualClock())
    assert "cairn_decode_hint" not in second
    _, (_, second) = ask_twice(calls, [[Call("d", [HINTED])], [Call("d", [OK])]], ManualClock(), 1801.0)
    assert "cairn_decode_hint" not in second


def test_a_refused_hint_is_forgotten_and_the_same_replica_asked_without():
    calls = [Call("p", [HANDED]), Call("p", [REFUSED]), Call("p", [HANDED])]
    prefiller, params = ask_twice(calls, [[Call("d", [HINTED])], [Call("d", [OK])]], ManualClock())
    assert ["cairn_decode_hint" in one for one in params] == [False, True, False]
    assert (prefiller.requests[2][1].owner, prefiller.requests[2][1].tried) == ("p", ())
