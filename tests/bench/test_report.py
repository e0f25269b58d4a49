"""The table and the JSON: words and keys that others read."""

import json

import pytest

from bench.scripted import Answer, Server, answer_at, run, token, virtually
from cairn.bench.plots import (
    collect_cached_shares,
    collect_ttfts,
    plot_cached_share,
    plot_comparison,
    plot_first_tokens,
)
from cairn.bench.report import comparison_rows, find_differences, make_result, read_result, save_result, table_lines
from cairn.bench.work import Conversation, Turn
from cairn.errors import ConfigError

ONE = Conversation((Turn((1, 2), 2, 4),))
RUN = {
    "date": "20261101-120000",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": None,
    "model_id": "m",
    "tokenizer_id": None,
    "num_prompts": 4,
    "dataset_name": "random",
    "seed": 0,
    "request_rate": 2.0,
    "burstiness": 1.0,
    "max_concurrency": 8,
}
# What the JSON of `vllm bench serve --save-result --save-detailed` has for a run without ramp-up and probes.
VLLM_KEYS = """
date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration
completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
total_token_throughput input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors
max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms
median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms
std_e2el_ms p99_e2el_ms
"""
OUR_KEYS = """
cached_tokens cached_share dataset_name error_classes interrupted requests_without_usage seed total_cached_tokens unsent
"""


@pytest.fixture(scope="module")
def ran():
    server = Server(
        [
            answer_at(1.0, 2.0, 5.0, prompt=100, cached=60),
            answer_at(2.0, prompt=50, cached=0),
            Answer(((0.25, b"busy"),), 503),
            answer_at(1.0, prompt=50, with_usage=False),
        ]
    )
    return virtually(run(server, [ONE] * 4, due=[0.0, 0.5, 1.0, 3.0]))


def as_json(ran, percentiles=(99.0,), run=RUN, with_texts=False, goals=()):
    return make_result(run, ran, percentiles, dict(goals), with_texts=with_texts)


def test_the_json_has_the_keys_of_others_and_ours(ran):
    result = as_json(ran, with_texts=True)
    assert set(result) == set(VLLM_KEYS.split()) | set(OUR_KEYS.split())
    assert "generated_texts" not in as_json(ran)
    assert {"p50_ttft_ms", "p99.9_ttft_ms"} <= set(as_json(ran, percentiles=(50.0, 99.9)))


def test_the_json_says_what_happened(ran):
    result = as_json(ran)
    assert (result["completed"], result["failed"], result["duration"]) == (3, 1, 5.0)
    assert result["error_classes"] == {"HTTP 503": 1}
    assert result["errors"] == ["", "", "HTTP 503: busy", ""]
    assert result["input_lens"] == [100, 50, 2, 2] and result["output_lens"] == [3, 1, 0, 1]
    assert result["cached_tokens"] == [60, 0, None, None]
    assert result["ttfts"] == [1.0, 2.0, 0.0, 1.0] and result["itls"] == [[1.0, 3.0], [], [], []]
    assert result["start_times"] == [0.0, 0.5, 1.0, 3.0]
    assert result["mean_ttft_ms"] == pytest.approx(4000 / 3)
    assert (result["total_cached_tokens"], result["cached_share"]) == (60, pytest.approx(0.4))
    assert result["requests_without_usage"] == 1


def test_tokens_of_an_answer_that_broke_off_are_not_counted():
    ran = virtually(run(Server([Answer(((1.0, token()), (2.0, token())))]), [ONE]))
    result = as_json(ran)
    assert (result["output_lens"], result["total_output_tokens"], result["itls"]) == ([0], 0, [[1.0]])
    assert result["errors"] == ["stream cut short: the stream ended before its answer did"]


def test_a_rate_without_end_is_a_word(ran):
    unbounded = as_json(ran, run=RUN | {"request_rate": float("inf")})
    assert unbounded["request_rate"] == "inf" and as_json(ran)["request_rate"] == 2.0
    assert not any("Request rate" in line for line in table_lines(unbounded))


def test_the_table(ran):
    lines = table_lines(as_json(ran))
    table = dict(line.rsplit(":", 1) for line in lines if ":" in line and "=" not in line)
    assert {name: value.strip() for name, value in table.items()} | {"Peak concurrent requests": "x"} == {
        "Successful requests": "3",
        "Failed requests": "1",
        "Maximum request concurrency": "8",
        "Request rate configured (RPS)": "2.00",
        "Benchmark duration (s)": "5.00",
        "Total input tokens": "152",
        "Total generated tokens": "5",
        "Request throughput (req/s)": "0.60",
        "Output token throughput (tok/s)": "1.00",
        "Peak output token throughput (tok/s)": "2.00",
        "Peak concurrent requests": "x",
        "Total token throughput (tok/s)": "31.40",
        "Mean TTFT (ms)": "1333.33",
        "Median TTFT (ms)": "1000.00",
        "P99 TTFT (ms)": "1980.00",
        "Mean TPOT (ms)": "2000.00",
        "Median TPOT (ms)": "2000.00",
        "P99 TPOT (ms)": "2000.00",
        "Mean ITL (ms)": "2000.00",
        "Median ITL (ms)": "2000.00",
        "P99 ITL (ms)": "2980.00",
        "Mean E2EL (ms)": "2666.67",
        "Median E2EL (ms)": "2000.00",
        "P99 E2EL (ms)": "4940.00",
        "Total cached tokens": "60",
        "Cached share of input (%)": "40.00",
        "Requests without usage": "1",
        "HTTP 503": "1",
    }
    assert "    busy" in lines
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50


def test_goodput_has_its_line_where_it_was_asked_for(ran):
    result = as_json(ran, goals={"ttft": 1000.0})
    assert "Request goodput (req/s):                 0.40" in table_lines(result)
    assert result["request_goodput"] == pytest.approx(0.4)
    assert as_json(ran)["request_goodput"] is None


def test_what_was_not_measured_is_no_number():
    ran = virtually(run(Server([Answer((), 500)]), [ONE]))
    result = as_json(ran)
    assert (result["completed"], result["mean_ttft_ms"], result["cached_share"]) == (0, None, None)
    lines = table_lines(result)
    assert "Mean TTFT (ms):                          n/a" in lines
    assert "Total cached tokens:                     n/a" in lines


def test_runs_are_appended_as_lines(ran, tmp_path):
    path = tmp_path / "new" / "runs.json"
    save_result(as_json(ran), path, append=True)
    save_result(as_json(ran) | {"label": "second"}, path, append=True)
    assert [json.loads(line)["label"] for line in path.read_text().splitlines()] == [None, "second"]
    assert read_result(path)["label"] == "second"
    save_result(as_json(ran), path, append=False)
    assert read_result(path)["label"] is None
    with pytest.raises(ConfigError, match="--result-dir"):
        save_result({}, path / "below", append=False)


def test_two_results_side_by_side(ran):
    one = as_json(ran)
    other = one | {"mean_ttft_ms": one["mean_ttft_ms"] / 4, "cached_share": None, "seed": 1, "p50_ttft_ms": 7.0}
    rows = {title: cells for title, *cells in comparison_rows(one, other)}
    assert rows["Mean TTFT (ms)"] == ["1,333.33", "333.33", "0.250"]
    assert rows["Successful requests"] == ["3", "3", "1.000"]
    assert rows["Cached share of input"] == ["0.400", "n/a", ""]
    assert rows["P50 TTFT (ms)"] == ["n/a", "7.000", ""]
    assert "Request goodput (req/s)" not in rows
    assert find_differences(one, other) == [("seed", 0, 1)]


@pytest.mark.parametrize(("text", "said"), [("", "cannot be read"), ("[]", "no `completed`"), ("{}", "no `completed`")])
def test_a_result_file_that_is_none(tmp_path, text, said):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_result(path)


def test_what_plots_show(ran):
    result = as_json(ran)
    assert collect_ttfts(result).tolist() == [1000.0, 2000.0, 1000.0]
    times, shares, so_far = collect_cached_shares(result)
    assert (times.tolist(), shares.tolist()) == ([0.0, 0.5], [0.6, 0.0])
    assert so_far.tolist() == [0.6, 60 / 150]
    failed = result | {"errors": ["", "cut", "", ""]}
    assert len(collect_cached_shares(failed)[0]) == 1 and collect_ttfts(failed).tolist() == [1000.0, 0.0, 1000.0]
    assert [len(part) for part in collect_cached_shares({})] == [0, 0, 0] and len(collect_ttfts({})) == 0


@pytest.mark.more
def test_plots_are_pictures(ran, tmp_path):
    pytest.importorskip("matplotlib")
    for number, result in enumerate((as_json(ran), {})):
        paths = [tmp_path / f"{kind}{number}.png" for kind in ("ttft", "cached", "both")]
        plot_first_tokens(result, paths[0])
        plot_cached_share(result, paths[1])
        plot_comparison([("a", result), ("b", result)], paths[2])
        assert {path.read_bytes()[:8] for path in paths} == {b"\x89PNG\r\n\x1a\n"}
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_first_tokens({}, tmp_path / "no" / "plot.png")
