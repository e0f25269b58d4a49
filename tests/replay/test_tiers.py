"""Traces through caches with tiers below them."""

from itertools import count

import numpy as np
import pytest

from cairn.cache.eviction import eviction_for
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy
from cairn.replay.layouts import layout_for
from cairn.replay.replay import Replay
from cairn.replay.trace import Trace, TraceRequest
from cairn.tiers import demotion
from cairn.types import SystemClock

LAYOUT = layout_for("nemotron-3-nano", 16, None, None)
STATE = LAYOUT.pages_per_checkpoint * LAYOUT.page_bytes


def request(number: int, path: list[int]) -> TraceRequest:
    return TraceRequest(float(number), 64 * len(path), np.array(path, np.int64), np.zeros(0, np.int64))


def replay(requests, budget: int, **tiers: int):
    policy = CachePolicy(placement_for("auto", 16, False), eviction_for("value"), False)
    run = Replay(LAYOUT, budget, policy, 2048, SystemClock(), tiers=tiers)
    return run.run(Trace("t", 64, tuple(requests)))


@pytest.fixture
def requests():
    """Twelve prompts of 6,400 tokens, each of them three times."""
    paths = [list(range(1000 * number, 1000 * number + 100)) for number in range(12)] * 3
    return [request(number, path) for number, path in enumerate(paths)]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_the_pool_drops_is_hit_below(requests, tier):
    budget = 4 * STATE
    without = replay(requests, budget)
    below = replay(requests, budget, **{tier: 1 << 40})
    assert below.hit_tokens == 24 * 6400 and below.tier_tokens >= 22 * 6400
    assert without.hit_tokens < below.hit_tokens // 2 and without.tier_tokens == 0
    assert below.prompt_tokens == without.prompt_tokens == below.hit_tokens + below.prefill_tokens


def test_a_tier_that_holds_a_part_is_worth_a_part(requests):
    tokens = [replay(requests, 4 * STATE, host=number * STATE).prefill_tokens for number in (0, 8, 1000)]
    assert tokens[0] >= tokens[1] > tokens[2]


def test_it_does_not_matter_how_long_writing_takes_here(requests, monkeypatch):
    quick, times = replay(requests, 4 * STATE, host=1 << 40), count(0, 1000.0)
    monkeypatch.setattr(demotion, "busy_time", lambda: next(times))
    slow = replay(requests, 4 * STATE, host=1 << 40)
    assert slow.hits == quick.hits and slow.tier_tokens == quick.tier_tokens > 0


def test_a_replay_gives_the_same_again(requests):
    first, again = (replay(requests, 4 * STATE, host=10 * STATE, disk=20 * STATE) for _ in range(2))
    assert first.hits == again.hits and first.tier_tokens == again.tier_tokens
