"""The arithmetic, against timelines worked out by hand."""

import math

import pytest

from bench.scripted import Answer, Server, answer_at, run, token, virtually
from cairn.bench.load import LoadResult
from cairn.bench.metrics import LatencyStats, summary_of
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
    summary = summary_of(timeline(), (50.0, 99.0), {})
    assert (summary.completed, summary.failed, summary.duration) == (3, 2, 6.0)
    assert dict(summary.failures) == {"HTTP 503": 1, "stream cut short": 1}
    assert (summary.input_tokens, summary.output_tokens) == (152, 8)
    assert (summary.cached_tokens, summary.told_tokens, summary.without_usage) == (60, 150, 1)
    assert summary.cached_share == pytest.approx(60 / 150)
    assert summary.rate(summary.output_tokens) == pytest.approx(8 / 6)
    ttft, tpot, itl, e2el = (summary.spreads[name] for name in ("ttft", "tpot", "itl", "e2el"))
    assert (ttft.mean, ttft.median) == (pytest.approx(5000 / 3), 2000)
    assert ttft.std == pytest.approx(1000 * math.sqrt(2) / 3)
    assert ttft.percentiles == ((50.0, 2000), (99.0, 2000))
    assert (tpot.mean, tpot.median) == (pytest.approx(4000 / 3), pytest.approx(4000 / 3))
    assert tpot.percentiles[1] == (99.0, pytest.approx(1000 * (2 / 3 + 0.99 * 4 / 3)))
    assert (itl.mean, itl.median) == (pytest.approx(1200), 1000)
    assert (e2el.mean, e2el.median) == (pytest.approx(11000 / 3), 4000)
    assert e2el.percentiles[1] == (99.0, pytest.approx(1000 * (4 + 0.98)))


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({}, 0),
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
    assert summary_of(timeline(), (99.0,), goals).good == good


def test_peaks():
    """Seconds 4 and 5 have tokens of two requests each: 4, 4.5 of the third one; 5 of the first and the third."""
    summary = summary_of(timeline(), (99.0,), {})
    assert summary.peak_tokens == 2
    # the second one ends at 3, when the third one is open since 2
    assert summary.peak_requests == 3


def test_one_that_ends_as_another_is_sent_is_not_open_with_it():
    server = Server([answer_at(1.0)])
    ran = virtually(run(server, [ONE] * 3, concurrency=1))
    assert summary_of(ran, (99.0,), {}).peak_requests == 1


def test_tokens_that_share_an_event_count_in_the_peak():
    pieces = ((0.5, token("abc", "length", token_ids=[1, 2, 3])),)
    ran = virtually(run(Server([Answer(pieces)]), [ONE] * 2))
    assert summary_of(ran, (99.0,), {}).peak_tokens == 6


def test_nothing_measured_is_no_figure():
    summary = summary_of(LoadResult(), (99.0,), {"ttft": 1.0})
    nothing = LatencyStats(None, None, None, ((99.0, None),))
    assert all(spread == nothing for spread in summary.spreads.values())
    assert (summary.completed, summary.failed, summary.cached_tokens, summary.cached_share) == (0, 0, None, None)
    assert (summary.rate(5), summary.peak_tokens, summary.peak_requests) == (0.0, 0, 0)


def test_zero_cached_is_not_unknown():
    ran = virtually(run(Server([answer_at(1.0, prompt=10, cached=0)]), [ONE]))
    summary = summary_of(ran, (99.0,), {})
    assert (summary.cached_tokens, summary.cached_share) == (0, 0.0)
