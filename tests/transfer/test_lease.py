"""What a producer promises, and what it never grants."""

import queue
import random
import re
import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from cairn.transfer import leases
from cairn.transfer.claim import match_claim
from cairn.transfer.contract import ContentName, LeaseDemand, Offer, OfferedCheckpoint
from cairn.transfer.digest import ContentDigest
from cairn.transfer.leases import Claimed, LeaseLimits, Leases, LeaseState
from cairn.transfer.wire import Claim, RefusalReason
from cairn.types import ManualClock
from transfer.parts import granted_numbers, num_active, parts
from transfer.world import BLOCK, LAYOUT, keys

PROMPT = keys(400)
NAME = ContentName("", "salt")
FILES = (
    OfferedCheckpoint(128, np.array([50], np.int32)),
    OfferedCheckpoint(256, np.array([51], np.int32)),
    OfferedCheckpoint(384, np.array([52], np.int32)),
    OfferedCheckpoint(400, np.array([53, 9], np.int32)),
)
OFFER = Offer("cmpl-1", NAME, PROMPT, parts(np.arange(25) + 20), FILES)
OTHERS = np.arange(30, dtype=np.int32) + 60


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def book(clock):
    return Leases(LAYOUT, LeaseLimits(max_pages=60), clock, random.Random(1).randbytes)


def claim(lease, *, request_id="cmpl-1", name=NAME, prompt=PROMPT, first=0, checkpoint=True):
    digest = ContentDigest(LAYOUT, name).of(prompt)
    return Claim(name.adapter, b"", first * BLOCK, checkpoint, digest, len(prompt), request_id, lease.nonce)


def next_end(book):
    """When the next lease expires, or None if there is none."""
    return min((lease.until for lease in book._active.values()), default=None)


def num_pages(book):
    """Pages that are leased once all ends have been heard of."""
    book.take_ended()
    return book.num_pages


def granted_by(book, claim):
    """The answer to a claim that is granted, and the lease."""
    claimed = book.claim(claim)
    assert isinstance(claimed, Claimed) and claimed.lease.state is LeaseState.CLAIMED
    return claimed.granted, claimed.lease


def test_a_claim_gets_its_pages_and_the_deepest_checkpoint(book):
    granted, _ = granted_by(book, claim(book.offer(OFFER), first=21))
    assert granted_numbers(granted) == [[41, 42, 43, 44]] and granted.first_tokens == (21 * 16,)
    assert granted.checkpoint_position == 400 and granted.checkpoint.tolist() == [53, 9]


def test_a_claim_of_a_shorter_prefix_gets_the_deepest_checkpoint_below_it(book):
    granted, _ = granted_by(book, claim(book.offer(OFFER), prompt=PROMPT[:300]))
    assert granted.checkpoint_position == 256 and len(granted_numbers(granted)[0]) == 19


def test_zero_pages_are_an_ordinary_claim(book):
    granted, _ = granted_by(book, claim(book.offer(OFFER), first=25, checkpoint=False))
    assert (
        granted.pages == granted.first_tokens == ()
        and granted.checkpoint_position is None
        and granted.checkpoint.tolist() == []
    )


def test_a_reference_is_used_once(book):
    offered = book.offer(OFFER)
    _, lease = granted_by(book, claim(offered))
    assert book.claim(claim(offered)) is RefusalReason.USED
    assert book.claim(claim(offered, first=1)) is RefusalReason.USED
    assert book.decline("cmpl-1", offered.nonce) is RefusalReason.USED
    assert book.heartbeat(lease) is None and book.confirm(lease) is None
    assert book.claim(claim(offered)) is RefusalReason.USED
    assert book.confirm(lease) is RefusalReason.USED, "it is confirmed once"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"request_id": "cmpl-2"}, RefusalReason.FORGED),
        ({"prompt": keys(400, seed=1)}, RefusalReason.OTHER_CONTENT),
        ({"name": ContentName("", "other")}, RefusalReason.OTHER_CONTENT),
        ({"name": ContentName("", None)}, RefusalReason.OTHER_CONTENT),
        ({"name": ContentName("adapter", "salt")}, RefusalReason.OTHER_CONTENT),
        ({"prompt": keys(401)}, RefusalReason.OUT_OF_RANGE),
        ({"prompt": PROMPT[:0]}, RefusalReason.OUT_OF_RANGE),
        ({"first": 26}, RefusalReason.OUT_OF_RANGE),
        ({"prompt": PROMPT[:100], "first": 7, "checkpoint": False}, RefusalReason.OUT_OF_RANGE),
        ({"prompt": PROMPT[:100]}, RefusalReason.OUT_OF_RANGE),  # the shallowest checkpoint is at 128
    ],
)
def test_what_does_not_fit_is_refused_and_spends_nothing(book, changed, why):
    offered = book.offer(OFFER)
    assert book.claim(claim(offered, **changed)) is why
    assert isinstance(book.claim(claim(offered)), Claimed)


def test_a_claim_under_a_lease_names_all_that_it_wants_by_its_end(book):
    """Marks may come along; without an end, or with another adapter than its digest, nothing is granted."""
    offered = book.offer(OFFER)
    whole = claim(offered)
    marks = ContentDigest(LAYOUT, NAME)
    marks.append(PROMPT)
    without_end = msgspec.structs.replace(whole, marks=marks.marks, end=None, position=0)
    assert book.claim(without_end) is RefusalReason.OUT_OF_RANGE
    assert book.claim(msgspec.structs.replace(without_end, position=400)) is RefusalReason.OTHER_CONTENT
    assert book.claim(msgspec.structs.replace(whole, adapter="b")) is RefusalReason.OTHER_CONTENT
    granted, _ = granted_by(book, msgspec.structs.replace(whole, marks=marks.marks))
    assert granted.position == 400


def test_an_unknown_nonce_is_refused(book):
    offered = book.offer(OFFER)
    wrong = bytes([offered.nonce[0] ^ 1]) + offered.nonce[1:]
    assert book.claim(claim(replace(offered, nonce=wrong))) is RefusalReason.UNKNOWN
    assert book.decline("cmpl-1", wrong) is RefusalReason.UNKNOWN
    assert book.heartbeat(None) is book.confirm(None) is RefusalReason.UNKNOWN


def test_a_lease_ends_at_its_time_and_no_heartbeat_brings_it_back(book, clock):
    offered = book.offer(OFFER)
    _, lease = granted_by(book, claim(offered))
    assert next_end(book) == 30.0
    clock.advance(30.0)
    assert book.heartbeat(lease) is RefusalReason.EXPIRED
    assert book.confirm(lease) is RefusalReason.EXPIRED
    assert book.claim(claim(offered)) is RefusalReason.EXPIRED
    assert [lease.state for lease in book.take_ended()] == [LeaseState.EXPIRED.value]
    assert book.take_ended() == [] and num_pages(book) == 0 and next_end(book) is None


@pytest.mark.parametrize("first_asked", ["claim", "decline", "heartbeat", "confirm"])
def test_whoever_asks_first_after_a_leases_time_hears_that_it_has_expired(book, clock, first_asked):
    """Nobody has looked at the clock before."""
    offered = book.offer(OFFER)
    if first_asked in ("heartbeat", "confirm"):
        granted_by(book, claim(offered))
    clock.advance(30.0)
    asked = {
        "claim": lambda: book.claim(claim(offered)),
        "decline": lambda: book.decline("cmpl-1", offered.nonce),
        "heartbeat": lambda: book.heartbeat(offered),
        "confirm": lambda: book.confirm(offered),
    }
    assert asked[first_asked]() is RefusalReason.EXPIRED and offered.state is LeaseState.EXPIRED


def test_heartbeats_prolong_a_claim_up_to_the_greatest_age(book, clock):
    offered = book.offer(OFFER)
    clock.advance(5.0)
    _, lease = granted_by(book, claim(offered))
    assert next_end(book) == 30.0, "an extension never shortens"
    clock.advance(24.0)
    assert book.heartbeat(lease) is None and next_end(book) == 49.0
    beats = 0
    while beats < 100 and book.heartbeat(lease) is None:
        clock.advance(19.0)
        beats += 1
    assert clock.now() >= 600.0 and beats < 40 and num_active(book) == 0


@pytest.mark.parametrize("has_lease", [True, False])
def test_a_claim_late_in_an_offers_time_gets_time_to_read(book, clock, has_lease):
    offered = book.offer(OFFER)
    clock.advance(25.0)
    assert isinstance(book.claim(claim(offered)) if has_lease else book.grant(claim(offered), offered), Claimed)
    assert next_end(book) == 45.0


def test_confirm_ends_the_lease(book):
    _, lease = granted_by(book, claim(book.offer(OFFER)))
    assert book.confirm(lease) is None and lease.state is LeaseState.CONFIRMED
    assert len(book.take_ended()) == 1 and book.num_pages == 0
    assert book.take_ended() == []


def test_a_release_ends_the_lease_before_and_after_the_claim(book):
    for claimed in (False, True):
        offered = book.offer(OFFER)
        if claimed:
            _, lease = granted_by(book, claim(offered))
            book.release(lease)
            book.release(lease)
        else:
            assert book.decline("cmpl-1", offered.nonce) is None
            assert book.decline("cmpl-1", offered.nonce) is RefusalReason.USED
        assert book.claim(claim(offered)) is RefusalReason.USED
        assert num_pages(book) == 0


def test_a_release_ends_what_has_not_ended(book):
    offered = book.offer(OFFER)
    book.release(offered)
    book.release(offered)
    assert [lease.state for lease in book.take_ended()] == [LeaseState.RELEASED.value]


def test_an_offer_is_withdrawn_by_its_whole_name_and_while_nobody_has_claimed_it(book):
    offered, other = book.offer(OFFER), book.offer(OFFER)
    for request_id, wrong in (("cmpl-2", offered.nonce), ("cmpl-1", b"x" * 16), ("", offered.nonce)):
        assert book.decline(request_id, wrong) in (RefusalReason.FORGED, RefusalReason.UNKNOWN)
    book.claim(claim(other))
    assert book.decline("cmpl-1", other.nonce) is RefusalReason.USED
    assert num_active(book) == 2
    book.decline("cmpl-1", offered.nonce)
    book.decline("cmpl-1", offered.nonce)
    assert num_active(book) == 1 and [lease.state for lease in book.take_ended()] == [LeaseState.RELEASED.value]


def test_a_peer_may_be_reading_for_a_while_after_what_it_claimed_has_ended(book, clock):
    linger = LeaseLimits(max_pages=60).linger
    unclaimed = book.offer(OFFER)
    assert book.may_be_read
    book.release(unclaimed)
    assert not book.may_be_read
    _, lease = granted_by(book, claim(book.offer(OFFER)))
    book.release(lease)
    clock.advance(linger - 1)
    assert book.may_be_read
    # it has given up, and says that its reads have not ended yet
    assert book.heartbeat(lease) is RefusalReason.USED
    clock.advance(linger - 1)
    assert book.may_be_read
    clock.advance(1)
    assert not book.may_be_read


def test_a_claim_of_no_token_at_all_is_none(book):
    offered = book.offer(OFFER)
    assert book.claim(claim(offered, prompt=PROMPT[:0], checkpoint=False)) is RefusalReason.OUT_OF_RANGE


def test_the_cap_counts_pages_and_files_of_all_leases(book, clock):
    assert len(OFFER.all_pages) == 30 and book.fits(LeaseDemand(num_new=60))
    first, _ = book.offer(OFFER), book.offer(replace(OFFER, pages=parts(OTHERS[:-5])))
    assert num_pages(book) == 55 and book.fits(LeaseDemand(OTHERS)) and not book.fits(LeaseDemand(num_new=6))
    beyond = book.offer(replace(OFFER, request_id="beyond", pages=parts(OTHERS + 100)))
    assert num_active(book) == 2 and [lease.state for lease in book.take_ended()] == ["released"]
    assert book.claim(claim(beyond, request_id="beyond")) is RefusalReason.USED
    assert book.num_pages == 55
    book.release(first)
    assert book.num_pages == 55, "the pages are kept until the end is heard of"
    assert num_pages(book) == 30 and book.fits(LeaseDemand(num_new=30)) and not book.fits(LeaseDemand(num_new=31))
    clock.advance(30.0)
    assert num_pages(book) == 0 and book.fits(LeaseDemand(num_new=60))


def test_a_page_counts_once_however_many_leases_share_it(book, clock):
    begun = replace(OFFER, keys=PROMPT[:160], pages=parts(np.arange(10) + 20), checkpoints=FILES[:1])
    leased = [book.offer(offer) for offer in (OFFER, OFFER, begun, begun, OFFER)]
    assert num_pages(book) == 30
    for each in leased[2:]:
        book.release(each)
    assert num_pages(book) == 30
    book.release(leased[0])
    book.release(leased[1])
    assert num_pages(book) == 0
    book.offer(begun)
    assert num_pages(book) == 11
    clock.advance(30.0)
    assert num_pages(book) == 0


def test_one_offer_larger_than_the_cap_is_held_alone(clock):
    book = Leases(LAYOUT, LeaseLimits(max_pages=29), clock, random.Random(1).randbytes)
    assert book.fits(LeaseDemand(OTHERS, 10**6))
    offered = book.offer(OFFER)
    assert (
        num_pages(book) == 30 and not book.fits(LeaseDemand(OFFER.all_pages)) and not book.fits(LeaseDemand(OTHERS[:1]))
    )
    book.offer(OFFER)
    assert num_active(book) == 1 and len(book.take_ended()) == 1
    book.release(offered)
    assert num_pages(book) == 0 and book.fits(LeaseDemand(OFFER.all_pages))


def test_two_threads_share_the_book(book):
    """One offers and takes ends, the other claims and confirms: every page is counted, and none for ever."""
    references, ended = queue.SimpleQueue(), []

    def claim_and_confirm():
        for _ in range(200):
            _, lease = granted_by(book, claim(references.get()))
            book.confirm(lease)

    other = threading.Thread(target=claim_and_confirm)
    other.start()
    for _ in range(200):
        references.put(book.offer(OFFER))
        ended += book.take_ended()
    other.join(20)
    ended += book.take_ended()
    assert [lease.state for lease in ended] == ["confirmed"] * 200 and len({e.remote_request_id for e in ended}) == 200
    assert book.num_pages == num_active(book) == 0 and not other.is_alive()


@pytest.mark.parametrize("ends", ["withdrawn", "expired", "claimed"])
@pytest.mark.parametrize("has_lease", [True, False])
def test_a_lease_that_ends_while_a_claim_is_compared_with_it_is_not_given(book, clock, monkeypatch, ends, has_lease):
    """Digests of long prompts are made without the lock, so another thread may come in between."""
    offered = book.offer(OFFER)
    whole = claim(offered)

    def end_meanwhile(*asked):
        matched = match_claim(*asked)
        monkeypatch.undo()
        others = {
            "withdrawn": lambda: book.release(offered),
            "expired": lambda: clock.advance(30.0),
            "claimed": lambda: granted_by(book, whole),
        }
        other = threading.Thread(target=others[ends])
        other.start()
        other.join(20)
        assert not other.is_alive()
        return matched

    monkeypatch.setattr(leases, "match_claim", end_meanwhile)
    if has_lease:
        refusal = {"withdrawn": "used", "expired": "expired", "claimed": "used"}[ends]
        assert book.claim(whole) is RefusalReason(refusal)
    else:
        assert book.grant(msgspec.structs.replace(whole, request_id=None, nonce=None), offered) is None
    left = {"withdrawn": ["released"], "expired": ["expired"], "claimed": []}[ends]
    assert [lease.state for lease in book.take_ended()] == left and num_active(book) == (ends == "claimed")


def test_equal_request_ids_do_not_meet(book):
    first, second = book.offer(OFFER), book.offer(OFFER)
    assert isinstance(book.claim(claim(first)), Claimed) and isinstance(book.claim(claim(second)), Claimed)


def test_what_is_remembered_of_the_past_is_bounded(clock):
    limits = LeaseLimits(max_pages=60, max_remembered=3)
    book = Leases(LAYOUT, limits, clock, random.Random(1).randbytes)
    leased = []
    for _ in range(5):
        leased.append(book.offer(OFFER))
        book.release(leased[-1])
    found = [book.claim(claim(each)) for each in leased]
    assert found == [RefusalReason.UNKNOWN] * 2 + [RefusalReason.USED] * 3


@pytest.mark.parametrize("ended", [LeaseState.CONFIRMED, LeaseState.RELEASED, LeaseState.EXPIRED])
def test_what_has_ended_stays_as_it_is(book, clock, ended):
    _, lease = granted_by(book, claim(book.offer(OFFER)))
    match ended:
        case LeaseState.CONFIRMED:
            assert book.confirm(lease) is None
        case LeaseState.RELEASED:
            book.release(lease)
        case LeaseState.EXPIRED:
            clock.advance(30.0)
    assert isinstance(book.claim(claim(lease)), RefusalReason) and isinstance(book.heartbeat(lease), RefusalReason)
    assert isinstance(book.confirm(lease), RefusalReason) and book.decline("cmpl-1", lease.nonce) is not None
    book.release(lease)
    clock.advance(600.0)
    assert [each.state for each in book.take_ended()] == [ended.value] and lease.state is ended
    with pytest.raises(KeyError):
        book._end(lease, LeaseState.RELEASED)


def test_the_states_are_those_that_are_drawn():
    assert {state.name for state in LeaseState} == set(re.findall("[A-Z]{5,}", leases.__doc__))
