"""Replicas as a router knows them, without Ray: subscribers are doubles."""

import asyncio
import math

import pytest

from cairn.deploy.ray.fleet import Fleet
from cairn.deploy.ray.load import make_report, parse_report
from cairn.engine.contract import EngineStats, KvEventsConfig, PoolStats
from cairn.errors import ConfigError
from cairn.routing.rule import RoutedRequest
from cairn.types import ManualClock

PROMPT = RoutedRequest(tuple(range(100)), 16, 1600)


def report(port=None, **load):
    events = None if port is None else KvEventsConfig(endpoint=f"tcp://h:{port}", replay_endpoint=f"tcp://h:{port + 1}")
    pool = PoolStats(num_pages=100, free_pages=25)
    return make_report(EngineStats(pool=pool, **load), events)


class Subscribers:
    def __init__(self, fails=False):
        self.made, self.closed, self.fails = [], [], fails

    def __call__(self, name, found):
        if self.fails:
            raise ConfigError("tcp://h: is no address")
        self.made.append((name, found.events_endpoint, found.replay_endpoint))
        return Subscriber(name, self)


class Subscriber:
    def __init__(self, name, owner):
        self.name, self.owner = name, owner

    async def run(self):
        await asyncio.Event().wait()

    def close(self):
        self.owner.closed.append(self.name)


def test_a_report_comes_through_plain_values():
    found = parse_report(report(5000, num_running=3, num_waiting=2))
    assert (found.num_running, found.num_waiting, found.free_share) == (3, 2, 0.25)
    assert (found.events_endpoint, found.replay_endpoint) == ("tcp://h:5000", "tcp://h:5001")
    assert found.load().num_running == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_running": "many"},
        {"num_waiting": -1},
        {"pending_tokens": 1 << 60},
        {"free_share": math.nan},
        {"free_share": 1.5},
        {"topic": "x" * 300},
    ],
)
def test_what_is_no_report_is_an_empty_one(wrong):
    assert parse_report(report(5000, num_running=3) | wrong) == parse_report({})


def test_the_prompt_stays_where_it_was_until_that_replica_is_gone():
    fleet = Fleet(clock=ManualClock())
    fleet.update({name: report() for name in "abc"})
    first = fleet.rank(PROMPT, list("abc"), (), None)[0]
    fleet.record_routed("r1", PROMPT, first)
    fleet.record_prefilled("r1", first)
    fleet.record_finished("r1", first)
    assert {fleet.rank(PROMPT, names, (), None)[0] for names in (list("abc"), list("cba"))} == {first}
    others = [name for name in "abc" if name != first]
    fleet.update({name: report() for name in others})
    assert fleet.rule.index.matched_masks(PROMPT.block_hashes) == []
    assert fleet.rank(PROMPT, others, (), None)[0] in others


def test_those_that_were_tried_come_last_and_the_owner_first():
    fleet = Fleet(clock=ManualClock())
    fleet.update({name: report() for name in "abc"})
    assert fleet.rank(PROMPT, list("abc"), ("a", "b"), None)[0] == "c"
    assert all(fleet.rank(PROMPT, list("abc"), (), name)[0] == name for name in "abc")
    assert fleet.rank(PROMPT, list("abc"), ("b",), "b")[-1] == "b"
    assert set(fleet.rank(PROMPT, list("abc"), (), "gone")) == set("abc")


def test_a_busy_replica_is_passed_over():
    fleet = Fleet(clock=ManualClock())
    fleet.update({"a": report(num_running=200), "b": report()})
    assert fleet.rank(RoutedRequest(num_tokens=100), ["a", "b"], (), None)[0] == "b"


def test_prefills_that_other_routers_have_sent_count_and_its_own_count_once():
    fleet = Fleet(clock=ManualClock())
    fleet.update({"a": report(), "b": report()})
    ask = RoutedRequest(num_tokens=100)

    def reported(tokens):
        fleet.update({"a": report(pending_prefill_tokens=tokens), "b": report()})
        return fleet._loads["a"].pending_tokens

    assert reported(5_000) == 5_000
    assert {fleet.rank(ask, names, (), None)[0] for names in (["a", "b"], ["b", "a"])} == {"b"}
    assert reported(0) == 0
    fleet.record_routed("r1", PROMPT, "a")
    assert reported(1_600) == 0 and reported(6_600) == 5_000
    fleet.record_prefilled("r1", "a")
    # a report that was made before the first token came may come after it
    assert reported(1_500) == 0
    assert reported(1_400) == 0
    assert reported(1_300) == 1_300


def test_each_replica_is_followed_once_and_let_go_when_it_is_gone():
    async def run():
        subscribers = Subscribers()
        fleet = Fleet(subscribe=subscribers, clock=ManualClock())
        fleet.update({"a": {}, "b": report(5000)})
        fleet.update({"a": report(6000), "b": report(5000, num_running=1)})
        await asyncio.sleep(0)
        made = list(subscribers.made)
        fleet.update({"b": report(5000)})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return made, list(subscribers.closed)

    made, closed = asyncio.run(run())
    assert made == [("b", "tcp://h:5000", "tcp://h:5001"), ("a", "tcp://h:6000", "tcp://h:6001")]
    assert closed == ["a"]


def test_an_address_that_is_none_is_logged_by_name_and_routing_goes_on(caplog):
    fleet = Fleet(subscribe=Subscribers(fails=True), clock=ManualClock())
    fleet.update({"a": report(5000)})
    assert "replica a is routed to by what was sent there alone: tcp://h: is no address" in caplog.text
    assert fleet.rank(PROMPT, ["a"], (), None) == ["a"]
