"""The outcome of a replay, and the memory of the trees at its end."""

import gc
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

from cairn.cache.checkpoint import Kind
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.reasons import Reason

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Kinds of objects that are there without any cache."""


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """Memory of the radix trees and the cache policies.

    `num_bytes`: all Python objects reachable from tree and policies, each counted once; `key_bytes`: key tokens among
    them. `nodes`: of the trees; `ghosts`: those without pages. `page_runs`: pages that the nodes' tokens would fill,
    the last one of each node counted as full.
    """

    num_bytes: int
    key_bytes: int
    nodes: int
    ghosts: int
    page_runs: int


def tree_memory(cache: PrefixCache) -> TreeMemory:
    """Measure it, in O(objects). The page pool, sequences and observers are not counted."""
    block = cache.layout.block_size
    nodes = ghosts = page_runs = key_bytes = 0
    stack = list(cache.tree.roots.values())
    while stack:
        node = stack.pop()
        nodes += 1
        ghosts += not node.resident
        page_runs += -(-node.num_tokens // block)
        key_bytes += len(node.raw)
        stack.extend(node.children)
    return TreeMemory(_reachable_bytes(cache), key_bytes, nodes, ghosts, page_runs)


def _reachable_bytes(cache: PrefixCache) -> int:
    outside: list[object] = [
        cache,
        cache.pool,
        cache.layout,
        cache.counters,
        cache.pinned.sequences,
        cache.pinned.pins,
        cache.pinned.steps,
    ]
    outside += [observer for observer in cache.tree.observers if observer is not cache.policy.eviction]
    seen, total = {id(each) for each in outside}, 0
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


@dataclass(slots=True)
class ReplayOutcome:
    """Counts of a replay, in tokens, requests, checkpoints, bytes and seconds.

    `forward_passes`: prefill chunks. `lost`: every prompt token that was not hit, under one reason; those that no
    earlier request had are `never_seen`. `refused`: requests that the budget cannot hold. `hits`: cached tokens, by
    request. `taken`, `used`, `evicted`: checkpoints by kind. `peak_bytes`: the most memory of pages in use. `seconds`:
    inside scheduler, cache and policies. `tree`: memory of the trees at the end.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefill_tokens: int = 0
    forward_passes: int = 0
    refused: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    hits: list[int] = field(default_factory=list)
    lost: Counter[Reason] = field(default_factory=Counter)
    taken: Counter[Kind] = field(default_factory=Counter)
    used: Counter[Kind] = field(default_factory=Counter)
    evicted: Counter[Kind] = field(default_factory=Counter)
    tree: TreeMemory | None = None

    @property
    def microseconds_per_request(self) -> float:
        return 1e6 * self.seconds / max(1, len(self.hits))
