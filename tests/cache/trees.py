"""Caches filled through their own door, to a given number of nodes."""

from itertools import count

import numpy as np
from simulation import PLAIN

from cairn.cache.eviction import ValuePerByte
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import Auto
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.sequence_blocks import Namespace
from cairn.types import Boundary, Clock, ManualClock


def grown(num_nodes: int, clock: Clock | None = None, seed: int = 0) -> PrefixCache:
    """A cache whose tree has at least so many nodes: conversations that begin with one of eight system prompts and
    part from one another again and again; some are salted, some hit, some short of a checkpoint."""
    rng = np.random.default_rng(seed)
    mib = 1 << 20
    layout = CacheLayout(
        block_size=16,
        page_bytes=mib,
        page_units=1,
        groups=(AttentionGroup("full", 16),),
        header_bytes=8,
        state_bytes=8 * mib - 8,
        state_units=1,
    )
    cache = PrefixCache(
        layout, num_nodes * 16 + 4000, CachePolicy(Auto(), ValuePerByte()), clock=clock or ManualClock()
    )
    systems = [rng.integers(0, 1000, 300 + 130 * number) for number in range(8)]
    known = list(systems)
    nodes = 0
    for number in count():
        base = known[int(rng.integers(len(known)))]
        base = base[: int(rng.integers(len(base) // 2, len(base) + 1))]
        space = PLAIN if number % 9 else Namespace(cache_salt=f"tenant {number % 4}")
        prompt = np.concatenate([base, rng.integers(0, 1000, int(rng.integers(100, 1500)))])[:6000]
        nodes += request(cache, prompt, space, f"r{number}")
        if len(known) < 400:
            known.append(prompt)
        if nodes >= num_nodes:
            break
    return cache


def request(cache: PrefixCache, prompt: np.ndarray, namespace: Namespace, name: str) -> int:
    """One prompt, computed in one step; returns how many nodes that has added at least."""
    lease = cache.lookup(namespace, prompt, name)
    assert cache.extend(lease, len(prompt)) is not None
    cache.begin_request(lease)
    ends = (Boundary(max(1, len(prompt) - 7), "message_end"),)
    facts = cache.prompt_facts(lease, len(prompt), ends)
    wanted = cache.policy.placement.in_prefill(facts, lease.hit, len(prompt))
    kept = [want.position for want in wanted if cache.reserve_checkpoint(lease, want) is not None]
    before = cache.checkpoints.taken.total()
    cache.commit(lease, len(prompt), kept)
    cache.release(lease)
    return cache.checkpoints.taken.total() - before
