"""One transfer at a time: what moves, what is accepted, and how it ends when something goes wrong."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from cairn.transfer import pull
from cairn.transfer.contract import ContentName, PagesFree, PullEnded
from cairn.transfer.leases import LeaseState
from cairn.transfer.producer import ROOM_SECONDS
from cairn.transfer.pull import PullLimits
from cairn.transfer.stream import ConnectionLost
from doubles.memory_channel import MemoryStream
from doubles.memory_link import Fault
from transfer.parts import num_active, num_quarantined
from transfer.world import BLOCK, PAGE_BYTES, STATE_PAGES, World, keys

PROMPT = keys(160)
PAGES = list(range(10, 20))
FILE = (160, (40, 41))


def moved(world):
    return [(move.remote_page, move.remote_offset, move.num_bytes) for move in world.link.moved]


def whole(*pages):
    return [(page, 0, PAGE_BYTES) for page in pages]


def ended(events):
    """(failure, checkpoint position) of the one outcome; the pages are free after it."""
    assert [type(event) for event in events] == [PullEnded, PagesFree], events
    return events[0].failure, events[0].checkpoint_position


def test_ssm_prefix_cold_start_moves_everything_once():
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    assert ended(world.run()) == (None, 160)
    assert moved(world) == whole(*PAGES, 40, 41)
    assert np.array_equal(world.memory[[*range(10), 30, 31]], world.p.memory[[*PAGES, 40, 41]])
    assert [lease.state for lease in world.leases.take_ended()] == [LeaseState.CONFIRMED.value]
    assert world.consumer.num_open == world.link.num_open == len(world.worker._reads) == 0


def test_mamba_align_only_the_deepest_checkpoint_moves():
    world = World()
    prompt = keys(400)
    files = [(position, (40 + 2 * at, 41 + 2 * at)) for at, position in enumerate((128, 256, 384, 400))]
    ref = world.offer(prompt, range(25), files)
    world.pull(world.pull_spec(ref, prompt, range(25), checkpoint=(30, 31)))
    assert ended(world.run()) == (None, 400)
    assert moved(world) == whole(*range(25), 46, 47)


def test_ssm_prefix_six_of_ten_pages_are_here():
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(6, 10), start=6 * BLOCK, checkpoint=(30, 31)))
    assert ended(world.run()) == (None, 160)
    assert moved(world) == whole(16, 17, 18, 19, 40, 41)


def test_ssm_prefix_only_the_checkpoint_is_lacking():
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, (), start=160, checkpoint=(30, 31)))
    assert ended(world.run()) == (None, 160)
    assert moved(world) == whole(40, 41)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 159])
def test_ssm_prefix_nothing_is_lacking_and_the_claim_is_confirmed_without_a_read(num_tokens):
    world = World()
    ref = world.offer(keys(num_tokens), PAGES[: -(-num_tokens // BLOCK)], [])
    world.pull(world.pull_spec(ref, keys(num_tokens), (), start=num_tokens))
    assert ended(world.run()) == (None, None)
    assert moved(world) == []
    assert [lease.state for lease in world.leases.take_ended()] == [LeaseState.CONFIRMED.value]


def test_a_full_local_hit_sends_just_a_release():
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, (), start=160, release_only=True))
    assert ended(world.run()) == (None, None)
    assert moved(world) == [] and world.sent == 2  # Hello, Release
    assert [lease.state for lease in world.leases.take_ended()] == [LeaseState.RELEASED.value]


def test_a_second_transfer_needs_no_second_handshake():
    world = World()
    for number in range(2):
        ref = world.offer(PROMPT, PAGES, [FILE])
        world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
        assert ended(world.run())[0] is None
        assert world.sent == 3 + 2 * number  # Hello, then Claim and Confirm of each


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"prompt": keys(160, seed=3)}, "other_content"),
        ({"name": ContentName("", "salt")}, "other_content"),
        ({"request_id": "cmpl-2"}, "forged"),
        ({"nonce": b"n" * 16}, "unknown"),
        ({"engine_id": "prefill-0"}, "restarted"),
        ({"host": "10.0.0.1"}, "allowlist"),
    ],
)
def test_a_wrong_reference_moves_no_byte(changed, why):
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    args = {"prompt": PROMPT, "pages": range(10), "checkpoint": (30, 31)}
    for key in ("request_id", "nonce", "engine_id"):
        if key in changed:
            changed = dict(changed)
            ref = type(ref)(**{name: getattr(ref, name) for name in ref.__slots__} | {key: changed.pop(key)})
    world.pull(world.pull_spec(ref, **args | changed))
    assert why in ended(world.run())[0]
    assert moved(world) == [] and not world.memory.any()
    assert num_active(world.leases) == 1, "the rightful one can still claim it"


def test_a_foreign_host_is_never_sent_to():
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10), host="169.254.169.254"))
    world.run()
    assert world.sent == 0


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (World(layout=b"M" * 32), "layouts differ"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused(world, why):
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10)))
    assert why in ended(world.run())[0]
    assert moved(world) == [] and not world.p.channel.streams


def test_a_silent_peer_ends_the_transfer_and_the_next_one_greets_again():
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10)))
    assert world.run() and world.consumer.num_open == 0
    world.pull(world.pull_spec(ref, PROMPT, range(10)))
    events = []
    for _ in range(12):
        events += world.tick()
        world.clock.advance(0.5)
    assert "no answer within" in ended(events)[0]
    ref = world.offer(PROMPT, PAGES, [FILE], request_id="cmpl-3")
    world.clock.advance(10.0)
    sent = world.sent
    world.pull(world.pull_spec(ref, PROMPT, range(10)))
    assert ended(world.run())[0] is None and world.sent - sent == 3


def lost(world, rounds):
    """Ticks while nothing is delivered; returns the events."""
    events = []
    for _ in range(rounds):
        events += world.tick()
        world.clock.advance(0.5)
    return events


def failures(events):
    return [event.failure for event in events if isinstance(event, PullEnded)]


def test_a_silent_peer_is_waited_for_once_and_then_probed_by_one_at_a_time():
    world = World(max_pages=2000)

    def pull(number):
        ref = world.offer(PROMPT, PAGES, [FILE], request_id=f"cmpl-{number}")
        world.pull(world.pull_spec(ref, PROMPT, range(10)))

    for number in range(48):
        pull(number)
    # all of them wait for the one answer, and none longer than for that
    assert len([why for why in failures(lost(world, 11)) if "no answer" in why]) == 48
    assert world.consumer.unresponsive.num_skipped == 0
    for number in range(48):
        pull(100 + number)
    sent = world.sent
    assert len([why for why in failures(world.tick()) if "did not answer within" in why]) == 48
    assert world.sent == sent and world.consumer.unresponsive.num_skipped == 48
    world.clock.advance(10.0)
    for number in range(3):
        pull(200 + number)
    probed = failures(world.tick())
    assert len(probed) == 2 and world.consumer.num_open == 1, "one probes, the others go on at once"
    world.deliver()
    assert ended(world.run()) == (None, None)
    pull(300)
    assert failures(world.run()) == [None], "whoever answers is asked again"


def restarted(world, number):
    """A new process at the same address, and a pull of what it has leased."""
    world.restart()
    ref = world.offer(PROMPT, PAGES, [FILE], request_id=f"cmpl-{number}")
    world.pull(world.pull_spec(ref, PROMPT, range(10)))


def test_a_producer_that_has_restarted_is_tried_at_once_however_often_the_one_before_was_silent():
    world = World()
    for number in range(3):
        restarted(world, number)
        assert "no answer" in failures(lost(world, 11))[0]
    restarted(world, 3)
    assert failures(world.run()) == [None] and world.consumer.unresponsive.num_skipped == 0


def test_a_producer_that_has_restarted_is_greeted_anew_though_nobody_says_that_the_one_before_is_gone(monkeypatch):
    """Its machine has lost power: the connection to it still looks open."""
    world = World()
    restarted(world, 1)
    assert failures(world.run()) == [None]
    monkeypatch.setattr(world, "cut", lambda: None)
    restarted(world, 2)
    assert failures(world.run()) == [None]


def test_a_reference_of_another_engine_ends_no_transfer_that_is_under_way():
    """Whoever sends one may have made it up."""
    world = World(descriptors_per_poll=1)
    ref = world.offer(PROMPT, PAGES, [FILE])
    first = world.pull(world.pull_spec(ref, PROMPT, range(10)))
    assert world.run(3) == [] and world.link.moved
    other = replace(ref, engine_id="prefill-0")
    second = world.pull(world.pull_spec(other, PROMPT, range(20, 30)))
    outcomes = {event.pull: event.failure for event in world.run() if isinstance(event, PullEnded)}
    assert outcomes[first] is None and "another engine" in outcomes[second]


def test_a_producer_that_restarts_during_a_handshake_is_not_taken_for_silent():
    world = World()
    restarted(world, 1)
    assert lost(world, 9) == []
    restarted(world, 2)
    assert ["no answer" in failure for failure in failures(lost(world, 2))] == [True, True]
    ref = world.offer(PROMPT, PAGES, [FILE], request_id="cmpl-3")
    world.pull(world.pull_spec(ref, PROMPT, range(10)))
    assert failures(world.run()) == [None] and world.consumer.unresponsive.num_skipped == 0


def test_a_silent_peer_is_not_avoided_for_longer_because_its_connection_ends_later():
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10)))
    assert "no answer" in failures(lost(world, 11))[0]
    world.clock.advance(9.0)
    world.cut()
    world.deliver()
    world.clock.advance(1.0)
    ref = world.offer(PROMPT, PAGES, [FILE], request_id="cmpl-3")
    world.pull(world.pull_spec(ref, PROMPT, range(10)))
    assert failures(world.run()) == [None] and world.consumer.unresponsive.num_skipped == 0


def refused(world, monkeypatch, reason, seconds=0.0):
    """From now on a connection to P is refused after a while."""

    async def connect(address):
        await asyncio.sleep(seconds)
        raise ConnectionLost(reason)

    monkeypatch.setattr(world.channel, "connect", connect)


def test_a_refused_connection_fails_at_once_and_the_next_transfer_tries_again(monkeypatch):
    world = World()
    refused(world, monkeypatch, "connection refused")
    for _ in range(2):
        ref = world.offer(PROMPT, PAGES, [FILE])
        world.pull(world.pull_spec(ref, PROMPT, range(10)))
        assert failures(world.tick()) == ["connection refused"] and world.consumer.num_open == 0
    assert world.consumer.unresponsive.num_skipped == 0


def test_a_connection_that_took_long_to_be_refused_counts_as_silence(monkeypatch):
    world = World()
    refused(world, monkeypatch, "no route to host", 3.0)
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10)))
    assert lost(world, 6) == []
    assert failures(world.tick()) == ["no route to host"]
    world.pull(world.pull_spec(ref, PROMPT, range(10)))
    assert "did not answer" in failures(world.tick())[0]


@pytest.mark.parametrize("steps", range(16))
def test_a_connection_that_is_lost_at_any_moment_ends_the_transfer_on_both_sides(steps):
    """From the hello to the confirmation: it fails at once, P lets go of what was claimed, and the next one works."""
    world = World(descriptors_per_poll=1)
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    events = [event for _ in range(steps) for event in world.step()]
    claimed = any(lease.state is LeaseState.CLAIMED for lease in world.leases._active.values())
    was_over = bool(events)
    world.cut()
    failure, position = ended(events + world.run())
    if was_over:
        assert (failure, position) == (None, 160)
    elif failure is not None:
        assert failure == ("it is not connected" if not steps else "cut")
    if claimed:
        # a confirmation may have been on its way
        assert [lease.state for lease in world.leases.take_ended()] in (["released"], ["confirmed"])
        assert world.leases.num_pages == 0
    again = world.offer(PROMPT, PAGES, [FILE], request_id="cmpl-3")
    world.pull(world.pull_spec(again, PROMPT, range(10), checkpoint=(30, 31)))
    assert ended(world.run()) == (None, 160)
    assert world.consumer.num_open == world.link.num_open == len(world.worker._reads) == 0


def test_a_connection_that_is_lost_while_reading_ends_the_transfer():
    world = World(descriptors_per_poll=1)
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    for _ in range(3):
        assert world.tick() == []
        world.deliver()
    assert num_active(world.leases) == 1
    world.cut()
    assert failures(world.run()) == ["cut"] and world.consumer.num_open == 0
    assert [lease.state for lease in world.leases.take_ended()] == ["released"]


def test_a_connection_that_is_lost_while_nothing_is_read_ends_the_transfer_at_once():
    """Neither the read nor the next heartbeat is waited for."""
    world, pull = reading(late_writes=True)
    world.cut()
    (end,) = world.run()
    assert end.failure == "cut" and num_quarantined(world.consumer) == 1
    world.fabric.inject(world.p.name, Fault.NONE)
    assert world.run() == [PagesFree(pull)]


def test_a_peer_that_takes_no_questions_is_waited_for_as_long_as_for_an_answer():
    """Its connection is full: all who wait for room give up in time, and nothing that was sent is lost."""
    world = World()
    first = world.offer(keys(16), [0])
    world.pull(world.pull_spec(first, keys(16), [0]))
    assert failures(world.run()) == [None]
    (stream,) = world.p.channel.streams
    stream.room, sent = 3, world.sent
    for number in range(8):
        ref = world.offer(keys(16, number), [number], request_id=f"cmpl-{number}")
        world.pull(world.pull_spec(ref, keys(16, number), [number]))
    assert world.tick() == [] and world.sent == sent + 3
    world.clock.advance(4.0)
    assert world.tick() == [] and world.consumer.num_open == 8
    world.clock.advance(1.0)
    why = failures(world.tick())
    assert len(why) == 8 and all("no answer within 5 s while claiming" in each for each in why[:1])
    assert world.consumer.num_open == 0
    world.deliver()
    ended_leases = [lease.state for lease in world.leases.take_ended()]
    assert ended_leases == ["confirmed", "released"], "what P has taken is given back, the rest was never claimed"


def test_a_slow_peer_whose_connection_is_full_takes_everything_in_the_end():
    world = World()
    first = world.offer(keys(16), [0])
    world.pull(world.pull_spec(first, keys(16), [0]))
    assert failures(world.run()) == [None]
    (stream,) = world.p.channel.streams
    stream.room = 2
    for number in range(8):
        ref = world.offer(keys(16, number), [number], request_id=f"cmpl-{number}")
        world.pull(world.pull_spec(ref, keys(16, number), [number]))
    assert failures(world.run()) == [None] * 8


def test_a_consumer_that_takes_no_answers_loses_its_connection_and_what_it_has_claimed():
    world = World()
    refs = [world.offer(keys(16, number), [number], request_id=f"cmpl-{number}") for number in range(8)]
    world.pull(world.pull_spec(refs[0], keys(16), [0]))
    assert failures(world.run()) == [None]
    (stream,) = world.channel.streams
    stream.room = 2
    for number in range(1, 8):
        world.pull(world.pull_spec(refs[number], keys(16, number), [number]))
    world.tick()
    # D stands still: P alone looks
    for _ in range(3):
        world.p.channel.look()
        world.event_loop.spin()
    claimed = [lease for lease in world.leases._active.values() if lease.state is LeaseState.CLAIMED]
    assert len(claimed) == 3 and stream.num_waiting == 2
    world.clock.advance(ROOM_SECONDS)
    world.event_loop.spin()
    assert {lease.state for lease in claimed} == {LeaseState.RELEASED} and not world.p.channel.streams


@pytest.mark.parametrize("kind", ["welcome", "granted", "done"])
def test_an_answer_that_never_comes_ends_the_transfer_in_time(kind, monkeypatch):
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    send = MemoryStream.send

    async def swallow(self, frame):
        if self.channel is not world.p.channel or kind.encode() not in frame:
            await send(self, frame)

    monkeypatch.setattr(MemoryStream, "send", swallow)
    world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    assert world.run() == []
    world.clock.advance(4.9)
    assert world.run() == []
    world.clock.advance(0.1)
    assert "no answer" in ended(world.run())[0]
    monkeypatch.undo()
    states = [lease.state for lease in world.leases.take_ended()]
    assert states == {"welcome": [], "granted": ["released"], "done": ["confirmed"]}[kind]
    again = world.offer(PROMPT, PAGES, [FILE], request_id="cmpl-3")
    world.pull(world.pull_spec(again, PROMPT, range(10), checkpoint=(30, 31)))
    assert "did not answer" in ended(world.run())[0]
    world.clock.advance(10.0)
    world.pull(world.pull_spec(again, PROMPT, range(10), checkpoint=(30, 31)))
    assert ended(world.run()) == (None, 160)
    # whoever has answered is tried by all again
    world.cut()
    world.deliver()
    for number in range(2):
        ref = world.offer(keys(16, number), [number], request_id=f"cmpl-{number}")
        world.pull(world.pull_spec(ref, keys(16, number), [number]))
    assert failures(world.run()) == [None, None] and world.consumer.unresponsive.num_skipped == 1


def test_whatever_goes_wrong_with_one_peer_is_a_failed_transfer(monkeypatch):
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10)))
    make_claim = pull.make_claim

    def fail_for_one(spec, layout):
        return make_claim(spec, layout) if len(spec.keys) != 160 else 1 / 0

    monkeypatch.setattr(pull, "make_claim", fail_for_one)
    other = world.offer(keys(32, 5), PAGES[:2], request_id="cmpl-2")
    world.pull(world.pull_spec(other, keys(32, 5), range(2)))
    assert failures(world.run()) == ["ZeroDivisionError: division by zero", None]


def test_a_lease_that_lapses_in_mid_read_is_never_accepted():
    world = World(descriptors_per_poll=1)
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    world.run(3)
    world.clock.advance(29.0)
    world.leases.expire()
    world.clock.advance(1.0)
    world.leases.expire()
    world.p.fill(PAGES, world.rng)
    failure, _ = ended(world.run())
    assert failure == "the read took longer than 30 s" or "expired" in failure
    assert world.consumer.num_open == world.link.num_open == 0


def test_heartbeats_keep_a_slow_read_alive():
    world = World(descriptors_per_poll=1)
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    world.clock.advance(29.0)
    events = world.run(3)
    for _ in range(12):
        world.clock.advance(2.4)
        events += world.run(1)
    assert world.clock.now() > 50.0
    assert ended(events + world.run()) == (None, 160)


def reading(**fabric):
    """A world whose peer has frozen in mid read, and the pull."""
    world = World(descriptors_per_poll=1, **fabric)
    ref = world.offer(PROMPT, PAGES, [FILE])
    pull = world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    world.run(3)
    world.fabric.inject(world.p.name, Fault.FROZEN)
    return world, pull


def test_a_heartbeat_is_sent_once_in_its_time_while_reading_and_while_given_up():
    world, pull = reading(late_writes=True)
    sent = world.sent
    for number in range(4):
        world.run(10)
        assert world.sent == sent + number
        world.clock.advance(PullLimits().heartbeat)
    world.port.abort(pull)
    world.run(10)
    # the release, and the heartbeat that was due
    sent = world.sent
    for number in range(4):
        world.run(10)
        assert world.sent == sent + number
        world.clock.advance(PullLimits().heartbeat)


def test_a_heartbeat_that_is_not_answered_ends_no_read(monkeypatch):
    world, _ = reading()
    send = MemoryStream.send

    async def swallow(self, frame):
        if self.channel is not world.p.channel or b"done" not in frame:
            await send(self, frame)

    monkeypatch.setattr(MemoryStream, "send", swallow)
    for _ in range(3):
        world.clock.advance(PullLimits().heartbeat)
        assert world.run(3) == []
    monkeypatch.undo()
    world.fabric.inject(world.p.name, Fault.NONE)
    assert ended(world.run()) == (None, 160)


def test_a_read_that_does_not_get_on_is_given_up():
    world, _ = reading()
    read, beat = PullLimits().read, PullLimits().heartbeat
    for _ in range(int(read / beat) - 1):
        world.clock.advance(beat)
        assert world.run(3) == []
    world.clock.advance(beat)
    (end,) = world.run()
    assert end.failure == f"the read took longer than {read:g} s" and num_quarantined(world.consumer) == 1


def test_nothing_more_is_read_once_it_is_given_up():
    world = World(descriptors_per_poll=1)
    ref = world.offer(PROMPT, PAGES, [FILE])
    pull = world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    world.run(3)
    begun = len(world.link.moved)
    world.port.abort(pull)
    world.run()
    # a handle holds three pages
    assert begun > 0 and len(world.link.moved) <= begun + 6 < len(PAGES) + STATE_PAGES


def test_a_frozen_peer_leaves_the_pages_in_quarantine_until_the_late_write_has_come():
    world = World(descriptors_per_poll=1, late_writes=True)
    ref = world.offer(PROMPT, PAGES, [FILE])
    pull = world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    world.run(3)
    world.fabric.inject(world.p.name, Fault.FROZEN)
    world.port.abort(pull)
    events = world.run()
    assert [type(event) for event in events] == [PullEnded] and events[0].failure == "aborted"
    assert num_quarantined(world.consumer) == 1
    world.clock.advance(10_000.0)
    assert world.run() == [] and world.consumer.num_open == 1, "no time frees them, only the link does"
    before = world.memory.copy()
    world.fabric.inject(world.p.name, Fault.NONE)
    assert world.run() == [PagesFree(pull)]
    assert not np.array_equal(world.memory, before), "the late write did come"
    assert world.consumer.num_open == world.link.num_open == 0


def test_a_producer_that_dies_in_mid_read_ends_it():
    world = World(descriptors_per_poll=1)
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    world.run(3)
    world.fabric.inject(world.p.name, Fault.DEAD)
    assert ended(world.run())[0] == "the link failed while reading"
    assert [lease.state for lease in world.leases.take_ended()] == [LeaseState.RELEASED.value], (
        "its side channel may live"
    )


def test_a_producer_that_restarts_before_the_confirmation_ends_it():
    world = World(descriptors_per_poll=1)
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    world.run(3)
    world.restart()
    assert ended(world.run())[0] == "cut"
    other = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(other, PROMPT, range(10), checkpoint=(30, 31)))
    assert ended(world.run()) == (None, 160)


@pytest.mark.parametrize("after", range(12))
def test_an_abort_at_any_moment_ends_everything_on_both_sides(after):
    world = World(descriptors_per_poll=1)
    ref = world.offer(PROMPT, PAGES, [FILE])
    pull = world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    events = [event for _ in range(after) for event in world.step()]
    world.port.abort(pull)
    world.port.abort(pull)
    assert ended(events + world.run())[0] == "aborted"
    world.clock.advance(30.0)
    assert len(world.leases.take_ended()) == 1 and world.leases.num_pages == 0
    assert world.consumer.num_open == world.link.num_open == len(world.worker._reads) == 0


def test_handles_hold_at_most_the_chunk():
    world = World(delay=1)
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    most = 0
    for _ in range(20):
        world.tick()
        world.deliver()
        most = max(most, world.link.num_open)
    assert most == 2 and world.consumer.num_open == 0
    assert len(world.link.moved) == len(PAGES) + STATE_PAGES


def test_a_grant_of_other_sizes_than_expected_is_given_back():
    world = World()
    ref = world.offer(PROMPT, PAGES, [FILE])
    world.pull(world.pull_spec(ref, PROMPT, range(9), checkpoint=(30, 31)))
    assert "local_pages lists 9 pages, tokens [0, 160) take 10" in ended(world.run())[0]
    assert [lease.state for lease in world.leases.take_ended()] == [LeaseState.RELEASED.value]
