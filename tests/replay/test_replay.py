"""The replay against the scheduler itself, and its sums."""

import random
import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from driver import Driver, layout

from cairn.cache.audit import audit
from cairn.cache.eviction import eviction_for
from cairn.cache.placement import Auto, placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.reasons import Reason
from cairn.replay import replay as replay_module
from cairn.replay.bounds import Paths
from cairn.replay.outcome import tree_memory
from cairn.replay.replay import Replay
from cairn.replay.trace import Trace, TraceRequest
from cairn.scheduler.scheduler import Scheduler
from cairn.types import Boundary, ManualClock
from tiers import first_of

UNIT = 16
CHUNK = 256
MODES = ("auto", "align", "all", "granular", "junction")
SEEDS = (range(1, 2), range(2, 9))


def replayed(trace, num_pages, mode="auto", eviction="value", exact=False, block_size=16):
    sizes = layout(block_size)
    placement = placement_for(mode, block_size, exact) if mode is not None else None
    policy = CachePolicy(placement, eviction_for(eviction), exact)
    replay = Replay(sizes, num_pages * sizes.page_bytes, policy, CHUNK, ManualClock())
    outcome = replay.run(trace)
    audit(replay.cache)
    assert not replay.cache.pinned.sequences and not replay.cache.pinned.steps
    return replay, outcome


def made_trace(rows, behind=0):
    """A trace of (path ids, answer ids, boundaries), with `behind` tokens after each path."""
    requests = [
        TraceRequest(
            float(t), len(p) * UNIT + behind, np.array(p, np.int64), np.array(a, np.int64), tuple(map(Boundary, ends))
        )
        for t, (p, a, ends) in enumerate(rows)
    ]
    return Trace("made", UNIT, tuple(requests))


def served(trace_rows, num_pages, mode, exact):
    """The same requests through the scheduler, one at a time. An answer is what the simulated model says, so a row is
    (make a prompt from all sequences so far, tokens of its answer). Returns prompts with answers, and hits."""
    driver = Driver(mode, num_pages, max_num_batched_tokens=CHUNK, exact=exact, max_model_len=1 << 14)
    sequences, told, hits = [], [], []
    for make_prompt, num_answer in trace_rows:
        prompt, ends = make_prompt(sequences)
        # the last token of an answer is sampled and not computed
        request = driver.requests[driver.submit(prompt, max_tokens=num_answer + 1, boundaries=ends)]
        while driver.scheduler.has_work:
            driver.plans.append(driver.pipeline.launch())
            driver.pipeline.collect()
        computed = prompt + request.output[:num_answer]
        sequences.append(computed)
        told.append((prompt, computed, ends))
        hits.append(request.stats.first_sequence.hit)
    return told, hits, driver


def random_rows(seed, number=20):
    draw = random.Random(seed)

    def make(continued, cut, fresh, marked):
        def prompt(sequences):
            start = []
            if sequences and continued:
                start = sequences[-1 - cut % min(8, len(sequences))]
                start = start[: max(1, (cut * 7) % (len(start) // UNIT)) * UNIT] if cut % 3 else start
            new = np.random.default_rng(fresh).integers(1000, 1 << 40, UNIT * (1 + fresh % 30))
            tokens = start + new.tolist()
            return tokens, (len(start),) if marked and start else ()

        return prompt

    return [
        (
            make(draw.random() < 0.8, draw.randint(0, 99), draw.randint(0, 10**6), draw.random() < 0.5),
            UNIT * draw.randint(1, 4),
        )
        for _ in range(number)
    ]


def as_trace(told):
    """Ids for units, numbered by the tokens before and in them."""
    ids, requests = {}, []
    for index, (prompt, computed, ends) in enumerate(told):
        line = [ids.setdefault(tuple(computed[: end + UNIT]), len(ids)) for end in range(0, len(computed), UNIT)]
        units = len(prompt) // UNIT
        line = np.array(line, np.int64)
        requests.append(TraceRequest(float(index), len(prompt), line[:units], line[units:], tuple(map(Boundary, ends))))
    return Trace("served", UNIT, tuple(requests))


@pytest.mark.parametrize(
    ("seeds", "sizes", "mode"),
    first_of(
        [
            *((SEEDS[0], (150, False), mode) for mode in MODES),
            (SEEDS[0], (4000, False), "auto"),
            *((SEEDS[0], (150, True), mode) for mode in ("auto", "align")),
        ],
        SEEDS,
        [(4000, False), (150, False), (150, True)],
        MODES,
    ),
    ids=str,
)
def test_the_scheduler_hits_the_same(mode, sizes, seeds):
    num_pages, exact = sizes
    for seed in seeds:
        told, hits, driver = served(random_rows(seed), num_pages, mode, exact)
        replay, outcome = replayed(as_trace(told), num_pages, mode, exact=exact)
        assert outcome.hits == hits
        assert sum(hits) > 0
        state = driver.scheduler.state
        assert outcome.prefill_tokens == state.counters.computed_prompt_tokens
        assert outcome.forward_passes == sum(bool(plan.prefills) for plan in driver.plans)
        assert outcome.taken == driver.cache.checkpoints.taken
        assert outcome.evicted == driver.cache.checkpoints.evicted
        assert outcome.used == driver.cache.counters.used
        assert replay.cache.pool.num_free == driver.cache.pool.num_free


def test_it_adds_up():
    rows = [([1, 2, 3], [4, 5], ()), ([1, 2, 3, 4, 5, 6], [7], ()), ([1, 2, 3], [], ()), ([1, 9], [], ())]
    trace = made_trace(rows, behind=5)
    _, outcome = replayed(trace, 1000)
    assert outcome.hits == [0, 5 * UNIT, 3 * UNIT, 0]
    assert outcome.prompt_tokens == sum(request.num_prompt_tokens for request in trace.requests) == 14 * UNIT + 20
    assert outcome.prefill_tokens == outcome.prompt_tokens - 8 * UNIT
    assert outcome.hit_tokens == 8 * UNIT
    # what is behind a path is computed every time, by a pass of its own if all else was hit
    assert outcome.forward_passes == 4
    # one unit of the last prompt had been seen, and 16 tokens are less than anything kept
    assert outcome.lost == {Reason.NEVER_SEEN: outcome.prefill_tokens - UNIT, Reason.TOO_SHORT: UNIT}


def test_a_prompt_that_is_all_cached_takes_no_pass():
    _, outcome = replayed(made_trace([([1] * 8, [], ()), ([1] * 8, [], ())]), 1000)
    assert outcome.hits == [0, 8 * UNIT] and outcome.forward_passes == 1


@cache
def served_trace():
    """What a server with room for all has had to do: nobody changes it."""
    told, _, _ = served(random_rows(5), 4000, "auto", False)
    return as_trace(told)


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("num_pages", [30, 90, 2000])
def test_every_token_is_charged_once(mode, num_pages):
    trace = served_trace()
    replay, outcome = replayed(trace, num_pages, mode)
    assert sum(outcome.lost.values()) == outcome.prefill_tokens
    assert min(outcome.lost.values()) > 0
    assert outcome.peak_bytes <= num_pages * replay.cache.layout.page_bytes
    assert len(outcome.hits) == len(trace.requests)
    if mode is None:
        assert outcome.hit_tokens == 0 and not outcome.taken and Reason.DISABLED in outcome.lost
    if num_pages == 90 and mode is not None:
        assert outcome.lost[Reason.EVICTED] > 0 and outcome.evicted.total() > 0


def test_what_does_not_fit_is_refused_and_counted():
    rows = [([1] * 40, [], ()), ([2] * 10, [], ()), ([1] * 40, [], ()), ([2] * 10, [], ())]
    _, outcome = replayed(made_trace(rows), 30)
    assert outcome.refused == 2 and outcome.hits == [0, 0, 0, 10 * UNIT]
    assert outcome.lost == {Reason.NEVER_SEEN: 50 * UNIT, Reason.DISABLED: 40 * UNIT}
    assert outcome.forward_passes == 3 + 1 + 3


def test_an_answer_stops_where_there_is_no_room_for_it():
    _, outcome = replayed(made_trace([([1] * 10, list(range(10, 60)), ()), ([1] * 10, [], ())]), 30)
    assert outcome.refused == 0 and len(outcome.hits) == 2


def test_what_even_the_ghosts_have_forgotten_counts_as_evicted():
    first = ([1, *range(100, 109)], [], ())
    others = [([seed, *range(1000 * seed, 1000 * seed + 19)], [], ()) for seed in range(2, 40)]
    replay, outcome = replayed(made_trace([first, *others, first]), 30)
    roots = replay.cache.tree.roots.values()
    assert sum(node.num_tokens for root in roots for node in below(root)) < len(others) * 20 * UNIT, "all is remembered"
    assert outcome.hits[-1] == 0
    never_seen = 10 * UNIT + len(others) * 20 * UNIT
    assert outcome.lost == {Reason.NEVER_SEEN: never_seen, Reason.EVICTED: 10 * UNIT}


def test_a_prompt_without_a_full_unit_never_meets_the_cache():
    _, outcome = replayed(made_trace([([], [], ()), ([], [1], ())], behind=7), 30)
    assert outcome.hits == [0, 0] and outcome.lost == Counter({Reason.NEVER_SEEN: 14})
    assert outcome.forward_passes == 2


def test_scheduler_and_cache_are_timed(monkeypatch):
    """Every call of these takes a second here, and all else takes two."""
    clock, calls = ManualClock(), Counter()
    inside = {
        PrefixCache: (
            *("lookup", "extend", "begin_request", "prompt_facts", "reserve_checkpoint"),
            *("pin_until", "commit", "release_step", "release"),
        ),
        Scheduler: ("plan", "apply", "skip_plain_steps"),
        Auto: ("in_prefill", "in_decode"),
    }
    outside = {Paths: ("shared", "add"), replay_module: ("key_tokens", "tree_memory")}

    def taking(owner, name, seconds):
        real = getattr(owner, name)

        def slow(*arguments, **named):
            clock.advance(seconds)
            calls[name] += 1
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, slow)

    for seconds, owners in ((1.0, inside), (2.0, outside)):
        for owner, names in owners.items():
            for name in names:
                taking(owner, name, seconds)
    sizes = layout()
    policy = CachePolicy(placement_for("auto", 16, False), eviction_for("lru"))
    rows = [([1] * 40, list(range(2, 9)), ()), ([1] * 40, [], ()), ([], [], ())]
    outcome = Replay(sizes, 100 * sizes.page_bytes, policy, CHUNK, clock).run(made_trace(rows, behind=3))
    names = {name for names in inside.values() for name in names}
    assert all(calls[name] for owner in (inside, outside) for names in owner.values() for name in names)
    assert outcome.seconds == sum(calls[name] for name in names)
    assert outcome.microseconds_per_request == 1e6 * outcome.seconds / 3


def test_bounds_of_the_arguments():
    sizes, policy = layout(), CachePolicy(placement_for("auto", 16, False), eviction_for("lru"))
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Replay(sizes, 100 * sizes.page_bytes, policy, 63, ManualClock())
    with pytest.raises(ValueError, match="num_pages"):
        Replay(sizes, sizes.page_bytes - 1, policy, CHUNK, ManualClock())


def test_an_answer_without_room_for_all_of_it_is_kept_as_far_as_it_goes():
    for mode in ("junction", "auto"):
        replay, outcome = replayed(made_trace([([1] * 10, list(range(10, 60)), ())]), 30, mode)
        deepest = max(node.end for root in replay.cache.tree.roots.values() for node in below(root))
        # a checkpoint had been let go of to make room for the last of it; a page is left for copy on write
        assert deepest == 29 * UNIT - 1 and outcome.peak_bytes == 30 * replay.cache.layout.page_bytes


def test_what_the_tree_takes_in_memory():
    rows = [([seed, *range(100 * seed, 100 * seed + 9)], [], ()) for seed in range(1, 40)]
    replay, outcome = replayed(made_trace(rows), 400)
    tree, cache = outcome.tree, replay.cache
    nodes = [node for root in cache.tree.roots.values() for node in below(root)]
    assert tree["tree_nodes"] == len(nodes)
    assert tree["tree_ghosts"] == sum(not node.resident for node in nodes) > 0
    assert tree["tree_page_runs"] == sum(-(-node.num_tokens // 16) for node in nodes)
    own = sum(map(sys.getsizeof, nodes)) + 4 * sum(node.num_tokens for node in nodes)
    assert own < tree["tree_bytes"] < 20 * own
    # a note that nobody but a policy has, and a pool that does not count
    cache.policy.eviction.note = [np.zeros(1250)[1:], bytes(1)]
    assert tree_memory(cache)["tree_bytes"] > tree["tree_bytes"] + 10_000
    cache.pool.much = bytes(50_000)
    assert tree_memory(cache)["tree_bytes"] < tree["tree_bytes"] + 40_000


def below(root):
    yield root
    for child in root.children:
        yield from below(child)


def test_an_answer_that_was_a_call_waits_from_its_end_until_it_is_used():
    path = np.arange(20)
    rows = [(path, [90, 91], []), (path + 100, [92, 93], []), (np.append(path, [90, 91, 7]), [], [])]
    trace = made_trace(rows)
    marked = replace(trace, requests=tuple(replace(each, tools_step=0) for each in trace.requests[:2]))
    replay, _ = replayed(marked, 2000)
    assert waits(replay) == [20 * UNIT, 20 * UNIT, 22 * UNIT, 22 * UNIT]
    replay, outcome = replayed(replace(trace, requests=(*marked.requests, trace.requests[2])), 2000)
    assert outcome.hits[-1] == 22 * UNIT and waits(replay) == [20 * UNIT, 20 * UNIT, 22 * UNIT]
    assert waits(replayed(trace, 2000)[0]) == []


def waits(replay):
    records = replay.cache.policy.eviction._records.values()
    return sorted(record.node.end for record in records if record.awaits_tools)
