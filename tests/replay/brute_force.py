"""The best schedule of a tiny trace, by trying everything: the rules of `benchmarks.offline_line`, stated once more.

Positions are all full units, prefixes are tuples of ids, and nothing is shared with the code under test.
"""

from itertools import combinations

from cairn.replay.trace import Trace

__all__ = ["best_hit_units", "held_bytes", "make_trace", "seen_units"]


def make_trace(rows, unit=4):
    """A trace of (path ids, answer ids) with nothing behind the paths."""
    import numpy as np

    from cairn.replay.trace import TraceRequest

    requests = [
        TraceRequest(float(t), len(path) * unit, np.array(path, np.int64), np.array(answer, np.int64))
        for t, (path, answer) in enumerate(rows)
    ]
    return Trace("tiny", unit, tuple(requests))


def whole(request):
    return tuple(request.path.tolist() + request.answer.tolist())


def held_bytes(held, unit_bytes, checkpoint_bytes):
    """Of checkpoints at the ends of `held` prefixes and of all tokens before them."""
    tokens = {prefix[:end] for prefix in held for end in range(1, len(prefix) + 1)}
    return len(held) * checkpoint_bytes + len(tokens) * unit_bytes


def seen_units(trace):
    """Per request the longest prefix of its path that an earlier one had, in units."""
    found, seen = [], set()
    for request in trace.requests:
        path = tuple(request.path.tolist())
        found.append(max((end for end in range(len(path) + 1) if path[:end] in seen or end == 0), default=0))
        seen |= {whole(request)[:end] for end in range(1, len(whole(request)) + 1)}
    return found


def best_hit_units(trace, unit_bytes, checkpoint_bytes, budget):
    """The most units that can be hit in all."""
    # what nobody looks at later is not worth holding: without it the search stays small
    wanted = [set() for _ in trace.requests]
    later = set()
    for index in range(len(trace.requests) - 1, -1, -1):
        wanted[index] = set(later)
        path = tuple(trace.requests[index].path.tolist())
        later |= {path[:end] for end in range(1, len(path) + 1)}
    states = {frozenset(): 0}
    for index, request in enumerate(trace.requests):
        path, line = tuple(request.path.tolist()), whole(request)
        following = {}
        for held, total in states.items():
            for hit in {0} | {len(prefix) for prefix in held if path[: len(prefix)] == prefix}:
                passed = {line[:end] for end in range(max(1, hit), len(line) + 1)}
                offered = (held | passed) & wanted[index]
                for size in range(len(offered) + 1):
                    for kept in combinations(sorted(offered), size):
                        if held_bytes(kept, unit_bytes, checkpoint_bytes) <= budget:
                            key = frozenset(kept)
                            following[key] = max(following.get(key, 0), total + hit)
        states = following
    return max(states.values())
