"""What the cache's own books take in memory: nodes, ghosts, checkpoints, queues and what the policies have learned."""

import gc
import sys
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

from cairn.cache.prefix_cache import PrefixCache

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Kinds of objects that are there without any cache."""


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """`num_bytes`: all objects that tree and policies refer to, each once, as Python counts them; `key_bytes` of them
    are key tokens. `nodes`: runs of tokens, `ghosts` of them without pages. `page_runs`: pages' worth of tokens that
    the nodes cover, every begun page of a node as one."""

    num_bytes: int
    key_bytes: int
    nodes: int
    ghosts: int
    page_runs: int


def tree_memory(cache: PrefixCache) -> TreeMemory:
    """Count it, in O(objects). The pool's one number a page, sequences and observers are not the tree's."""
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
        cache.sequences,
        cache.pins,
        cache.step_pins,
    ]
    # what only carries news
    outside += [observer for observer in cache.tree.observers if observer is not cache.policy.eviction]
    seen, total = {id(each) for each in outside}, 0
    stack: list[object] = [cache.checkpoints, cache.policy]
    while stack:
        found = stack.pop()
        if id(found) in seen or isinstance(found, _SHARED):
            continue
        seen.add(id(found))
        total += sys.getsizeof(found)
        stack.extend(gc.get_referents(found))
        if isinstance(found, np.ndarray) and found.base is not None:
            stack.append(found.base)
    return total
