"""A log that was written by hand: what is made of it, and what is refused."""

import json
from base64 import b64encode
from dataclasses import replace

import numpy as np
import pytest
from logged import LoggedServer, hits_by_name, layout, logged_hits, replayed

from cairn.cache.sequence_blocks import Namespace
from cairn.cli import main
from cairn.errors import ConfigError
from cairn.replay.bounds import footprint_bytes, unlimited_hits
from cairn.replay.layouts import sizes_for
from cairn.replay.trace import Trace
from cairn.replay.traces import read_trace
from cairn.types import Boundary

SIZES = {"active_weights": 1000, "score_numbers": 8}
UNIT = 16


def first_line(sizes, num_pages, mode="auto", eviction="value", exact=False, **fields) -> dict:
    groups = [{"name": group.name, "tokens_per_page": group.tokens_per_page} for group in sizes.groups]
    names = ("block_size", "page_bytes", "page_units", "header_bytes", "state_bytes", "state_units")
    return {
        "name": "made",
        "unit": UNIT,
        "source": "cairn",
        "version": 3,
        "layout": {name: getattr(sizes, name) for name in names} | {"groups": groups},
        "forward_sizes": SIZES,
        "budget_bytes": num_pages * sizes.page_bytes,
        "policy": {"placement": mode, "eviction": eviction, "exact": exact},
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "in_flight_sharing": True,
    } | fields


HEADER = first_line(layout(), 100)


def line(number, hashes, num_out=0, **fields) -> dict:
    """A request that is served alone, at step 1000 * `number`. `hashes`: of all its tokens, or of those behind
    `prefix`."""
    hashes = list(hashes)
    behind = fields["prefix"][1] if "prefix" in fields else 0
    length = behind + len(hashes)
    num_in, at = length - num_out, float(number)
    return {
        "n": number,
        "id": f"r{number}",
        "t": at,
        "in": num_in,
        "out": num_out,
        "finish": "stop",
        "cached_tokens": 0,
        "namespace": 0,
        "block_hashes": [1000 * number + unit for unit in range(behind // UNIT, length // UNIT)],
        "token_hashes": b64encode(np.array(hashes, "<u2").tobytes()).decode(),
        "arrived_step": 1000 * number,
        "finished_step": 1000 * number + 500,
        "scheduled": at + 0.1,
        "finished": at + 0.3,
    } | fields


def written(path, lines, header=HEADER):
    path.write_text("\n".join(json.dumps(each) for each in (header, *lines)))
    return path


def read(path, *lines, header=HEADER) -> Trace:
    return read_trace(written(path / "log", lines, header))


def test_a_line_is_a_request_like_any_other(tmp_path):
    ends = {"boundaries": [[3, "system_end", 0], [5, "breakpoint", 60]]}
    trace = read(
        tmp_path,
        line(1, range(40), 10, namespace=7, **ends),
        line(2, range(50, 58), prefix=[1001, 32]),
        line(3, range(9), parallel_sample=True),
    )
    first, second, third = trace.requests
    assert trace.unit == 1 and trace.name == "made" and trace.header.max_num_batched_tokens == 256
    # the last token of an answer is not computed
    assert first.path.tolist() == list(range(30)) and first.answer.tolist() == list(range(30, 39))
    assert first.boundaries == (Boundary(3, "system_end"), Boundary(5, "breakpoint", 60)) and first.namespace == "7"
    assert second.path.tolist() == [*range(32), *range(50, 58)] and second.namespace is None
    assert [request.is_parallel_sample for request in trace.requests] == [False, False, True]
    assert unlimited_hits(trace).tolist() == [0, 32, 0]
    assert footprint_bytes(trace, layout()) == 4 * (39 + 8) + 3 * layout().checkpoint_bytes
    assert (third.name, third.arrived, third.timeline.scheduled) == ("r3", 3.0, 3.1)


def test_requests_are_in_order_of_their_starts_and_those_never_served_are_left_out(tmp_path):
    waited = {name: value for name, value in line(2, range(20), finish="abort").items() if name != "scheduled"}
    trace = read(tmp_path, line(3, range(20)), waited, line(1, range(20), t=0.5, scheduled=9.0, finished=9.5))
    assert list(logged_hits(trace)) == ["r3", "r1"]


def test_what_is_found_depends_on_when_it_was_looked_up(tmp_path):
    """Two prompts at once: the second is looked up before, or after, the first one's tokens are there."""
    header = first_line(layout(), 100, in_flight_sharing=False)
    for arrived, hit in ((1000, 0), (1001, 100)):
        other = line(2, range(120), arrived_step=arrived)
        assert replayed(read(tmp_path, line(1, range(100)), other, header=header)).outcome.hits == [0, hit]


def test_a_chunk_is_there_when_it_has_been_computed(tmp_path):
    header = first_line(layout(), 1000, "granular", in_flight_sharing=False)
    for arrived, hit in ((1001, 64), (1002, 128), (1004, 192)):
        second = line(2, range(210), arrived_step=arrived)
        assert replayed(read(tmp_path, line(1, range(200)), second, header=header)).outcome.hits == [0, hit]


def test_a_state_that_another_request_needs_is_kept(tmp_path):
    second = line(2, [*range(70), *range(500, 600)], arrived_step=1000)
    for shares, hit in ((False, 0), (True, 70)):
        header = first_line(layout(), 1000, "junction", in_flight_sharing=shares)
        assert replayed(read(tmp_path, line(1, range(200)), second, header=header)).outcome.hits == [0, hit]


def test_a_smaller_priority_comes_first(tmp_path):
    """Two prompts wait for the only slot, of which one is the beginning of the other."""
    header = first_line(layout(), 1000, max_num_seqs=1)
    for priority, hits in ((0, [0, 0, 100]), (-1, [0, 64, 0])):
        waiting = [line(2, range(500, 600)), line(3, range(500, 700), priority=priority)]
        trace = read(
            tmp_path, line(1, range(100), 50), *(each | {"arrived_step": 1001} for each in waiting), header=header
        )
        assert replayed(trace).outcome.hits == hits


TWO_SESSIONS = (
    line(1, range(9000), session=5),
    line(2, range(20000, 20100), session=7),
    line(3, range(30000, 30100), 50),
    line(4, range(500, 600), session=5) | {"arrived_step": 3001},
    line(5, range(500, 700), session=7) | {"arrived_step": 3001},
)
"""A long session, a short one, and one request of each that wait for the only slot."""


def test_the_least_served_session_comes_first(tmp_path):
    """As the server's own policy had it; with another one they go as they came."""
    for policy, hits in (("session", [64, 0]), ("fcfs", [0, 100])):
        header = first_line(layout(), 1000, max_num_seqs=1, scheduling_policy=policy)
        assert replayed(read(tmp_path, *TWO_SESSIONS, header=header)).outcome.hits[-2:] == hits


@pytest.mark.parametrize(("flags", "hits"), [((), [0, 100]), (("--scheduling-policy", "session"), [64, 0])])
def test_another_policy_may_be_asked_for(flags, hits, tmp_path):
    path, out = (
        written(tmp_path / "log", TWO_SESSIONS, first_line(layout(), 1000, max_num_seqs=1)),
        tmp_path / "out.json",
    )
    words = ["replay", str(path), "--no-bounds", "--json", str(out), "--per-request", *flags]
    assert main(words) == 0
    assert [each["cached_tokens"] for each in json.loads(out.read_text())[0]["per_request"][-2:]] == hits


def test_an_answer_that_was_left_is_not_kept_to_its_end(tmp_path):
    for finish, hit in (("stop", 149), ("abort", 128)):
        first = line(1, range(150), 50, finish=finish, finished_step=1050)
        assert replayed(read(tmp_path, first, line(2, range(160)))).outcome.hits == [0, hit]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"in": 0}, r"\$\.in"),
        ({"in": 1 << 30}, r"\$\.in"),
        ({"in": "many"}, r"\$\.in"),
        ({"prefix": [9, 16]}, "`prefix` names no beginning"),
        ({"prefix": [1001, 16]}, "`prefix` names no beginning"),
        ({"prefix": [1]}, r"\$\.prefix"),
        ({"prefix": [1001, 32], "in": 20}, "`prefix` names no beginning"),
        ({"block_hashes": []}, "`block_hashes` must have a hash"),
        ({"block_hashes": [-1, 2]}, r"\$\.block_hashes"),
        ({"token_hashes": "AAA"}, r"\$\.token_hashes"),
        ({"token_hashes": "Ä"}, r"\$\.token_hashes"),
        ({"token_hashes": "AAAA"}, "`token_hashes` must have 2 bytes"),
        ({"token_hashes": "AAAAAAAA"}, "`token_hashes` must have a hash"),
        ({"boundaries": [3]}, r"\$\.boundaries"),
        ({"boundaries": [[3, "x", 0]]}, r"\$\.boundaries"),
        ({"boundaries": [[3, "message_end", -1]]}, r"\$\.boundaries"),
        ({"boundaries": [[99, "message_end", 0]]}, "`boundaries`"),
        ({"arrived_step": -1}, r"\$\.arrived_step"),
        ({"finished_step": 9}, "`finished_step`"),
        ({"priority": "low"}, r"\$\.priority"),
        ({"session": "name"}, r"\$\.session"),
        ({"client": -1}, r"\$\.client"),
        ({"cached_tokens": 41}, "`cached_tokens`"),
        ({"received_tokens": 41}, "`received_tokens`"),
        ({"scheduled": "soon"}, r"\$\.scheduled"),
        ({"finished": 1e300}, r"\$\.finished"),
        ({"finish": None}, r"\$\.finish"),
    ],
)
def test_a_line_that_is_wrong_is_named(fields, said, tmp_path):
    path = written(tmp_path / "log", [line(1, range(32)), line(2, range(40)) | fields])
    with pytest.raises(ConfigError, match=f"log:3.*{said}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": 2}, "`version` 2 is not 3.*record a new one with `cairn serve --request-log FILE`"),
        ({"version": None}, "`version` None"),
        ({"unit": 0}, r"\$\.unit"),
        ({"layout": {}}, r"\$\.layout"),
        ({"layout": HEADER["layout"] | {"page_bytes": 0}}, r"\$\.layout"),
        ({"policy": "auto"}, r"\$\.policy"),
        ({"budget_bytes": -1}, r"\$\.budget_bytes"),
        ({"max_num_seqs": 0}, r"\$\.max_num_seqs"),
        ({"in_flight_sharing": 1}, r"\$\.in_flight_sharing"),
        ({"scheduling_policy": "lifo"}, r"\$\.scheduling_policy"),
        ({"forward_sizes": 5}, r"\$\.forward_sizes"),
        ({"forward_sizes": {"active_weights": 7}}, "`score_numbers`"),
        ({"forward_sizes": SIZES | {"active_weights": 0}}, r"\$\.forward_sizes\.active_weights"),
        ({"forward_sizes": SIZES | {"active_weights": 1 << 51}}, r"\$\.forward_sizes\.active_weights"),
        ({"forward_sizes": SIZES | {"score_numbers": -1}}, r"\$\.forward_sizes\.score_numbers"),
        (
            {"forward_sizes": SIZES | {"limited_scores": [{"score_numbers": 8, "window": 0}]}},
            r"\$\.forward_sizes\.limited_scores\[0\]\.window",
        ),
        ({"forward_sizes": SIZES | {"score_numbers": True}}, r"\$\.forward_sizes\.score_numbers"),
    ],
)
def test_a_header_that_is_wrong_is_named(fields, said, tmp_path):
    with pytest.raises(ConfigError, match=f"log:1.*{said}"):
        read_trace(written(tmp_path / "log", [line(1, range(32))], HEADER | fields))


def test_a_log_without_requests_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no request"):
        read_trace(written(tmp_path / "log", []))


@pytest.mark.parametrize(("header", "fields"), [({"version": 1}, {}), ({}, {"block_hashes": [1]})])
def test_the_command_ends_with_2_and_says_where(header, fields, tmp_path, capsys):
    path = written(tmp_path / "log", [line(1, range(40)) | fields], HEADER | header)
    assert main(["replay", str(path)]) == 2
    assert f"{path}:{2 if fields else 1}" in capsys.readouterr().err


def test_the_command_goes_by_the_servers_rules(tmp_path):
    path = written(tmp_path / "log", [line(1, range(100)), line(2, range(120))])
    told = tmp_path / "told.json"
    assert main(["replay", str(path), "--json", str(told), "--per-request", "--no-bounds"]) == 0
    (result,) = json.loads(told.read_text())
    assert result["budget_bytes"] == HEADER["budget_bytes"] and result["hit_tokens"] == 100
    assert result["per_request"] == [
        {"request": "r1", "prompt_tokens": 100, "cached_tokens": 0},
        {"request": "r2", "prompt_tokens": 120, "cached_tokens": 100},
    ]


def test_flops_are_counted_with_the_servers_sizes(tmp_path, capsys):
    path, out = written(tmp_path / "log", [line(1, range(100)), line(2, range(120))]), tmp_path / "told.json"
    assert main(["replay", str(path), "--json", str(out), "--no-bounds"]) == 0
    (result,) = json.loads(out.read_text())
    # a token at p: 2 for each weight, 4 for each number of its queries and each of p + 1 keys
    costs = [2 * 1000 + 4 * 8 * (p + 1) for p in range(120)]
    saved, computed = sum(costs[:100]), sum(costs[:100]) + sum(costs[100:])
    assert (result["flops_saved"], result["prefill_flops"], result["active_weights"]) == (saved, computed, 1000)
    assert f"{saved:.2e} ({saved / (saved + computed):.0%})" in capsys.readouterr().out


def test_a_layout_that_is_named_goes_before_the_logs_sizes(tmp_path):
    path, out = written(tmp_path / "log", [line(1, range(100))]), tmp_path / "told.json"
    assert main(["replay", str(path), "--layout", "nemotron-3-nano", "--json", str(out), "--sweep", "100%"]) == 0
    assert json.loads(out.read_text())[0]["active_weights"] == sizes_for("nemotron-3-nano").active_weights


def test_answers_that_branch_count_once_in_every_line(tmp_path):
    other = line(2, range(100), id="r1/1", arrived_step=1000, parallel_sample=True)
    lines = [line(1, range(100)), other, line(3, range(100))]
    path, shown = written(tmp_path / "log", lines), tmp_path / "out.json"
    assert main(["replay", str(path), "--json", str(shown), "--per-request"]) == 0
    policy, unlimited = json.loads(shown.read_text())
    for told in (policy, unlimited):
        assert (told["requests"], told["prompt_tokens"], told["hit_tokens"]) == (2, 200, 100)
    assert [each["request"] for each in policy["per_request"]] == ["r1", "r3"]


# -- with other sizes than the server's ------------------------------------------------------------------------------


def test_who_finds_no_room_waits_and_so_does_who_came_after_its_end(tmp_path):
    """Three prompts at once, and room for two: the third begins when the first has ended. Another one that came after
    its end comes after its end here, too."""
    lines = [line(n, range(300 * n, 300 * n + 130), 30, arrived_step=0, finished_step=30) for n in (1, 2, 3)]
    fourth = line(4, range(900, 1010), arrived_step=31)
    for num_pages in (100, 20):
        replay = replayed(read(tmp_path, *lines, fourth, header=first_line(layout(16, 1), num_pages)))
        assert replay.outcome.hits == [0, 0, 0, 100] and replay.outcome.refused == 0
        assert replay.outcome.peak_bytes <= num_pages * 64


def test_who_runs_and_finds_no_room_sends_the_youngest_back(tmp_path):
    """Both answers grow into the last pages; the younger one is computed again when the older has ended."""
    answers = [line(n, range(300 * n, 300 * n + 180), 100, arrived_step=n) for n in (1, 2)]
    trace = read(tmp_path, *answers, header=first_line(layout(16, 1), 16))
    replay = replayed(trace)
    assert replay.outcome.refused == 0 and replay.outcome.forward_passes == 3
    # both are complete, whether or not their pages are still there
    for request in trace.requests:
        keys = np.concatenate([request.path, request.answer]).astype(np.int64)
        sequence = replay.cache.lookup(Namespace(), keys, request.name)
        assert sequence.ever_matched == 179
        replay.cache.release(sequence)
    assert replayed(trace, budget_bytes=64 * 100).outcome.forward_passes == 2


def test_an_answer_is_kept_as_far_as_there_are_pages(tmp_path):
    trace = read(tmp_path, line(1, range(182), 150), line(2, range(60)), header=first_line(layout(16, 0), 100))
    replay = replayed(trace, budget_bytes=64 * 5)
    assert replay.outcome.hits == [0, 59] and replay.outcome.refused == 0


def test_refused_prompts_are_counted_as_in_other_traces(tmp_path):
    outcome = replayed(read(tmp_path, line(1, range(600)), line(2, range(600))), budget_bytes=64 * 8).outcome
    assert outcome.refused == 2 and outcome.forward_passes == 2 * 3
    assert outcome.lost == {"never_seen": 600, "disabled": 600}


def test_what_the_cache_has_forgotten_was_seen_all_the_same(tmp_path):
    """Ghosts are bounded, and a log remembers all of it."""
    prompts = [line(n, range(64 * (n % 40), 64 * (n % 40) + 64)) for n in range(1, 81)]
    outcome = replayed(read(tmp_path, *prompts), budget_bytes=64 * 8).outcome
    assert outcome.lost == {"never_seen": 40 * 64, "evicted": 40 * 64}


def test_a_log_of_a_server_without_a_cache(tmp_path):
    log = written(tmp_path / "log", [line(1, range(100)), line(2, range(100))], first_line(layout(), 100, "none"))
    assert main(["replay", str(log), "--json", str(tmp_path / "out.json")]) == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert [each["hit_tokens"] for each in told] == [0, 100]
    assert told[0]["lost_tokens"] == {"disabled": 100, "never_seen": 100}


def test_namespaces_share_nothing(tmp_path):
    trace = read(tmp_path, line(1, range(100)), line(2, range(100), namespace=5), line(3, range(100), namespace=5))
    assert hits_by_name(trace, replayed(trace)) == {"r1": 0, "r2": 0, "r3": 100}


@pytest.mark.parametrize(("theirs", "ours"), [(48, 16), (16, 5), (16, 1), (16, 48)])
def test_other_blocks_than_the_servers(theirs, ours, tmp_path):
    """What is hit of answers does not depend on where the server needed pages."""
    server = LoggedServer(tmp_path / "log", num_pages=4000, sizes=layout(theirs))
    server.submit("a", range(1000, 1060), max_tokens=150)
    server.run()
    keys = server.sequences["a"]
    for name, prompt in (("b", keys[:205]), ("c", [*keys[:190], 7, 8, 9])):
        server.submit(name, prompt, max_tokens=20)
        server.run()
    server.close()
    trace = read_trace(tmp_path / "log")
    trace = replace(trace, header=replace(trace.header, layout=layout(ours)))
    assert replayed(trace, budget_bytes=4000 * 64).outcome.hits == list(logged_hits(trace).values()) == [0, 192, 128]


@pytest.mark.parametrize("same_line", [False, True])
def test_word_of_a_call_comes_when_it_came(same_line, tmp_path):
    """Told of before the third request, or with it in one line; of requests that are in no line it says nothing."""
    waits = {"tool_waits": [["r1", 1700], ["nobody", 5]]}
    lines = [line(1, range(100), 50), line(2, range(500, 600)), line(3, range(900, 1000))]
    lines[0 if same_line else 2] |= waits
    trace = read(tmp_path, *lines)
    assert [each.tools_step for each in trace.requests] == [1700, None, None]
    replay = replayed(trace)
    records = replay.cache.policy.eviction._records.values()
    assert sorted(record.node.end for record in records if record.awaits_tools) == [50, 64, 99], (
        "and a place within the answer"
    )
    again = replayed(read(tmp_path, *lines, line(4, range(120))))
    records = again.cache.policy.eviction._records.values()
    assert again.outcome.hits[-1] == 99 and [r.node.end for r in records if r.awaits_tools] == [50, 64]


def test_word_of_a_call_that_is_none_is_named(tmp_path):
    for waits, said in (([["r1"]], r"tool_waits\[0\]"), ([["r1", -1]], r"tool_waits\[0\]\[1\]"), (3, "tool_waits")):
        with pytest.raises(ConfigError, match=f"log:2.*{said}"):
            read(tmp_path, line(1, range(100), tool_waits=waits))
