"""One party's silence is nobody else's wait: servers that do not answer, and prompts that nobody fetches, keep plain
requests waiting on neither side, and what is held for them is bounded."""

from collections import Counter

import numpy as np
import pytest
from pd_world import REMOTE_DECODE, World, alone, prefill, silent

from cairn.errors import InvalidRequest, QueueFull
from cairn.scheduler.fetch import MAX_BYPASSED, SLOW_SECONDS
from cairn.scheduler.request import Phase
from cairn.transfer.contract import LookupRequest
from cairn.types import RequestId
from tiers import more
from transfer.parts import num_active

TEXT = np.random.default_rng(5).integers(0, 50, 9000).tolist()
PLANS = 2
"""A plain request that has a slot, pages and tokens is in one of so many plans, whatever others wait for."""


def text(place: int, length: int) -> list[int]:
    """Some tokens of which no other place has the same."""
    return [place // 50, place % 50, *TEXT[place : place + length - 2]]


def phases(server) -> Counter:
    return Counter(request.phase for request in server.scheduler.state.requests.values())


def starts(server, name, plans: int = PLANS) -> bool:
    """Whether the request runs, or has ended, after so many plans. The clock stands still."""
    before = server.runner.steps
    for _ in range(4 * plans):
        if server.runner.steps >= before + plans:
            break
        server.turn()
    request = server.scheduler.state.requests.get(RequestId(name))
    return request is None or request.phase is not Phase.WAITING


def let_all_end(world, *names) -> None:
    for _ in range(400):
        world.run(turns=4000)
        if all(any(name in server.ended for server in world.servers) for name in names):
            return
        world.clock.advance(0.5)
    raise AssertionError("no end in sight")


def clean(world) -> None:
    for _ in range(200):
        world.run()
        if not any(server.scheduler.state.transfers.is_open for server in world.servers):
            break
        world.clock.advance(1.0)
    for server in world.servers:
        server.assert_clean()


# -- fetches from a server that does not answer ------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [more(1), 2])
@pytest.mark.parametrize("running", [0, more(1)])
def test_a_plain_request_does_not_wait_for_fetches_from_a_silent_server(ahead, running):
    world = World()
    d = world.server(2, max_num_seqs=8, ahead=ahead, num_pages=1000)
    busy = [d.submit(text(3000 + i, 60), max_tokens=200) for i in range(running)]
    names = [d.submit(text(i, 20), params=silent(i)) for i in range(48)]
    for _ in range(6):
        d.turn()
    assert phases(d)[Phase.FETCHING] == 8
    plain = [d.submit(text(2000 + i, 40)) for i in range(3)]
    assert all(starts(d, name) for name in plain)
    let_all_end(world, *names, *plain, *busy)
    for i, name in enumerate(plain):
        assert d.answers[name] == alone(text(2000 + i, 40))
    for i, name in enumerate(names):
        assert d.answers[name] == alone(text(i, 20))
    assert d.scheduler.state.counters.failed_pulls == 48
    clean(world)


def test_fetches_begin_in_the_order_of_their_turns():
    world = World()
    d = world.server(2, max_num_seqs=3)
    names = [d.submit(text(i, 20), params=silent(i)) for i in range(9)]
    d.turn()
    begun = [fetch.request.id for fetch in d.scheduler.state.transfers.fetching.values()]
    assert begun == names[:3]
    first = d.submit(text(50, 20), params=silent(50), priority=-1)
    d.scheduler.abort(RequestId(names[0]))
    d.turn()
    begun = [fetch.request.id for fetch in d.scheduler.state.transfers.fetching.values()]
    assert begun == [*names[1:3], first]
    let_all_end(world, *names[1:], first)
    clean(world)


def test_a_failed_fetch_is_computed_in_its_old_place():
    world = World()
    d = world.server(2, max_num_seqs=1)
    busy = d.submit(text(3000, 60), max_tokens=60)
    d.turn()
    fetched = d.submit(text(0, 20), params=silent(0))
    later = [d.submit(text(100 + i, 20)) for i in range(3)]
    d.turn()
    assert phases(d)[Phase.FETCHING] == 1
    while phases(d)[Phase.FETCHING]:
        world.clock.advance(0.5)
        d.turn()
    assert busy not in d.ended and d.ended == {}
    assert [request.id for request in d.scheduler.state.waiting.plain] == [fetched, *later]
    let_all_end(world, busy, fetched, *later)
    assert list(d.ended) == [busy, fetched, *later]
    clean(world)


def test_pages_for_fetches_are_those_that_requests_before_them_do_not_need():
    """Two slots are taken; the first in the queue needs most of the pool, a fetch behind it could have what is free."""
    world = World()
    d = world.server(2, num_pages=60, max_num_seqs=2)
    busy = [d.submit(text(3000 + i, 60), max_tokens=150) for i in range(2)]
    for _ in range(3):
        d.turn()
    large = d.submit(text(0, 500))
    fetched = d.submit(text(1000, 300), params=silent(0))
    small = d.submit(text(2000, 100), params=silent(1))
    for _ in range(4):
        d.turn()
    assert phases(d)[Phase.FETCHING] == 0
    let_all_end(world, *busy, large, fetched, small)
    assert list(d.ended).index(large) < list(d.ended).index(fetched)
    assert d.answers[large] == alone(text(0, 500)) and d.answers[fetched] == alone(text(1000, 300))
    clean(world)


def test_what_was_fetched_takes_no_slot_before_an_older_request():
    world = World()
    p, d = world.server(1), world.server(2, max_num_seqs=1)
    fetchable = [text(100 * i, 40) for i in range(1, 4)]
    references = [prefill(p, prompt) for prompt in fetchable]
    busy = d.submit(text(3000, 60), max_tokens=30)
    d.turn()
    older = d.submit(text(0, 40))
    fetched = [d.submit(prompt, params=params) for prompt, params in zip(fetchable, references, strict=True)]
    seen = set()
    for _ in range(400):
        p.turn()
        d.turn()
        seen |= set(phases(d))
        if len(d.ended) == 5:
            break
    assert Phase.READY in seen
    assert list(d.ended) == [busy, older, *fetched]
    assert d.scheduler.state.counters.external_hits == 40 * 3
    clean(world)


def test_what_has_come_whole_takes_no_slot_before_an_older_request_while_others_run():
    world = World()
    p, d = world.server(1), world.server(2, max_num_seqs=2)
    reference = prefill(p, text(1000, 40))
    busy = [d.submit(text(3000 + 100 * i, 60), max_tokens=count) for i, count in enumerate((150, 40))]
    d.turn()
    older = d.submit(text(0, 40), max_tokens=20)
    fetched = d.submit(text(1000, 40), max_tokens=1, params=reference)
    while busy[1] not in d.ended:
        p.turn()
        d.turn()
    assert (phases(d)[Phase.WAITING], phases(d)[Phase.READY]) == (1, 1)
    world.run()
    assert list(d.ended) == [busy[1], older, fetched, busy[0]]
    clean(world)


def test_what_was_fetched_gives_way_to_an_older_request_that_lacks_pages():
    world = World()
    p, d = world.server(1), world.server(2, num_pages=60, max_num_seqs=1)
    reference = prefill(p, text(1000, 400))
    busy = d.submit(text(3000, 60), max_tokens=60)
    d.turn()
    fetched = d.submit(text(1000, 400), params=reference)
    for _ in range(40):
        p.turn()
        d.turn()
    assert phases(d)[Phase.READY] == 1 and busy not in d.ended
    older = d.submit(text(0, 600), priority=-1)
    world.run()
    assert list(d.ended) == [busy, older, fetched]
    assert d.answers[older] == alone(text(0, 600)) and d.answers[fetched] == alone(text(1000, 400))
    clean(world)


def test_a_running_request_does_not_wait_for_the_pages_of_a_slow_fetch():
    world = World()
    d = world.server(2, num_pages=40, max_num_seqs=2)
    running = d.submit(text(0, 100), max_tokens=250)
    for _ in range(3):
        d.turn()
    fetched = d.submit(text(1000, 300), params=silent(0))
    for _ in range(2):
        d.turn()
    assert phases(d)[Phase.FETCHING] == 1
    world.run(turns=3000)
    world.clock.advance(SLOW_SECONDS)
    world.run(turns=3000)
    assert set(d.ended) == {running, fetched} and d.scheduler.state.counters.failed_pulls == 0
    assert d.answers[running] == alone(text(0, 100), 250)
    clean(world)


@pytest.mark.parametrize("priority", [-1, 0])
def test_a_waiting_request_does_not_wait_for_the_pages_of_a_slow_fetch(priority):
    world = World()
    d = world.server(2, num_pages=40, max_num_seqs=2)
    fetched = d.submit(text(1000, 400), params=silent(0))
    for _ in range(2):
        d.turn()
    plain = d.submit(text(0, 300), priority=priority)
    world.run()
    assert phases(d) == {Phase.FETCHING: 1, Phase.WAITING: 1}
    world.clock.advance(SLOW_SECONDS)
    world.run()
    assert plain in d.ended
    let_all_end(world, fetched)
    assert d.answers[fetched] == alone(text(1000, 400))
    clean(world)


def test_a_fetch_that_finds_no_pages_is_overtaken_by_a_bounded_number_of_requests():
    world = World()
    d = world.server(2, num_pages=60, max_num_seqs=2)
    names = [d.submit(text(3000, 200), max_tokens=100)]
    for _ in range(2):
        d.turn()
    large = d.submit(text(0, 800), params=silent(0))
    for number in range(2 * MAX_BYPASSED):
        names.append(d.submit(text(10 * number + 1000, 200), max_tokens=20))
        while len(d.scheduler.state.waiting.plain) > 2:
            d.turn()
    let_all_end(world, large, *names)
    place = list(d.ended).index(large)
    assert MAX_BYPASSED <= place <= MAX_BYPASSED + 8
    assert d.answers[large] == alone(text(0, 800))
    clean(world)


# -- prompts that nobody fetches ---------------------------------------------------------------------------------------


def test_offers_of_one_prompt_that_nobody_fetches_are_counted_once_and_stall_nobody():
    world = World()
    p = world.server(1, num_pages=1000, max_leases_per_client=100, max_num_seqs=8)
    prompt = TEXT[:4000]
    names = [p.submit(prompt, max_tokens=1, params=REMOTE_DECODE) for _ in range(100)]
    world.run()
    assert all(p.ended[name].transfer.offered is not None for name in names)
    assert p.producer.leases.num_pages == p.layout.pages_for(4000) + p.layout.pages_per_checkpoint
    assert num_active(p.producer.leases) == 100
    plain = p.submit(text(5000, 60))
    other = p.submit(text(6000, 60), max_tokens=1, params=REMOTE_DECODE, client="another")
    assert starts(p, plain) and starts(p, other)
    world.run()
    assert p.answers[plain] == alone(text(5000, 60)) and p.ended[other].transfer.offered is not None
    clean(world)


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_prompts_that_begin_alike_share_what_is_leased(max_tokens):
    """The bound is kept to the page, whichever pages are shared, and copied."""
    world = World()
    p = world.server(1, num_pages=200, lease_share=0.3, max_num_seqs=4)
    common = text(0, 300)
    names = [
        p.submit(common + text(1000 + 20 * i, 5 + 9 * i), max_tokens=max_tokens, params=REMOTE_DECODE)
        for i in range(12)
    ]
    world.run()
    leased = [name for name in names if name in p.ended]
    assert leased == names[: len(leased)] and 4 <= len(leased) < 12
    assert p.producer.leases.num_pages <= 60
    held = {page for leased in p.scheduler.state.transfers.offers.values() for page in leased.pin.pages.tolist()}
    assert len(held) == p.producer.leases.num_pages
    clean(world)


def test_a_cached_prompt_needs_no_more_room_than_it_has_already():
    world = World()
    p = world.server(1, num_pages=100, lease_share=0.1)
    names = [p.submit(text(0, 100), max_tokens=1, params=REMOTE_DECODE) for _ in range(5)]
    world.run()
    assert all(name in p.ended for name in names) and p.producer.leases.num_pages == 10
    # this one goes on writing in a copy of the last page, which finds no room
    decodes = p.submit(text(0, 100), max_tokens=5, params=REMOTE_DECODE)
    world.run()
    assert decodes not in p.ended and p.producer.leases.num_pages == 10
    world.pass_time(31)
    assert p.answers[decodes] == alone(text(0, 100), 5) and p.ended[decodes].transfer.offered is not None
    clean(world)


def test_what_was_fetched_for_another_server_does_not_overtake_a_hand_over_that_waits_for_room():
    world = World()
    p, d = world.server(1, num_pages=100, lease_share=0.3, wait_seconds=120.0), world.server(2)
    first = d.submit(text(0, 40), max_tokens=30, params=prefill(p, text(0, 40)))
    world.run()
    turn, hint = text(0, 40) + d.answers[first][:-1], d.params(first)
    p.cache.clear()
    prefill(p, text(1000, 100))
    large = p.submit(text(2000, 400), max_tokens=1, params=REMOTE_DECODE)
    world.run()
    busy = p.submit(text(3000, 60), max_tokens=120)
    p.turn()
    small = p.submit(turn, max_tokens=1, params=REMOTE_DECODE | hint)
    for _ in range(60):
        p.turn()
        d.turn()
    assert busy not in p.ended and small not in p.ended
    assert [request.id for request in p.scheduler.state.transfers.ready] == [small]
    world.run()
    world.pass_time(31)
    assert large in p.ended and small not in p.ended
    world.pass_time(31)
    assert p.ended[small].transfer.offered is not None and p.scheduler.state.counters.external_hits == len(turn)
    clean(world)


def test_hand_overs_without_room_wait_beside_the_queue_and_go_in_order():
    world = World()
    p, d = world.server(1, num_pages=100, lease_share=0.3), world.server(2)
    prompts = [text(200 * i, 100) for i in range(8)]
    names = [p.submit(prompt, max_tokens=1, params=REMOTE_DECODE) for prompt in prompts]
    world.run()
    assert [name in p.ended for name in names] == [True] * 3 + [False] * 5
    assert len(p.scheduler.state.waiting.kv_exports) == 5
    plain = p.submit(text(5000, 100))
    assert starts(p, plain)
    world.run()
    assert p.answers[plain] == alone(text(5000, 100))
    small = p.submit(text(5500, 5), max_tokens=1, params=REMOTE_DECODE)
    for place in range(8):
        # whoever has the reference reads it: one place is free, and the next in turn has it
        waiting = [name for name in [*names, small] if name not in p.ended]
        name = d.submit(prompts[place], params=p.params(names[place]))
        world.run()
        assert d.answers[name] == alone(prompts[place])
        assert not waiting or waiting[0] in p.ended
    assert d.scheduler.state.counters.external_hits == 800 and small in p.ended
    assert [name for name in p.ended if name != plain] == [*names, small]
    clean(world)


def test_a_hand_over_that_finds_no_room_in_time_is_refused():
    world = World()
    p = world.server(1, num_pages=100, lease_share=0.3)
    names = [p.submit(text(200 * i, 100), max_tokens=1, params=REMOTE_DECODE) for i in range(9)]
    world.run()
    world.pass_time(29.5)
    assert list(p.ended) == names[:3]
    world.pass_time(1)
    # the leases of the first three have run out, and three others have their place; for the last three none has come
    assert set(p.ended) == set(names)
    assert all(p.ended[name].transfer.offered is not None for name in names[:6])
    for name in names[6:]:
        request = p.ended[name]
        assert request.outcome.finish_reason == "error" and request.outcome.refused and not p.answers[name]
        assert "no room for this prompt for 30 s" in request.outcome.failure
    counters = p.scheduler.state.counters
    assert counters.refused_kv_exports == {"total": 0, "client": 0, "timeout": 3}
    clean(world)


def test_a_hand_over_whose_leases_have_ended_waits_for_a_slot_like_any_other():
    world = World()
    p = world.server(1, num_pages=100, lease_share=0.1, max_num_seqs=1, lease_seconds=8.0)
    prefill(p, text(0, 100))
    second = p.submit(text(200, 100), max_tokens=1, params=REMOTE_DECODE)
    world.run()
    assert p.scheduler.state.waiting.kv_exports.head is not None
    busy = p.submit(text(400, 60), max_tokens=60)
    for _ in range(20):
        p.turn()
        world.clock.advance(0.5)
    assert busy not in p.ended and second not in p.ended and not p.producer.leases.num_pages
    world.run()
    assert p.ended[second].transfer.offered is not None
    assert p.scheduler.state.counters.refused_kv_exports["timeout"] == 0
    clean(world)


def test_an_answer_that_has_begun_is_refused_as_well():
    """A hand-over that decodes is preempted, comes back without its place among the leases, and waits in vain."""
    world = World()
    p = world.server(1, num_pages=60, lease_share=0.3, max_num_seqs=4, wait_seconds=5.0)
    oldest = p.submit(text(0, 500), max_tokens=300)
    for _ in range(4):
        p.turn()
    decoding = p.submit(text(1000, 200), max_tokens=150, params=REMOTE_DECODE)
    while not p.scheduler.state.counters.preemptions:
        assert p.turn()
    begun = list(p.answers[decoding])
    assert begun
    other = p.submit(text(2000, 60), max_tokens=1, params=REMOTE_DECODE, priority=-1)
    while other not in p.ended:
        assert p.turn()
    let_all_end(world, oldest, decoding)
    assert p.ended[decoding].outcome.refused and p.answers[decoding] == begun
    assert p.answers[oldest] == alone(text(0, 500), 300)
    clean(world)


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_leases_are_bounded_per_client():
    world = World()
    p, d = world.server(1, max_leases_per_client=3, num_pages=1000), world.server(2)
    prompts = [text(200 * i, 60) for i in range(9)]
    first = p.submit(prompts[0], max_tokens=1, params=REMOTE_DECODE, client="a")
    world.run()
    for prompt in prompts[1:3]:
        p.submit(prompt, max_tokens=1, params=REMOTE_DECODE, client="a")
    with pytest.raises(QueueFull, match=r"3 prompts of this client .* \(max_leases_per_client 3\)"):
        p.submit(prompts[3], max_tokens=1, params=REMOTE_DECODE, client="a")
    world.run()
    with pytest.raises(QueueFull, match="max_leases_per_client"):
        p.submit(prompts[3], max_tokens=1, params=REMOTE_DECODE, client="a")
    for client in ("b", ""):
        for prompt in prompts[3:6]:
            p.submit(prompt, max_tokens=1, params=REMOTE_DECODE, client=client)
    p.submit(prompts[3], client="a")
    world.run()
    d.submit(prompts[0], params=p.params(first))
    world.run()
    left = p.submit(prompts[7], max_tokens=1, params=REMOTE_DECODE, client="a")
    p.scheduler.abort(RequestId(left))
    p.submit(prompts[8], max_tokens=1, params=REMOTE_DECODE, client="a")
    assert p.scheduler.state.counters.refused_kv_exports == {"total": 0, "client": 2, "timeout": 0}
    clean(world)


def test_leases_are_bounded_in_all():
    world = World()
    p = world.server(1, max_leases=4, max_leases_per_client=3, num_pages=1000)
    for index in range(4):
        p.submit(text(200 * index, 60), max_tokens=1, params=REMOTE_DECODE, client=str(index))
        if index == 1:
            world.run()
    with pytest.raises(QueueFull, match=r"4 prompts are held .* \(max_leases 4\)"):
        p.submit(text(1000, 60), max_tokens=1, params=REMOTE_DECODE, client="5")
    assert p.scheduler.state.counters.refused_kv_exports["total"] == 1
    plain = p.submit(text(1000, 60))
    world.run()
    assert plain in p.ended and num_active(p.producer.leases) == 4
    world.pass_time(31)
    prefill(p, text(1000, 60))
    clean(world)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [({"max_leases_per_client": 2}, "max_leases_per_client 2"), ({"max_leases": 2}, "max_leases 2")],
)
def test_more_at_once_than_ever_may_be_is_a_wrong_request(bounds, said):
    world = World()
    p = world.server(1, **bounds)
    made = [p.spec(text(100 * i, 30), max_tokens=1, params=REMOTE_DECODE) for i in range(3)]
    with pytest.raises(InvalidRequest, match=said) as raised:
        p.scheduler.submit_together([[spec] for spec in made])
    assert raised.value.param == "prompt" and not p.scheduler.state.requests
    p.scheduler.submit_together([[spec] for spec in made[:2]])
    with pytest.raises(QueueFull, match=said):
        p.scheduler.submit_together([made[2:]])
    assert len(p.scheduler.state.requests) == 2


def test_what_is_asked_for_by_content_counts_against_the_bound_of_all():
    world = World()
    p, d = world.server(1, num_pages=1000), world.server(2, num_pages=1000, max_leases=2)
    prompt = TEXT[:130]
    first = d.submit(prompt, max_tokens=100, params=prefill(p, prompt))
    world.run()
    turn = prompt + d.answers[first] + text(500, 30)
    hint = d.params(first)
    heard = []
    events = d.port.events
    d.port.events = lambda: [heard.append(event) or event for event in events()]
    for index in range(2):
        d.submit(text(1000 + 200 * index, 60), max_tokens=1, params=REMOTE_DECODE)
    world.run()
    before = p.scheduler.state.counters.computed_prompt_tokens
    prefill(p, turn, hint=hint["cairn_decode_hint"])
    assert any(isinstance(event, LookupRequest) for event in heard)
    assert p.scheduler.state.counters.external_hits == 0 and num_active(d.producer.leases) == 2
    assert p.scheduler.state.counters.computed_prompt_tokens - before == len(turn) - 130
    world.pass_time(31)
    p.cache.clear()
    prefill(p, turn, hint=hint["cairn_decode_hint"])
    assert p.scheduler.state.counters.external_hits == 229
    clean(world)
