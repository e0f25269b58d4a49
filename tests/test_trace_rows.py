"""Lines of traces: both forms, read within the bounds that the reader names."""

import json

import pytest

from cairn.errors import ConfigError
from cairn.trace_rows import MOONCAKE_UNIT, TraceBounds, trace_lines, trace_rows

BOUNDS = TraceBounds(lines=4, unit=32, tokens=1000, ids=50)
ROW = {"t": 1.5, "in": 70, "out": 20, "h": [[5, 2], [49, 9]]}
MOONCAKE = {"timestamp": 1500, "input_length": 1000, "output_length": 0, "hash_ids": [49, 3]}


@pytest.fixture
def read(tmp_path):
    def reading(*lines, bounds=BOUNDS):
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        found = trace_lines(path, bounds.lines)
        return trace_rows(next(found), found, bounds)

    return reading


def test_both_forms(read):
    unit, rows = read({"unit": 16}, {**ROW, "more": 7})
    (row,) = rows
    assert (unit, row.arrived, row.num_in, row.num_out, row.line["more"]) == (16, 1.5, 70, 20, 7)
    assert row.ids.tolist() == [5, 6, 49, 50] and row.where.endswith("trace.jsonl:2")
    unit, rows = read(MOONCAKE, "", MOONCAKE)
    first, second = rows
    assert (unit, first.arrived, first.num_in, first.num_out) == (MOONCAKE_UNIT, 1.5, 1000, 0)
    assert first.ids.tolist() == second.ids.tolist() == [49] and second.where.endswith("trace.jsonl:3")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (({"unit": 33},), "`unit` must be a whole number from 1 to 32"),
        (({"unit": 16}, {**ROW, "in": 1001}), "`in` must be a whole number from 1 to 1000"),
        (({"unit": 16}, {**ROW, "out": 1001}), "`out` must be a whole number from 0 to 1000"),
        (({"unit": 16}, {**ROW, "h": [[50, 1]]}), "whole numbers below 50"),
        (({"unit": 16}, {**ROW, "h": [[5, 50]]}), "whole numbers below 50"),
        (({"unit": 16}, ROW, ROW, "", ROW), ":5: a trace may have 4 lines"),
        (({**MOONCAKE, "input_length": 1001},), "`input_length` must be a whole number from 1 to 1000"),
        (({**MOONCAKE, "output_length": 1001},), "`output_length` must be a whole number from 0 to 1000"),
        (({**MOONCAKE, "hash_ids": [50]},), "from 0 to 49"),
        (({**MOONCAKE, "timestamp": 2e15},), "a time from 0 to 1e.15"),
    ],
)
def test_the_readers_bounds_hold(read, lines, said):
    with pytest.raises(ConfigError, match=said):
        list(read(*lines)[1])
    wider = TraceBounds(lines=5, unit=33, tokens=1001, ids=51)
    if "time" not in said:
        assert len(list(read(*lines, bounds=wider)[1])) == sum("in" in line or "timestamp" in line for line in lines)


def test_rows_are_read_as_they_are_asked_for(read):
    _, rows = read({"unit": 16}, ROW, {**ROW, "in": -1})
    assert next(rows).num_in == 70
    with pytest.raises(ConfigError, match=r":3: `in`"):
        next(rows)
