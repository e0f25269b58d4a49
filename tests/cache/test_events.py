"""What routers are told, held against the tree after every operation, and against what a lookup really hits."""

import os
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from simulation import PLAIN, Simulation
from test_state_machine import COMMON, PICK, SEGMENTS, CacheMachine

from cairn.cache.checkpoint import Kind, Origin
from cairn.cache.events import (
    AllBlocksCleared,
    BlockEvents,
    BlockRemoved,
    BlockStored,
    Event,
    KeyName,
    block_hash,
    next_digest,
    root_digest,
)
from cairn.cache.eviction import LeastRecentlyUsed
from cairn.cache.placement import CheckpointPoint, placement_for
from cairn.cache.prefix_cache import GHOST_FACTOR, PrefixCache
from cairn.cache.sequence_blocks import Namespace

Announced = dict[int, tuple[int, ...]]
"""Block hash -> all tokens of the path up to the block's end."""


@dataclass
class Router:
    """A consumer that believes what it is told and checks that it can be true."""

    paths: Announced = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def receive(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case BlockStored(hashes, parent, tokens, size):
                assert hashes and len(tokens) == size * len(hashes)
                path = self.paths[parent] if parent is not None else ()
                for index, name in enumerate(hashes):
                    path += tokens[index * size : (index + 1) * size]
                    assert name not in self.paths, "stored twice"
                    self.paths[name] = path
            case BlockRemoved(hashes):
                assert hashes
                for name in hashes:
                    del self.paths[name]
            case AllBlocksCleared():
                assert not self.paths


def observe(sim: Simulation, ghost_factor: int = GHOST_FACTOR) -> tuple[Router, BlockEvents]:
    """Put an observer under a cache that has not been used yet."""
    router, policy, layout, num_pages = Router(), sim.cache.policy, sim.cache.layout, sim.cache.pool.num_pages
    events = BlockEvents(layout.block_size, router.receive, policy.exact, layout.state_bytes == 0)
    sim.cache = PrefixCache(layout, num_pages, replace(policy, eviction=LeastRecentlyUsed()), sim.clock)
    sim.cache.observe(events)
    sim.cache.tree._max_ghost_tokens = ghost_factor * num_pages * layout.block_size
    return router, events


def anchors(sim: Simulation) -> list[tuple[Namespace, tuple[int, ...]]]:
    """From the tree alone: every path that some later prompt can resume at its end."""
    found, exact = [], sim.cache.policy.exact
    for namespace, root in sim.cache.tree.roots.items():
        stack = [(child, ()) for child in root.children]
        while stack:
            node, above = stack.pop()
            path = above + tuple(node.keys().tolist())
            if sim.cache.layout.state_bytes == 0:
                hit = node.pages is not None and (node.decode_by is None or not exact)
            else:
                hit = node.checkpoint is not None and (node.checkpoint.origin is not Origin.DECODE or not exact)
            if hit and namespace.cache_salt is None:
                found.append((namespace, path))
            stack += [(child, path) for child in node.children]
    return found


def expected(sim: Simulation) -> Announced:
    """The announced blocks, computed from scratch."""
    size = sim.cache.layout.block_size
    blocks: Announced = {}
    for namespace, path in anchors(sim):
        digest = root_digest(namespace)
        for end in range(size, len(path) + 1, size):
            tokens = path[end - size : end]
            if min(tokens) < 0:
                break
            digest = sha256(digest + b"".join(token.to_bytes(8, "little") for token in tokens)).digest()
            blocks[int(np.frombuffer(digest[:8], ">i8")[0])] = path[:end]
    return blocks


def hits(sim: Simulation, namespace: Namespace, keys: tuple[int, ...]) -> int:
    lease = sim.cache.lookup(namespace, np.array(keys, np.int64), "a router's next request")
    sim.cache.release(lease)
    return lease.hit


class EventsMachine(CacheMachine):
    """The cache's own machine with a router behind it, and two more kinds of prompt."""

    @initialize(
        mode=st.sampled_from(["auto", "auto", "align", "all", "junction"]),
        lru=st.booleans(),
        exact=st.booleans(),
        num_pages=st.sampled_from([8, 40, 90, 400]),
        block_size=st.sampled_from([1, 4, 16]),
        state_bytes=st.sampled_from([0, 100, 300]),
    )
    def build(self, **arguments) -> None:
        super().build(**arguments)
        self.router, self.observer = observe(self.sim)

    @precondition(lambda self: len(self.sim.requests) < 4)
    @rule(part=PICK, follow=PICK, image=st.integers(0, 70))
    def start_with_an_image(self, part: int, follow: int, image: int) -> None:
        before, after = SEGMENTS[part % len(SEGMENTS)], SEGMENTS[follow % len(SEGMENTS)]
        prompt = before[: image % 7] + (-5, -5, -6)[: image % 4] + after
        self.count += 1
        self.sim.start(f"r{self.count}", prompt)

    @precondition(lambda self: len(self.sim.requests) < 4)
    @rule(part=PICK)
    def start_with_an_adapter(self, part: int) -> None:
        self.count += 1
        self.sim.start(f"r{self.count}", SEGMENTS[part % len(SEGMENTS)], Namespace(adapter="a"))

    @invariant()
    def router_knows_what_the_tree_holds(self) -> None:
        if hasattr(self, "sim"):
            assert self.router.paths == expected(self.sim)
            assert self.observer.num_blocks == len(self.router.paths)

    @precondition(lambda self: len(self.sim.requests) < 4)
    @rule()
    def every_anchor_hits(self) -> None:
        stateless = self.sim.cache.layout.state_bytes == 0
        for namespace, path in anchors(self.sim):
            prompt = (*path, 10**6) if stateless else path
            assert hits(self.sim, namespace, prompt) >= len(path)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "sim"):
            assert self.router.paths == {} and self.observer.num_blocks == 0
            if self.router.events:
                assert self.router.events[-1] == AllBlocksCleared()
            assert not self.observer._live.keys() - self.sim.cache.tree.roots.values()


TestEventsMachine = EventsMachine.TestCase
TestEventsMachine.settings = settings(max_examples=15, stateful_step_count=50, **COMMON)


@pytest.mark.more
def test_more_steps() -> None:
    run_state_machine_as_test(EventsMachine, settings=settings(TestEventsMachine.settings, max_examples=70))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_more_steps() -> None:
    examples = int(os.environ.get("CAIRN_LONG_EXAMPLES", "5000"))
    run_state_machine_as_test(EventsMachine, settings=settings(max_examples=examples, stateful_step_count=80, **COMMON))


# -- examples ----------------------------------------------------------------------------------------------------------


def small(num_pages: int = 200, exact: bool = False, **layout: int) -> tuple[Simulation, Router]:
    sim = Simulation.build(num_pages, placement_for("junction", 4, False), LeastRecentlyUsed(), exact, **layout)
    return sim, observe(sim)[0]


def committed(sim: Simulation, prompt: tuple[int, ...], *kept: int, namespace: Namespace = PLAIN) -> None:
    """A request that computes `prompt` and keeps checkpoints at `kept`."""
    request = sim.start("r", prompt, namespace)
    sim._extend(request, len(prompt))
    for position in range(request.lease.kv_write_from, len(prompt)):
        sim._write(request, position)
    for position in kept:
        assert sim._fill(request, CheckpointPoint(position, Kind.PROMPT_END))
    sim._commit(request, len(prompt), list(kept))
    sim.apply()
    sim.end(request)


def chain(*blocks: tuple[int, ...], namespace: Namespace = PLAIN) -> tuple[int, ...]:
    digest, hashes = root_digest(namespace), []
    for block in blocks:
        digest = next_digest(digest, np.array(block, np.int64).tobytes())
        hashes.append(block_hash(digest))
    return tuple(hashes)


A, B, C, D = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16)


def test_full_blocks_up_to_the_checkpoint_and_none_beyond():
    sim, router = small()
    committed(sim, A + B + C + (1, 2), 11)
    assert router.events == [BlockStored(chain(A, B), None, A + B, 4, "")]


def test_keys_and_values_without_a_checkpoint_are_not_announced():
    sim, router = small()
    committed(sim, A + B)
    assert router.events == []


def test_a_deeper_checkpoint_announces_only_what_is_new():
    sim, router = small()
    committed(sim, A + B + C, 6)
    committed(sim, A + B + C, 12)
    a, b, c = chain(A, B, C)
    assert router.events == [
        BlockStored((a,), None, A, 4, ""),
        BlockStored((b, c), a, B + C, 4, ""),
    ]


def test_a_shallower_checkpoint_announces_nothing():
    sim, router = small()
    committed(sim, A + B + C, 5, 12)
    assert router.events == [BlockStored(chain(A, B, C), None, A + B + C, 4, "")]


def test_a_branch_inside_a_block_has_its_own_block():
    sim, router = small()
    committed(sim, A + B + C, 12)
    committed(sim, (*A, 5, 6, 0, 0, *D), 12)
    other = chain(A, (5, 6, 0, 0), D)
    assert router.events[1] == BlockStored(other[1:], other[0], (5, 6, 0, 0, *D), 4, "")


def test_what_goes_is_what_no_path_needs():
    sim, router = small()
    committed(sim, A + B + C, 12)
    committed(sim, A + B + D, 12)
    sim.cache.checkpoints.make_room(sim.cache.pool.num_free + 1)
    first, second = chain(A, B, C), chain(A, B, D)
    assert router.events[2:] == [BlockRemoved(first[2:])]
    sim.cache.checkpoints.make_room(sim.cache.pool.num_pages)
    assert router.events[3:] == [BlockRemoved(second[::-1]), AllBlocksCleared()]


def test_what_comes_back_is_announced_again_with_the_same_name():
    sim, router = small()
    committed(sim, A + B, 8)
    sim.cache.clear()
    committed(sim, A + B, 8)
    stored = BlockStored(chain(A, B), None, A + B, 4, "")
    assert router.events == [stored, BlockRemoved(chain(A, B)[::-1]), AllBlocksCleared(), stored]


def test_salted_prompts_stay_secret_and_salts_and_adapters_change_every_name():
    sim, router = small()
    salted, adapted = Namespace(cache_salt="s"), Namespace(adapter="lora")
    committed(sim, A + B, 8, namespace=salted)
    assert router.events == []
    committed(sim, A + B, 8, namespace=adapted)
    committed(sim, A + B, 8)
    assert router.events == [
        BlockStored(chain(A, B, namespace=adapted), None, A + B, 4, "lora"),
        BlockStored(chain(A, B), None, A + B, 4, ""),
    ]
    spaces = [PLAIN, adapted, salted, Namespace("lora", "s"), Namespace("s"), Namespace("", "lora")]
    assert len({chain(A, namespace=space) for space in spaces}) == len(spaces)


def test_content_without_vocabulary_ids_ends_what_is_announced():
    sim, router = small()
    committed(sim, (*A, 5, -1, 7, 8, *C, *D), 16)
    committed(sim, (*A, 5, -1, 7, 8, *C, *B), 16)
    assert router.events == [BlockStored(chain(A), None, A, 4, "")]


def test_without_recurrent_state_keys_and_values_are_enough():
    sim, router = small(state_bytes=0)
    committed(sim, A + B + (1,))
    assert router.events == [BlockStored(chain(A, B), None, A + B, 4, "")]


def test_without_recurrent_state_what_is_left_of_a_cut_run_stays():
    sim, router = small(state_bytes=0)
    committed(sim, A + B)
    committed(sim, A + C)
    sim.cache.checkpoints.make_room(sim.cache.pool.num_free + 1)
    sim.cache.checkpoints.make_room(sim.cache.pool.num_free + 1)
    a = chain(A)
    assert router.events[2:] == [BlockRemoved(chain(A, B)[1:]), BlockRemoved(chain(A, C)[1:])]
    assert router.paths == {a[0]: A}
    sim.cache.clear()
    assert router.events[4:] == [BlockRemoved(a), AllBlocksCleared()]


def test_a_forgotten_root_is_forgotten_here_too():
    sim = Simulation.build(200, placement_for("junction", 4, False), LeastRecentlyUsed())
    router, observer = observe(sim, ghost_factor=0)
    committed(sim, A + B, 8)
    assert len(observer._live) == 2 and len(observer._adapters) == 1
    sim.cache.clear()
    assert sim.cache.tree.roots == observer._live == observer._adapters == router.paths == {}


def test_in_exact_mode_decoded_states_serve_nobody_and_are_not_announced():
    sim, router = small(exact=True)
    request = sim.start("r", A)
    sim.prefill(request, 4)
    before = list(router.events)
    for token in B:
        sim.decode(request, token)
    sim.finish(request)
    assert router.events == before == [BlockStored(chain(A), None, A, 4, "")]
    assert any(node.checkpoint.origin is Origin.DECODE for node in sim.cache.tree.nodes() if node.checkpoint)


def test_names_are_those_that_any_sha256_gives():
    seed = bytes.fromhex("4b" * 32)
    assert (
        next_digest(seed, np.array([1, 2], np.int64).tobytes())
        == sha256(seed + bytes([1] + [0] * 7 + [2] + [0] * 7)).digest()
    )
    assert block_hash(b"\xff" * 8 + b"\x00" * 24) == -1
    assert block_hash(b"\x00" * 7 + b"\x02" + b"\xff" * 24) == 2


def test_a_block_has_tokens():
    with pytest.raises(ValueError, match="block_size"):
        BlockEvents(0, Router().receive)


# -- images ------------------------------------------------------------------------------------------------------------


@dataclass
class Numbers:
    """Keys from `base` down stand for an image of `length` places. Implements `KeyNames`."""

    base: int
    length: int
    digest: bytes

    def name(self, key: int) -> KeyName | None:
        place = self.base - key
        return KeyName(self.digest, place, 9) if 0 <= place < self.length else None


def told_of(numbers: Numbers | None, *prompts) -> Router:
    router = Router()
    sim = Simulation.build(200, placement_for("auto", 4, False), LeastRecentlyUsed())
    events = BlockEvents(4, router.receive, contents=numbers)
    sim.cache.tree.observers += (events,)
    for number, prompt in enumerate(prompts):
        request = sim.start(f"r{number}", tuple(prompt))
        sim.prefill(request, len(prompt))
        sim.finish(request)
    return router


def test_images_are_told_by_their_digest():
    digest = bytes(range(32))
    before, behind = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15]
    routers = [
        told_of(Numbers(base, 7, digest), [*before, *range(base, base - 7, -1), *behind]) for base in (-1, -5000)
    ]
    (one,), (other,) = (router.events for router in routers)
    assert one == other
    assert one.token_ids == (*before, *[9] * 7, *behind)[:16]
    assert one.extra_keys == (None, (digest.hex(),), (digest.hex(),), (digest.hex(),))
    (another,) = told_of(Numbers(-1, 7, bytes(32)), [*before, *range(-1, -8, -1), *behind]).events
    assert another.block_hashes[0] == one.block_hashes[0]
    assert not set(another.block_hashes[1:]) & set(one.block_hashes)


def test_a_path_is_told_up_to_the_first_number_without_a_name():
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, -1, -2, 11, 12, 13]
    for numbers in (None, Numbers(-100, 5, bytes(32))):
        (stored,) = told_of(numbers, prompt).events
        assert stored.token_ids == tuple(prompt[:8])
