"""The simulated fleet of `benchmarks.routing`: its caches, its time and its figures, on traces made here."""

import gzip
import json

import numpy as np
import pytest
from benchmarks import routing
from benchmarks.closed_loops import ClosedLoops, Loop, LoopServer, ProxiedLoops
from benchmarks.queued_server import StepTimes, sessions_of, shipped_policies
from benchmarks.routing_baselines import BASELINES, SHARED_CACHE, SHIPPED, make_router
from benchmarks.routing_fleet import Fleet, FleetOptions, ReplayCache, ServerModel, SimulatedReplica
from benchmarks.routing_trace import RepeatedTrace, num_copies

from cairn.cache.eviction import eviction_for
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy
from cairn.replay.bounds import footprint_bytes
from cairn.replay.replay import Replay
from cairn.replay.trace import Trace, TraceRequest
from cairn.replay.traces import read_trace
from cairn.routing.rule import ReplicaLoad, RoutedRequest, RoutingOptions
from cairn.types import ManualClock
from tiers import first

UNIT = 64
LAYOUT = CacheLayout(
    block_size=16,
    page_bytes=1024,
    page_units=1,
    groups=(AttentionGroup("full", 16),),
    header_bytes=0,
    state_bytes=4096,
    state_units=1,
)
SERVER = ServerModel(prefill_speed=1000.0, decode_seconds=0.01, max_running=2)
SYSTEM, BIG = 10, 1 << 20


def of(arrived, path, answer=(), session=0, behind=5):
    path, answer = np.array(path, np.int64), np.array(answer, np.int64)
    return TraceRequest(arrived, len(path) * UNIT + behind, path, answer, session=session)


def chats(num_sessions=9, turns=4):
    """Sessions with one of two system prompts, each turn of which repeats all that came before."""
    requests, private = [], 0
    for session in range(num_sessions):
        path = [SYSTEM * (session % 2) + unit for unit in range(6)]
        for turn in range(turns):
            path = path + [1000 * (session + 1) + 50 * turn + unit for unit in range(3)]
            answer = [1000 * (session + 1) + 50 * turn + 10 + unit for unit in range(2)]
            if turn == turns - 1:
                answer = [-1 - private, -2 - private]
                private += 2
            requests.append(of(3.0 * session + 7.0 * turn, path, answer, session))
            path = path + answer
    return Trace("chats", UNIT, tuple(sorted(requests, key=lambda request: request.arrived)))


def options(replicas, budget_bytes=BIG, **others):
    return FleetOptions(replicas, LAYOUT, budget_bytes, SERVER, **others)


def run(rule, trace, replicas=3, budget_bytes=BIG, copies=1, speedup=1.0, seed=0, **others):
    repeated = RepeatedTrace(trace, copies, seed)
    fleet = Fleet(options(replicas, budget_bytes, **others), make_router(rule, seed, RoutingOptions()), UNIT)
    return fleet, fleet.run(repeated, speedup)


def policy():
    return CachePolicy(placement_for("auto", LAYOUT.block_size, exact=False), eviction_for("value"))


# -- one replica is a replay -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "budget_bytes"), [(SHIPPED, 90 * 1024), ("round robin", BIG)])
def test_one_replica_hits_what_a_replay_hits(rule, budget_bytes):
    trace = chats()
    replay = Replay(LAYOUT, budget_bytes, policy(), 8192, ManualClock()).run(trace)
    _, outcome = run(rule, trace, replicas=1, budget_bytes=budget_bytes)
    assert outcome.cached.tolist() == replay.hits and sum(replay.hits) > 0
    assert (sum(replay.hits) < replay.prompt_tokens * 0.5) == (budget_bytes < BIG), "the small one has to evict"


def test_one_cache_is_a_replay_of_all_copies():
    repeated = RepeatedTrace(chats(), 3, seed=1)
    whole = Trace("whole", UNIT, tuple(arrival.request for arrival in repeated.arrivals()))
    replay = Replay(LAYOUT, 200 * 1024, policy(), 8192, ManualClock()).run(whole)
    row = routing.single_cache(repeated, LAYOUT, 200 * 1024)
    assert row["cached_share"] == replay.hit_tokens / replay.prompt_tokens > 0.3


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.more
def test_cached_tokens_of_every_rule():
    """Counts of a run that nothing but a change of the cache or of a rule moves."""
    trace = chats(12, 5)
    cached = {rule: int(run(rule, trace)[1].cached.sum()) for rule in (SHIPPED, *BASELINES)}
    prompt = sum(request.num_prompt_tokens for request in trace.requests)
    most = routing.single_cache(RepeatedTrace(trace, 1, 0), LAYOUT, 3 * BIG)["cached_share"] * prompt
    # a system prompt is computed once, or once more by each of the two other replicas
    computed_more = cached["hash of first block"] - cached["hash of session"]
    assert computed_more % (6 * UNIT) == 0 < computed_more <= 4 * 6 * UNIT and cached["hash of first block"] == most
    assert cached[SHIPPED] >= max(count for rule, count in cached.items() if rule != "hash of first block")
    assert cached["round robin"] < 0.72 * cached[SHIPPED] < cached[SHIPPED] <= most


def test_with_one_cache_for_all_each_request_hits_what_one_cache_has():
    trace, budget_bytes = chats(), 90 * 1024
    repeated = RepeatedTrace(trace, 1, 0)
    router = make_router(SHARED_CACHE, 0, RoutingOptions())
    outcome = Fleet(options(3, budget_bytes // 3, shares_cache=True, load_period=0.0), router, UNIT).run(repeated, 1.0)
    single = routing.single_cache(repeated, LAYOUT, 3 * (budget_bytes // 3))
    assert outcome.cached.sum() / outcome.prompt.sum() == single["cached_share"]
    assert np.bincount(outcome.replica).min() >= 10, "and goes where least work waits"


@pytest.mark.parametrize("rule", first(1, [SHIPPED, *BASELINES]))
def test_the_same_seed_gives_the_same_run(rule):
    first, second = (run(rule, chats(), copies=2, speedup=5.0, seed=3)[1] for _ in range(2))
    for name in ("replica", "cached", "ttft"):
        assert getattr(first, name).tolist() == getattr(second, name).tolist()
    assert len(set(first.replica.tolist())) > 1


def test_the_router_hears_of_blocks_only_after_a_while():
    trace = Trace("two", UNIT, (of(0.0, range(8), session=0), of(4.0, range(8), session=1)))
    heard = {}
    for delay in (0.1, 10.0):
        router = make_router(SHIPPED, 0, RoutingOptions())
        applied = []
        router.apply = lambda replica, event, applied=applied: applied.append(event)
        Fleet(options(2, event_delay=delay), router, UNIT).run(RepeatedTrace(trace, 1, 0), 1.0)
        heard[delay] = len(applied)
    assert heard[0.1] > 0 == heard[10.0]


def test_what_is_announced_is_what_requests_ask_for():
    """Blocks are named alike on both sides: else no event would ever match."""
    router = make_router(SHIPPED, 0, RoutingOptions())
    router.record_routed = lambda request, replica, now: None
    asked = []
    choose = router.choose
    router.choose = lambda request, replicas, now: asked.append(request) or choose(request, replicas, now)
    trace = chats(3, 3)
    fleet = Fleet(options(2), router, UNIT)
    outcome = fleet.run(RepeatedTrace(trace, 1, 0), 1.0)
    fleet._tell_router(1e9)
    index = router._index
    for request, arrival, number in zip(asked, trace.requests, outcome.replica.tolist(), strict=True):
        assert len(request.block_hashes) == len(arrival.path)
        assert index.matched_by(f"replica-{number}", request.block_hashes) == len(arrival.path)


# -- the modelled server -----------------------------------------------------------------------------------------------


def test_prompts_are_computed_one_after_the_other_and_slots_bound_them():
    replica = SimulatedReplica(options(1), UNIT, with_events=False)
    first = replica.serve(of(0.0, range(10), [90], behind=360), 0.0)
    assert (first.cached, first.num_computed, first.first_token_time) == (0, 1000, 1.0)
    assert first.finished_time == pytest.approx(1.0 + UNIT * 0.01)
    second = replica.serve(of(0.0, range(100, 110), [91], behind=360), 0.5)
    assert second.first_token_time == 2.0
    # the first has finished at 1.64; the second and this one fill both slots
    third = replica.serve(of(0.0, range(100, 110), [92, 93], behind=360), 1.0)
    assert third.cached == 640 and third.first_token_time == pytest.approx(2.36)
    fourth = replica.serve(of(0.0, range(200, 210), behind=360), 1.0)
    assert fourth.first_token_time == pytest.approx(second.finished_time + 1.0)
    load = replica.load(1.5)
    assert (load.num_running, load.num_waiting, load.pending_tokens) == (2, 2, 500 + 360 + 1000)
    assert replica.computed_by(np.array([0.5, 1.0, 2.36, 2.5, 100.0])).tolist() == [500, 1000, 2360, 2360, 3360]
    assert replica.load(2.5).pending_tokens == 1000 and replica.load(100.0).num_running == 0


def test_load_is_reported_now_and_then():
    requests = tuple(of(0.4 * number, range(20 * number, 20 * number + 8), session=number) for number in range(8))
    for period, reported in ((1.0, [0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0]), (0.0, [0.4 * n for n in range(8)])):
        router = make_router("round robin", 0, RoutingOptions())
        seen = []
        choose = router.choose
        router.choose = lambda request, replicas, now, seen=seen, choose=choose: (
            seen.append(replicas["replica-0"].as_of) or choose(request, replicas, now)
        )
        Fleet(options(2, load_period=period), router, UNIT).run(
            RepeatedTrace(Trace("steady", UNIT, requests), 1, 0), 1.0
        )
        assert seen == pytest.approx(reported)


def test_baselines_choose_as_they_are_called():
    loads = {name: ReplicaLoad() for name in "abc"}
    alike = [RoutedRequest((7, number), UNIT, 2 * UNIT, f"session {number % 4}") for number in range(40)]
    chosen = {}
    for rule in BASELINES:
        router = make_router(rule, 0, RoutingOptions())
        chosen[rule] = []
        for request in alike:
            chosen[rule].append(router.choose(request, loads, 0.0))
            router.record_routed(request, chosen[rule][-1], 0.0)
    assert chosen["round robin"][:4] == ["a", "b", "c", "a"]
    assert sorted(map(chosen["least loaded"].count, "abc")) == [13, 13, 14]
    assert max(map(chosen["two choices"].count, "abc")) <= 15
    assert len(set(chosen["hash of first block"])) == 1
    assert all(len({chosen["hash of session"][at] for at in range(start, 40, 4)}) == 1 for start in range(4))
    with pytest.raises(SystemExit, match="there is no rule 'random'; there are cairn, round robin"):
        make_router("random", 0, RoutingOptions())


def test_a_session_waits_for_its_answers():
    requests = (
        of(0.0, range(10), [90], session=0, behind=360),
        of(0.5, range(20, 30), session=1, behind=360),
        of(1.0, [*range(10), 90, 91], session=0, behind=0),
        of(1.1, [*range(10), 90, 92], session=0, behind=0),
        of(9.0, [*range(10), 90, 91, 93], session=0, behind=0),
    )
    _, outcome = run("round robin", Trace("two", UNIT, requests), replicas=1)
    # the first is answered at 1.64, but the second one's prompt takes until 2; no answer, no decoding
    assert outcome.arrived.tolist() == pytest.approx([0.0, 0.5, 1.64, 2.064, 9.0])
    assert outcome.ttft.tolist() == pytest.approx([1.0, 1.5, 0.424, 0.064, 0.064])


# -- repeating a trace -------------------------------------------------------------------------------------------------


def test_copies_share_what_sessions_share_and_nothing_else():
    trace = chats(4, 2)
    repeated = RepeatedTrace(trace, 3, seed=2)
    by_copy = {}
    for arrival in repeated.arrivals():
        by_copy.setdefault(arrival.session, []).append(arrival)
    assert len(repeated) == 24 and repeated.num_sessions == len(by_copy) == 12
    shared = set(range(6)) | set(range(SYSTEM, SYSTEM + 6))
    content = {}
    for session, arrivals in by_copy.items():
        first, second = (arrival.request for arrival in arrivals)
        assert [arrival.is_last for arrival in arrivals] == [False, True]
        # a follow-up goes on from the prompt and its answer, as late after it as in the trace
        assert second.path[: len(first.path) + 2].tolist() == [*first.path, *first.answer]
        assert arrivals[1].time - arrivals[0].time == pytest.approx(7.0)
        content[session] = {*second.path.tolist(), *second.answer.tolist()} - shared
        assert set(second.path[:6].tolist()) <= shared and len(content[session]) == 10
    assert len(set.union(*content.values())) == 120
    whole = Trace("whole", UNIT, tuple(arrival.request for arrival in repeated.arrivals()))
    assert repeated.footprint_bytes(LAYOUT) == footprint_bytes(whole, LAYOUT)
    assert np.all(np.diff(repeated.times) >= 0) and repeated.last_start < repeated.horizon


def test_enough_copies():
    trace = chats(9, 4)
    assert [num_copies(trace, *of_each) for of_each in ((1, 1, 1), (3, 3, 1), (4, 3, 1), (4, 1, 40))] == [1, 1, 2, 5]


def test_sessions_can_be_cut():
    trace = chats(9, 4)
    kept = routing.cut_sessions(trace, 14.0).requests
    assert kept == tuple(request for request in trace.requests if request.arrived - 3.0 * request.session <= 14.0)
    assert len(kept) == 27 and routing.cut_sessions(trace, 1e9).requests == trace.requests


def test_a_trace_without_sessions_is_refused():
    with pytest.raises(SystemExit, match="made does not say which requests belong to a session"):
        RepeatedTrace(Trace("made", UNIT, (of(0.0, [1], session=None),)), 2, 0)


# -- figures -----------------------------------------------------------------------------------------------------------


def test_imbalance_is_the_most_over_the_mean():
    assert routing.imbalance(np.array([[10.0] * 20, [30.0] * 20])) == 1.5
    assert routing.imbalance(np.array([[0.0, 10.0], [0.0, 30.0]])) == 1.5
    assert routing.imbalance(np.zeros((2, 3))) is None and routing.imbalance(np.zeros((2, 0))) is None


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"t": 2.0 * number, "s": number // 3, "in": 9 * UNIT, "out": UNIT, "v": 0, "h": [[0, 6], [100 + 9 * number, 3]]}
        for number in range(60)
    ]
    head = {"name": "made", "unit": UNIT, "n": len(rows), "source": "", "license": "", "real": False, "note": ""}
    with gzip.open(tmp_path / "made.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in [head, *rows])
    return tmp_path


@pytest.mark.more
def test_a_study_is_continued_and_told(folder, capsys):
    assert [request.session for request in read_trace(folder / "made.jsonl.gz").requests[:4]] == [0, 0, 0, 1]
    out, plot = folder / "rows.json", folder / "plot.svg"
    command = [str(folder), "--json", str(out), "--sessions", "1", "--requests", "20", "--prefill-speed", "100"]
    routing.main([*command, "--replicas", "1,3", "--rules", "cairn"])
    before = json.loads(out.read_text())["rows"]
    routing.main([*command, "--replicas", "3", "--rules", "round robin,cairn", "--plot", str(plot)])
    rows = json.loads(out.read_text())["rows"]
    assert rows[:4] == before and [row["rule"] for row in rows[4:]] == ["round robin"]
    assert [row["rule"] for row in before] == ["one cache", "cairn", "one cache", "cairn"]
    one, cairn = before[:2]
    assert one["cached_share"] == cairn["cached_share"] > 0.3 and cairn["imbalance"] == cairn["of_one_cache"] == 1
    assert cairn["index_bytes"] > 0 == rows[-1]["index_bytes"]
    assert "round robin" in capsys.readouterr().out and "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--set", "warp=1"], "'warp=1' is not NAME=NUMBER with a name of "),
        (["--replicas", "0"], "must be at least 1, not 0"),
        (["--utilization", "-1"], "must be above 0, not -1.0"),
    ],
)
def test_bad_flags_are_named(folder, flags, told, capsys):
    with pytest.raises(SystemExit):
        routing.main([str(folder), *flags])
    assert told in capsys.readouterr().err


def test_a_replica_has_the_memory_of_its_sessions():
    repeated = RepeatedTrace(chats(30, 2), 2, 0)
    whole = repeated.footprint_bytes(LAYOUT)
    assert routing.replica_bytes(repeated, LAYOUT, 0.5, replicas=2) == whole // 4
    assert routing.replica_bytes(repeated, LAYOUT, 0.5, replicas=4) == whole // 4, "at least that of 30 sessions"


def test_the_cache_keeps_no_books_of_all_prompts():
    cache = ReplayCache(LAYOUT, BIG)
    for request in chats(3, 2).requests:
        cache.serve(request, UNIT)
    assert cache._paths.num_units == 0


# -- closed loops: one server, and two behind the proxy's rule -------------------------------------------------------

TIMES = StepTimes(step=0.01, prompt_token=1e-3, sequence=0.01)


def loops() -> list[Loop]:
    sessions = sessions_of(chats())
    pauses = [np.full(len(session.requests), 0.5) for session in sessions]
    return [Loop(sessions[:4], pauses[:4], 2), Loop(sessions[4:], pauses[4:], 5)]


def servers(number: int) -> list[LoopServer]:
    return [LoopServer(LAYOUT, BIG, *shipped_policies(LAYOUT, 2), TIMES) for _ in range(number)]


def test_each_session_is_served_whole_and_in_order():
    served = ClosedLoops(servers(1), loops())
    served.serve(np.random.default_rng(0))
    assert [len(ttft) for ttft in served.ttft] == [16, 20]
    assert [len(seconds) for seconds in served.session_seconds] == [4, 5]
    assert all(served.next_turn[number] == 4 for number in range(9))


def test_a_session_stays_where_its_prefix_is():
    served = ProxiedLoops(servers(2), loops(), seed=0)
    chosen: dict[int, set[LoopServer]] = {}
    choose = served.choose

    def note(number: int, when: float) -> LoopServer:
        server = choose(number, when)
        chosen.setdefault(number, set()).add(server)
        return server

    served.choose = note
    served.serve(np.random.default_rng(0))
    assert [len(ttft) for ttft in served.ttft] == [16, 20]
    assert [len(places) for places in chosen.values()] == [1] * 9
    assert len(set.union(*chosen.values())) == 2


def test_servers_have_clocks_of_their_own():
    """Two serve the same sooner than one, and nobody's request is lost between them."""
    alone, both = ClosedLoops(servers(1), loops()), ProxiedLoops(servers(2), loops(), seed=0)
    for served in (alone, both):
        served.serve(np.random.default_rng(0))
    mean = [np.mean([*served.ttft[0], *served.ttft[1]]) for served in (alone, both)]
    assert mean[1] <= mean[0]
    assert sum(len(server.outcome.prompt) for server in both.servers) == 36
