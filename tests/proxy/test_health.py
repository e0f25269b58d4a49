"""When a server counts as up, to the second."""

import asyncio
import socket

import httpx
import pytest

from cairn.proxy.options import ProxyOptions
from cairn.proxy.server_pool import UpstreamError, UpstreamResponse
from cairn.proxy.upstream import HealthChecker, UpstreamPool
from cairn.types import ManualClock

SLOW = UpstreamError("no answer within 5 s", kind="timeout")
GONE = UpstreamError("cannot be reached", kind="unreached", sent=False)


class Scripted:
    """Stands in for the HTTP client: what the servers would answer, and who was asked."""

    def __init__(self):
        self.answer = 200
        self.asked = []

    async def fetch(self, method, url, content, headers, seconds, max_bytes):
        self.asked.append((method, url, seconds))
        if isinstance(self.answer, Exception):
            raise self.answer
        return UpstreamResponse(self.answer, [])


@pytest.fixture
def checks():
    clock = ManualClock(100)
    pool, client = UpstreamPool("decode", ["http://a", "http://b"], clock), Scripted()
    options = ProxyOptions(decode=["http://a", "http://b"], health_interval=5.0, health_timeout=2.0)
    health = HealthChecker([pool], client, options, clock)

    def check(answer, seconds=5.0):
        client.answer = answer
        clock.advance(seconds)
        asyncio.run(health.check_if_due())
        return [upstream.up for upstream in pool.upstreams.values()]

    check.client, check.pool, check.health = client, pool, health
    return check


def test_all_are_asked_at_the_interval(checks):
    assert checks.health.seconds_left == 0
    assert checks(200, 0) == [True, True]
    assert checks.client.asked == [("GET", "http://a/health", 2.0), ("GET", "http://b/health", 2.0)]
    assert checks.health.seconds_left == 5
    checks(200, 4.9)
    assert len(checks.client.asked) == 2
    checks(200, 0.2)
    assert len(checks.client.asked) == 4


@pytest.mark.parametrize("answer", [503, 404, 301, GONE])
def test_a_server_that_says_no_is_down_at_once_and_up_again_at_once(checks, answer):
    assert checks(answer) == [False, False]
    assert checks(200) == [True, True]
    assert checks(answer) == [False, False]


def test_a_server_that_is_slow_gets_a_second_chance(checks):
    assert checks(SLOW) == [False, False]
    checks(200)
    assert checks(SLOW) == [True, True]
    assert checks(200) == [True, True]
    assert checks(SLOW) == [True, True]
    assert checks(SLOW) == [False, False]
    assert checks(SLOW) == [False, False]
    assert checks(200) == [True, True]


def test_a_check_that_could_not_be_sent_says_nothing_of_a_server(checks):
    local = UpstreamError("too many open files", kind="local", sent=False)
    assert checks(local) == [False, False]
    checks(200)
    assert checks(local) == checks(local) == checks(local) == [True, True]
    assert checks(SLOW) == [True, True]
    assert checks(local) == [True, True]
    assert checks(SLOW) == [False, False]


def test_a_bug_in_a_check_does_not_end_the_checks(checks, caplog):
    async def watch():
        checks.health._interval = 0.0
        checks.client.answer = ZeroDivisionError("told to break")
        checking = asyncio.create_task(checks.health.run())
        while len(checks.client.asked) < 4:
            await asyncio.sleep(0)
        checks.client.answer = 200
        while not all(upstream.up for upstream in checks.pool.upstreams.values()):
            await asyncio.sleep(0)
        checking.cancel()

    asyncio.run(asyncio.wait_for(watch(), 10))
    assert "a bug in the health checks" in caplog.text


def test_the_log_has_an_address_that_clients_can_use(setting, caplog):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    caplog.set_level("INFO")
    proxy = setting.proxy([], [setting.decode()], host="::1")
    assert f"proxy on http://[::1]:{proxy.port}" in caplog.messages
    assert httpx.get(f"http://[::1]:{proxy.port}/version", timeout=10, verify=False).status_code == 200
