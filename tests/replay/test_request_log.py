"""A log that was written by hand: what is made of it, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from logged import Logged, first_line, layout, logged, replayed

from cairn.cli import main
from cairn.errors import ConfigError
from cairn.replay.bounds import unlimited_hits
from cairn.replay.layouts import sizes_for
from cairn.replay.request_log import LoggedTrace
from cairn.replay.traces import read_trace

HEADER = first_line(layout(), 100)
SIZES = {"active_weights": 1000, "score_numbers": 8}


def line(n, num_in, num_out=0, shares=(), h=None, ops=(), **fields) -> dict:
    start = shares[1] // 16 if shares else 0
    h = [1000 * n + unit for unit in range(start, (num_in + num_out) // 16)] if h is None else h
    plain = {"n": n, "id": f"r{n}", "t": float(n), "in": num_in, "out": num_out, "finish": "stop", "ns": 0}
    return {**plain, "shares": list(shares), "h": h, "ops": list(ops), "cached_tokens": 0} | fields


def written(path, lines, header=HEADER):
    path.write_text("\n".join(json.dumps(each) for each in (header, *lines)))
    return path


def read(path, *lines, sizes=layout()) -> LoggedTrace:  # noqa: B008
    trace = read_trace(written(path / "log", lines, first_line(sizes, 100)))
    assert isinstance(trace, LoggedTrace)
    return trace


def served(n, length, *, hit=0, step=1):
    """The calls of a prompt that is served alone, with nothing generated."""
    return [
        *(["l", n, length, 0, 0], ["x", n, length, 1], ["a", n, 0], ["h", n]),
        *(["p", step, [[n, length, 1]]], ["c", n, length, 1], ["s", step], ["r", n, None]),
    ]


def test_sequences_share_what_the_log_says(tmp_path):
    trace = read(
        tmp_path,
        line(1, 30, 10),
        line(2, 40, shares=(1, 35)),
        line(3, 60, 4, shares=(2, 38)),
        line(4, 20, shares=(1, 20)),
        line(5, 50),
    )
    first, second, third, fourth, other = (request.keys() for request in trace.logged)
    assert [len(each) for each in (first, second, third, fourth, other)] == [40, 40, 64, 20, 50]
    for ours, theirs, count in ((first, second, 35), (second, third, 38), (first, third, 35), (first, fourth, 20)):
        alike = ours[: len(theirs)] == theirs[: len(ours)]
        assert (len(alike) if alike.all() else int(np.argmin(alike))) == count
    assert not set(other) & set(first)
    # as a trace: to the token
    assert trace.unit == 1 and [len(request.path) for request in trace.requests] == [30, 40, 60, 20, 50]
    assert unlimited_hits(trace).tolist() == [0, 35, 38, 20, 0]
    assert trace.requests[0].answer.tolist() == first[30:].tolist()


def test_hashes_tie_what_was_forgotten(tmp_path):
    trace = read(tmp_path, line(1, 40, h=[7, 8]), line(2, 60, h=[7, 8, 9]), line(3, 70, shares=(1, 20), h=[8, 9, 10]))
    first, second, third = (request.keys() for request in trace.logged)
    assert first[:32].tolist() == second[:32].tolist() and second[:48].tolist() == third[:48].tolist()
    assert third[48] not in second


def test_requests_are_in_order_of_arrival_and_those_never_served_are_left_out(tmp_path):
    trace = read(tmp_path, line(3, 20), line(1, 20), line(2, 20, cached_tokens=None, finish="abort"))
    assert list(logged(trace)) == ["r1", "r3"] and [request.arrived for request in trace.requests] == [1.0, 3.0]


def test_calls_are_made_in_their_order(tmp_path):
    """Two prompts at once: the second is looked up before, or after, the first one's tokens are there."""
    first, second = served(1, 100), served(2, 120, step=2)
    lines = line(1, 100), line(2, 120, shares=(1, 100))
    for ops, hits in ((first + second, [0, 100]), (second[:4] + first + second[4:], [0, 0])):
        trace = read(tmp_path, lines[0], {**lines[1], "ops": ops})
        assert replayed(trace).outcome.hits == hits


def test_calls_that_are_missing_do_not_end_the_replay(tmp_path):
    """As after a gap: any of the calls may be."""
    calls = served(1, 100) + served(2, 120, step=2)
    for missing in range(len(calls)):
        kept = [call for index, call in enumerate(calls) if index != missing]
        trace = read(tmp_path, line(1, 100), line(2, 120, shares=(1, 100), ops=kept))
        outcome = replayed(trace).outcome
        assert len(outcome.hits) == 2 and all(hit in (0, 64, 100) for hit in outcome.hits)


def test_what_a_preemption_has_cost_is_charged_to_it(tmp_path):
    begun = [*served(1, 100)[:4], ["p", 1, [[1, 64, 1]]], ["c", 1, 64, 0], ["s", 1], ["r", 1, "preempted"]]
    trace = read(tmp_path, line(1, 100), line(2, 100, shares=(1, 100), ops=begun + served(2, 100, step=2)))
    assert replayed(trace, "junction").outcome.lost["preempted"] == 64


def test_requests_that_began_in_an_earlier_file_are_computed_first(tmp_path):
    trace = read(tmp_path, line(1, 100), line(2, 120, shares=(1, 100), ops=served(2, 120)))
    assert replayed(trace).outcome.hits == [0, 100]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"in": 0}, r"\$\.in"),
        ({"in": 1 << 30}, r"\$\.in"),
        ({"in": "many"}, r"\$\.in"),
        ({"shares": [9, 10]}, "`shares`"),
        ({"shares": [1]}, "`shares`"),
        ({"shares": [1, 999], "h": []}, "`shares`"),
        ({"shares": [1, 35], "in": 60, "h": [5]}, "`shares` names more tokens than request 1 has"),
        ({"h": []}, "`h`"),
        ({"h": [-1, 2]}, r"\$\.h"),
        ({"b": [3]}, "`kinds`"),
        ({"b": [3], "kinds": "x"}, "`kinds`"),
        ({"b": [99], "kinds": "m"}, "`b`"),
        ({"b": [3], "kinds": "m", "hold": [1, 2]}, "`hold`"),
        ({"ops": [["z", 1]]}, "`ops` has"),
        ({"ops": [[]]}, "`ops` has"),
        ({"ops": [[["l"]]]}, "`ops` has"),
        ({"ops": [["l", 1]]}, "`ops`"),
        ({"ops": [["l", 1, 0, 0, 0]]}, "`ops`"),
        ({"ops": [["r", 1, "tired"]]}, "`ops`"),
        ({"ops": [["t", -1.0]]}, "`ops`"),
        ({"n": None}, r"\$\.n"),
        ({"n": 1}, "`n` 1 stands in a line above"),
    ],
)
def test_a_line_that_is_wrong_is_named(fields, said, tmp_path):
    path = written(tmp_path / "log", [line(1, 32), line(2, 40) | fields])
    with pytest.raises(ConfigError, match=f"log:3.*{said}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": 2}, "`version`"),
        ({"unit": 0}, r"\$\.unit"),
        ({"layout": {}}, r"\$\.layout"),
        ({"layout": HEADER["layout"] | {"page_bytes": 0}}, "`layout`"),
        ({"policy": "auto"}, r"\$\.policy"),
        ({"budget_bytes": -1}, r"\$\.budget_bytes"),
        ({"forward_sizes": 5}, "`forward_sizes`: Expected `object`.*--layout"),
        ({"forward_sizes": {"active_weights": 7}}, "`forward_sizes`: .*`score_numbers`"),
        ({"forward_sizes": SIZES | {"active_weights": 0}}, r"`forward_sizes`: .*\$\.active_weights"),
        ({"forward_sizes": SIZES | {"active_weights": 1 << 51}}, r"`forward_sizes`: .*\$\.active_weights"),
        ({"forward_sizes": SIZES | {"score_numbers": -1}}, r"`forward_sizes`: .*\$\.score_numbers"),
        ({"forward_sizes": SIZES | {"score_numbers": True}}, r"`forward_sizes`: .*\$\.score_numbers"),
        ({"forward_sizes": SIZES | {"score_numbers": "8"}}, r"`forward_sizes`: .*\$\.score_numbers"),
    ],
)
def test_a_header_that_is_wrong_is_named(fields, said, tmp_path):
    with pytest.raises(ConfigError, match=f"log:1.*{said}"):
        read_trace(written(tmp_path / "log", [line(1, 32)], HEADER | fields))


def test_a_log_without_requests_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no request"):
        read_trace(written(tmp_path / "log", []))


def test_the_command_goes_by_the_servers_rules(tmp_path):
    ops = served(1, 100) + served(2, 120, step=2)
    path = written(tmp_path / "log", [line(1, 100), line(2, 120, shares=(1, 100), ops=ops)])
    told = tmp_path / "told.json"
    assert main(["replay", str(path), "--json", str(told), "--per-request", "--no-bounds"]) == 0
    (result,) = json.loads(told.read_text())
    assert result["budget_bytes"] == HEADER["budget_bytes"] and result["hit_tokens"] == 100
    assert [each["cached_tokens"] for each in result["per_request"]] == [0, 100]


@pytest.mark.parametrize("told", [{}, {"forward_sizes": None}, {"forward_sizes": SIZES}])
def test_flops_are_counted_where_the_log_says_with_what(told, tmp_path, capsys):
    ops = served(1, 100) + served(2, 120, step=2)
    lines = [line(1, 100), line(2, 120, shares=(1, 100), ops=ops)]
    path, out = written(tmp_path / "log", lines, HEADER | told), tmp_path / "told.json"
    assert main(["replay", str(path), "--json", str(out), "--no-bounds"]) == 0
    (result,) = json.loads(out.read_text())
    if told.get("forward_sizes") is None:
        assert result["hit_tokens"] == 100 and not {"flops_saved", "prefill_flops", "active_weights"} & result.keys()
        return
    # a token at p: 2 for each weight, 4 for each number of its queries and each of p + 1 keys
    costs = [2 * 1000 + 4 * 8 * (p + 1) for p in range(120)]
    saved, computed = sum(costs[:100]), sum(costs[:100]) + sum(costs[100:])
    assert (result["flops_saved"], result["prefill_flops"], result["active_weights"]) == (saved, computed, 1000)
    assert f"{saved:.2e} ({saved / (saved + computed):.0%})" in capsys.readouterr().out


def test_a_layout_that_is_named_goes_before_the_logs_sizes(tmp_path):
    path, out = written(tmp_path / "log", [line(1, 100)], HEADER | {"forward_sizes": SIZES}), tmp_path / "told.json"
    assert main(["replay", str(path), "--layout", "nemotron-3-nano", "--json", str(out), "--sweep", "100%"]) == 0
    assert json.loads(out.read_text())[0]["active_weights"] == sizes_for("nemotron-3-nano").active_weights


# -- with other sizes than the server's ------------------------------------------------------------------------------


def test_one_that_waits_for_what_steps_still_name_is_computed(tmp_path):
    """The file that the second one hit is the step's until that has been applied, and there is no lease any more."""
    calls = [
        *served(1, 64),
        *(["l", 2, 64, 0, 0], ["a", 2, 0], ["h", 2], ["p", 2, [[2, 64, 0]]]),
        *(["l", 3, 304, 0, 0], ["x", 3, 304, 1]),
        *(["r", 2, None], ["s", 2]),
        *(["a", 3, 0], ["h", 3], ["p", 3, [[3, 304, 1]]], ["c", 3, 304, 1], ["s", 3], ["r", 3, None]),
    ]
    lines = line(1, 64), line(2, 64, shares=(1, 64)), line(3, 304, ops=calls)
    trace = read(tmp_path, *lines, sizes=layout(16, 7))
    for pages in (1000, 20):
        assert replayed(trace, budget_bytes=64 * pages).outcome.hits == [0, 64, 0]


def test_an_answer_is_kept_as_far_as_there_are_pages(tmp_path):
    trace = read(tmp_path, line(1, 32, 150), line(2, 60, 4, shares=(1, 60)), sizes=layout(16, 0))
    replay = replayed(trace, budget_bytes=64 * 5)
    assert replay.outcome.hits == [0, 59] and replay.outcome.refused == 0


def test_smaller_blocks_than_the_servers(tmp_path):
    """Its pages lasted longer, so the log says less often that there were new ones."""
    for theirs, ours in ((48, 16), (16, 5), (16, 1), (16, 48)):
        server = Logged(tmp_path / "log", num_pages=4000, sizes=layout(theirs))
        server.submit("a", range(1000, 1060), max_tokens=150)
        server.run()
        keys = server.requests["a"].keys().tolist()
        for name, prompt in (("b", keys[:205]), ("c", [*keys[:190], 7, 8, 9])):
            server.submit(name, prompt, max_tokens=20)
            server.run()
        server.close()
        trace = replace(read_trace(tmp_path / "log"), layout=layout(ours))
        assert replayed(trace, budget_bytes=4000 * 64).outcome.hits == list(server.hits().values()) == [0, 192, 128]
        (tmp_path / "log").unlink()


# -- what is counted -------------------------------------------------------------------------------------------------


def test_several_answers_to_a_prompt_count_it_once(tmp_path):
    server = Logged(tmp_path / "log")
    server.submit("a", range(100), max_tokens=4, n=3)
    server.run()
    server.submit("b", range(100), max_tokens=4)
    server.run()
    server.close()
    trace = read_trace(tmp_path / "log")
    assert [request.branches for request in trace.requests] == [False, True, True, False]
    outcome = replayed(trace).outcome
    assert (outcome.prompt_tokens, outcome.hit_tokens, outcome.prefill_tokens) == (200, 100, 100)
    assert unlimited_hits(trace).tolist() == [0, 0, 0, 100]
    shown = tmp_path / "out.json"
    assert main(["replay", str(tmp_path / "log"), "--json", str(shown), "--per-request"]) == 0
    logged_policy, offline, unlimited = json.loads(shown.read_text())
    for told in (logged_policy, offline, unlimited):
        assert (told["requests"], told["prompt_tokens"], told["hit_tokens"]) == (2, 200, 100)
    assert [each["request"] for each in logged_policy["per_request"]] == ["a", "b"]


def test_what_the_cache_has_forgotten_was_seen_all_the_same(tmp_path):
    """Ghosts are bounded, and a log remembers all of it."""
    prompts = [line(n, 64) for n in range(1, 41)] + [line(40 + n, 64, shares=(n, 64)) for n in range(1, 41)]
    outcome = replayed(read(tmp_path, *prompts), budget_bytes=64 * 8).outcome
    assert outcome.lost == {"never_seen": 40 * 64, "evicted": 40 * 64}


def test_a_log_of_a_server_without_a_cache(tmp_path):
    log = written(tmp_path / "log", [line(1, 100), line(2, 100, shares=(1, 100))], first_line(layout(), 100, "none"))
    assert main(["replay", str(log), "--json", str(tmp_path / "out.json")]) == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert [each["hit_tokens"] for each in told] == [0, 100, 100]
    assert told[0]["lost_tokens"] == {"disabled": 100, "never_seen": 100}


def test_refused_prompts_are_counted_as_in_other_traces(tmp_path):
    outcome = replayed(read(tmp_path, line(1, 600), line(2, 600, shares=(1, 600))), budget_bytes=64 * 8).outcome
    assert outcome.refused == 2 and outcome.forward_passes == 2 * 3
    assert outcome.lost == {"never_seen": 600, "disabled": 600}
