"""The arithmetic, against timelines worked out by hand."""

import math

import pytest

from bench.scripted import Answer, Server, answer_at, run, token, virtually
from cairn.bench.load import LoadResult
from cairn.bench.report import summarize
from cairn.bench.work import Conversation, Turn

ONE = Conversation((Turn((1, 2), 2, 4),))


def timeline():
    """Three answers, two failures, one of them after a token, sent a second apart.

    sent  tokens at        TTFT  gaps       latency  output  TPOT
    0     1, 2, 5          1     1, 3       5        3       (5 - 1) / 2 = 2
    1     3                2     -          2        1       -
    2     4, 4.5, 5, 6     2     .5 .5 1    4        4       (4 - 2) / 3 = 2/3
    """
    server = Server(
        [
            answer_at(1.0, 2.0, 5.0, prompt=100, cached=60),
            answer_at(2.0, prompt=50, cached=0),
            answer_at(2.0, 2.5, 3.0, 4.0, prompt=30, with_usage=False),
            Answer(((0.25, b""),), 503),
            Answer(((2.0, token()),)),
        ]
    )
    return virtually(run(server, [ONE] * 5, due=[0.0, 1.0, 2.0, 3.0, 4.0]))


def test_sums_and_spreads():
    figures = summarize(timeline(), (50.0, 99.0), {})
    assert (figures["completed"], figures["failed"], figures["duration"]) == (3, 2, 6.0)
    assert figures["error_classes"] == {"HTTP 503": 1, "stream cut short": 1}
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (152, 8)
    assert (figures["total_cached_tokens"], figures["requests_without_usage"]) == (60, 1)
    assert figures["cached_share"] == pytest.approx(60 / 150)
    assert figures["output_throughput"] == pytest.approx(8 / 6)
    assert (figures["mean_ttft_ms"], figures["median_ttft_ms"]) == (pytest.approx(5000 / 3), 2000)
    assert figures["std_ttft_ms"] == pytest.approx(1000 * math.sqrt(2) / 3)
    assert (figures["p50_ttft_ms"], figures["p99_ttft_ms"]) == (2000, 2000)
    assert (figures["mean_tpot_ms"], figures["median_tpot_ms"]) == (pytest.approx(4000 / 3), pytest.approx(4000 / 3))
    assert figures["p99_tpot_ms"] == pytest.approx(1000 * (2 / 3 + 0.99 * 4 / 3))
    assert (figures["mean_itl_ms"], figures["median_itl_ms"]) == (pytest.approx(1200), 1000)
    assert (figures["mean_e2el_ms"], figures["median_e2el_ms"]) == (pytest.approx(11000 / 3), 4000)
    assert figures["p99_e2el_ms"] == pytest.approx(1000 * (4 + 0.98))


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({"ttft": 1000.0}, 1),
        ({"ttft": 999.0}, 0),
        ({"ttft": 2000.0}, 3),
        ({"tpot": 700.0}, 2),
        ({"tpot": 0.0}, 1),
        ({"ttft": 2000.0, "e2el": 4000.0}, 2),
        ({"ttft": 1000.0, "e2el": 4000.0}, 0),
    ],
)
def test_goodput_counts_requests_that_keep_every_goal(goals, good):
    assert summarize(timeline(), (99.0,), goals)["request_goodput"] == pytest.approx(good / 6.0)


def test_without_goals_there_is_no_goodput():
    assert summarize(timeline(), (99.0,), {})["request_goodput"] is None


def test_peaks():
    """Seconds 4 and 5 have tokens of two requests each: 4, 4.5 of the third one; 5 of the first and the third."""
    figures = summarize(timeline(), (99.0,), {})
    assert figures["max_output_tokens_per_s"] == 2
    # the second one ends at 3, when the third one is open since 2
    assert figures["max_concurrent_requests"] == 3


def test_one_that_ends_as_another_is_sent_is_not_open_with_it():
    server = Server([answer_at(1.0)])
    ran = virtually(run(server, [ONE] * 3, concurrency=1))
    assert summarize(ran, (99.0,), {})["max_concurrent_requests"] == 1


def test_tokens_that_share_an_event_count_in_the_peak():
    pieces = ((0.5, token("abc", "length", token_ids=[1, 2, 3])),)
    ran = virtually(run(Server([Answer(pieces)]), [ONE] * 2))
    assert summarize(ran, (99.0,), {})["max_output_tokens_per_s"] == 6


def test_nothing_measured_is_no_figure():
    figures = summarize(LoadResult(), (99.0,), {"ttft": 1.0})
    kinds = ("mean", "median", "std", "p99")
    assert {figures[f"{kind}_{name}_ms"] for kind in kinds for name in ("ttft", "tpot", "itl", "e2el")} == {None}
    assert (figures["completed"], figures["failed"]) == (0, 0)
    assert (figures["total_cached_tokens"], figures["cached_share"]) == (None, None)
    assert (figures["request_throughput"], figures["max_output_tokens_per_s"]) == (0.0, 0)
    assert (figures["request_goodput"], figures["max_concurrent_requests"]) == (0.0, 0)


def test_zero_cached_is_not_unknown():
    ran = virtually(run(Server([answer_at(1.0, prompt=10, cached=0)]), [ONE]))
    figures = summarize(ran, (99.0,), {})
    assert (figures["total_cached_tokens"], figures["cached_share"]) == (0, 0.0)
