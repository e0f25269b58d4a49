"""The second turn: P asks D for what D has computed, D looks at what it holds, and P reads it. Here `p` answers and
`d` asks, as in the other direction: every engine has both roles."""

import dataclasses

import msgspec
import numpy as np
import pytest

from cairn.transfer import producer
from cairn.transfer.contract import (
    ContentName,
    KvSource,
    LeaseEnded,
    LookupId,
    LookupRequest,
    Offer,
    PagesFree,
    Peer,
    PullEnded,
    PullId,
    SchedulerSide,
)
from cairn.transfer.digest import ContentDigest, SequenceIndex
from cairn.transfer.leases import Claimed, LeaseLimits, Leases, LeaseState
from cairn.transfer.producer import Producer
from cairn.transfer.wire import Claim, Granted, RefusalReason
from cairn.types import ManualClock
from transfer.parts import granted_numbers, num_active, numbers, parts
from transfer.ranked_world import LAYOUT, PLAIN, World, content_spec_of, leased_spec_of, moves, offer_of
from transfer.world import GEOMETRY, keys
from turned_loop import TurnedLoop

PROMPT = keys(500)


def marks_of(tokens, name=PLAIN):
    digest = ContentDigest(LAYOUT, name)
    digest.append(tokens)
    return digest.marks


class Case:
    """`p` holds 400 tokens of a sequence and checkpoints; `d` asks for 500 of it."""

    def __init__(self, p=(1, 16), d=(1, 16), *, positions=(128, 384), **fabric):
        self.world = World(p, d, kv_heads=2, sides={"num_pages": 128}, **fabric)
        self.p, self.d = self.world.p, self.world.d
        self.side: SchedulerSide = self.p.door
        self.content = self.world.content(500)
        count, k = self.p.pages_of(400), self.p.pages_per_file
        self.pages = [*range(20, 20 + count)]
        self.files = {position: [*range(60 + k * at, 60 + k * (at + 1))] for at, position in enumerate(positions)}
        self.recent = SequenceIndex(LAYOUT)
        self.recent.remember(PLAIN, PROMPT[:400])
        self.asked: list[LookupRequest] = []
        self.events = {"p": [], "d": []}

    def ask(self, *, start=0, checkpoint=True, prompt=PROMPT, name=PLAIN, engine_id=None):
        self.local = [*range(self.d.pages_of(len(prompt)) - start // self.d.geometry.block_size)]
        self.file = [*range(100, 100 + self.d.pages_per_file)] if checkpoint else None
        source = {} if engine_id is None else {"engine_id": engine_id}
        spec = content_spec_of(self.p, prompt, self.local, start=start, checkpoint=self.file, name=name, **source)
        self.pull = self.d.door.pull(spec)
        self.run()

    def run(self, rounds=30):
        events = self.world.run(rounds)
        for side in events:
            self.events[side] += events[side]
        self.asked = [event for event in self.events["p"] if isinstance(event, LookupRequest)]
        return events["d"]

    def held(self, position):
        """What `p` offers when it holds so many tokens."""
        files = {at: file for at, file in self.files.items() if at <= position}
        pages = self.pages[: self.p.pages_of(position)]
        return offer_of(self.p, self.content, PROMPT[:position], pages, files, request_id="answer-1")

    def answer_from_memory(self):
        """As a scheduler does: what is known of the marks, cut to a mark that is held."""
        found = self.recent.find_longest(self.asked[-1].marks)
        return self.side.answer_lookup(self.asked[-1].lookup, None if found is None else self.held(len(found[1])))

    def leases(self):
        return [event for event in self.events["p"] if isinstance(event, LeaseEnded)]


SIZES = pytest.mark.parametrize(("p", "d"), [((1, 16), (1, 16)), ((2, 64), (1, 16)), ((1, 16), (2, 128))])


@SIZES
@pytest.mark.parametrize("start", [0, 256])
def test_what_the_other_side_holds_is_read_up_to_its_deepest_mark(p, d, start):
    case = Case(p, d)
    case.ask(start=start)
    assert case.asked == [LookupRequest(LookupId(1), "", marks_of(PROMPT), start, None)] and case.events["d"] == []
    reference = case.answer_from_memory()
    assert case.run() == [PullEnded(case.pull, None, 384, 384), PagesFree(case.pull)]
    assert case.leases() == [LeaseEnded(reference, "confirmed")] and reference.startswith("answer-1~")
    taken = case.local[: case.d.pages_of(384) - start // case.d.geometry.block_size]
    for rank in case.d.ranks:
        rank.check_tokens(case.content, start, 384, taken, only_these=False)
        rank.check_file(case.content, 384, case.file)
    assert case.p.door.is_idle and case.d.door.is_idle


def test_only_new_pages_and_one_checkpoint_move():
    case = Case()
    case.ask(start=256)
    case.answer_from_memory()
    case.run()
    page_bytes = case.p.geometry.page_bytes
    assert moves(case.d) == [(0, page, 0, page_bytes) for page in [*case.pages[16:24], *case.files[384]]]


def test_pages_without_a_checkpoint_and_a_checkpoint_that_nobody_wants():
    case = Case(positions=())
    case.ask()
    case.answer_from_memory()
    assert case.run()[0] == PullEnded(case.pull, None, 384, None)
    case = Case()
    case.ask(checkpoint=False)
    case.answer_from_memory()
    assert case.run()[0] == PullEnded(case.pull, None, 384, None) and len(moves(case.d)) == 24


def test_where_no_page_is_wanted_only_the_checkpoint_moves():
    case = Case()
    file = [*range(100, 100 + case.d.pages_per_file)]
    case.pull = case.d.door.pull(content_spec_of(case.p, PROMPT, [], checkpoint=file))
    case.run()
    case.answer_from_memory()
    assert case.run()[0] == PullEnded(case.pull, None, 384, 384) and len(moves(case.d)) == len(file)
    case.d.ranks[0].check_file(case.content, 384, file)


def test_nothing_held_is_said_at_once():
    case = Case()
    case.ask()
    assert case.side.answer_lookup(case.asked[0].lookup, None) is None
    assert case.run(2) == [PullEnded(case.pull, "refused by the peer: not_cached", 0, None), PagesFree(case.pull)]
    assert case.leases() == [] and case.p.door.is_idle


@pytest.mark.parametrize(("name", "prompt"), [(ContentName("", "salt"), PROMPT), (PLAIN, keys(500, 1))])
def test_another_salt_or_prompt_is_found_nowhere(name, prompt):
    case = Case()
    case.ask(name=name, prompt=prompt)
    assert case.answer_from_memory() is None
    assert "not_cached" in case.run()[0].failure and moves(case.d) == []


@pytest.mark.parametrize("position", [64, 256])
def test_an_offer_that_brings_nothing_new_is_refused_and_never_leased(position):
    case = Case()
    case.ask(start=256)
    reference = case.side.answer_lookup(case.asked[0].lookup, case.held(position))
    assert "not_cached" in case.run()[0].failure
    assert case.leases() == [LeaseEnded(reference, "released")] and case.p.producer.leases.num_pages == 0


def test_no_answer_in_time_is_a_refusal_and_a_late_one_ends_at_once():
    case = Case()
    case.ask()
    case.world.clock.advance(1.9)
    assert case.run() == [] and len(case.p.producer._lookups) == 1
    case.world.clock.advance(0.1)
    assert "not_cached" in case.run()[0].failure and len(case.p.producer._lookups) == 0
    reference = case.side.answer_lookup(case.asked[0].lookup, case.held(384))
    assert not case.p.door.is_idle
    case.run()
    assert case.leases() == [LeaseEnded(reference, "released")] and case.p.door.is_idle
    assert case.side.answer_lookup(LookupId(77), None) is None


def test_an_abort_before_the_answer_closes_the_ask():
    case = Case()
    case.ask()
    case.d.door.abort(case.pull)
    assert case.run() == [PullEnded(case.pull, "aborted", 0, None), PagesFree(case.pull)]
    assert len(case.p.producer._lookups) == 0
    reference = case.side.answer_lookup(case.asked[0].lookup, case.held(384))
    case.run()
    assert case.leases() == [LeaseEnded(reference, "released")]


def test_a_connection_that_is_lost_before_the_answer_closes_the_ask():
    case = Case()
    case.ask()
    case.world.network.cut(case.d.channel, case.p.channel)
    assert case.run() == [PullEnded(case.pull, "cut", 0, None), PagesFree(case.pull)]
    assert len(case.p.producer._lookups) == 0
    reference = case.side.answer_lookup(case.asked[0].lookup, case.held(384))
    case.run()
    assert case.leases() == [LeaseEnded(reference, "released")] and case.p.door.is_idle


def test_a_connection_that_is_lost_after_the_answer_ends_its_lease():
    case = Case(descriptors_per_poll=1)
    case.ask()
    reference = case.answer_from_memory()
    case.run(3)
    case.world.network.cut(case.d.channel, case.p.channel)
    assert case.run()[0] == PullEnded(case.pull, "cut", 384, 384)
    assert case.leases() == [LeaseEnded(reference, "released")]


def test_an_abort_after_the_answer_ends_its_lease():
    case = Case()
    case.ask()
    reference = case.answer_from_memory()
    case.d.door.abort(case.pull)
    case.run()
    assert case.leases() == [LeaseEnded(reference, "released")]
    assert moves(case.d) == [] and case.p.door.is_idle


def test_an_aborted_read_waits_for_its_late_writes():
    case = Case(descriptors_per_poll=1, late_writes=True)
    case.ask()
    case.answer_from_memory()
    case.run(3)
    case.d.door.abort(case.pull)
    case.run()
    assert [type(event) for event in case.events["d"]] == [PullEnded, PagesFree]
    assert [lease.state for lease in case.leases()] == ["released"]


def test_heartbeats_keep_a_slow_read_alive():
    case = Case(descriptors_per_poll=1)
    case.ask()
    case.answer_from_memory()
    case.run(4)
    for _ in range(11):
        case.world.clock.advance(2.5)
        case.run(2)
    assert next_end(case.p.producer.leases) == 25.0 + 20.0
    case.run()
    assert case.events["d"][0] == PullEnded(case.pull, None, 384, 384)


def test_a_lease_that_lapses_in_mid_read_is_never_accepted():
    case = Case(descriptors_per_poll=1)
    case.p.producer.leases._limits = LeaseLimits(max_pages=4096, duration=4.0, extension=4.0)
    case.ask()
    case.answer_from_memory()
    case.run(4)
    case.world.clock.advance(4.0)
    assert case.run()[0].failure == "refused by the peer: expired" and moves(case.d) != []
    assert [lease.state for lease in case.leases()] == ["expired"]


def next_end(leases):
    return min(lease.until for lease in leases._active.values())


def test_an_engine_that_has_restarted_is_not_asked():
    case = Case()
    case.ask(engine_id="p-before")
    assert "restarted" in case.events["d"][0].failure and case.asked == []


def test_a_prompt_without_a_mark_asks_for_nothing():
    case = Case()
    case.ask(prompt=PROMPT[:63])
    assert "too little" in case.events["d"][0].failure and case.asked == []


def test_a_hint_to_a_foreign_host_is_never_followed():
    case = Case()
    spec = content_spec_of(case.p, PROMPT, range(32), host="169.254.169.254")
    case.d.door.pull(spec)
    assert "allowlist" in case.run()[0].failure and not case.d.channel.sent


def test_the_caller_numbers_pulls():
    case = Case()
    spec = content_spec_of(case.p, PROMPT, range(32), checkpoint=range(100, 100 + case.d.pages_per_file))
    case.d.consumer.pull(spec, PullId(41))
    with pytest.raises(AssertionError, match="pull 41 is open"):
        case.d.consumer.pull(spec, PullId(41))
    case.run()
    case.answer_from_memory()
    assert PullEnded(PullId(41), None, 384, 384) in case.run()


# -- what is granted to whom -------------------------------------------------------------------------------------------

N16 = b"n" * 16
HELD = Offer("answer-1", PLAIN, PROMPT[:384], parts(range(24)), ())
ASK = Claim("", marks_of(PROMPT), 128, False)


class Side:
    """Lookups and leases of one engine, without a network."""

    def __init__(self):
        self.clock = ManualClock()
        self.event_loop = TurnedLoop(self.clock)
        nonces = iter(range(10**6))
        self.asked: list[LookupRequest] = []
        self.producer = Producer(
            Peer("p", GEOMETRY, (), LAYOUT),
            LeaseLimits(max_pages=60),
            self.clock,
            lambda size: next(nonces).to_bytes(size, "little"),
            self.asked.append,
        )
        self.leases = self.producer.leases

    def claim(self, claim=ASK):
        """A task: the answer to it."""
        task = self.event_loop.create_task(self.producer.look_up(claim))
        self.event_loop.spin()
        return task

    def grant(self, lookup, offer=HELD):
        self.producer.answer_lookup(lookup, self.leases.offer(offer))
        self.event_loop.spin()

    def granted(self, claim=ASK, offer=HELD):
        waiting = self.claim(claim)
        assert not waiting.done()
        self.grant(self.asked[-1].lookup, offer)
        claimed = waiting.result()
        assert isinstance(claimed, Claimed) and isinstance(claimed.granted, Granted)
        return claimed


def test_a_grant_is_a_claimed_lease_like_any_other():
    side = Side()
    claimed = side.granted()
    assert (claimed.granted.position, claimed.lease.request_id) == (384, "answer-1")
    assert granted_numbers(claimed.granted) == [[*range(8, 24)]]
    assert side.leases.num_pages == 24 and next_end(side.leases) == 30.0
    side.clock.advance(20.0)
    assert side.leases.heartbeat(claimed.lease) is None
    assert next_end(side.leases) == 40.0
    assert side.leases.confirm(claimed.lease) is None
    assert len(side.leases.take_ended()) == 1 and side.leases.num_pages == 0


def test_a_grant_cannot_be_claimed_by_another():
    side = Side()
    claimed = side.granted()
    claim = Claim("", b"", 0, False, marks_of(PROMPT)[5 * 32 : 6 * 32], 384, "answer-1", claimed.lease.nonce)
    assert side.leases.claim(claim) is RefusalReason.USED
    assert side.leases.decline("answer-1", claimed.lease.nonce) is RefusalReason.USED
    assert num_active(side.leases) == 1


@pytest.mark.parametrize("answered", [False, True])
def test_a_claim_whose_sender_has_gone_leaves_no_lease_behind(answered):
    """Also where the answer and its end come at once."""
    side = Side()
    waiting = side.claim()
    if answered:
        side.producer.answer_lookup(LookupId(1), side.leases.offer(HELD))
    waiting.cancel()
    side.event_loop.spin()
    assert waiting.cancelled() and len(side.producer._lookups) == 0
    side.grant(LookupId(1))
    assert num_active(side.leases) == 0 and {lease.state for lease in side.leases._past.values()} == {
        LeaseState.RELEASED
    }


def test_a_claim_whose_marks_do_not_lead_to_its_end_is_refused():
    """The end is looked for first; when less of its sequence is left, the marks have to tell how much."""
    side = Side()
    end = ContentDigest(LAYOUT, PLAIN).of(PROMPT[:400])
    waiting = side.claim(Claim("", marks_of(keys(512, 1)), 128, False, end, 400))
    side.grant(LookupId(1))
    assert waiting.result() is RefusalReason.NOT_CACHED and num_active(side.leases) == len(side.producer._lookups) == 0
    waiting = side.claim(Claim("", ASK.marks, 128, False, end, 400))
    side.grant(LookupId(2))
    assert num_active(side.leases) == 1 and isinstance(waiting.result(), Claimed)


@pytest.mark.parametrize(
    "offer",
    [
        dataclasses.replace(HELD, keys=PROMPT[:383]),
        dataclasses.replace(HELD, keys=keys(384, 1)),
        dataclasses.replace(HELD, name=ContentName("", "salt")),
        dataclasses.replace(HELD, keys=np.append(PROMPT, PROMPT)[:512]),
    ],
)
def test_an_offer_of_something_else_than_was_asked_for_is_our_own_bug(offer):
    side = Side()
    side.claim()
    with pytest.raises(AssertionError, match="at no mark"):
        side.producer.answer_lookup(LookupId(1), side.leases.offer(offer))


def test_open_asks_are_bounded_and_the_rest_refused(monkeypatch):
    monkeypatch.setattr(producer, "MAX_LOOKUPS", 3)
    side = Side()
    waiting = [side.claim() for _ in range(5)]
    assert [each.done() for each in waiting] == [False] * 3 + [True] * 2
    assert {each.result() for each in waiting[3:]} == {RefusalReason.NOT_CACHED} and len(side.asked) == 3
    side.clock.advance(2.0)
    side.event_loop.spin()
    assert {each.result() for each in waiting} == {RefusalReason.NOT_CACHED}
    assert len(side.producer._lookups) == 0 and not side.claim().done()


@pytest.mark.parametrize("marks", [ASK.marks + b"x", ASK.marks[:31], b""])
def test_broken_and_missing_marks_are_refused(marks):
    side = Side()
    assert side.claim(Claim("", marks, 0, False)).result() is RefusalReason.OUT_OF_RANGE
    assert len(side.producer._lookups) == 0


# -- a grant that does not follow from the claim -----------------------------------------------------------------------


def grant_otherwise(monkeypatch, changed):
    """Claims are answered with grants that say something else."""
    grant = Leases.grant

    def lie(self, *args):
        claimed = grant(self, *args)
        return dataclasses.replace(claimed, granted=msgspec.structs.replace(claimed.granted, **changed))

    monkeypatch.setattr(Leases, "grant", lie)


@pytest.mark.parametrize(
    "changed",
    [
        {"position": 448},  # the pages of 384 tokens
        {"position": 512},  # beyond the marks
        {"position": 383},
        {"position": 0},
        {"position": 128},  # not beyond the start
        {"pages": ()},
        {"pages": (), "first_tokens": ()},
        {"first_tokens": (112,)},
        {"pages": (numbers(range(16)),) * 2, "first_tokens": (128,) * 2},  # there is one group
        {"checkpoint_position": 400},
        {"checkpoint_position": 0},
        {"checkpoint_position": None},
        {"checkpoint": numbers([])},
    ],
)
def test_a_grant_that_does_not_follow_from_the_claim_moves_nothing(changed, monkeypatch):
    case = Case()
    case.ask(start=128)
    grant_otherwise(monkeypatch, changed)
    case.answer_from_memory()
    assert case.run()[0].failure == "the peer's grant is not what was claimed"
    assert moves(case.d) == [] and [lease.state for lease in case.leases()] == ["released"]


@pytest.mark.parametrize("changed", [{"pages": (numbers([-1] * 16),)}, {"checkpoint": b"\0"}])
def test_a_grant_of_what_are_no_page_numbers_is_no_record_and_moves_nothing(changed, monkeypatch):
    case = Case()
    case.ask(start=128)
    grant_otherwise(monkeypatch, changed)
    case.answer_from_memory()
    assert case.run() == [] and case.d.consumer.frames.dropped == 1
    case.world.clock.advance(5.0)
    assert "no answer within 5 s while claiming" in case.run()[0].failure
    assert moves(case.d) == [] and [lease.state for lease in case.leases()] == ["released"]


@pytest.mark.parametrize("end", [None, 431])
@pytest.mark.parametrize("position", [64, 128, 400, 430, 432, 499, 500, 512])
def test_a_grant_is_taken_at_marks_and_at_the_end_that_was_named_alone(position, end, monkeypatch):
    """The right number of pages, but neither at a mark of the claim nor beyond its start."""
    case, grant = Case(), Leases.grant
    case.d.door.pull(content_spec_of(case.p, PROMPT, range(24), start=128, end=end))
    case.run()

    def lie(self, *args):
        pages = numbers(range(max(0, -(-position // 16) - 8)))
        return Claimed(grant(self, *args).lease, Granted(position, (128,), (pages,), None, numbers([])))

    monkeypatch.setattr(Leases, "grant", lie)
    case.answer_from_memory()
    assert case.run()[0].failure == "the peer's grant is not what was claimed" and moves(case.d) == []
    assert [lease.state for lease in case.leases()] == ["released"]


@SIZES
@pytest.mark.parametrize("end", [400, 397])
def test_an_answer_that_ends_between_two_marks_is_read_to_its_end(p, d, end):
    case = Case(p, d, positions=(128, 384, end))
    case.recent.remember(PLAIN, PROMPT[:end])
    spec = content_spec_of(
        case.p, PROMPT, range(case.d.pages_of(500)), checkpoint=range(90, 90 + case.d.pages_per_file), end=end
    )
    case.pull = case.d.door.pull(spec)
    case.run()
    (asked,) = case.asked
    assert asked.end == ContentDigest(LAYOUT, PLAIN).of(PROMPT[:end]) and asked.marks == marks_of(PROMPT)
    _, held = case.recent.find_longest(asked.marks, asked.end)
    case.side.answer_lookup(asked.lookup, case.held(len(held)))
    assert case.run()[0] == PullEnded(case.pull, None, end, end)
    for rank in case.d.ranks:
        rank.check_tokens(case.content, 0, end, [*range(case.d.pages_of(end))], only_these=False)
        rank.check_file(case.content, end, range(90, 90 + case.d.pages_per_file))


@pytest.mark.parametrize(
    ("end", "reach"), [(None, 448), (64, 64), (431, 431), (500, 500), (501, 448), (10**9, 448), (0, 448), (-1, 448)]
)
def test_a_source_provides_tokens_up_to_its_end_and_to_marks_where_that_is_not_known(end, reach):
    assert KvSource("p", "127.0.0.1", 1, end=end).reach(500) == reach
    assert KvSource("p", "127.0.0.1", 1, "cmpl-1", N16, end).reach(500) == 500, "a lease delivers all of it"


@pytest.mark.parametrize("end", [-1, 0, 501, 10**9])
def test_an_end_that_is_no_position_of_the_prompt_is_as_none(end, monkeypatch):
    case = Case()
    case.d.door.pull(content_spec_of(case.p, PROMPT, range(32), end=end))
    case.run()
    assert case.asked[0].end is None
    grant = Leases.grant

    def lie(self, *args):
        pages = numbers(range(max(0, -(-end // 16)) if end < 10**6 else 0))
        return Claimed(grant(self, *args).lease, Granted(max(end, 0), (0,), (pages,), None, numbers([])))

    monkeypatch.setattr(Leases, "grant", lie)
    case.answer_from_memory()
    case.world.clock.advance(5.0)
    assert case.run()[0].failure is not None and moves(case.d) == []


def test_an_end_that_is_not_known_is_answered_at_a_mark():
    case = Case()
    spec = content_spec_of(case.p, PROMPT, range(32), end=431)
    case.d.door.pull(spec)
    case.run()
    _, held = case.recent.find_longest(case.asked[0].marks, case.asked[0].end)
    case.side.answer_lookup(case.asked[0].lookup, case.held(len(held)))
    assert case.run()[0] == PullEnded(PullId(1), None, 384, None)


@pytest.mark.parametrize("changed", [{"position": 383}, {"position": 385}, {"pages": (numbers(range(23)),)}])
def test_a_grant_of_another_part_of_the_lease_is_refused(changed, monkeypatch):
    case = Case()
    reference = case.p.door.offer(case.held(384))
    case.d.door.pull(leased_spec_of(reference, case.p, PROMPT[:384], range(24)))
    claim = Leases.claim

    def lie(self, asked):
        claimed = claim(self, asked)
        return dataclasses.replace(claimed, granted=msgspec.structs.replace(claimed.granted, **changed))

    monkeypatch.setattr(Leases, "claim", lie)
    assert case.run()[0].failure == "the peer's grant is not what was claimed" and moves(case.d) == []


def test_a_content_claim_is_answered_by_no_lease_that_was_offered_to_others():
    case = Case()
    case.p.door.offer(case.held(384))
    case.ask()
    assert num_active(case.p.producer.leases) == 1 and case.answer_from_memory() is not None
    assert case.run()[0] == PullEnded(case.pull, None, 384, 384)
    assert num_active(case.p.producer.leases) == 1
