"""One request: what is read from its stream, however it comes, and what is said of what fails."""

import asyncio
import json
import re
from contextlib import closing, suppress

import httpx
import pytest

from bench.scripted import DONE, Answer, Server, answer_at, event, send, token, usage, virtually
from cairn.bench.client import Endpoint, EventLoopClock, HttpSender, RequestRecord


def test_times_are_those_of_the_events():
    server = Server([answer_at(0.5, 0.75, 1.5, prompt=10, cached=4)])
    outcome = virtually(send(server))
    assert outcome == RequestRecord(
        sent=0.0,
        ended=1.5,
        prompt_tokens=10,
        token_times=(0.5, 0.75, 1.5),
        output_tokens=3,
        cached_tokens=4,
        has_usage=True,
        text="xxx",
    )
    assert (outcome.ttft, outcome.itls, outcome.latency) == (0.5, (0.25, 0.75), 1.5)
    assert outcome.tpot == 0.5


async def timed(server):
    """What became of a request, and when its connection was free."""
    return await send(server), asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("after", "ending", "freed"),
    [(0.5, None, 2.0), (30.0, None, 2.5), (0.25, httpx.ReadError("cut"), 1.75)],
    ids=["ends", "does not end", "is cut"],
)
def test_a_stream_is_read_to_its_end_for_its_connection(after, ending, freed):
    """One that is closed before is lost to the next request. What comes of it is none of the request's times."""
    whole = answer_at(0.5, 1.5)
    outcome, moment = virtually(timed(Server([Answer(whole.pieces, after=after, ending=ending)])))
    assert outcome.failure is None and (outcome.ended, moment) == (1.5, freed)


ODD = "a\u2028b\x85c\x0bd\u00e9\U0001f40b\n"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_the_stream_may_be_cut_at_every_byte(newline):
    """Line separators of Unicode are text here, and a character may be cut in two."""
    whole = token(ODD) + b": a comment\n\n" + token("end", "stop") + usage(3, 2, 1) + DONE
    whole = whole.replace(b"\n", newline)
    expected = virtually(send(Server([Answer(((1.0, whole),))])))
    assert (expected.text, expected.output_tokens, expected.cached_tokens) == (ODD + "end", 2, 1)
    assert expected.failure is None
    for cut in range(1, len(whole)):
        pieces = ((1.0, whole[:cut]), (1.0, whole[cut:]))
        assert virtually(send(Server([Answer(pieces)]))) == expected, cut
    single = tuple((1.0, whole[at : at + 1]) for at in range(len(whole)))
    assert virtually(send(Server([Answer(single)]))) == expected


def test_events_without_a_token_start_no_clock():
    """A role that goes ahead, a finish reason that comes after."""
    ahead = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    first = event(choices=[{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}])
    last = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    outcome = virtually(send(Server([Answer(((0.1, ahead), (2.0, first), (3.0, last), (3.5, DONE)))])))
    assert (outcome.token_times, outcome.ended, outcome.text, outcome.output_tokens) == ((2.0,), 3.0, "hi", 1)


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}], ids=str
)
def test_thoughts_and_tool_calls_are_tokens(delta):
    chunk = event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])
    outcome = virtually(send(Server([Answer(((1.0, chunk), (2.0, token("x", "stop"))))])))
    assert (outcome.token_times, outcome.text, outcome.failure) == ((1.0, 2.0), "x", None)


def test_token_ids_count_where_text_does_not():
    pieces = ((1.0, token("", None, token_ids=[5])), (2.0, token("é", "length", token_ids=[6, 7])), (2.0, DONE))
    outcome = virtually(send(Server([Answer(pieces)])))
    assert (outcome.token_times, outcome.output_tokens, outcome.has_usage) == ((1.0, 2.0), 3, False)


def test_an_answer_without_text_is_there_with_its_first_choice():
    pieces = ((1.0, token("")), (2.0, token("", "stop")), (2.0, usage(5, 2, 0)))
    outcome = virtually(send(Server([Answer(pieces)])))
    assert (outcome.ttft, outcome.ended, outcome.output_tokens, outcome.failure) == (1.0, 2.0, 2, None)


def test_without_usage_lengths_are_what_was_seen():
    outcome = virtually(send(Server([answer_at(1.0, 2.0, with_usage=False)]), num_tokens=9))
    assert (outcome.prompt_tokens, outcome.output_tokens) == (9, 2)
    assert (outcome.cached_tokens, outcome.has_usage, outcome.failure) == (None, False, None)


@pytest.mark.parametrize(
    "told",
    [
        {"prompt_tokens": "10", "completion_tokens": 2},
        {"prompt_tokens": -1, "completion_tokens": 2},
        {"prompt_tokens": 10, "completion_tokens": True},
        {"prompt_tokens": 10},
        [],
    ],
)
def test_a_usage_that_makes_no_sense_is_none(told):
    pieces = ((1.0, token("x", "stop")), (1.0, event(choices=[], usage=told)), (1.0, DONE))
    outcome = virtually(send(Server([Answer(pieces)])))
    assert (outcome.has_usage, outcome.prompt_tokens, outcome.failure) == (False, 7, None)


def test_the_last_usage_that_was_told_counts():
    """Servers that send it with every event, and servers that send events without any after it."""
    early = event(choices=[{"index": 0, "text": "x"}], usage={"prompt_tokens": 10, "completion_tokens": 1})
    pieces = ((1.0, early), (2.0, usage(10, 2, 5)), (3.0, event(choices=[], usage=None)), (3.0, DONE))
    outcome = virtually(send(Server([Answer(pieces)])))
    assert (outcome.has_usage, outcome.output_tokens, outcome.cached_tokens) == (True, 2, 5)


def test_a_usage_may_leave_out_what_was_cached():
    assert virtually(send(Server([Answer(((1.0, token("x", "stop")), (1.0, usage(10, 1))))]))).cached_tokens is None


ERROR = json.dumps({"error": {"message": "too many", "code": "x"}}).encode()


@pytest.mark.parametrize(
    ("answer", "kind", "detail", "ended"),
    [
        (Answer(((0.5, ERROR),), 429, "application/json"), "HTTP 429", "too many", 0.5),
        (Answer(((0.5, b"<html>oh"),), 503, "text/html"), "HTTP 503", "<html>oh", 0.5),
        (Answer(((0.5, b"[" * 70_000), (1.0, b"[" * 9)), 500), "HTTP 500", "[" * 300, 0.5),
        (Answer(((0.5, b"[" * 10_000),), 500), "HTTP 500", "[" * 300, 0.5),
        (Answer(((0.5, b'{"detail": "no"}'),), 404), "HTTP 404", "{'detail': 'no'}", 0.5),
        (Answer(((0.5, b"{}"),), 307), "HTTP 307", "{}", 0.5),
        (Answer(((0.5, b"{}"),), 200, "application/json"), "no event stream", "application/json", 0.0),
        (Answer(((0.5, token()), (1.0, ERROR.join((b"data: ", b"\n\n"))))), "error in the stream", "too many", 1.0),
        (Answer(((0.5, token()), (1.0, event(error="gone")))), "error in the stream", "gone", 1.0),
        (Answer(((0.5, token()),), ending=httpx.ReadError("reset"), after=1.0), "connection broken", "reset", 1.5),
        (Answer(((0.5, token()),), ending=httpx.RemoteProtocolError("cut")), "connection broken", "cut", 0.5),
        (Answer(((0.5, token()),)), "stream cut short", "before its answer did", 0.5),
        (Answer(()), "stream cut short", "before its answer did", 0.0),
        (Answer(((0.5, DONE),)), "no answer", "no choice", 0.5),
        (Answer(((0.5, b"data: {oh\n\n"),)), "unreadable event", "no JSON", 0.5),
        (Answer(((0.5, b"data: " + b"[" * 200_000 + b"\n\n"),)), "unreadable event", "no JSON", 0.5),
        (Answer(((0.5, b"data: 7\n\n"),)), "unreadable event", "object", 0.5),
        (Answer(((0.5, token()), (99.0, DONE))), "timeout", "within 20 s", 20.0),
        (Answer(((0.5, token()),), ending=httpx.ReadTimeout("")), "timeout", "ReadTimeout", 0.5),
        (httpx.ConnectError("refused"), "connection failed", "refused", 0.0),
        (httpx.ConnectTimeout(""), "connection failed", "in time", 0.0),
    ],
)
def test_what_fails_is_said(answer, kind, detail, ended):
    outcome = virtually(send(Server([answer]), seconds=20.0))
    assert outcome.failure is not None and outcome.failure.kind == kind
    assert detail in outcome.failure.detail and len(outcome.failure.detail) <= 300
    assert outcome.ended == ended


def test_an_event_without_an_end_is_not_kept():
    endless = Answer(tuple((0.1 * number, b"data: " + b"x" * 1000) for number in range(1, 50)), after=99.0)
    server = Server([endless])
    outcome = virtually(send(server, max_bytes=10_059))
    assert outcome.failure.kind == "endless answer" and outcome.ended == pytest.approx(1.0) and server.open_now == 0
    assert virtually(send(Server([answer_at(1.0)]), max_bytes=10_059)).failure is None


def test_a_secret_that_a_server_repeats_is_not_passed_on():
    answer = Answer(((0.0, b"wrong key sk-secret, Bearer sk-secret"),), 401)
    outcome = virtually(send(Server([answer]), secrets=("Bearer sk-secret", "sk-secret")))
    assert outcome.failure.detail == "wrong key ***, ***"


def test_cancelling_closes_the_stream():
    server = Server([Answer(((0.5, token()), (99.0, DONE)))])

    async def cancelled():
        task = asyncio.create_task(send(server))
        await asyncio.sleep(1.0)
        assert server.open_now == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert virtually(cancelled())
    assert server.open_now == 0


def test_a_kept_connection_that_the_server_closes_is_no_failure():
    """Servers close those that nobody uses for a while, perhaps as a request is on its way. A new one is another
    matter: who closes that without an answer has failed."""

    async def play(answers):
        """How many of three requests failed, of how many that came, where connection i answers so many and is closed
        by the next."""
        left, came, served = list(answers), [], []

        async def serve(incoming, outgoing):
            served.append(asyncio.current_task())
            with suppress(asyncio.IncompleteReadError), closing(outgoing):
                await answer(incoming, outgoing, left.pop(0))

        async def answer(incoming, outgoing, budget):
            while head := (await incoming.readuntil(b"\r\n\r\n")).lower():
                await incoming.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
                came.append(budget)
                if not budget:
                    break
                budget -= 1
                body = b"".join(data for _, data in answer_at(0.0).pieces)
                fields = b"content-type: text/event-stream\r\ncontent-length: %d" % len(body)
                outgoing.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (fields, body))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
        async with server, httpx.AsyncClient(trust_env=False) as http:
            sender = HttpSender(http, Endpoint(url, "completions", "m"), EventLoopClock(), 30.0)
            failures = [(await sender.send({}, 1)).failure for _ in range(3)]
        await asyncio.wait(served, timeout=10)
        return [failure and failure.kind for failure in failures], len(came)

    broken = "connection broken"
    assert asyncio.run(play([3])) == ([None] * 3, 3)
    assert asyncio.run(play([1, 1, 1])) == ([None] * 3, 5)
    assert asyncio.run(play([0, 3])) == ([broken, None, None], 3)
    assert asyncio.run(play([2, 0, 0])) == ([None, None, broken], 4)
