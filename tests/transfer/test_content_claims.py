"""The second turn: P asks D for what D has computed, D looks at what it holds, and P reads it. Here `p` answers and
`d` asks, as in the other direction: every engine has both roles."""

import dataclasses
import random

import msgspec
import numpy as np
import pytest

from cairn.transfer.contract import (
    ContentName,
    LeaseEnded,
    LookupId,
    LookupRequest,
    Offer,
    PagesFree,
    PullEnded,
    PullId,
    SchedulerSide,
)
from cairn.transfer.digest import ContentDigest, SequenceIndex, content_digest
from cairn.transfer.leases import LeaseLimits, Leases
from cairn.transfer.producer import ContentLookups, LookupLimits
from cairn.transfer.wire import (
    Claim,
    Confirm,
    Confirmed,
    Granted,
    Heartbeat,
    RefusalReason,
    Refused,
    Release,
    Released,
    pack_pages,
    unpack_pages,
)
from cairn.types import ManualClock
from transfer.ranked_world import LAYOUT, PLAIN, World, content_spec_of, leased_spec_of, moves, offer_of
from transfer.world import keys

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
    assert case.run() == [] and case.p.producer.lookups.num_open == 1
    case.world.clock.advance(0.1)
    assert "not_cached" in case.run()[0].failure and case.p.producer.lookups.num_open == 0
    reference = case.side.answer_lookup(case.asked[0].lookup, case.held(384))
    assert not case.p.door.is_idle
    case.run()
    assert case.leases() == [LeaseEnded(reference, "released")] and case.p.door.is_idle
    assert case.side.answer_lookup(LookupId(77), None) is None


def test_repetitions_are_one_ask_and_a_lost_answer_is_given_again():
    case = Case()
    case.ask()
    for _ in range(3):
        case.world.clock.advance(0.5)
        case.run(3)
    assert len(case.asked) == 1 and case.events["d"] == []
    case.answer_from_memory()
    case.events["p"] += case.p.door.events()
    assert len(case.p.producer.take_frames()) == 1, "this one is lost"
    assert case.run() == []
    case.world.clock.advance(0.5)
    assert case.run()[0] == PullEnded(case.pull, None, 384, 384)
    assert len(case.asked) == 1 and [lease.state for lease in case.leases()] == ["confirmed"]


def test_an_abort_before_the_answer_closes_the_ask():
    case = Case()
    case.ask()
    case.d.door.abort(case.pull)
    assert case.run() == [PullEnded(case.pull, "aborted", 0, None), PagesFree(case.pull)]
    assert case.p.producer.lookups.num_open == 0
    reference = case.side.answer_lookup(case.asked[0].lookup, case.held(384))
    case.run()
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


def test_flipped_bits_end_nobody():
    """Every frame of a whole exchange, each byte of it changed, by a connection without a session: it ends well."""
    case, rng = Case(), random.Random(4)
    spec = content_spec_of(case.p, PROMPT, range(32), start=128)
    case.pull = case.d.door.pull(spec)
    for _ in range(12):
        for engine in (case.p, case.d):
            case.events[engine.name] += engine.turn()
        for _, frame in [*case.d.outgoing]:
            for broken in flipped(frame, rng):
                case.p.producer.receive(rng.randbytes(8), broken)
        frames = [frame for _, _, frame in case.world.answers]
        for port, frame in [*case.d.outgoing]:
            case.d.outgoing.popleft()
            answer = case.world.engines[port].producer.receive(b"2", frame)
            frames += [] if answer is None else [answer]
        case.world.answers.clear()
        for frame in frames:
            case.d.consumer.receive(("127.0.0.1", 1), frame)
        for event in case.events["p"]:
            if isinstance(event, LookupRequest) and case.p.producer.lookups.num_open:
                case.side.answer_lookup(event.lookup, case.held(384))
    assert case.events["d"] == [PullEnded(case.pull, None, 384, None), PagesFree(case.pull)]
    assert len([event for event in case.events["p"] if isinstance(event, LookupRequest)]) == 1


def next_end(leases):
    return min(lease.until for lease in leases._active.values())


def flipped(frame, rng):
    for at in range(len(frame)):
        broken = bytearray(frame)
        broken[at] ^= rng.randrange(1, 256)
        yield bytes(broken)


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
    assert "allowlist" in case.run()[0].failure and not case.d.outgoing


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

ME, N16 = b"m" * 16, b"n" * 16
HELD = Offer("answer-1", PLAIN, PROMPT[:384], np.arange(24, dtype=np.int32), ())
ASK = Claim(ME, "", marks_of(PROMPT), 128, False)


class Side:
    """Lookups and leases of one engine, without a network."""

    def __init__(self, **limits):
        self.clock = ManualClock()
        nonces = iter(range(10**6))
        self.leases = Leases(
            LAYOUT, 16, LeaseLimits(max_pages=60), self.clock, lambda size: next(nonces).to_bytes(size, "little")
        )
        self.lookups = ContentLookups(self.leases, LAYOUT, self.clock, LookupLimits(**limits))

    def granted(self, claim=ASK, offer=HELD):
        assert self.lookups.claim(b"s", claim) is None
        self.lookups.grant(self.lookups.take_requests()[-1].lookup, offer, self.leases.offer(offer))
        ((session, reply),) = self.lookups.take_replies()
        assert session == b"s" and isinstance(reply, Granted)
        return reply


def test_a_grant_is_a_claimed_lease_like_any_other():
    side = Side()
    reply = side.granted()
    assert (reply.claim, reply.position, reply.request_id) == (ME, 384, "answer-1")
    assert unpack_pages(reply.pages).tolist() == [*range(8, 24)]
    assert side.lookups.claim(b"s", ASK) == reply, "said again"
    assert side.leases.num_pages == 24 and next_end(side.leases) == 30.0
    side.clock.advance(20.0)
    assert not isinstance(side.leases.heartbeat(Heartbeat(ME, "answer-1", reply.nonce)), Refused)
    assert next_end(side.leases) == 40.0
    confirm = Confirm(ME, "answer-1", reply.nonce, reply.generation)
    assert side.leases.confirm(confirm) == Confirmed(ME, reply.generation)
    assert (
        len(side.leases.take_ended()) == 1
        and side.leases.num_pages == 0
        and side.lookups.claim(b"s", ASK).reason is RefusalReason.EXPIRED
    )


def test_a_grant_cannot_be_claimed_confirmed_or_released_by_another():
    side = Side()
    reply = side.granted()
    other = b"o" * 16
    claim = Claim(other, "", b"", 0, False, marks_of(PROMPT)[5 * 32 : 6 * 32], 384, "answer-1", reply.nonce)
    for refused in (
        side.leases.claim(claim),
        side.leases.claim(msgspec.structs.replace(claim, claim=ME)),
        side.leases.confirm(Confirm(other, "answer-1", reply.nonce, reply.generation)),
        side.leases.release(Release(other, "answer-1", reply.nonce)),
        side.lookups.claim(b"s", Claim(ME, "", ASK.marks, 0, False)),
    ):
        assert refused.reason is RefusalReason.USED
    assert side.leases.num_active == 1


def test_the_same_claim_by_another_connection_or_with_other_words_is_refused_while_it_is_open():
    side = Side()
    assert side.lookups.claim(b"s", ASK) is None is side.lookups.claim(b"s", ASK)
    assert side.lookups.claim(b"t", ASK).reason is RefusalReason.USED
    assert side.lookups.claim(b"s", Claim(ME, "a", ASK.marks, 128, False)).reason is RefusalReason.USED
    assert side.lookups.num_open == 1 and len(side.lookups.take_requests()) == 1


def test_a_claim_whose_marks_do_not_lead_to_its_end_is_refused():
    """The end is looked for first; when less of its sequence is left, the marks have to tell how much."""
    side = Side()
    end = content_digest(LAYOUT, PLAIN, PROMPT[:400])
    side.lookups.claim(b"s", Claim(ME, "", marks_of(keys(512, 1)), 128, False, end, 400))
    side.lookups.grant(LookupId(1), HELD, side.leases.offer(HELD))
    ((_, reply),) = side.lookups.take_replies()
    assert reply.reason is RefusalReason.NOT_CACHED and side.leases.num_active == side.lookups.num_open == 0
    assert side.lookups.claim(b"s", Claim(b"o" * 16, "", ASK.marks, 128, False, end, 400)) is None
    side.lookups.grant(LookupId(2), HELD, side.leases.offer(HELD))
    assert side.leases.num_active == 1 and isinstance(side.lookups.take_replies()[0][1], Granted)


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
    side.lookups.claim(b"s", ASK)
    with pytest.raises(AssertionError, match="at no mark"):
        side.lookups.grant(LookupId(1), offer, N16)


def test_open_asks_are_bounded_and_the_rest_refused():
    side = Side(max_open=3)
    claims = [Claim(bytes([number]) * 16, "", ASK.marks, 0, False) for number in range(5)]
    answers = [side.lookups.claim(b"s", claim) for claim in claims]
    assert answers[:3] == [None] * 3 and {answer.reason for answer in answers[3:]} == {RefusalReason.NOT_CACHED}
    side.clock.advance(2.0)
    assert side.lookups.take_requests() == [], "too late to be asked"
    assert [reply.claim for _, reply in side.lookups.take_replies()] == [claim.claim for claim in claims[:3]]
    assert side.lookups.num_open == 0 and side.lookups.claim(b"s", claims[4]) is None


@pytest.mark.parametrize("marks", [ASK.marks + b"x", ASK.marks[:31], b""])
def test_broken_and_missing_marks_are_refused(marks):
    side = Side()
    assert side.lookups.claim(b"s", Claim(ME, "", marks, 0, False)).reason is RefusalReason.OUT_OF_RANGE
    assert side.lookups.num_open == 0


def test_a_release_that_overtakes_its_claim_still_counts():
    side = Side()
    release = Release(ME, None, None)
    assert side.lookups.release(release) == Released(ME) == side.lookups.release(release)
    assert side.lookups.claim(b"s", ASK).reason is RefusalReason.NOT_CACHED and side.lookups.num_open == 0


def test_what_is_remembered_of_answers_is_bounded():
    side = Side(max_remembered=2)
    for number in range(5):
        side.lookups.release(Release(bytes([number]) * 16, None, None))
    answers = [side.lookups.claim(b"s", Claim(bytes([n]) * 16, "", ASK.marks, 0, False)) for n in (4, 3, 2)]
    assert [answer and answer.reason for answer in answers] == [
        RefusalReason.NOT_CACHED,
        RefusalReason.NOT_CACHED,
        None,
    ]


# -- a grant that does not follow from the claim -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"position": 448},  # the pages of 384 tokens
        {"position": 512},  # beyond the marks
        {"position": 383},
        {"position": 0},
        {"position": 128},  # not beyond the start
        {"pages": b""},
        {"pages": b"\xff" * 64},
        {"checkpoint_position": 400},
        {"checkpoint_position": 0},
        {"checkpoint_position": None},
        {"checkpoint": b""},
        {"checkpoint": b"\0"},
    ],
)
def test_a_grant_that_does_not_follow_from_the_claim_moves_nothing(changed, monkeypatch):
    case = Case()
    case.ask(start=128)
    grant = Leases.grant

    def lie(self, *args):
        reply = grant(self, *args)
        return msgspec.structs.replace(reply, **changed)

    monkeypatch.setattr(Leases, "grant", lie)
    case.answer_from_memory()
    assert case.run()[0].failure == "the peer's grant is not what was claimed"
    assert moves(case.d) == [] and [lease.state for lease in case.leases()] == ["released"]


@pytest.mark.parametrize("end", [None, 431])
@pytest.mark.parametrize("position", [64, 128, 400, 430, 432, 499, 500, 512])
def test_a_grant_is_taken_at_marks_and_at_the_end_that_was_named_alone(position, end, monkeypatch):
    """The right number of pages, but neither at a mark of the claim nor beyond its start."""
    case, grant = Case(), Leases.grant
    case.d.door.pull(content_spec_of(case.p, PROMPT, range(24), start=128, end=end))
    case.run()

    def lie(self, *args):
        reply = grant(self, *args)
        pages = pack_pages(np.arange(max(0, -(-position // 16) - 8)))
        return msgspec.structs.replace(reply, position=position, pages=pages, checkpoint_position=None, checkpoint=b"")

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
    assert asked.end == content_digest(LAYOUT, PLAIN, PROMPT[:end]) and asked.marks == marks_of(PROMPT)
    _, held = case.recent.find_longest(asked.marks, asked.end)
    case.side.answer_lookup(asked.lookup, case.held(len(held)))
    assert case.run()[0] == PullEnded(case.pull, None, end, end)
    for rank in case.d.ranks:
        rank.check_tokens(case.content, 0, end, [*range(case.d.pages_of(end))], only_these=False)
        rank.check_file(case.content, end, range(90, 90 + case.d.pages_per_file))


@pytest.mark.parametrize("end", [-1, 0, 501, 10**9])
def test_an_end_that_is_no_position_of_the_prompt_is_as_none(end, monkeypatch):
    case = Case()
    case.d.door.pull(content_spec_of(case.p, PROMPT, range(32), end=end))
    case.run()
    assert case.asked[0].end is None
    grant = Leases.grant

    def lie(self, *args):
        reply = grant(self, *args)
        pages = pack_pages(np.arange(max(0, -(-end // 16)) if end < 10**6 else 0))
        return msgspec.structs.replace(
            reply, position=max(end, 0), pages=pages, checkpoint_position=None, checkpoint=b""
        )

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


@pytest.mark.parametrize("changed", [{"request_id": "answer-2"}, {"nonce": N16}, {"position": 383}])
def test_a_grant_of_another_lease_is_refused(changed, monkeypatch):
    case = Case()
    reference = case.p.door.offer(case.held(384))
    case.d.door.pull(leased_spec_of(reference, case.p, PROMPT[:384], range(24)))
    claim = Leases.claim
    monkeypatch.setattr(Leases, "claim", lambda self, asked: msgspec.structs.replace(claim(self, asked), **changed))
    assert case.run()[0].failure == "the peer's grant is not what was claimed" and moves(case.d) == []


def test_a_content_claim_is_answered_by_no_lease_that_was_offered_to_others():
    case = Case()
    case.p.door.offer(case.held(384))
    case.ask()
    assert case.p.producer.leases.num_active == 1 and case.answer_from_memory() is not None
    assert case.run()[0] == PullEnded(case.pull, None, 384, 384)
    assert case.p.producer.leases.num_active == 1
