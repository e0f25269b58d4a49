"""Clients that leave, and replicas that are killed under load."""

from contextlib import ExitStack

from exchanges import KEY
from fleet import Fleet, OpenStream, until
from load import Load
from test_routing import ids

RUNNING = "vllm:num_requests_running"
STREAMS, MOST_STREAMS = 6, 24


def test_a_client_that_leaves_ends_its_request(fleet: Fleet):
    ended = fleet.total("vllm:request_success_total")
    with fleet.stream(ids(51, 200)):
        until(lambda: fleet.total(RUNNING) == 1 and fleet.total("cairn:held_pages") > 0, "a running stream")
    fleet.assert_nothing_is_held()
    assert fleet.total("vllm:request_success_total") == ended + 1
    audits = fleet.total("cairn:audits_total")
    fleet.complete(ids(51, 200), max_tokens=1)
    until(lambda: fleet.total("cairn:audits_total") > audits, "a recount")


def test_many_clients_that_leave_at_once_leave_nothing(fleet: Fleet):
    with ExitStack() as stack:
        for number in range(8):
            stack.enter_context(fleet.stream(ids(60 + number, 100)))
        until(lambda: fleet.total(RUNNING) == 8, "eight running streams")
    fleet.assert_nothing_is_held()


def test_a_frozen_replica_is_shown_as_down_beside_the_figures_of_the_other(fleet: Fleet):
    assert sorted(fleet.metric("cairn:replica_up").values()) == [1, 1]
    frozen = fleet.replicas()[0].process
    frozen.suspend()
    try:
        assert sorted(fleet.metric("cairn:replica_up").values()) == [0, 1]
        assert len(fleet.metric(RUNNING)) == 1
    finally:
        frozen.resume()
    until(lambda: sorted(fleet.metric("cairn:replica_up").values()) == [1, 1], "both up again")


def open_on_all(fleet: Fleet, stack: ExitStack) -> list[OpenStream]:
    """As many streams as STREAMS, and more until each replica has one: where they go is a matter of all load before."""
    streams: list[OpenStream] = []
    while len(streams) < MOST_STREAMS:
        streams.append(stack.enter_context(fleet.stream(ids(70 + len(streams), 100))))
        until(lambda: fleet.total(RUNNING) == len(streams), "the streams are counted")
        if len(streams) >= STREAMS and all(fleet.metric(RUNNING).values()):
            break
    return streams


def test_a_killed_replica_costs_its_open_streams_and_nothing_else_and_comes_back(fleet: Fleet):
    first, second = fleet.replicas()
    load = Load(fleet.url, KEY)
    with ExitStack() as stack:
        streams = open_on_all(fleet, stack)
        stack.enter_context(load.running())
        until(lambda: len(load.asked) > 8, "load")
        first.kill()
        until(lambda: not any(process.is_running() for process in first.engine), "the engine of a killed replica gone")
        until(lambda: fleet.num_ready() == 2, "another replica in its place")
        assert second.process.is_running()
        num_asked = len(load.asked)
        until(lambda: len(load.asked) > num_asked + 8, "load afterwards")
        until(lambda: all(fleet.metric("vllm:prompt_tokens_total").values()), "the new replica used")
        ended = [stream for stream in streams if stream.has_ended]
        # on a slow machine an answer of the other replica may have come to its end meanwhile: whole, as none of the
        # killed one's can be
        broken = [stream for stream in ended if not stream.is_whole]
        assert 0 < len(broken) < len(streams)
        for stream in broken:
            *events, last = stream.events()
            assert "error" in last and not any("error" in event for event in events)
            assert stream.is_done
    # whatever was open on it and had begun is told so; all else is answered, by the other one if need be
    assert all(asked.stream and asked.status == 200 and asked.error for asked in load.failed), load.failed
    assert len(load.failed) <= load.num_clients
