"""A request to an ASGI application of this process, and its answer in chunks."""

import asyncio

import pytest

from cairn.deploy.ray.exchange import AnswerHead, AsgiExchange, RelayedRequest


def request(body=b""):
    return RelayedRequest(
        "POST", "/v1/completions", b"/v1/completions", b"a=1", [(b"x-a", b"1")], ("10.0.0.9", 5), body=body
    )


async def start(send, status=200):
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/event-stream")]})


async def write(send, body, more=True):
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_application_sees_the_request_and_a_whole_answer_is_one_item():
    async def app(scope, receive, send):
        message = await receive()
        assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/v1/completions", b"a=1")
        assert (scope["headers"], scope["client"]) == ([(b"x-a", b"1")], ("10.0.0.9", 5))
        assert message == {"type": "http.request", "body": b"{}", "more_body": False}
        await start(send, 422)
        await write(send, b"no", more=False)

    async def run():
        return [item async for item in AsgiExchange(app, request(b"{}")).run()]

    assert asyncio.run(run()) == [AnswerHead(422, [(b"content-type", b"text/event-stream")], b"no", True)]


def test_what_queues_up_comes_as_one_chunk():
    go = asyncio.Event()

    async def app(scope, receive, send):
        await start(send)
        await write(send, b"a")
        await go.wait()
        for part in (b"b", b"c", b"d"):
            await write(send, part)
        await write(send, b"", more=False)

    async def run():
        items = AsgiExchange(app, request()).run()
        head = await anext(items)
        go.set()
        await settle()
        return head, [item async for item in items]

    head, rest = asyncio.run(run())
    assert (head.body, head.complete) == (b"a", False)
    assert rest == [b"bcd"]


def test_nothing_is_buffered_without_bound():
    sent = []

    async def app(scope, receive, send):
        await start(send)
        for _ in range(8):
            await write(send, bytes(1 << 20))
            sent.append(1)
        await write(send, b"", more=False)

    async def run():
        items = AsgiExchange(app, request()).run()
        await anext(items)
        await settle()
        waiting = len(sent)
        return waiting, [len(item) async for item in items]

    waiting, sizes = asyncio.run(run())
    assert waiting == 2
    assert sum(sizes) == 7 << 20


def test_an_answer_that_nobody_takes_any_more_is_a_client_that_has_gone():
    seen = []

    async def app(scope, receive, send):
        await receive()
        await start(send)
        await write(send, b"a")
        seen.append(await receive())

    async def run():
        items = AsgiExchange(app, request()).run()
        await anext(items)
        await items.aclose()
        await settle()

    asyncio.run(run())
    assert seen == [{"type": "http.disconnect"}]


def test_an_application_that_ends_in_mid_answer_is_an_error():
    async def app(scope, receive, send):
        await start(send)
        await write(send, b"a")
        raise ValueError("a bug")

    async def run():
        items = AsgiExchange(app, request()).run()
        await anext(items)
        return [item async for item in items]

    with pytest.raises(RuntimeError, match="in mid-answer") as raised:
        asyncio.run(run())
    assert isinstance(raised.value.__cause__, ValueError)
