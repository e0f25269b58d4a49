"""What a server's metrics say of drafts, and what becomes of it in a result."""

import asyncio

import httpx
import pytest
from msgspec.structs import replace

from bench.scripted import Server, answer_at, run, virtually
from bench.test_report import ONE, RUN
from cairn.bench.client import Endpoint
from cairn.bench.report import comparison_rows, make_result, table_lines
from cairn.bench.spec_decode import SpecDecodeCounts, parse_spec_decode, read_spec_decode
from cairn.engine.contract import EngineConfig, EngineStats, SpecDecodeStats
from cairn.server.metrics import Metrics
from doubles.echo_core import build_echo_core

COUNTS = SpecDecodeCounts(10, 40, 25, {0: 9, 1: 8, 2: 5, 3: 3})


def exposition(counts):
    info = replace(build_echo_core(EngineConfig(model="echo")).info, num_speculative_tokens=4)
    drafts = SpecDecodeStats(
        num_drafts=counts.drafts,
        num_draft_tokens=counts.draft_tokens,
        num_accepted_tokens=counts.accepted_tokens,
        accepted_per_pos={str(position): count for position, count in counts.accepted_per_pos.items()},
    )
    return Metrics(info, "m").exposition(EngineStats(spec_decode=drafts)).decode()


def test_our_own_metrics_are_read():
    assert parse_spec_decode(exposition(COUNTS)) == COUNTS


def test_engines_are_added_up():
    text = "\n".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}",model_name="m"{more}}} {value}'
        for engine in "01"
        for name, value, more in (
            ("drafts", 5.0, ""),
            ("draft_tokens", "2e+01", ""),
            ("accepted_tokens", 12.0, ""),
            ("accepted_tokens_per_pos", 4.0, ',position="0"'),
            ("accepted_tokens_per_pos", 2.0, ',position="1"'),
        )
    )
    assert parse_spec_decode(text) == SpecDecodeCounts(10, 40, 24, {0: 8, 1: 4})


@pytest.mark.parametrize("text", ["", "vllm:generation_tokens_total 5.0", "vllm:spec_decode_num_drafts_total e"])
def test_no_metrics_of_drafts(text):
    assert parse_spec_decode(text) is None


def read(answer):
    async def ask():
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda request: answer)) as http:
            return await read_spec_decode(
                http, Endpoint("http://s/v1/completions", "completions", "m", base_url="http://s")
            )

    return asyncio.run(ask())


def test_a_server_that_does_not_show_them_is_none():
    assert read(httpx.Response(200, text=exposition(COUNTS))) == COUNTS
    for status in (401, 404, 500):
        assert read(httpx.Response(status, text=exposition(COUNTS))) is None
    assert read(httpx.Response(200, content=b"x" * (17 << 20))) is None


def test_figures_are_those_of_the_load_alone():
    figures = SpecDecodeCounts(30, 80, 55, {0: 25, 1: 16, 2: 9, 3: 5}).since(COUNTS).figures()
    assert figures == {
        "spec_decode_acceptance_rate": 75.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 40,
        "spec_decode_accepted_tokens": 30,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.4, 0.2, 0.1],
    }
    assert COUNTS.since(COUNTS).figures() == {}


def test_a_table_has_them_where_there_are_some():
    load = virtually(run(Server([answer_at(1.0, 2.0)]), [ONE]))
    plain = make_result(RUN, load, (99.0,), {})
    assert not any("Acceptance" in line for line in table_lines(plain))
    result = plain | COUNTS.figures()
    lines = [" ".join(line.split()) for line in table_lines(result)]
    first = lines.index("Acceptance rate (%): 62.50")
    assert lines[first + 1 : first + 7] == [
        "Acceptance length: 3.50",
        "Drafts: 10",
        "Draft tokens: 40",
        "Accepted tokens: 25",
        "Per-position acceptance (%):",
        "Position 0: 90.00",
    ]
    rows = {title: values for title, *values in comparison_rows(plain, result)}
    assert rows["Acceptance length"] == ["n/a", "3.500", ""]
