"""Hand-overs of a model with attention of limited reach: what is leased and read of it is what D needs to go on, and
the answers are those of one server."""

import numpy as np
import pytest
from pd_world import World, prefill

from tiers import first_of

WINDOW, CHUNK = 40, 64
TEXT = np.random.default_rng(3).integers(0, 50, 3000).tolist()
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, CHUNK - 1, CHUNK, CHUNK + 1, 400, 2001)
BLOCKS = ((16, 16), (16, 64), (64, 16), (32, 16))


def pair(blocks=(16, 16), seed=0, **arguments):
    world = World(seed, limited=True)
    return world, *(world.server(port, block_size=size, **arguments) for port, size in zip((1, 2), blocks, strict=True))


def needed(server, length: int) -> int:
    """Pages of keys and values that going on at token `length` takes, counted by the tokens in them."""
    first = (0, max(0, length - WINDOW + 1), length // CHUNK * CHUNK)
    sizes = [group.tokens_per_page for group in server.layout.groups]
    return sum(len({token // size for token in range(start, length)}) for start, size in zip(first, sizes, strict=True))


# Each length once, each pair of block sizes at least twice.
CASES = first_of(
    [(length, BLOCKS[index % 4]) for index, length in enumerate(LENGTHS[:-1])] + [(2001, (16, 64))], LENGTHS, BLOCKS
)


@pytest.mark.parametrize(("length", "blocks"), CASES, ids=str)
def test_a_prompt_is_hit_whole_and_costs_its_windows_alone(length, blocks):
    world, p, d = pair(blocks)
    prompt = TEXT[:length]
    params = prefill(p, prompt)
    assert p.producer.leases.num_pages == needed(p, length) + p.layout.pages_per_checkpoint
    assert (
        sum(map(len, params["remote_block_ids"])) == p.producer.leases.num_pages
        and len(params["remote_block_ids"]) == 4
    )
    held = d.cache.pool.num_free
    name = d.submit(prompt, max_tokens=60 if length < 500 else 3, params=params)
    d.turn()
    (fetch,) = d.scheduler.state.transfers.fetching.values()
    assert sum(len(part.pages) for part in fetch.target.pages) == needed(d, length)
    # besides them that of the next token, where nothing before it is within reach
    assert held - d.cache.pool.num_free - needed(d, length) - d.layout.pages_per_checkpoint in (0, length % CHUNK == 0)
    world.run()
    assert d.answers[name] == world.alone(prompt, 60 if length < 500 else 3)
    counters = d.scheduler.state.counters
    assert (counters.computed_prompt_tokens, counters.external_hits) == (0, length)
    if blocks[0] == blocks[1]:
        moved = [move.remote_page for move in d.link.moved]
        assert len(moved) == len(set(moved)) == needed(p, length) + p.layout.pages_per_checkpoint
    # the window came into the tree with the state
    passes = d.runner.forward_passes
    again = d.submit(prompt, max_tokens=1)
    world.run()
    assert d.answers[again] == d.answers[name][:1] and d.runner.forward_passes == passes
    longer = d.submit([*prompt, *TEXT[2500:2530]], max_tokens=1)
    world.run()
    assert d.ended[longer].stats.first_sequence.hit == length
    assert d.answers[longer] == world.alone([*prompt, *TEXT[2500:2530]], 1)
    for server in (p, d):
        server.assert_clean()


@pytest.mark.parametrize("known", [10, 48, 79, 100, 129])
@pytest.mark.parametrize("blocks", BLOCKS[:3], ids=str)
def test_what_is_here_already_is_not_read_again(known, blocks):
    """The window at the prompt's end begins before, within and behind what D knows."""
    world, p, d = pair(blocks)
    prompt = TEXT[:130]
    d.submit(prompt[:known], max_tokens=1)
    world.run()
    name = d.submit(prompt, max_tokens=30, params=prefill(p, prompt))
    world.run()
    assert d.answers[name] == world.alone(prompt, 30)
    assert d.scheduler.state.counters.external_hits == 130 - known
    sizes = [group.tokens_per_page for group in d.layout.groups]
    first = [max(start, known // size * size) for start, size in zip((0, 91, 128), sizes, strict=True)]
    pages = sum(-(-130 // size) - start // size for start, size in zip(first, sizes, strict=True))
    if blocks == (16, 16):
        assert len(d.link.moved) == pages + d.layout.pages_per_checkpoint
    for server in (p, d):
        server.assert_clean()


@pytest.mark.parametrize(
    ("answer", "cut", "hit"), [(100, 230, 229), (80, 220, 209), (40, 165, 130), (100, 200, 192), (60, 189, 189)]
)
@pytest.mark.parametrize("blocks", BLOCKS[:3], ids=str)
def test_the_second_turn_comes_back_for_the_answer(answer, cut, hit, blocks):
    """As much as goes on at the answer's end, or at the last mark where that is not what was sent."""
    world, p, d = pair(blocks)
    first = d.submit(TEXT[:130], max_tokens=answer, params=prefill(p, TEXT[:130]))
    world.run()
    said = d.params(first)["cairn_decode_hint"]
    turn = [*TEXT[:130], *d.answers[first], *TEXT[500:530]][:cut]
    params = prefill(p, turn, hint=said)
    sequence = p.ended[f"{p.engine_id}-r{p.count}"].stats.first_sequence
    assert (sequence.hit, p.scheduler.state.counters.external_hits) == (hit, hit - 130)
    second = d.submit(turn, max_tokens=20, params=params)
    world.run()
    assert d.answers[second] == world.alone(turn, 20)
    for server in (p, d):
        server.assert_clean()
