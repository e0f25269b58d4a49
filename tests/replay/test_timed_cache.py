"""What a replayed trace and a replayed log have in common."""

import pytest

from cairn.cache.eviction import LeastRecentlyUsed
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy
from cairn.replay.timed_cache import TimedCache
from cairn.types import ManualClock


def timed(num_pages: int = 10, mode: str = "auto", max_tokens: int = 200, clock: ManualClock | None = None):
    layout = CacheLayout(16, 1024, 1, (AttentionGroup("full", 16),), 0, 1024, 1)
    policy = CachePolicy(placement_for(mode, 16, False), LeastRecentlyUsed())
    return TimedCache(layout, num_pages * 1024 + 1023, policy, clock or ManualClock(), max_tokens)


def test_bounds_of_the_arguments():
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        timed(max_tokens=63)
    with pytest.raises(ValueError, match="num_pages"):
        timed(num_pages=0)


def test_a_prompt_fits_with_one_page_more():
    assert timed(10).can_hold(9 * 16) and not timed(10).can_hold(9 * 16 + 1)


def test_the_cache_is_shown_the_traces_time_which_never_goes_back():
    cache = timed()
    times = []
    for seconds in (3.0, 2.0, 5.5):
        cache.advance_to(seconds)
        times.append(cache.cache.journal.clock.now())
    assert times == [3.0, 3.0, 5.5]


@pytest.mark.parametrize(
    ("mode", "start", "limit", "end"),
    [("auto", 0, 200, 200), ("auto", 0, 201, 192), ("auto", 100, 1000, 256), ("granular", 64, 1000, 128)],
)
def test_chunks_end_at_the_limit_or_on_the_grid(mode, start, limit, end):
    assert timed(mode=mode).chunk_end(start, limit) == end


def test_only_what_is_inside_is_timed_and_the_most_pages_are_kept():
    clock = ManualClock()
    cache = timed(clock=clock)
    clock.advance(1.0)
    with cache.stopwatch:
        clock.advance(2.0)
    pages = cache.cache.pool.allocate(7)
    cache.record_usage()
    cache.cache.pool.release(pages)
    cache.record_usage()
    outcome = cache.finish()
    assert outcome.seconds == 2.0 and outcome.peak_bytes == 7 * 1024
