"""A log that was written by hand: what is made of it, and what is refused."""

import json

import numpy as np
import pytest
from logged import first_line, layout, logged, replayed

from cairn.cli import main
from cairn.errors import ConfigError
from cairn.replay.request_log import LoggedTrace
from cairn.replay.traces import read_trace

HEADER = first_line(layout(), 100)


def line(n, num_in, num_out=0, shares=(), h=None, ops=(), **fields) -> dict:
    start = shares[1] // 16 if shares else 0
    h = [1000 * n + unit for unit in range(start, (num_in + num_out) // 16)] if h is None else h
    plain = {"n": n, "id": f"r{n}", "t": float(n), "in": num_in, "out": num_out, "finish": "stop", "ns": 0}
    return {**plain, "shares": list(shares), "h": h, "ops": list(ops), "cached_tokens": 0} | fields


def written(path, lines, header=HEADER):
    path.write_text("\n".join(json.dumps(each) for each in (header, *lines)))
    return path


def read(path, *lines) -> LoggedTrace:
    trace = read_trace(written(path / "log", lines))
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
    # as a trace in units: two prompts share full units alone
    paths = [request.path.tolist() for request in trace.requests]
    assert [len(path) for path in paths] == [1, 2, 3, 1, 3]
    assert paths[1][:1] == paths[2][:1] == paths[0] == paths[3] and paths[1][1] == paths[2][1]
    assert len(trace.requests[0].answer) == 1 and trace.requests[0].answer[0] == paths[1][1]


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
