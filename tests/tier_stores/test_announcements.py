"""What KV events say of the tiers: each block where it is, by medium, and not where it is no more."""

import pytest
from tier_world import Router, TierWorld, blocks_of

from cairn.cache.events import BlockNames, block_hash, root_digest
from cairn.cache.sequence_blocks import Namespace

PROMPT = [7 * i % 50 for i in range(200)]
BLOCKS_OF_CHUNK = 4


def other(number: int, length: int = 300) -> list[int]:
    return [(number * 31 + 3 * i) % 50 for i in range(length)]


@pytest.mark.parametrize("medium", ["CPU", "DISK"])
def test_a_tier_announces_the_whole_chunks_that_it_has(medium, tmp_path):
    world = TierWorld(**({"host_pages": 4000} if medium == "CPU" else {"folder": tmp_path}))
    router = Router()
    world.answer(PROMPT)
    assert router.follow(world).blocks(medium, PROMPT) == 200 // 64 * BLOCKS_OF_CHUNK
    assert router.blocks("GPU", PROMPT) == 200 // 16
    world.driver.cache.clear()
    # nothing of the pool is left, and the prompt still belongs here
    assert router.follow(world).blocks("GPU", PROMPT) == 0 and router.blocks(medium, PROMPT) == 12
    longer = PROMPT + other(2, 100)
    world.answer(longer)
    assert router.follow(world).blocks(medium, longer) == 300 // 64 * BLOCKS_OF_CHUNK


def test_what_a_tier_drops_is_no_longer_announced():
    world, router = TierWorld(host_pages=60, num_pages=200), Router()
    for number in range(6):
        world.answer(other(number))
        # drops are told when the next path is looked at, or between steps
        world.demoter.poll()
        router.follow(world)
        store = world.stores[0]
        chunks_here = [entry for entry in store._index if entry.facts.tail is None]
        assert len(router.has["CPU"]) == len(chunks_here) * BLOCKS_OF_CHUNK
    assert router.blocks("CPU", other(5)) > 0 and not all(router.blocks("CPU", other(each)) for each in range(6))


def test_after_a_restart_a_path_is_announced_once_it_has_been_used(tmp_path):
    TierWorld(folder=tmp_path).answer(PROMPT)
    world, router = TierWorld(folder=tmp_path), Router()
    world.demoter.poll()
    assert router.follow(world).blocks("DISK", PROMPT) == 0
    world.answer(PROMPT)
    assert world.stores[0].counters.hits == 1
    assert router.follow(world).blocks("DISK", PROMPT) == 12


def test_salted_prompts_are_announced_nowhere():
    world = TierWorld(host_pages=4000)
    world.answer(PROMPT, namespace=Namespace(cache_salt="secret"))
    assert len(world.stores[0]._index) and not world.events


def test_both_tiers_announce_for_themselves(tmp_path):
    world, router = TierWorld(host_pages=60, num_pages=200, folder=tmp_path), Router()
    for number in range(6):
        world.answer(other(number))
    world.demoter.poll()
    router.follow(world)
    assert all(router.blocks("DISK", other(number)) == 16 for number in range(6))
    assert not all(router.blocks("CPU", other(number)) for number in range(6))


def test_a_block_of_two_chunks_stays_until_both_are_gone():
    world, router = TierWorld(host_pages=4000), Router()
    fork = [*PROMPT[:56], *other(3, 8)]
    world.answer(PROMPT[:64])
    world.answer(fork)
    assert router.follow(world).blocks("CPU", PROMPT) == router.blocks("CPU", fork) == 4
    store = world.stores[0]
    (first, second) = [entry.facts.key for entry in store._index if entry.facts.tail is None]
    for key, others in ((first, second), (second, None)):
        for entry in [each for each in store._index if each.facts.parent == key]:
            store._index.remove(entry.facts.key)
        assert store._index.get(key) is None
        world.demoter.poll()
        assert router.follow(world).blocks("CPU", fork) == (4 if others else 0)
    assert router.blocks("CPU", PROMPT) == 0


def test_names_are_those_of_the_pool():
    world, router = TierWorld(host_pages=4000), Router()
    world.answer(PROMPT)
    router.follow(world)
    assert router.has["CPU"] <= router.has["GPU"]
    chain = BlockNames(16).chain(root_digest(Namespace()), b"".join(blocks_of(PROMPT, 16)))
    assert {block_hash(digest) for digest in chain} <= router.has["GPU"]
