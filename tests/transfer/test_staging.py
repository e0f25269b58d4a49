"""Reading by way of staging: who gets a buffer, when it comes free, and that nothing of an unwanted read is laid
out."""

import dataclasses

import msgspec
import numpy as np
import pytest

from cairn.errors import ConfigError
from cairn.transfer.contract import PagesFree, Peer, PullEnded, PullId, ReadOrder
from cairn.transfer.geometry import ModelUnits
from cairn.transfer.links.contract import LinkError, ReadState
from cairn.transfer.memory import HostPool
from cairn.transfer.planner import STAGING_BYTES, PairedPages, StagingArea, staging_pages_for
from doubles.memory_link import Fault
from transfer.parts import parts, polled
from transfer.ranked_world import CANARY, World, leased_spec_of, offer_of
from transfer.test_geometry import geometry, model
from transfer.world import keys

ONE, TWO, THREE = PullId(1), PullId(2), PullId(3)


def staging(rows, block_size=16, num_pages=5):
    return StagingArea(HostPool(np.zeros((num_pages + rows, 8), np.uint8)), num_pages, block_size)


@pytest.mark.parametrize(("block_size", "need"), [(16, 8), (32, 4), (64, 2), (128, 1), (256, 1)])
def test_too_few_pages_are_refused_with_the_number_that_is_needed(block_size, need):
    with pytest.raises(ConfigError, match=f"at least {need} are needed"):
        staging(need - 1, block_size)
    assert staging(need, block_size).buffer_pages == need


@pytest.mark.parametrize(("rows", "buffers", "pages"), [(8, 1, 8), (15, 1, 15), (16, 2, 8), (32, 4, 8), (70, 4, 17)])
def test_bays_share_the_rows_and_each_takes_a_block(rows, buffers, pages):
    area = staging(rows)
    taken = [area.acquire(PullId(pull)) for pull in range(buffers + 1)]
    assert taken == [5 + buffer * pages for buffer in range(buffers)] + [None] and area.buffer_pages == pages


def test_bays_go_round_among_those_who_wait():
    area = staging(8)
    assert area.acquire(ONE) == 5
    assert [area.acquire(pull) for pull in (ONE, TWO, THREE)] == [None] * 3
    area.release(5)
    assert [area.acquire(pull) for pull in (THREE, TWO)] == [None, None], "others were there before"
    assert area.acquire(ONE) == 5 and area.acquire(ONE) is None
    area.release(5)
    assert area.acquire(ONE) is None and area.acquire(TWO) == 5
    area.stop_waiting(THREE)
    area.stop_waiting(THREE)
    area.release(5)
    assert area.acquire(ONE) == 5 and len(area._waiting) == 0


@pytest.mark.parametrize(
    ("page_bytes", "block_size", "expected"),
    [
        (2048, 16, 64 * 8),  # tiny pages: 64 blocks are enough
        (320 << 10, 16, (STAGING_BYTES // (320 << 10)) // 8 * 8),
        (5 << 20, 16, 16),  # two blocks, however large
        (40 << 20, 128, 2),
        (1 << 20, 256, 64),
    ],
)
def test_the_engine_is_told_how_many_pages_to_reserve(page_bytes, block_size, expected):
    local = dataclasses.replace(geometry(1, 16), block_size=block_size, page_bytes=page_bytes)
    assert staging_pages_for(model(), local) == expected
    StagingArea(HostPool(np.zeros((3 + expected, 1), np.uint8)), 3, block_size)


def test_a_model_without_attention_needs_none():
    assert staging_pages_for(ModelUnits((), 4), geometry(1)) == 0


# -- the planner -------------------------------------------------------------------------------------------------------


def order(remote, num_tokens=400, *, ranks=None, start=0, local_pages=25):
    ranks = tuple(b"r%d" % rank for rank in range(remote.tp_size)) if ranks is None else ranks
    count = -(-num_tokens // remote.block_size)
    lists = parts(range(count), start, remote.block_size), parts(range(local_pages), start)
    return ReadOrder(ONE, Peer("p", remote, ranks), num_tokens, *lists, None, None)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"remote": geometry(1, 64, header=8)}, "header_bytes: 8 at the peer, 7 here"),
        ({"remote": geometry(1, 24)}, "--block-size 16 and the peer's 24"),
        ({"remote": geometry(1, 256)}, "a block of 256 tokens at the peer does not fit 8 staging pages"),
        ({"remote": geometry(1, 64), "local_pages": 24}, "local_pages lists 24 pages"),
        ({"remote": geometry(2, 16), "local_pages": 24}, "local_pages lists 24 pages"),
        ({"remote": geometry(2, 64), "ranks": (b"r0",)}, "the peer describes 1 ranks and has 2"),
        ({"remote": geometry(1, 64), "ranks": ()}, "the peer describes 0 ranks and has 1"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_in_words(changed, why):
    plan = PairedPages(model(), geometry(1), 0, staging(8))
    with pytest.raises(LinkError, match=why):
        plan(order(**changed))


def test_without_staging_equal_blocks_are_read_and_others_refused():
    plan = PairedPages(model(), geometry(1), 0)
    assert len(plan(order(geometry(1)))) == len(plan(order(geometry(2)))) == 1
    with pytest.raises(LinkError, match="there are none"):
        plan(order(geometry(1, 64)))


def test_own_sizes_that_cannot_hold_the_model_are_refused_at_once():
    with pytest.raises(ConfigError, match="kv heads"):
        PairedPages(model(4), geometry(1), 0)
    with pytest.raises(ConfigError, match="rank 1"):
        PairedPages(model(), geometry(1), 1)


def test_what_follows_from_a_peer_is_worked_out_once_and_forgotten_in_time(monkeypatch):
    plan, made = PairedPages(model(), geometry(1), 0, staging(8)), []
    from cairn.transfer import planner

    pair = planner.pair
    monkeypatch.setattr(planner, "pair", lambda *args: made.append(args) or pair(*args))
    for _ in range(3):
        plan(order(geometry(1, 64)))
    assert len(made) == 1
    for tp_size in range(2, 100):
        plan(order(geometry(tp_size, 64)))
    plan(order(geometry(1, 64)))
    assert len(made) == 1 + 98 + 1 and plan._pairing.cache_info().currsize == 64


@pytest.mark.parametrize("rows", [8, 16, 33])
def test_pieces_cover_every_token_once_and_fit_a_bay(rows):
    area = staging(rows)
    plan = PairedPages(model(), geometry(1), 0, area)
    for block in (32, 64, 128):
        pieces = plan(order(geometry(1, block), 397, start=16, local_pages=24))
        assert [piece.start for piece in pieces] == [16, *[piece.end for piece in pieces[:-1]]] and pieces[
            -1
        ].end == 397
        for piece in pieces:
            num_pages = -(-piece.end // block) - piece.start // block
            assert len(piece.remote_pages) == num_pages and num_pages * block <= area.buffer_pages * 16


# -- through the port --------------------------------------------------------------------------------------------------


def handed_over(world, num_tokens, number, *, pages):
    """One offer of P and D's pull of it into `pages`."""
    content, prompt = world.content(num_tokens, seed=number), keys(num_tokens, number)
    p, d = world.p, world.d
    held = np.arange(p.pages_of(num_tokens)) + number * p.pages_of(num_tokens)
    reference = p.door.offer(offer_of(p, content, prompt, held, {}, request_id=f"cmpl-{number}"))
    return d.door.pull(leased_spec_of(reference, p, prompt, pages)), content


def test_many_reads_share_one_bay_and_all_end_well():
    world = World((1, 64), (1, 16), kv_heads=1, sides={"staging_blocks": 1, "num_pages": 64}, descriptors_per_poll=2)
    pulls = {}
    for number in range(6):
        pages = range(number * 10, number * 10 + 10)
        pull, content = handed_over(world, 150, number, pages=pages)
        pulls[pull] = content, pages
    most, events = 0, []
    for _ in range(200):
        events += world.run(1)["d"]
        most = max(most, len(world.d.ranks[0].staging._waiting))
    assert most >= 4, "they did wait for each other"
    assert [event.failure for event in events if isinstance(event, PullEnded)] == [None] * 6
    for content, pages in pulls.values():
        world.d.ranks[0].check_tokens(content, 0, 150, pages)
    assert len(world.d.ranks[0].staging._free) == 1 and len(world.d.ranks[0].staging._waiting) == 0


def test_a_short_read_does_not_wait_for_all_of_a_long_one():
    world = World((1, 64), (1, 16), kv_heads=1, sides={"staging_blocks": 1, "num_pages": 100}, descriptors_per_poll=1)
    long, _ = handed_over(world, 640, 0, pages=range(40))
    world.run(4)
    short, _ = handed_over(world, 64, 15, pages=range(50, 54))
    ended = [event.pull for event in world.run(200)["d"] if isinstance(event, PullEnded)]
    assert ended == [short, long]


def test_a_read_that_waits_for_a_bay_fails_by_its_own_deadline_and_is_gone_at_once():
    world = World((1, 64), (1, 16), kv_heads=1, sides={"staging_blocks": 1})
    first, _ = handed_over(world, 64, 0, pages=range(4))
    world.fabric.inject("p-0", Fault.FROZEN)
    world.run(6)
    second, _ = handed_over(world, 64, 1, pages=range(10, 14))
    world.run(6)
    world.clock.advance(29.0)
    world.run(6)
    world.clock.advance(1.0)
    events = world.run(6)["d"]
    assert events[0].pull == first and "longer than 30 s" in events[0].failure
    assert len(events) == 3 and events[1].pull == second and events[2] == PagesFree(second)
    assert len(world.d.ranks[0].staging._waiting) == 0 and len(world.d.ranks[0].staging._free) == 0
    world.fabric.inject("p-0", Fault.NONE)
    assert world.run(6)["d"] == [PagesFree(first)] and len(world.d.ranks[0].staging._free) == 1


def test_late_writes_into_staging_never_reach_a_page_of_the_lease():
    world = World((1, 64), (1, 16), kv_heads=1, sides={"staging_blocks": 2}, descriptors_per_poll=1, late_writes=True)
    pull, _ = handed_over(world, 400, 0, pages=range(25))
    while not world.d.ranks[0].link.num_open:
        world.run(1)
    world.fabric.inject("p-0", Fault.FROZEN)
    world.d.door.abort(pull)
    rank = world.d.ranks[0]
    events = world.run(20)["d"]
    assert [type(event) for event in events] == [PullEnded] and len(rank.staging._free) == 0
    # The pages are not free yet, but whatever a late write does, they must not change any more.
    rank.memory[: rank.num_pages] = CANARY
    other = rank.staging.acquire(TWO)
    assert other is None, "a buffer in quarantine is nobody's"
    rank.staging.stop_waiting(TWO)
    world.fabric.inject("p-0", Fault.NONE)
    assert world.run(40)["d"] == [PagesFree(pull)]
    assert any(move.late for move in rank.link.moved), "the late write did come"
    assert (rank.memory[: rank.num_pages] == CANARY).all() and len(rank.staging._free) == 2


def test_a_peer_that_dies_gives_every_bay_back():
    world = World((2, 64), (1, 16), kv_heads=2, sides={"staging_blocks": 2}, descriptors_per_poll=1)
    pull, _ = handed_over(world, 400, 0, pages=range(25))
    while not world.d.ranks[0].link.num_open:
        world.run(1)
    world.fabric.inject("p-1", Fault.DEAD)
    events = world.run(40)["d"]
    assert events[0].failure == "the link failed while reading" and events[1] == PagesFree(pull)
    assert len(world.d.ranks[0].staging._free) == 2 and len(world.d.ranks[0].worker._reads) == 0
    again, _ = handed_over(world, 64, 1, pages=range(4))
    failed = world.run(40)["d"]
    assert failed[0].failure is not None and failed[1] == PagesFree(again)
    assert len(world.d.ranks[0].staging._free) == 2


def test_a_dead_peer_found_at_the_start_leaves_no_bay_taken():
    world = World((1, 64), (1, 16), kv_heads=1, sides={"staging_blocks": 1})
    rank = world.d.ranks[0]
    world.fabric.inject("p-0", Fault.DEAD)
    remote = order(world.p.geometry, 64, ranks=(b"p-0",), local_pages=4)
    with pytest.raises(LinkError, match="gone"):
        rank.worker.start(remote)
    assert len(rank.staging._free) == 1 and len(rank.staging._waiting) == len(rank.worker._reads) == 0


def test_a_handle_never_has_more_than_a_bay():
    world = World((1, 64), (1, 16), kv_heads=1, sides={"staging_blocks": 4})
    rank, sizes = world.d.ranks[0], []
    read = rank.link.read
    rank.link.read = lambda peer, descriptors: sizes.append(int(descriptors.num_bytes.sum())) or read(peer, descriptors)
    handed_over(world, 640, 0, pages=range(40))
    world.run(30)
    buffer = rank.staging.buffer_pages * rank.geometry.page_bytes
    assert sum(sizes) == 640 * rank.geometry.page_bytes // 16 and max(sizes) == buffer and len(sizes) == 5


def test_polling_a_read_after_its_cancel_lays_nothing_out():
    """All bytes of the piece have landed when the cancel comes: they stay in staging."""
    world = World((1, 64), (1, 16), kv_heads=1, sides={"staging_blocks": 1}, delay=1)
    world.p.store(world.content(64), 64, [3], {})
    rank = world.d.ranks[0]
    read = order(world.p.geometry, 64, ranks=(b"p-0",), local_pages=4)
    read = msgspec.structs.replace(read, remote=parts([3], block=64))
    rank.worker.start(read)
    assert polled(rank.worker, ONE) is ReadState.READING
    world.fabric.late_writes = True
    rank.worker.cancel(ONE)
    assert polled(rank.worker, ONE) is ReadState.CANCELLED
    assert len(rank.link.moved) == 4 and (rank.memory[: rank.num_pages] == CANARY).all()
    assert len(rank.staging._free) == 1
