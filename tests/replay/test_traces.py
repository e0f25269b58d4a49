"""Both forms of traces, and key tokens that share exactly what the trace shares."""

import gzip
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cache.tree import TokenKey, walk
from cairn.errors import ConfigError
from cairn.replay.bounds import Paths
from cairn.replay.trace import key_tokens
from cairn.replay.traces import read_trace
from cairn.trace_rows import MOONCAKE_UNIT

HEADER = {"name": "made", "unit": 16}
ROW = {"t": 1.5, "s": 0, "in": 40, "out": 20, "v": 0, "h": [[5, 2]]}


def write(tmp_path, *lines, zipped=False):
    path = tmp_path / ("made.jsonl.gz" if zipped else "made.jsonl")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if zipped:
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_the_own_form(tmp_path, zipped):
    rows = [ROW, {**ROW, "in": 100, "b": [0, 17, 31, 40, 99], "h": [[5, 2], [90, 4]]}]
    trace = read_trace(write(tmp_path, HEADER, *rows, zipped=zipped))
    assert (trace.name, trace.unit, len(trace.requests)) == ("made", 16, 2)
    first, second = trace.requests
    assert first.arrived == 1.5 and first.num_prompt_tokens == 40 and first.session == 0
    assert first.path.tolist() == [5, 6] and second.path.tolist() == [5, 6, 90, 91, 92, 93]
    assert [end.position for end in second.boundaries] == [16, 32, 96]
    # 40 + 20 tokens fill units 2, and 100 + 20 unit 6: nobody extends them, so they are their own
    assert first.answer.tolist() == [-1] and second.answer.tolist() == [-2]


def test_an_answer_may_be_a_call(tmp_path):
    rows = [ROW, {**ROW, "called_tools": True}, {**ROW, "called_tools": False}]
    assert [each.tools_step for each in read_trace(write(tmp_path, HEADER, *rows)).requests] == [None, 0, None]


def test_an_answer_is_what_the_first_follower_says_it_is(tmp_path):
    rows = [
        {**ROW, "v": 1},
        {**ROW, "s": 1, "in": 80, "h": [[5, 2], [70, 3]]},  # another session
        {**ROW, "in": 59, "h": [[5, 3]]},  # too short to hold prompt and answer
        {**ROW, "in": 80, "h": [[5, 1], [60, 4]]},  # another beginning
        {**ROW, "in": 64, "h": [[5, 2], [80, 2]]},
        {**ROW, "in": 64, "h": [[5, 2], [85, 2]]},
    ]
    assert read_trace(write(tmp_path, HEADER, *rows)).requests[0].answer.tolist() == [80]
    rows[0]["v"] = 0
    assert read_trace(write(tmp_path, HEADER, *rows)).requests[0].answer.tolist() == [-1]


def test_a_piece_of_a_trace_without_sessions_keeps_its_answers(tmp_path):
    """Its sessions count up, and not from 0: each row is one of its own all the same."""
    rows = [{**ROW, "s": 41, "v": 1}, {**ROW, "s": 42, "v": 1, "in": 64, "h": [[5, 2], [80, 2]]}]
    assert read_trace(write(tmp_path, HEADER, *rows)).requests[0].answer.tolist() == [80]


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 100), st.integers(0, 40), st.booleans(), st.integers(0, 1)),
        max_size=12,
    )
)
def test_answers_are_those_of_the_first_follower(tmp_path_factory, drawn):
    """By the README of the traces, word for word, of paths over so few ids that many begin alike."""
    rows = [
        {
            "t": 0,
            "s": session,
            "in": num_in,
            "out": out,
            "v": int(seen),
            "h": [[start, num_in // 16]] if num_in > 15 else [],
        }
        for session, num_in, out, seen, start in drawn
    ]
    trace = read_trace(write(tmp_path_factory.mktemp("drawn"), HEADER, *rows, {**ROW, "s": 2}, {**ROW, "s": 2}))
    for index, (row, request) in enumerate(zip(rows, trace.requests, strict=False)):
        units, whole = len(request.path), row["in"] + row["out"]
        after = [
            other.path
            for other, its in zip(trace.requests[index + 1 :], rows[index + 1 :], strict=False)
            if its["s"] == row["s"] and its["in"] >= whole and (other.path[:units] == request.path).all()
        ]
        end = max(units, whole // 16)
        if row["v"] and after:
            assert request.answer.tolist() == after[0][units:end].tolist()
        else:
            assert len(request.answer) == end - units and (request.answer < 0).all()


def test_a_path_may_have_one_id_less_or_more(tmp_path):
    rows = [{**ROW, "h": [[5, 1]]}, {**ROW, "h": [[5, 1 << 40]]}, {**ROW, "in": 15, "h": []}]
    assert [r.path.tolist() for r in read_trace(write(tmp_path, HEADER, *rows)).requests] == [[5], [5, 6], []]


def test_mooncakes_form(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 2000, "output_length": 10, "hash_ids": [1, 2, 8, 9]},
        {"timestamp": 3000, "input_length": 2100, "output_length": 10, "hash_ids": [4, 2, 7, 9, 11]},
    ]
    trace = read_trace(write(tmp_path, *rows))
    assert (trace.name, trace.unit) == ("made", MOONCAKE_UNIT)
    assert [request.arrived for request in trace.requests] == [0, 2.5, 3]
    assert [request.path.tolist() for request in trace.requests] == [[1, 2], [1, 2, 8], [4, 2, 7, 9]]
    # 1600 tokens are three units, and the second row goes on from them
    assert [request.answer.tolist() for request in trace.requests] == [[8], [], []]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "is empty"),
        ([HEADER], "no requests"),
        ([HEADER, 7], "must be a JSON object"),
        ([{"unit": 0}, ROW], "`unit` must be a whole number"),
        ([HEADER, {**ROW, "in": -1}], "`in` must be"),
        ([HEADER, {**ROW, "in": True}], "`in` must be"),
        ([HEADER, {**ROW, "out": 1 << 40}], "`out` must be"),
        ([HEADER, {**ROW, "t": -1}], "`t` must be"),
        ([HEADER, {**ROW, "t": float("nan")}], "`t` must be"),
        ([HEADER, {**ROW, "v": 2}], "`v` must be"),
        ([HEADER, {**ROW, "h": 3}], "`h` must be"),
        ([HEADER, {**ROW, "h": [[1 << 60, 1]]}], "`h` must list"),
        ([HEADER, {**ROW, "h": [[1]]}], "`h` must list"),
        ([HEADER, {**ROW, "b": [41]}], "`b` must list"),
        ([HEADER, {**ROW, "called_tools": 1}], "`called_tools` must be true or false"),
        ([{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}], "`hash_ids` must list"),
        ([{"input_length": 9, "output_length": 1, "hash_ids": []}], "`timestamp` must be"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, lines, says):
    with pytest.raises(ConfigError, match=says):
        read_trace(write(tmp_path, *lines))


@pytest.mark.parametrize("content", [b"{", b"\x1f\x8bnot gzip", b"\xff\xfe{}\n", b"[" * 100_000])
def test_what_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ConfigError, match="bad"):
        read_trace(tmp_path / "bad")
    with pytest.raises(ConfigError, match="absent"):
        read_trace(tmp_path / "absent")


def test_keys_share_what_ids_share():
    draw = random.Random(0)
    for unit in (1, 16, 64, 512):
        for _ in range(50):
            one, two = ([draw.choice((-3, -2, -1, 0, 1, 2)) for _ in range(4)] for _ in range(2))
            keys = [key_tokens(np.array(ids, np.int64), unit) for ids in (one, two)]
            units = next((k for k in range(4) if one[k] != two[k]), 4)
            differs = np.flatnonzero(keys[0] != keys[1])
            assert (differs[0] if len(differs) else 4 * unit) == units * unit
            assert len(np.unique(keys[0])) == len(set(one)) * unit


def test_paths_know_what_was_seen():
    draw, paths, seen = random.Random(1), Paths(), set()
    for _ in range(300):
        path, answer = ([draw.randint(0, 2) for _ in range(draw.randint(least, 4))] for least in (1, 0))
        assert paths.shared(np.array(path, np.int64)) == max(
            end for end in range(len(path) + 1) if end == 0 or tuple(path[:end]) in seen
        )
        line = tuple(path + answer)
        paths.add(np.array(path, np.int64), np.array(answer, np.int64))
        seen |= {line[:end] for end in range(1, len(line) + 1)}
        assert paths.num_units == len(seen)
        nodes = walk(paths.root, TokenKey(np.array(line, np.int64))).evicted_tail
        assert nodes[-1].end == len(line) and len(path) in [node.end for node in nodes]
