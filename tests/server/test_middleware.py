"""Middleware layer by layer, and bounds where they are met exactly: the last that is allowed, the first that is not."""

import asyncio
import contextlib
import gzip
import json
import zlib

import pytest

from cairn.engine.contract import RenderedPrompt
from cairn.errors import InvalidRequest, Overloaded, QueueFull
from cairn.http.application import http_application
from cairn.http.middleware import ApiKey, BodyLimit, Gate, GateKeeper, RequestIds, get_body_send
from cairn.server.error_handlers import MAX_NESTING, find_deep_field
from cairn.server.images.memory import ImageAllocation, ImageMemory
from cairn.server.openai.prompts import truncate_prompt
from cairn.server.openai.requests import CompletionRequest
from cairn.types import Boundary


def status(layer, headers=(), parts=(b"",), read=None):
    """The status of a POST request through one layer of middleware, in front of an application that says 200. `read`:
    the body that it gets, if that is not what was sent."""

    async def app(scope, receive, send):
        body = await receive()
        assert body["body"] == (b"".join(parts) if read is None else read) and not body.get("more_body")
        if body["body"] != b"".join(parts):
            assert not {name for name, _ in scope["headers"]} & {b"content-encoding", b"content-length"}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def play():
        sent, unread = [], list(parts)

        async def receive():
            return {"type": "http.request", "body": unread.pop(0), "more_body": bool(unread)}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "query_string": b"",
            "headers": headers,
        }
        await layer(app)(scope, receive, send)
        return sent[0]["status"]

    return asyncio.run(play())


@pytest.mark.parametrize(("size", "expected"), [(100, 200), (101, 413)])
@pytest.mark.parametrize("announced", [False, True])
def test_a_body_may_have_as_many_bytes_as_are_allowed(size, expected, announced):
    headers = [(b"content-length", str(size).encode())] if announced else []
    parts = (b"x" * 60, b"x" * (size - 60))
    assert status(lambda app: BodyLimit(app, 100, 5.0), headers=headers, parts=parts) == expected


@pytest.mark.parametrize(
    ("encoding", "pack", "expected"),
    [
        ("gzip", gzip.compress, 200),
        ("X-GZIP", gzip.compress, 200),
        ("gzip", lambda body: gzip.compress(body + b"x"), 413),
        ("gzip", lambda body: gzip.compress(b"x" * 50_000), 413),
        ("gzip", lambda body: body[:60], 400),
        ("gzip", lambda body: gzip.compress(body)[:-1], 400),
        ("gzip", lambda body: gzip.compress(body[:50]) + gzip.compress(body[50:]), 400),
        ("gzip", lambda body: gzip.compress(body)[:-8] + bytes(8), 400),
        ("gzip", lambda body: b"", 400),
        ("identity", lambda body: body, 200),
        ("", lambda body: body, 200),
        ("deflate", zlib.compress, 415),
        ("br", lambda body: body, 415),
        ("gzip, gzip", lambda body: gzip.compress(gzip.compress(body)), 415),
    ],
)
def test_a_body_in_gzip_is_bounded_once_it_is_unpacked(encoding, pack, expected):
    """100 bytes of zeroes are far fewer in gzip."""
    packed = pack(bytes(100))
    headers = [(b"content-encoding", encoding.encode()), (b"content-length", str(len(packed)).encode())]
    layer = lambda app: BodyLimit(app, 100, 5.0)  # noqa: E731
    assert status(layer, headers=headers, parts=(packed[:10], packed[10:]), read=bytes(100)) == expected


@pytest.mark.parametrize("keys", [None, ["k"]])
def test_an_application_has_four_layers(keys):
    """From the outside in: who is refused early costs least."""
    app = http_application(
        "four",
        None,
        gate=Gate(1),
        gated_paths=frozenset(),
        api_keys=keys,
        open_paths=frozenset(),
        max_body_bytes=1,
        body_seconds=1.0,
        new_id=lambda: "id",
    )
    layers = [layer.cls for layer in app.user_middleware]
    assert layers == [RequestIds, *([ApiKey] if keys else []), GateKeeper, BodyLimit]


def test_as_many_requests_may_be_open_as_are_allowed_and_all_are_waited_for():
    async def play():
        gate = Gate(2)
        gate.enter()
        gate.enter()
        with pytest.raises(QueueFull, match="2 requests"):
            gate.enter()
        empty = asyncio.create_task(gate.wait_empty())
        gate.leave()
        await asyncio.sleep(0)
        assert not empty.done() and gate.num_open == 1
        gate.leave()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert empty.done()
        gate.close()
        with pytest.raises(Overloaded, match="shutting down"):
            gate.enter()

    asyncio.run(play())


def test_images_may_have_as_many_bytes_as_there_is_room_for():
    room = ImageMemory(100)
    first, second = ImageAllocation(room, "one"), ImageAllocation(room, "other")
    first.allocate(60)
    second.allocate(40)
    with pytest.raises(Overloaded, match="100 bytes"):
        second.allocate(1)
    first.shrink(10)
    assert room.num_bytes == 50
    second.allocate(50)
    for allocation in (first, second):
        allocation.shrink(0)
    assert room.num_bytes == 0


def test_a_body_may_be_nested_as_deeply_as_is_allowed():
    deepest = "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1)
    assert find_deep_field(f'{{"a": 1, "b": {deepest}}}'.encode()) is None
    assert find_deep_field(f'{{"a": 1, "b": [{deepest}]}}'.encode()) == "b"


def test_an_end_at_the_cut_is_no_place_in_what_is_kept():
    body = CompletionRequest(**json.loads('{"prompt": "x", "truncate_prompt_tokens": 6}'))
    ends = [Boundary(4), Boundary(5), Boundary(10)]
    prompt = RenderedPrompt(token_ids=list(range(10)), boundaries=ends, field="prompt", text="text")
    kept = truncate_prompt(prompt, body, 100)
    assert kept.token_ids == [4, 5, 6, 7, 8, 9] and kept.text is None
    assert [boundary.position for boundary in kept.boundaries] == [1, 6]
    assert truncate_prompt(prompt, body, 6).token_ids == kept.token_ids
    with pytest.raises(InvalidRequest, match="1 to 5"):
        truncate_prompt(prompt, body, 5)


@pytest.mark.parametrize("started", [False, True])
def test_a_bug_behind_the_start_of_an_answer_gets_no_second_one(started):
    async def app(scope, receive, send):
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def play():
        sent = []

        async def send(message):
            sent.append(message.get("status"))

        with pytest.raises(ZeroDivisionError) if started else contextlib.nullcontext():
            await RequestIds(app, lambda: "id")({"type": "http", "path": "/", "headers": []}, None, send)
        return sent[0], sent.count(None)

    assert asyncio.run(play()) == ((200, 0) if started else (500, 1))


def test_a_stream_goes_through_the_layers_with_its_start_and_past_them_after_it():
    """They see every event of an application that does not ask for the server's own `send`."""

    async def play(asks):
        seen, sent = [], []

        async def app(scope, receive, send):
            body_send = get_body_send(scope, send) if asks else send
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await body_send({"type": "http.response.body", "body": b"a"})

        async def layer(scope, receive, send):
            async def see(message):
                seen.append(message["type"])
                await send(message)

            await app(scope, receive, see)

        async def send(message):
            sent.append(message)

        await RequestIds(layer, lambda: "id")({"type": "http", "path": "/", "headers": []}, None, send)
        return seen, sent

    start, body = "http.response.start", "http.response.body"
    for asks, expected in ((True, [start]), (False, [start, body])):
        seen, sent = asyncio.run(play(asks))
        assert seen == expected
        assert [message["type"] for message in sent] == [start, body]
        assert (b"x-request-id", b"id") in sent[0]["headers"]


def test_without_the_layer_of_ids_events_go_where_the_start_goes():
    async def send(message): ...

    assert get_body_send({"type": "http"}, send) is send
