"""What a load's outcomes come to. Failed requests are counted; no average has them in it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from cairn.bench.load import LoadResult
from cairn.bench.stream import RequestOutcome

METRICS = MappingProxyType(
    {
        "ttft": ("TTFT", "Time to First Token"),
        "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
        "itl": ("ITL", "Inter-token Latency"),
        "e2el": ("E2EL", "End-to-end Latency"),
    }
)
"""Name to the short and the long title."""


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Milliseconds; all None where there was nothing to measure. `std` is the population's; percentiles are
    interpolated linearly."""

    mean: float | None
    median: float | None
    std: float | None
    percentiles: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums and spreads over the requests that succeeded. Rates are per second of `duration`.

    `cached_tokens` and `told_tokens`: cached and all prompt tokens of the requests whose usage says what was cached,
    None where none does.
    """

    duration: float
    completed: int
    failures: tuple[tuple[str, int], ...]
    interrupted: int
    unsent: int
    without_usage: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    told_tokens: int
    good: int
    peak_tokens: float
    peak_requests: int
    spreads: Mapping[str, LatencyStats]

    @property
    def failed(self) -> int:
        return sum(count for _, count in self.failures)

    @property
    def cached_share(self) -> float | None:
        """Cached prompt tokens of all prompt tokens, where the server says."""
        return None if self.cached_tokens is None else self.cached_tokens / max(1, self.told_tokens)

    def rate(self, count: float) -> float:
        return count / self.duration if self.duration > 0 else 0.0


def summary_of(ran: LoadResult, percentiles: Sequence[float], goals: Mapping[str, float]) -> Summary:
    """`percentiles`: from 0 to 100. `goals`: milliseconds by metric (ttft, tpot, e2el) that a good request keeps, all
    of them; without goals none is counted as good."""
    good = [outcome for outcome in ran.outcomes if outcome.failure is None]
    kinds = Counter(outcome.failure.kind for outcome in ran.outcomes if outcome.failure is not None)
    told = [outcome for outcome in good if outcome.cached_tokens is not None]
    seconds: dict[str, list[float]] = {
        "ttft": [outcome.first_token for outcome in good],
        "tpot": [value for outcome in good if (value := outcome.per_token) is not None],
        "itl": [gap for outcome in good for gap in outcome.gaps],
        "e2el": [outcome.latency for outcome in good],
    }
    return Summary(
        duration=ran.seconds,
        completed=len(good),
        failures=tuple(kinds.most_common()),
        interrupted=ran.interrupted,
        unsent=ran.unsent,
        without_usage=sum(not outcome.has_usage for outcome in good),
        input_tokens=sum(outcome.prompt_tokens for outcome in good),
        output_tokens=sum(outcome.output_tokens for outcome in good),
        cached_tokens=sum(outcome.cached_tokens or 0 for outcome in told) if told else None,
        told_tokens=sum(outcome.prompt_tokens for outcome in told),
        good=sum(_keeps(outcome, goals) for outcome in good) if goals else 0,
        peak_tokens=_peak_tokens(good),
        peak_requests=_peak_requests(good),
        spreads={name: _spread(seconds[name], percentiles) for name in METRICS},
    )


def _spread(seconds: Sequence[float], percentiles: Sequence[float]) -> LatencyStats:
    if not seconds:
        return LatencyStats(None, None, None, tuple((p, None) for p in percentiles))
    values = np.array(seconds) * 1000
    return LatencyStats(
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        percentiles=tuple((p, float(np.percentile(values, p))) for p in percentiles),
    )


def _keeps(outcome: RequestOutcome, goals: Mapping[str, float]) -> bool:
    # An answer of one token has no time per token; it keeps every goal for it.
    reached = {"ttft": outcome.first_token, "tpot": outcome.per_token or 0.0, "e2el": outcome.latency}
    return all(reached[name] * 1000 <= goal for name, goal in goals.items())


def _peak_tokens(good: Iterable[RequestOutcome]) -> float:
    """The most output tokens of one second, counted in whole seconds from the first sending."""
    outcomes = [outcome for outcome in good if outcome.token_times]
    start = min((outcome.sent for outcome in outcomes), default=0.0)
    weights: dict[int, float] = {}
    for outcome in outcomes:
        seconds = Counter(int(moment - start) for moment in outcome.token_times)
        share = outcome.output_tokens / len(outcome.token_times)
        for second, events in seconds.items():
            weights[second] = weights.get(second, 0.0) + events * share
    return max(weights.values(), default=0.0)


def _peak_requests(good: Iterable[RequestOutcome]) -> int:
    """The most requests that were open at one moment; one that ends as another is sent is not open with it."""
    changes = sorted(change for outcome in good for change in ((outcome.sent, 1), (outcome.ended, -1)))
    open_now = most = 0
    for _, change in changes:
        open_now += change
        most = max(most, open_now)
    return most
