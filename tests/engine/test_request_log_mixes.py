"""The replay of random mixes that a scheduler has served with a runner of tags: every mode, pools that evict and
preempt, holds that end, answers that branch. The cache of the replay ends up as that of the server, page by page."""

import random
from collections import Counter, defaultdict
from dataclasses import asdict

import numpy as np
import pytest
from logged import Logged, cached, layout, logged, replayed

from cairn.cache.lease import Namespace
from cairn.cache.reasons import Reason
from cairn.replay.traces import read_trace
from cairn.types import Boundary

LONG = pytest.mark.long
MODES = ("auto", "align", "all", "granular", "junction")


class Mix:
    """Prompts that go on from each other, at any token, in three namespaces."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.fresh = np.random.default_rng(seed).integers
        self.told: list[list[int]] = []

    def prompt(self) -> list[int]:
        draw = self.draw
        before = draw.choice(self.told[-12:]) if self.told and draw.random() < 0.8 else []
        if before and draw.random() < 0.4:
            before = before[: draw.randint(1, len(before))]
        if before and draw.random() < 0.15:
            return before
        return before[:200] + self.fresh(0, 1 << 40, draw.randint(1, 150)).tolist()

    def boundaries(self, length: int, holds: bool) -> list[Boundary]:
        draw = self.draw
        ends = sorted({draw.randint(1, length) for _ in range(draw.randint(0, 3))})
        return [
            Boundary(end, draw.choice(("system_end", "message_end", "breakpoint")), draw.choice((0, 5)) * holds)
            for end in ends
        ]


def serve(server: Logged, seed: int, requests: int, holds=False, branches=False, aborts=True) -> None:
    mix, submitted = Mix(seed), 0
    draw = mix.draw
    while submitted < requests or server.scheduler.has_work:
        while submitted < requests and len(server.scheduler.books.requests) < 9 and draw.random() < 0.7:
            prompt = mix.prompt()
            server.submit(
                f"r{submitted}",
                prompt,
                max_tokens=draw.randint(1, 150 if draw.random() < 0.4 else 20),
                namespace=Namespace(cache_salt=draw.choice((None, None, None, "a", "b"))),
                boundaries=mix.boundaries(len(prompt), holds),
                n=draw.randint(2, 3) if branches and draw.random() < 0.3 else 1,
            )
            submitted += 1
        running = list(server.scheduler.books.requests)
        if aborts and running and draw.random() < 0.02:
            server.scheduler.abort(draw.choice(running))
        server.clock.advance(draw.random() * 0.2)
        if server.scheduler.has_work:
            server.step()
        done = [each for each in server.requests.values() if each.finish is not None]
        mix.told = [each.keys().tolist() for each in done]
    server.close()


def assert_replayed(server: Logged, path) -> None:
    trace = read_trace(path)
    replay = replayed(trace)
    assert cached(trace, replay) == logged(trace) == server.hits()
    counters, outcome = server.cache.counters, replay.outcome
    assert (outcome.prompt_tokens, outcome.hit_tokens) == (counters.queries, counters.hits)
    assert books(replay.cache) == books(server.cache)


def books(cache) -> dict:
    """What there is to be compared. That another namespace knows a prompt is not in the log, so it counts as new."""
    residents, counters = cache.residents, cache.counters
    for by_reason in (counters.reasons, counters.lost):
        by_reason[Reason.NEVER_SEEN] += by_reason.pop(Reason.NAMESPACE, 0)
    return {
        "counters": {name: +count if isinstance(count, Counter) else count for name, count in asdict(counters).items()},
        "taken": residents.taken,
        "evicted": residents.evicted,
        "free": cache.pool.num_free,
        "ghosts": residents.num_ghost_tokens,
        "nodes": sorted((node.start, node.end, node.resident, bool(node.checkpoint)) for node in residents.nodes()),
    }


@pytest.mark.parametrize(
    ("mode", "num_pages", "exact"),
    [*((mode, 60, False) for mode in MODES), ("auto", 4000, False), ("auto", 60, True), ("align", 60, True)],
)
def test_the_replay_goes_the_same_way(mode, num_pages, exact, tmp_path):
    server = Logged(tmp_path / "log", mode, num_pages, exact=exact)
    serve(server, seed=1, requests=30)
    assert sum(server.hits().values()) > 0 or num_pages < 4000
    assert server.scheduler.books.counters.preemptions > 0 or num_pages > 60
    assert_replayed(server, tmp_path / "log")


def test_without_a_state_any_length_is_hit_again(tmp_path):
    server = Logged(tmp_path / "log", num_pages=120, sizes=layout(pages_per_checkpoint=0))
    server.runner._slots = defaultdict(lambda: (0, 0))  # it knows no model without a state to go on from
    serve(server, seed=2, requests=40)
    assert sum(server.hits().values()) > 0
    assert_replayed(server, tmp_path / "log")


@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_what_clients_hold_ends_at_the_same_time(block_size, tmp_path):
    server = Logged(tmp_path / "log", num_pages=2600 // block_size, sizes=layout(block_size), eviction="lru")
    serve(server, seed=3, requests=60, holds=True)
    assert server.requests["r1"].times.arrived < server.clock.now() - 10
    assert_replayed(server, tmp_path / "log")


@pytest.mark.parametrize("num_pages", [1000, 60])
def test_answers_that_branch_are_replayed(num_pages, tmp_path):
    server = Logged(tmp_path / "log", num_pages=num_pages)
    serve(server, seed=4, requests=40, branches=True)
    assert any("." in name for name in server.requests)
    assert_replayed(server, tmp_path / "log")


def test_answers_that_branch_are_logged_with_the_cache_off(tmp_path):
    server = Logged(tmp_path / "log", "none")
    serve(server, seed=4, requests=20, branches=True)
    assert any("." in name for name in server.requests)
    assert_replayed(server, tmp_path / "log")


@pytest.mark.parametrize("ahead", [2])
def test_steps_that_are_planned_ahead_are_replayed(ahead, tmp_path):
    server = Logged(tmp_path / "log", num_pages=60, max_in_flight=ahead)
    flying = []

    def step():
        while server.scheduler.can_plan:
            flying.append(server.scheduler.plan())
        server.scheduler.apply(server.runner.run(flying.pop(0)))

    server.step = step
    serve(server, seed=5, requests=40)
    assert_replayed(server, tmp_path / "log")


def one_by_one(path, mode, num_pages, eviction="value"):
    """A server to which one request comes after the other, whatever its cache does."""
    server = Logged(path, mode, num_pages, eviction=eviction, max_num_batched_tokens=1024)
    mix = Mix(6)
    for index in range(60):
        server.submit(f"r{index}", mix.prompt(), max_tokens=mix.draw.randint(1, 60), boundaries=())
        server.run()
        mix.told.append(server.requests[f"r{index}"].keys().tolist())
    server.close()
    return server


@pytest.mark.parametrize(
    ("logged_mode", "modes"),
    [("align", ("auto",)), pytest.param("auto", MODES, marks=LONG), pytest.param("align", MODES, marks=LONG)],
)
def test_other_rules_give_what_a_server_with_these_rules_would_have(logged_mode, modes, tmp_path):
    one_by_one(tmp_path / "log", logged_mode, 400)
    trace = read_trace(tmp_path / "log")
    for mode in modes:
        for num_pages, eviction in ((2000, "value"), (120, "value"), (120, "lru")):
            if mode == "granular" and num_pages < 2000:
                continue  # it computes in other steps than the log has, and what goes first depends on it
            server = one_by_one(tmp_path / "other", mode, num_pages, eviction)
            replay = replayed(trace, mode, num_pages * trace.layout.page_bytes, eviction)
            assert cached(trace, replay) == server.hits(), (mode, num_pages)


@pytest.mark.parametrize("num_pages", [20, 40, 60, 150])
def test_less_room_than_the_server_had(num_pages, tmp_path):
    server = Logged(tmp_path / "log", num_pages=600)
    serve(server, seed=7, requests=60, holds=True, branches=True)
    trace = read_trace(tmp_path / "log")
    for mode in (*MODES, "none"):
        replay = replayed(trace, mode, num_pages * trace.layout.page_bytes)
        outcome = replay.outcome
        refused = [each for each in trace.logged if trace.layout.pages_for(each.num_prompt_tokens) + 1 > num_pages]
        assert outcome.refused == len(refused)
        assert all(0 <= hit <= each.num_prompt_tokens for hit, each in zip(outcome.hits, trace.logged, strict=True))
        assert outcome.hit_tokens + sum(outcome.lost.values()) == outcome.prompt_tokens
        assert outcome.peak_bytes <= num_pages * trace.layout.page_bytes
        assert mode != "none" or not any(hit for name, hit in cached(trace, replay).items() if "." not in name)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_many_mixes(seed, tmp_path):
    draw = random.Random(seed)
    server = Logged(
        tmp_path / "log",
        draw.choice(MODES),
        draw.choice((50, 60, 90, 150, 600)),
        layout(16, draw.choice((1, 3, 7))),
        exact=draw.random() < 0.3,
        eviction=draw.choice(("value", "lru")),
        max_num_seqs=draw.choice((1, 2, 8)),
    )
    serve(server, seed, 150, holds=draw.random() < 0.5, branches=draw.random() < 0.5)
    assert_replayed(server, tmp_path / "log")
