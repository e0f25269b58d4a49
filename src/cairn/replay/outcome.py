"""The outcome of a replay, and the memory of the trees at its end."""

import gc
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

from cairn.cache.checkpoint import Kind
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.reasons import Reason

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Kinds of objects that are there without any cache."""


@dataclass(slots=True)
class ReplayOutcome:
    """Counts of a replay, in tokens, requests, checkpoints, bytes and seconds.

    `forward_passes`: prefill chunks. `lost`: every prompt token that was not hit, under one reason; those that no
    earlier request had are `never_seen`. `tier_tokens`: those hit that came from tiers below the cache. `refused`:
    requests that the budget cannot hold. `hits`: cached tokens, by request. `taken`, `used`, `evicted`: checkpoints by
    kind. `peak_bytes`: the most memory of pages in use. `seconds`: inside scheduler, cache and policies. `tree`: memory
    of the trees at the end, see `tree_memory`.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefill_tokens: int = 0
    forward_passes: int = 0
    refused: int = 0
    tier_tokens: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    hits: list[int] = field(default_factory=list)
    lost: Counter[Reason] = field(default_factory=Counter)
    taken: Counter[Kind] = field(default_factory=Counter)
    used: Counter[Kind] = field(default_factory=Counter)
    evicted: Counter[Kind] = field(default_factory=Counter)
    tree: Mapping[str, int] = field(default_factory=dict)

    @property
    def microseconds_per_request(self) -> float:
        return 1e6 * self.seconds / max(1, len(self.hits))


def tree_memory(cache: PrefixCache) -> dict[str, int]:
    """Memory of the radix trees and the cache policies, in O(objects). The page pool, sequences and observers are not
    counted.

    `tree_bytes`: all Python objects reachable from tree and policies, each counted once. `tree_nodes`, and among them
    `tree_ghosts`: those without pages. `tree_page_runs`: pages that the nodes' tokens would fill, the last one of each
    node counted as full.
    """
    nodes = [*cache.tree.roots.values(), *cache.tree.nodes()]
    return {
        "tree_bytes": _reachable_bytes(cache),
        "tree_nodes": len(nodes),
        "tree_ghosts": sum(not node.resident for node in nodes),
        "tree_page_runs": sum(-(-node.num_tokens // cache.layout.block_size) for node in nodes),
    }


def _reachable_bytes(cache: PrefixCache) -> int:
    pinned, eviction = cache.pinned, cache.policy.eviction
    outside = [cache, cache.pool, cache.layout, cache.counters, pinned.sequences, pinned.pins, pinned.steps]
    outside += [observer for observer in cache.tree.observers if observer is not eviction]
    seen, total = set(map(id, outside)), 0
    stack: list[object] = [cache.checkpoints, cache.policy]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, _SHARED):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        stack.extend(gc.get_referents(item))
        if isinstance(item, np.ndarray) and item.base is not None:
            stack.append(item.base)
    return total
