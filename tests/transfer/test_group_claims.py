"""What is offered, granted and read of attention groups of limited reach: what going on at the grant's end needs."""

from dataclasses import replace

import numpy as np
import pytest

from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.transfer.claim import find_pages, make_claim, plan_read
from cairn.transfer.contract import (
    ContentName,
    KvSource,
    Offer,
    OfferedCheckpoint,
    Peer,
    PullId,
    PullSpec,
)
from cairn.transfer.leases import Claimed, LeaseLimits, Leases
from cairn.transfer.wire import Granted, RefusalReason
from cairn.types import ManualClock
from transfer.parts import granted_numbers, num_active, numbers
from transfer.world import LAYOUT, keys

REACHES = ((None, False), (40, False), (64, True))
PROMPT, END = keys(400), 400


def groups(*sizes):
    return tuple(AttentionGroup("group", size, *reach) for size, reach in zip(sizes, REACHES, strict=True))


def pages(group, start, end, number):
    """Pages of tokens [start, end), numbered from `number` on."""
    count = len({token // group.tokens_per_page for token in range(start, end)})
    return GroupPages(group, start, np.arange(number, number + count, dtype=np.int32))


def needed(end, *sizes):
    """What going on at `end` takes of groups of these sizes, with numbers from 100, 200 and 300 on."""
    return tuple(
        pages(group, group.needed_at(end), end, number)
        for group, number in zip(groups(*sizes), (100, 200, 300), strict=True)
    )


OFFER = Offer(
    "cmpl-1", ContentName(), PROMPT, needed(END, 48, 16, 24), (OfferedCheckpoint(END, np.array([7], np.int32)),)
)
PEER = Peer(
    "p",
    CacheLayout(16, 384, 1, groups(48, 16, 24), 8, 360, 1),
    (b"link",),
)


def listed(parts):
    return [(part.first_token, part.pages.tolist()) for part in parts]


def test_an_offer_has_what_going_on_at_its_end_needs():
    assert listed(find_pages(OFFER, 0, END)) == [
        (0, [*range(100, 109)]),
        (361, [200, 201, 202]),
        (384, [300]),
    ]
    assert listed(find_pages(OFFER, 370, END)) == [(370, [107, 108]), (370, [201, 202]), (384, [300])]
    assert listed(find_pages(OFFER, 395, END)) == [(395, [108]), (395, [202]), (395, [300])]
    assert find_pages(OFFER, END, END) == ()


def test_nothing_earlier_can_be_resumed_from_it():
    """At 399 a token before the first one of the window is needed."""
    assert find_pages(OFFER, 0, 399) is None and find_pages(OFFER, 0, 64) is None
    assert find_pages(OFFER, 384, 399) is not None, "whoever has all up to there needs no more"


def spec(start=0, source=None, end=END, parts=None, state=True):
    source = source or KvSource("p", "127.0.0.1", 1, "cmpl-1", b"n" * 16)
    parts = tuple(
        pages(group, max(group.needed_at(end), start // group.tokens_per_page * group.tokens_per_page), END, number)
        for group, number in zip(groups(96, 32, 48), (10, 30, 50), strict=True)
    )
    lowest = min(part.first_token for part in parts)
    return PullSpec("cmpl-2", source, ContentName(), PROMPT, lowest, parts, np.array([3], np.int32) if state else None)


@pytest.fixture
def book():
    numbers = iter(range(1, 100))
    return Leases(
        LAYOUT, LeaseLimits(max_pages=100), ManualClock(), lambda size: next(numbers).to_bytes(size, "little")
    )


@pytest.mark.parametrize("start", [0, 100, 370, 390])
def test_a_claim_is_granted_by_group_and_read_from_where_it_is_needed(book, start):
    asked = spec(start, KvSource("p", "127.0.0.1", 1, "cmpl-1", book.offer(OFFER).nonce))
    claimed = book.claim(make_claim(asked, LAYOUT))
    assert isinstance(claimed, Claimed)
    granted = claimed.granted
    assert granted.first_tokens == (asked.start, max(361, asked.start), max(384, asked.start))
    assert granted_numbers(granted) == [part.pages.tolist() for part in find_pages(OFFER, asked.start, END)]
    order = plan_read(asked, PullId(1), PEER, granted)
    assert [part.first_token for part in order.remote] == [part.first_token for part in order.local]
    assert [part.first_token for part in order.local] == [part.first_token for part in asked.pages]
    assert [part.group.tokens_per_page for part in order.remote] == [48, 16, 24]
    for part in (*order.remote, *order.local):
        touched = {token // part.group.tokens_per_page for token in range(part.first_token, END)}
        assert len(part.pages) == len(touched)


def test_a_claim_of_less_than_is_leased_is_out_of_range(book):
    asked = spec(0, KvSource("p", "127.0.0.1", 1, "cmpl-1", book.offer(OFFER).nonce))
    assert book.claim(make_claim(replace(asked, keys=PROMPT[:384]), LAYOUT)) is RefusalReason.OUT_OF_RANGE
    assert num_active(book) == 1


WHOLE = Granted(
    END,
    (0, 361, 384),
    tuple(part.pages for part in OFFER.pages),
    END,
    numbers([7]),
)


@pytest.mark.parametrize(
    "changed",
    [
        {"first_tokens": (0, 360, 384)},
        {"first_tokens": (0, 362, 384)},
        {"first_tokens": (0, 361)},
        {"pages": WHOLE.pages[:2]},
        {"pages": WHOLE.pages[:2], "first_tokens": (0, 361)},
        {"pages": (*WHOLE.pages[:2], numbers(range(2)))},
        {"pages": (*WHOLE.pages, numbers([])), "first_tokens": (0, 361, 384, 400)},
        {"checkpoint_position": 384},
        {"checkpoint_position": None, "checkpoint": numbers([])},
    ],
)
def test_a_grant_that_does_not_follow_from_the_claim_is_refused(changed):
    grant = {name: getattr(WHOLE, name) for name in WHOLE.__struct_fields__}
    assert plan_read(spec(), PullId(1), PEER, WHOLE) is not None
    assert plan_read(spec(), PullId(1), PEER, Granted(**grant | changed)) is None


@pytest.mark.parametrize(
    "other",
    [
        (),
        PEER.geometry.groups[:2],
        (*PEER.geometry.groups[:2], AttentionGroup("group", 24, 64)),
        (*PEER.geometry.groups[:2], AttentionGroup("group", 24, 128, True)),
    ],
)
def test_a_peer_with_other_groups_is_not_read(other):
    """The handshake refuses it before."""
    peer = replace(PEER, geometry=replace(PEER.geometry, groups=other))
    assert plan_read(spec(), PullId(1), peer, WHOLE) is None


@pytest.mark.parametrize(("end", "taken"), [(384, True), (320, True), (400, True), (390, False)])
def test_without_a_lease_any_mark_may_come_with_its_window(end, taken):
    """Pages are set aside for all of it, and those of the window are filled."""
    asked = spec(100, KvSource("p", "127.0.0.1", 1, end=400), end=100)
    parts = find_pages(replace(OFFER, pages=needed(end, 48, 16, 24)), asked.start, end)
    granted = Granted(
        end,
        tuple(part.first_token for part in parts),
        tuple(part.pages for part in parts),
        end,
        WHOLE.checkpoint,
    )
    order = plan_read(asked, PullId(1), PEER, granted)
    assert (order is not None) == taken
    if order is not None:
        window = max(end - 39, 64)
        assert [part.first_token for part in order.local] == [96, window, end // 64 * 64]
        assert [len(part.pages) for part in order.local][1] == -(-end // 32) - window // 32


def test_without_a_state_the_whole_prompt_is_no_place_to_go_on():
    """Its last token is computed, of which a token more is needed than the window at the end has."""
    asked = spec(100, KvSource("p", "127.0.0.1", 1, end=400), end=100)
    parts = find_pages(OFFER, asked.start, END)
    listed = tuple(part.first_token for part in parts), tuple(part.pages for part in parts)
    assert plan_read(asked, PullId(1), PEER, Granted(END, *listed, None, numbers([]))) is None
    assert plan_read(asked, PullId(1), PEER, Granted(END, *listed, END, WHOLE.checkpoint)) is not None
