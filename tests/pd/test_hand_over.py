"""A prompt computed on one server and decoded on another: answers, counts and what is left behind."""

from itertools import pairwise, product

import numpy as np
import pytest
from pd_world import LAYOUT_HASH, REMOTE_DECODE, World, alone, prefill, silent

from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace
from cairn.engine.transfers.kv_transfer import parse_role
from cairn.errors import InvalidRequest
from cairn.scheduler.fetch import cancel_slow_fetch
from cairn.scheduler.kv_lookup import answer_lookup
from cairn.scheduler.peer_source import MAX_RELEASES
from cairn.step import Image
from cairn.transfer.contract import ContentName, LookupId, LookupRequest
from cairn.transfer.digest import ContentDigest
from cairn.transfer.leases import LeaseState
from cairn.types import RequestId
from doubles.hand_plans import slots_without_row
from doubles.memory_link import Fault
from tiers import first_of
from transfer.parts import num_active

TEXT = np.random.default_rng(3).integers(0, 50, 3000).tolist()
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 400)


def pair(seed=0, **arguments):
    world = World(seed)
    return world, world.server(1, **arguments), world.server(2, **arguments)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", ["auto", "align", None])
def test_the_answer_is_that_of_one_server(length, mode):
    world, p, d = pair(mode=mode)
    prompt = TEXT[:length]
    params = prefill(p, prompt)
    name = d.submit(prompt, params=params)
    world.run()
    assert d.answers[name] == alone(prompt)
    assert d.scheduler.state.counters.computed_prompt_tokens == 0
    assert d.scheduler.state.counters.external_hits == length
    for server in (p, d):
        server.assert_clean()


@pytest.mark.parametrize("length", LENGTHS)
def test_the_second_time_nothing_moves(length):
    world, p, d = pair()
    prompt = TEXT[:length]
    for _ in range(2):
        params = prefill(p, prompt)
        d.link.moved.clear()
        before = d.runner.forward_passes
        name = d.submit(prompt, max_tokens=1, params=params)
        world.run()
        assert d.answers[name] == alone(prompt, 1)
        assert d.runner.forward_passes == before
    assert not d.link.moved
    assert d.cache.counters.hits == length
    assert params["remote_prefill_cached_tokens"] == length
    p.assert_clean()
    d.assert_clean()


@pytest.mark.parametrize("known", [1, 16, 40, 64, 100, 111, 112, 127, 128, 200, 399, 400])
@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 128), (64, 16)])
def test_only_what_is_missing_moves(known, block_sizes):
    """D has computed the beginning of the prompt before; whole pages of it stay where they are."""
    world = World()
    p, d = world.server(1, block_size=block_sizes[0]), world.server(2, block_size=block_sizes[1])
    prompt = TEXT[:400]
    d.submit(prompt[:known], max_tokens=1)
    world.run()
    params = prefill(p, prompt)
    d.link.moved.clear()
    name = d.submit(prompt, params=params)
    world.run()
    assert d.answers[name] == alone(prompt)
    assert d.scheduler.state.counters.computed_prompt_tokens == known
    block = block_sizes[1]
    pages = -(-400 // block) - known // block if known < 400 else 0
    if block_sizes[0] == block and known < 400:
        state = d.layout.pages_per_checkpoint
        assert len(d.link.moved) == pages + state
        assert sum(move.num_bytes for move in d.link.moved) == (pages + state) * d.layout.page_bytes
    elif known == 400:
        assert not d.link.moved
    else:
        read = sum(move.num_bytes for move in d.link.moved)
        assert read == (400 - known // block * block) * 8 + d.layout.checkpoint_bytes
    for server in (p, d):
        server.assert_clean()


def test_many_at_once():
    world, p, d = pair(num_pages=300)
    asked = {}
    for index in range(8):
        prompt = TEXT[index * 7 : index * 7 + 90 + 11 * index]
        asked[d.submit(prompt, params=prefill(p, prompt), max_tokens=5)] = prompt
    world.run()
    for name, prompt in asked.items():
        assert d.answers[name] == alone(prompt, 5)
    assert d.scheduler.state.counters.computed_prompt_tokens == 0
    for server in (p, d):
        server.assert_clean()


def test_p_queues_above_its_share():
    """Three prompts fit under the leases; the fourth waits until one of them has been fetched."""
    world, p, d = pair(num_pages=100, lease_share=0.3)
    prompts = [TEXT[start : start + 100] for start in (0, 200, 400, 600)]
    names = [p.submit(prompt, max_tokens=1, params=dict(REMOTE_DECODE)) for prompt in prompts]
    world.run()
    assert [name in p.ended for name in names] == [True, True, True, False]
    assert p.producer.leases.num_pages == 30
    name = d.submit(prompts[0], params=p.params(names[0]))
    world.run()
    assert d.answers[name] == alone(prompts[0])
    assert names[3] in p.ended


@pytest.mark.parametrize("others", [0, 2])
def test_a_client_that_leaves_before_its_turn_lets_go_of_what_is_held_for_it(others):
    """At once, not when the lease runs out: what P holds for other servers is bounded, and prompts wait for it."""
    world, p, d = pair(max_num_seqs=1)
    running = d.submit(TEXT[:100], max_tokens=200)
    for _ in range(3):
        d.turn()
    queued = [d.submit(TEXT[1000 : 1010 + i], params=prefill(p, TEXT[1000 : 1010 + i])) for i in range(others)]
    name = d.submit(TEXT[500:900], params=prefill(p, TEXT[500:900]))
    d.scheduler.abort(RequestId(name))
    for _ in range(6):
        d.turn()
        p.turn()
    assert num_active(p.producer.leases) <= others and p.producer.leases.num_pages < p.layout.pages_for(400)
    world.run()
    assert p.scheduler.state.counters.expired_offers == 0 and p.producer.leases.num_pages == 0
    assert all(other in d.ended for other in (running, *queued))
    for server in (p, d):
        server.assert_clean()


@pytest.mark.parametrize("steps", range(12))
def test_a_client_that_leaves_at_any_moment_of_a_fetch_lets_go_of_what_is_held_for_it(steps):
    """From the queue over handshake, claim and read to the confirmation: nothing is left to run out by itself."""
    world, p, d = pair()
    name = d.submit(TEXT[:300], params=prefill(p, TEXT[:300]))
    for step in range(steps):
        (d, p)[step % 2].turn()
    d.scheduler.abort(RequestId(name))
    world.run()
    assert p.producer.leases.num_pages == p.scheduler.state.counters.expired_offers == 0
    for server in (p, d):
        server.assert_clean()


def test_a_fetch_that_gives_way_lets_go_of_what_is_held_for_it():
    """It is computed then, before a connection to P was there."""
    world, p, d = pair()
    name = d.submit(TEXT[:300], params=prefill(p, TEXT[:300]))
    d.scheduler.poll()
    assert d.scheduler.state.transfers.fetching
    world.clock.advance(1.0)
    cancel_slow_fetch(d.scheduler.state)
    world.run()
    assert d.answers[name] == alone(TEXT[:300])
    assert p.producer.leases.num_pages == p.scheduler.state.counters.expired_offers == 0
    for server in (p, d):
        server.assert_clean()


def test_what_one_server_has_claimed_another_does_not_release():
    """Not when it was sent the same reference, and refuses it; nor does P itself."""
    world, p, d = pair()
    other = world.server(3)
    params = prefill(p, TEXT[:300])
    name = d.submit(TEXT[:300], params=params)
    while not any(lease.state is LeaseState.CLAIMED for lease in p.producer.leases._active.values()):
        d.turn()
        p.turn()
    other.scheduler.release_source(parse_role(params, other.kv).source)
    p.scheduler.withdraw(params["remote_request_id"])
    for _ in range(6):
        other.turn()
        p.turn()
    assert p.producer.leases.num_pages and other.consumer.num_open == 0
    world.run()
    assert d.answers[name] == alone(TEXT[:300]) and d.scheduler.state.counters.external_hits == 300
    for server in (p, d, other):
        server.assert_clean()


def test_releases_are_bounded_and_end_by_themselves():
    """As many as may be at a time, of a server that does not answer."""
    world = World()
    d = world.server(2)
    source = parse_role(silent(1), d.kv).source
    for _ in range(MAX_RELEASES + 50):
        d.scheduler.release_source(source)
    d.turn()
    assert d.consumer.num_open == len(d.scheduler.state.transfers.peers._releases) == MAX_RELEASES
    world.pass_time(10.0)
    assert d.consumer.num_open == len(d.scheduler.state.transfers.peers._releases) == 0


def test_a_prompt_larger_than_the_share_goes_alone():
    world, p, d = pair(num_pages=100, lease_share=0.1)
    prompt = TEXT[:400]
    name = d.submit(prompt, params=prefill(p, prompt))
    world.run()
    assert d.answers[name] == alone(prompt)
    p.assert_clean()


def test_a_prompt_that_cannot_be_handed_over_is_refused():
    world = World()
    p = world.server(1, num_pages=20)
    with pytest.raises(InvalidRequest, match="together"):
        p.submit(TEXT[:300], max_tokens=1, params=REMOTE_DECODE)


@pytest.mark.parametrize("max_tokens", [2, 5, 40])
def test_p_may_decode_as_well(max_tokens):
    """A proxy that forgets `max_tokens: 1` gets the prompt handed over all the same."""
    world, p, d = pair(num_pages=60)
    prompt = TEXT[:100]
    name = p.submit(prompt, max_tokens=max_tokens, params=REMOTE_DECODE)
    others = [p.submit(TEXT[start : start + 150], max_tokens=60) for start in (300, 600, 900)]
    world.run()
    assert p.answers[name] == alone(prompt, max_tokens)
    again = d.submit(prompt, params=p.params(name))
    world.run()
    assert d.answers[again] == alone(prompt)
    assert d.scheduler.state.counters.external_hits == 100
    assert all(other in p.ended for other in others)
    for server in (p, d):
        server.assert_clean()


@pytest.mark.parametrize("mode", ["auto", None])
def test_a_state_for_another_server_is_not_kept_by_a_request_that_was_preempted(mode):
    """What it pinned would be missing to the one that it gave way to, which may have been promised the whole pool."""
    world, p, d = pair(num_pages=24, lease_share=1.0, mode=mode)
    oldest = p.submit(TEXT[500:520], max_tokens=340)
    prompts = [TEXT[start : start + 60] for start in (0, 100)]
    names = [p.submit(prompt, max_tokens=100, params=REMOTE_DECODE) for prompt in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        world.run(turns=2000)
        assert p.answers[name] == alone(prompt, 100)
        again = d.submit(prompt, params=p.params(name))
        world.run(turns=2000)
        assert d.answers[again] == alone(prompt)
    assert p.answers[oldest] == alone(TEXT[500:520], 340)
    assert p.scheduler.state.counters.preemptions >= 1
    assert d.scheduler.state.counters.external_hits == 120
    for server in (p, d):
        server.assert_clean()


def hint(server, name) -> dict:
    """What the answer says of where its pages are."""
    return server.params(name)["cairn_decode_hint"]


@pytest.mark.parametrize(
    ("block_sizes", "answer", "ends"),
    first_of(
        [*product([(16, 64)], (1, 2, 3, 64, 200), (True, False)), ((16, 16), 100, True), ((128, 16), 100, False)],
        [(16, 16), (16, 64), (128, 16)],
        (1, 2, 3, 64, 100, 200),
        (True, False),
    ),
)
def test_the_second_turn_comes_back_for_the_answer(answer, block_sizes, ends):
    """To the very token, or to the last multiple of 64 where the hint does not say where the answer ended."""
    world = World()
    p, d = world.server(1, block_size=block_sizes[0]), world.server(2, block_size=block_sizes[1])
    prompt = TEXT[:130]
    first = d.submit(prompt, max_tokens=answer, params=prefill(p, prompt))
    world.run()
    turn = prompt + d.answers[first] + TEXT[500:530]
    said = hint(d, first)
    computed = 130 + answer - 1
    assert said == {"engine": d.engine_id, "host": "127.0.0.1", "port": 2, "num_tokens": computed}
    if not ends:
        del said["num_tokens"]
    p.link.moved.clear()
    before = p.scheduler.state.counters.computed_prompt_tokens
    params = prefill(p, turn, hint=said)
    reached = max(130, computed if ends else computed // 64 * 64)
    assert p.scheduler.state.counters.external_hits == reached - 130
    assert p.scheduler.state.counters.computed_prompt_tokens - before == len(turn) - reached
    read = sum(move.num_bytes for move in p.link.moved)
    if block_sizes[0] == block_sizes[1]:
        new_pages = -(-reached // block_sizes[0]) - 130 // block_sizes[0]
        assert read <= (new_pages + p.layout.pages_per_checkpoint) * p.layout.page_bytes
    d.link.moved.clear()
    second = d.submit(turn, params=params)
    world.run()
    assert d.answers[second] == alone(turn)
    missing = -(-len(turn) // block_sizes[1]) - computed // block_sizes[1]
    if block_sizes[0] == block_sizes[1]:
        moved = sum(move.num_bytes for move in d.link.moved)
        assert moved <= (missing + d.layout.pages_per_checkpoint) * d.layout.page_bytes
    for server in (p, d):
        server.assert_clean()


def test_what_is_asked_for_by_content_leaves_those_that_run_their_share():
    """A prompt larger than the share runs alone; what it begins with is asked for meanwhile. The two share pages, so
    that their leases could name more pages than there are."""
    world, p, d = pair(num_pages=60, budget=68)
    prompt = TEXT[:300]
    first = d.submit(prompt, max_tokens=1, params=prefill(p, prompt))
    world.run()
    said = hint(d, first)
    long = prompt + TEXT[300:800]
    world.fabric.descriptors_per_poll = 1
    name = d.submit(long, max_tokens=1, params=REMOTE_DECODE)
    d.turn()
    p.cache.clear()
    again = p.submit(TEXT[:320], max_tokens=1, params=REMOTE_DECODE | {"cairn_decode_hint": said})
    for _ in range(10):
        world.run()
    assert name in d.ended and again in p.ended
    assert d.producer.leases.num_pages == 50 + 3
    assert p.answers[again] == alone(TEXT[:320], 1)


def test_a_sequence_larger_than_the_share_is_leased_to_whoever_asks_for_its_content_while_nothing_else_is():
    world, p, d = pair(num_pages=100, lease_share=0.1)
    prompt = TEXT[:300]
    first = d.submit(prompt, max_tokens=1, params=prefill(p, prompt))
    world.run()
    p.cache.clear()
    prefill(p, TEXT[:320], hint=hint(d, first))
    assert p.scheduler.state.counters.external_hits == 300
    world.pass_time(31)
    for server in (p, d):
        server.assert_clean()


def test_a_prompt_that_waits_for_the_share_with_its_pages_fetched_is_not_overtaken():
    world, p, d = pair(num_pages=100, lease_share=0.3, wait_seconds=120.0)
    first = d.submit(TEXT[:200], max_tokens=1, params=prefill(p, TEXT[:200]))
    world.run()
    p.cache.clear()
    prefill(p, TEXT[1000:1100])
    long = p.submit(TEXT[:310], max_tokens=1, params=REMOTE_DECODE | {"cairn_decode_hint": hint(d, first)})
    world.run()
    assert [request.id for request in p.scheduler.state.transfers.ready] == [long]
    short = p.submit(TEXT[2000:2100], max_tokens=1, params=REMOTE_DECODE)
    world.run()
    assert long not in p.ended and short not in p.ended
    world.pass_time(31)
    assert p.ended[long].transfer.offered is not None and p.answers[long] == alone(TEXT[:310], 1)
    world.pass_time(31)
    assert p.answers[short] == alone(TEXT[2000:2100], 1)
    world.pass_time(31)
    p.assert_clean()


def test_a_hint_that_leads_nowhere_changes_nothing():
    world, p, d = pair()
    prompt = TEXT[:300]
    first = d.submit(prompt[:130], max_tokens=100, params=prefill(p, prompt[:130]))
    world.run()
    turn = prompt[:130] + d.answers[first] + TEXT[500:530]
    d.cache.clear()
    params = prefill(p, turn, hint=hint(d, first))
    assert p.scheduler.state.counters.external_hits == 0
    assert p.scheduler.state.counters.failed_pulls == 0
    assert params["remote_prefill_cached_tokens"] == 130
    d.die()
    world.fabric.inject(d.engine_id, Fault.DEAD)
    name = p.submit(TEXT[1000:1300], max_tokens=1, params=REMOTE_DECODE | {"cairn_decode_hint": hint(d, first)})
    for _ in range(20):
        world.clock.advance(0.5)
        world.run()
    assert name in p.ended


def test_an_answer_of_another_salt_is_not_found():
    world, p, d = pair()
    salted = Namespace(cache_salt="a")
    prompt = TEXT[:130]
    first = d.submit(prompt, max_tokens=100, params=prefill(p, prompt, namespace=salted), namespace=salted)
    world.run()
    turn = prompt + d.answers[first] + TEXT[500:530]
    prefill(p, turn, hint=hint(d, first))
    assert p.scheduler.state.counters.external_hits == 0
    prefill(p, turn, hint=hint(d, first), namespace=salted)
    assert p.scheduler.state.counters.external_hits > 0


def test_content_that_is_named_with_another_adapter_than_its_digests_is_not_offered():
    """Only a peer that lies does so."""
    world, p, d = pair()
    name = d.submit(TEXT[:130], max_tokens=100, params=prefill(p, TEXT[:130]))
    world.run()
    digest, offered = ContentDigest(LAYOUT_HASH, ContentName()), []
    digest.append(np.array(TEXT[:130] + d.answers[name][:-1]))
    d.port.answer_lookup = lambda lookup, offer: offered.append(None if offer is None else len(offer.keys))
    for adapter in ("", "another"):
        answer_lookup(d.scheduler.state, LookupRequest(LookupId(1), adapter, digest.marks, 0, digest.of()))
    assert offered == [229, None]


def test_the_reason_says_that_another_server_failed():
    world, p, d = pair()
    prompt = TEXT[:100]
    params = prefill(p, prompt)
    p.die()
    world.fabric.inject(p.engine_id, Fault.DEAD)
    name = d.submit(prompt, params=params)
    for _ in range(20):
        world.clock.advance(0.5)
        world.run()
    assert d.answers[name] == alone(prompt)
    assert d.ended[name].stats.first_sequence.reason is Reason.REMOTE_FAILED
    assert set(d.ended[name].stats.first_sequence.lost) == set(d.cache.counters.lost) == {Reason.REMOTE_FAILED}
    assert d.cache.counters.reasons[Reason.REMOTE_FAILED] == 1


def test_less_comes_back_than_keys_and_values_are_there():
    """P knows 200 tokens of the turn and has a state at 128; D gives the state at 192, and no page that P lacks. Nor
    does P know where the answer ended."""
    world = World()
    p, d = world.server(1, block_size=128, mode="align"), world.server(2)
    prompt = TEXT[:130]
    first = d.submit(prompt, max_tokens=100, params=prefill(p, prompt))
    world.run()
    turn = prompt + d.answers[first] + TEXT[500:540]
    # what follows is not the turn: the page of token 200 belongs to another path as well
    p.submit([*turn[:200], 1, 2, 3], max_tokens=1)
    world.run()
    said = hint(d, first)
    del said["num_tokens"]
    name = p.submit(turn, max_tokens=3, params=REMOTE_DECODE | {"cairn_decode_hint": said})
    world.run()
    assert p.ended[name].stats.first_sequence.hit == 192
    assert p.ended[name].stats.first_sequence.matched == 200
    assert p.answers[name] == alone(turn, 3)
    second = d.submit(turn, params=p.params(name))
    world.run()
    assert d.answers[second] == alone(turn)
    for server in (p, d):
        server.assert_clean()


def test_an_image_is_compared_by_its_digest_and_not_by_its_numbers():
    """The same key tokens, which are numbers of one process alone, stand for the same image or for another one."""
    world, p, d = pair()
    prompt = [*TEXT[:20], *range(-1, -41, -1), *TEXT[60:100]]

    def image(digest: bytes) -> Image:
        return Image(20, 40, (1, 8, 20), digest * 32, 1, 1, bytes(3))

    params = prefill(p, prompt, images=(image(b"a"),))
    other = d.submit(prompt, params=params, images=(image(b"b"),))
    world.run()
    assert d.ended[other].transfer.remote_failed and d.scheduler.state.counters.failed_pulls == 1
    d.cache.clear()
    params = prefill(p, prompt, images=(image(b"a"),))
    same = d.submit(prompt, max_tokens=100, params=params, images=(image(b"a"),))
    world.run()
    assert d.scheduler.state.counters.external_hits == 100
    # the second turn finds the answer behind the image
    turn = prompt + d.answers[same] + TEXT[500:530]
    prefill(p, turn, images=(image(b"a"),), hint=hint(d, same))
    assert p.scheduler.state.counters.external_hits == 99


def turn_until(done, *servers) -> None:
    for _ in range(400):
        if done():
            return
        for server in servers:
            server.turn()
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_prompt_that_came_whole_is_drawn_apart_from_those_that_run(ahead):
    """Its first token comes of a step without a forward pass, and no two such steps come one after the other."""
    world, p, d = pair(max_num_seqs=8, ahead=ahead, num_pages=800)
    plans, launch = [], d.runner.launch
    d.runner.launch = lambda plan: plans.append(plan) or launch(plan)
    busy = d.submit(TEXT[500:560], max_tokens=150)
    turn_until(lambda: len(d.answers[busy]) > 3, d)
    prompts = [TEXT[7 * index : 7 * index + 90] for index in range(5)]
    handed = [p.submit(prompt, max_tokens=1, params=dict(REMOTE_DECODE)) for prompt in prompts]
    turn_until(lambda: all(name in p.ended for name in handed), p)
    names = []
    for prompt, name in zip(prompts, handed, strict=True):
        # one turn apart, and so they come
        names.append(d.submit(prompt, max_tokens=5, params=p.params(name)))
        d.turn()
        p.turn()
    turn_until(lambda: all(d.answers[name] for name in names), p, d)
    assert busy not in d.ended
    drawn = [index for index, plan in enumerate(plans) if slots_without_row(plan)]
    assert sum(len(slots_without_row(plans[index])) for index in drawn) == len(names)
    assert len(drawn) > 1 and not plans[drawn[0]].num_seqs
    assert all(plan.num_seqs or after.num_seqs for plan, after in pairwise(plans[drawn[0] :]))
    world.run()
    for name, prompt in zip(names, prompts, strict=True):
        assert d.answers[name] == alone(prompt, 5)
    assert d.answers[busy] == alone(TEXT[500:560], 150)
    for server in (p, d):
        server.assert_clean()
