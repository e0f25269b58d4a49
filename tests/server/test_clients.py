"""Who a request comes from, as the engine is told: limits per client are counted by it."""

import asyncio
import contextlib

import httpx
import pytest

from cairn.http.clients import cancel_on_disconnect, get_client_id
from cairn.http.error_responses import ClientDisconnected
from cairn.http.web_server import create_web_server
from cairn.proxy.app import create_app
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService

BODY = {"prompt": "hi", "max_tokens": 1}
FORWARDED = {"X-Forwarded-For": "203.0.113.5"}


@contextlib.contextmanager
def at(address):
    """A client that connects from this address of the loopback."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=10, trust_env=False) as http:
        yield http


def clients_of(server, url=None, peer="127.0.0.1", headers=None, body=BODY):
    """What the engine is told of the requests behind one body."""
    before = len(server.requests)
    with at(peer) as http:
        answer = http.post(f"{url or server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    clients = [request.client for request in server.requests[before:]]
    assert clients and all(len(client) <= 64 for client in clients)
    return clients


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_a_key_is_a_client_wherever_it_is(serve):
    server = serve({"api_key": ["first", "second"]})
    first = clients_of(server, headers=bearer("first"))
    assert first == clients_of(server, peer="127.0.0.2", headers=bearer("first") | FORWARDED)
    second = clients_of(server, headers=bearer("second"))
    assert first != second and "first" not in first[0] and first[0].startswith("key:")


def test_without_keys_an_address_is_a_client(server):
    assert clients_of(server) == clients_of(server, headers=bearer("made up")) == ["address:127.0.0.1"]
    assert clients_of(server, peer="127.0.0.2") == ["address:127.0.0.2"]
    assert clients_of(server, body=BODY | {"prompt": ["a", "b"]}) == ["address:127.0.0.1"] * 2


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("203.0.113.5", "address:203.0.113.5"),
        ("198.51.100.1, 203.0.113.5", "address:203.0.113.5"),
        ("203.0.113.5, 127.0.0.1", "address:203.0.113.5"),
        ("", "address:127.0.0.1"),
        ("unknown", ""),
        ("\xff" * 1000, ""),
        ("1" * 30_000, ""),
        ("203.0.113.5," * 2000, "address:127.0.0.1"),
    ],
    ids=["one", "forged before it", "through two", "empty", "no address", "bytes", "long", "many"],
)
def test_a_trusted_proxy_is_believed(server, said, told):
    """The last address in the header that is no trusted proxy's counts: those before it anybody may add."""
    assert clients_of(server, headers={"X-Forwarded-For": said.encode("latin-1")}) == [told]


def test_a_stranger_is_not_believed(server, serve):
    assert clients_of(server, peer="127.0.0.2", headers=FORWARDED) == ["address:127.0.0.2"]
    other = serve({"forwarded_allow_ips": "10.0.0.0/8,127.0.0.2"})
    assert clients_of(other, headers=FORWARDED) == ["address:127.0.0.1"]
    assert clients_of(other, peer="127.0.0.2", headers=FORWARDED) == ["address:203.0.113.5"]


def test_behind_the_proxy_two_addresses_are_two_clients(server, run_app):
    proxy = run_app(create_app(ProxyService(ProxyOptions(decode=[server.url]))))
    for peer in ("127.0.0.2", "127.0.0.3"):
        assert clients_of(server, proxy.url, peer) == [f"address:{peer}"]
        assert clients_of(server, proxy.url, peer, FORWARDED) == [f"address:{peer}"]
    assert clients_of(server, proxy.url, "127.0.0.1", FORWARDED) == ["address:203.0.113.5"]


@pytest.mark.parametrize("client", [None, (), ("", 0), ("/run/cairn.sock", 0), ("testclient", 50000)])
def test_without_an_address_there_is_no_client(client):
    assert get_client_id({"type": "http", "client": client}) == get_client_id({"type": "http"}) == ""


@pytest.mark.parametrize(
    ("host", "told"), [("::ffff:127.0.0.1", "127.0.0.1"), ("2001:DB8:0::1", "2001:db8::1"), ("fe80::1%eth0", "fe80::1")]
)
def test_an_address_has_one_form(host, told):
    assert get_client_id({"type": "http", "client": (host, 1)}) == f"address:{told}"


@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_a_proxy_is_known_in_either_form(host):
    """The second is how a socket for both families writes the first."""
    seen = []

    async def app(scope, receive, send):
        seen.append(get_client_id(scope))

    config = create_web_server(app, forwarded_allow_ips=("127.0.0.0/8",)).config
    config.load()
    scope = {"type": "http", "client": (host, 1), "headers": [(b"x-forwarded-for", b"203.0.113.5")]}
    asyncio.run(config.loaded_app(scope, None, None))
    assert seen == ["address:203.0.113.5"]


def test_work_ends_when_its_client_leaves_and_only_then():
    """In one task, which goes on afterwards; the cancellation of another comes through as itself."""
    ended = []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            ended.append(seconds)

    async def leaves():
        return {"type": "http.disconnect"}

    async def stays():
        await asyncio.Event().wait()

    async def run():
        with pytest.raises(ClientDisconnected):
            await cancel_on_disconnect(leaves, work(30))
        assert ended == [30]
        assert asyncio.current_task().cancelling() == 0
        assert await cancel_on_disconnect(stays, work(0.01)) == "done"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await cancel_on_disconnect(stays, work(31))
        assert ended == [30, 0.01, 31]
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "nobody watches for what has ended"

    asyncio.run(run())


def test_work_that_never_waits_is_not_watched():
    asked = []

    async def receive():
        asked.append(True)
        return {"type": "http.disconnect"}

    async def work():
        return "done"

    async def run():
        assert await cancel_on_disconnect(receive, work()) == "done"
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert asked == []
