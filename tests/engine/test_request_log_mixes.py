"""The replay of what a real core has served to eight clients at once with a runner of tags: the cached tokens that it
comes to are those that the server has counted."""

import itertools
import os
import random
from collections import Counter
from dataclasses import replace

import pytest
from loads import Load, serve
from logged import LoggedServer, hits_by_name, layout, logged_hits, replayed

from cairn.cache.reasons import Reason
from cairn.replay.traces import read_trace
from cairn.scheduler import sessions
from tiers import more

LONG = pytest.mark.long
KINDS = ("chat", "rag", "agent", "mixed")
MODES = ("auto", "align", "all", "granular", "junction")
POOL = 300
"""Pages: twice what runs at once."""


@pytest.fixture(autouse=True)
def same_key(monkeypatch):
    """With a key that is drawn, two sequences that diverge seem to share a token more once in 65,536 times, which in
    a run of some hundreds decides. With this one no two of these do where it counts."""
    monkeypatch.setattr(os, "urandom", lambda size: bytes(range(size)))


def assert_agrees(server: LoggedServer, path, within: float = 0.0005) -> None:
    """Two sequences of a log may seem to share a token more than they do, and nothing else may differ."""
    trace = read_trace(path)
    replay = replayed(trace)
    counters, outcome = server.cache.counters, replay.outcome
    assert outcome.prompt_tokens == counters.queries
    assert sum(hit for name, hit in logged_hits(trace).items() if not branch(name)) == counters.hits
    assert abs(outcome.hit_tokens - counters.hits) <= within * counters.hits
    if server.cache.enabled:
        # what another namespace has is not in the log
        new = counters.lost[Reason.NEVER_SEEN] + counters.lost[Reason.NAMESPACE]
        assert abs(outcome.lost[Reason.NEVER_SEEN] - new) <= 0.02 * counters.queries


def branch(name: str) -> bool:
    return "/" in name


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        *((0, kind) if kind == "mixed" else more(0, kind) for kind in KINDS),
        *(more(3, kind) for kind in KINDS),
        *(pytest.param(seed, kind, marks=LONG) for seed in range(4, 12) for kind in KINDS),
    ],
)
def test_eight_clients_at_once(kind, seed, tmp_path):
    server = LoggedServer(tmp_path / "log", num_pages=POOL)
    serve(server, Load(seed), kind, requests=150)
    assert server.cache.checkpoints.evicted.total() > 20 and server.cached_tokens > 5_000
    assert server.log.dropped == 0
    assert_agrees(server, tmp_path / "log")


@pytest.mark.parametrize("kind", ["rag", "mixed", *map(more, ("chat", "agent"))])
def test_with_room_for_all_every_request_hits_the_same(kind, tmp_path):
    server = LoggedServer(tmp_path / "log", num_pages=6000)
    serve(server, Load(1), kind, requests=60)
    trace = read_trace(tmp_path / "log")
    hits = hits_by_name(trace, replayed(trace))
    assert {name: hit for name, hit in logged_hits(trace).items() if not branch(name)} == {
        name: hit for name, hit in hits.items() if not branch(name)
    }


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("align", {}),
        ("auto", {"exact": True}),
        more("junction", {}),
        more("auto", {"eviction": "lru"}),
        more("all", {}),
        more("granular", {}),
        more("align", {"exact": True}),
        more("auto", {"in_flight_sharing": False}),
    ],
)
def test_under_every_policy(mode, fields, tmp_path):
    server = LoggedServer(tmp_path / "log", mode, num_pages=POOL, **fields)
    serve(server, Load(2), "mixed", requests=80)
    assert server.cached_tokens > 0
    assert_agrees(server, tmp_path / "log")


class _ManySessions(LoggedServer):
    """Requests of a few sessions of two clients, of one session each, and of none."""

    def submit(self, name, prompt, *rest, **fields):
        number = len(self.sequences)
        session = ("", f"session {number % 3}", f"only {number}")[number % 3]
        super().submit(name, prompt, *rest, session=session, client="ab"[number % 2], **fields)


@pytest.mark.parametrize(("seed", "num_pages"), [(0, POOL), *(more(seed, 120) for seed in range(1, 4))])
def test_sessions_that_take_turns(seed, num_pages, tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "FIRST_LEVEL", 128)
    fields = {"scheduling_policy": "session", "max_num_seqs": 3}
    server = _ManySessions(tmp_path / "log", num_pages=num_pages, **fields)
    serve(server, Load(seed), "mixed", requests=120)
    assert server.scheduler.state.counters.bypasses > 0
    assert read_trace(tmp_path / "log").header.scheduling_policy == "session"
    assert_agrees(server, tmp_path / "log")
    assert not any(name in (tmp_path / "log").read_text() for name in ("session ", "only "))


class _ToolUsers(LoggedServer):
    """Most answers were calls, of which the cache is told up to three steps after their ends, if it goes on so long."""

    def __init__(self, *arguments, **fields):
        super().__init__(*arguments, **fields)
        self._random, self._late = random.Random(1), list[tuple[int, str]]()

    def step(self):
        ended = super().step()
        self._late += [(self._random.randrange(4), name) for name in ended if self._random.random() < 0.7]
        for _, name in (each for each in self._late if not each[0]):
            base, _, index = name.partition("/")
            self.core.await_tools(base, int(index or 0))
        self._late = [(steps - 1, name) for steps, name in self._late if steps]
        return ended


@pytest.mark.parametrize(
    ("seed", "kind", "fields"),
    [
        (1, "chat", {"max_in_flight": 2}),
        more(0, "agent", {}),
        *(more(seed, kind, {}) for seed in range(2, 5) for kind in ("mixed", "agent")),
    ],
)
def test_sessions_that_wait_for_their_tools(seed, kind, fields, tmp_path):
    server = _ToolUsers(tmp_path / "log", num_pages=POOL, **fields)
    serve(server, Load(seed), kind, requests=150)
    trace = read_trace(tmp_path / "log")
    told = [each for each in trace.requests if each.tools_step is not None]
    assert len(told) > 50 and all(each.tools_step >= each.timeline.finished_step for each in told)
    assert_agrees(server, tmp_path / "log")
    replay = replayed(trace)
    untold = replace(trace, requests=tuple(replace(each, tools_step=None) for each in trace.requests))
    assert 0 < waits(replay.cache) <= waits(server.cache), "word that came after the last request is in no line"
    assert replayed(untold).outcome.evicted != replay.outcome.evicted == server.cache.checkpoints.evicted


def waits(cache) -> int:
    return sum(record.awaits_tools for record in cache.policy.eviction._records.values())


@pytest.mark.parametrize("block_size", [48, more(1)])
def test_with_pages_of_other_sizes(block_size, tmp_path):
    sizes = layout(block_size)
    server = LoggedServer(tmp_path / "log", num_pages=8000 // block_size, sizes=sizes)
    serve(server, Load(3), "chat", requests=80)
    assert_agrees(server, tmp_path / "log")


def test_what_clients_hold_ends_at_the_same_time(tmp_path):
    server = LoggedServer(tmp_path / "log", num_pages=POOL)
    serve(server, Load(4, holds=True), "chat", requests=120)
    assert any(report.held_breakpoints for report in server.reports.values())
    assert_agrees(server, tmp_path / "log")


@pytest.mark.parametrize(("seed", "num_pages"), [(1, 100), more(2, 100), *(more(seed, 80) for seed in range(3, 9))])
def test_of_a_pool_that_hardly_holds_what_runs(seed, num_pages, tmp_path):
    server = LoggedServer(tmp_path / "log", num_pages=num_pages)
    serve(server, Load(seed), "chat", requests=150)
    assert server.scheduler.state.counters.preemptions > 0 and server.log.dropped == 0
    trace = read_trace(tmp_path / "log")
    assert set(server.reports) <= logged_hits(trace).keys()
    assert_agrees(server, tmp_path / "log")


@pytest.mark.parametrize(("kind", "num_pages"), [("mixed", POOL), more("chat", 100)])
def test_two_steps_at_a_time(kind, num_pages, tmp_path):
    """As a GPU's server has them."""
    server = LoggedServer(tmp_path / "log", num_pages=num_pages, max_in_flight=2)
    serve(server, Load(1), kind, requests=150)
    assert read_trace(tmp_path / "log").header.max_in_flight == 2
    assert_agrees(server, tmp_path / "log")


def test_with_the_cache_off(tmp_path):
    server = LoggedServer(tmp_path / "log", "none")
    serve(server, Load(5), "chat", requests=40)
    assert_agrees(server, tmp_path / "log")


def test_without_a_state_any_length_is_hit_again(tmp_path):
    server = LoggedServer(tmp_path / "log", num_pages=POOL, sizes=layout(pages_per_checkpoint=0))
    # the runner of tags knows no model without a state to go on from
    server.core._runner._slots = _Anything()
    serve(server, Load(6), "mixed", requests=80)
    assert_agrees(server, tmp_path / "log")


class _Anything(dict):
    def __missing__(self, slot):
        return 0, 0


def test_prompts_that_are_computed_whole_hit_nothing(tmp_path):
    server = LoggedServer(tmp_path / "log")
    for index in range(4):
        server.submit(f"r{index}", [1, 2, 3, 4] * 25, prompt_logprobs=0 if index % 2 else None)
        server.run()
    server.close()
    trace = read_trace(tmp_path / "log")
    assert hits_by_name(trace, replayed(trace)) == logged_hits(trace) == {"r0": 0, "r1": 0, "r2": 100, "r3": 0}


def test_several_answers_to_a_prompt_count_it_once(tmp_path):
    server = LoggedServer(tmp_path / "log")
    server.submit("a", range(100), max_tokens=4, n=3)
    server.run()
    answers = [server.sequences[name] for name in ("a", "a/1", "a/2")]
    for index, answer in enumerate(answers):
        server.submit(f"b{index}", [*answer, 7, 8])
        server.run()
    server.close()
    trace = read_trace(tmp_path / "log")
    assert [request.is_parallel_sample for request in trace.requests] == [False, True, True, False, False, False]
    outcome = replayed(trace).outcome
    # each answer can be gone on from: its last token was not computed
    assert outcome.hits == [0, 0, 0, 103, 103, 103]
    assert outcome.hit_tokens == server.cached_tokens and outcome.prompt_tokens == 100 + 3 * 106


def test_what_came_from_another_server_is_no_hit_and_is_hit_later(tmp_path):
    """As a decode server's line has it; `tests/pd/test_request_logs.py` has real ones."""
    server = LoggedServer(tmp_path / "log")
    for index in range(2):
        server.submit(f"r{index}", [*range(100), *range(1000, 1000 + index)])
        server.run()
    server.close()
    text = (tmp_path / "log").read_text().replace('"received_tokens":0', '"received_tokens":100', 1)
    (tmp_path / "log").write_text(text)
    trace = read_trace(tmp_path / "log")
    replay = replayed(trace)
    assert replay.outcome.hits == [0, 100] and replay.cache.counters.received == 100
    assert replay.outcome.prefill_tokens == 1 and replay.outcome.forward_passes == 1


def test_a_state_that_another_request_waits_for_is_kept_again(tmp_path):
    """Two prompts at once that part off every place that the policy keeps: the second begins where they part."""
    server = LoggedServer(tmp_path / "log", "junction", max_num_batched_tokens=128)
    common = list(range(200))
    server.submit("a", [*common, *range(300, 500)])
    server.step()
    server.submit("b", [*common, *range(600, 700)])
    server.close()
    trace = read_trace(tmp_path / "log")
    assert hits_by_name(trace, replayed(trace)) == logged_hits(trace) == {"a": 0, "b": 200}


def one_by_one(path, seed, mode, num_pages, eviction="value"):
    """A server to which one request comes after the other, whatever its cache does."""
    server = LoggedServer(path, mode, num_pages, eviction=eviction, max_num_batched_tokens=1024, max_num_seqs=1)
    serve(server, Load(seed, aborts=False), "mixed", requests=60, concurrency=1)
    return server


@pytest.mark.parametrize(
    ("logged_mode", "modes"),
    [more("align", ("auto",)), pytest.param("auto", MODES, marks=LONG), pytest.param("align", MODES, marks=LONG)],
)
def test_other_rules_give_what_a_server_with_these_rules_would_have(logged_mode, modes, tmp_path):
    """Where little fits, a hit more or less of one load is a hundredth of all: four have to be right together."""
    differences, hits = Counter(), Counter()
    for seed in range(5, 9):
        one_by_one(tmp_path / "log", seed, logged_mode, 400)
        trace = read_trace(tmp_path / "log")
        for rules in itertools.product(modes, (2000, 120), ("value", "lru")):
            mode, num_pages, eviction = rules
            server = one_by_one(tmp_path / "other", seed, mode, num_pages, eviction)
            replay = replayed(trace, mode, num_pages * trace.header.layout.page_bytes, eviction)
            differences[rules] += replay.outcome.hit_tokens - server.cached_tokens
            hits[rules] += server.cached_tokens
    for rules, difference in differences.items():
        assert abs(difference) <= (0.005 if rules[1] == 120 else 0) * hits[rules], (rules, difference, hits[rules])


@pytest.mark.parametrize("num_pages", [20, 150, *map(more, (40, 60))])
def test_less_room_than_the_server_had(num_pages, tmp_path):
    server = LoggedServer(tmp_path / "log", num_pages=600)
    serve(server, Load(7, holds=True), "mixed", requests=60)
    trace = read_trace(tmp_path / "log")
    layout = trace.header.layout
    for mode in (*MODES, "none"):
        outcome = replayed(trace, mode, num_pages * layout.page_bytes).outcome
        refused = [each for each in trace.requests if layout.pages_for(each.num_prompt_tokens) + 1 > num_pages]
        assert outcome.refused == len(refused)
        assert all(0 <= hit <= each.num_prompt_tokens for hit, each in zip(outcome.hits, trace.requests, strict=True))
        assert outcome.peak_bytes <= num_pages * layout.page_bytes
        assert mode != "none" or not any(outcome.hits)


def test_a_larger_cache_hits_more(tmp_path):
    server = LoggedServer(tmp_path / "log", num_pages=POOL)
    serve(server, Load(8), "chat", requests=100)
    trace = read_trace(tmp_path / "log")
    hits = [replayed(trace, budget_bytes=pages * 64).outcome.hit_tokens for pages in (80, 200, 1000)]
    assert hits[0] < hits[1] < hits[2]
