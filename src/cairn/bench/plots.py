"""Plots of one result and of two, made from the JSON of `vllm bench serve` or of cairn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cairn.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BINS = 40
_NO_CACHE = "the server did not say what was cached"


def plot_first_tokens(result: Mapping[str, Any], path: Path) -> None:
    """The distribution of the times to first token. Raises ConfigError where it cannot be drawn or written."""
    figure, axes = new_figure()
    values = collect_ttfts(result)
    axes[0].hist(values, bins=_BINS, color="tab:blue", alpha=0.8)
    for name, style in (("median", "-"), ("mean", "--"), ("p99", ":")):
        value = result.get(f"{name}_ttft_ms")
        if value is not None:
            axes[0].axvline(value, color="black", linestyle=style, linewidth=1, label=f"{name} {value:,.1f} ms")
    axes[0].set(xlabel="time to first token, ms", ylabel="requests", xlim=(0, None))
    if axes[0].lines:
        axes[0].legend(frameon=False)
    save_figure(figure, path)


def plot_cached_share(result: Mapping[str, Any], path: Path) -> None:
    """Over time: each request's cached share of its prompt, and that of all requests so far."""
    figure, axes = new_figure()
    times, shares, so_far = collect_cached_shares(result)
    if len(times):
        axes[0].scatter(times, 100 * shares, s=9, alpha=0.5, color="tab:blue", linewidths=0, label="one request")
        axes[0].plot(times, 100 * so_far, color="black", linewidth=1.2, label="all so far")
        axes[0].legend(frameon=False)
    else:
        axes[0].set_title(_NO_CACHE)
    axes[0].set(xlabel="sent after, s", ylabel="cached, % of the prompt's tokens", ylim=(-3, 103))
    save_figure(figure, path)


def plot_comparison(results: Sequence[tuple[str, Mapping[str, Any]]], path: Path) -> None:
    """Share of requests whose first token came within so long, and the cached share so far; one line a result."""
    figure, axes = new_figure(2)
    for name, result in results:
        values = np.sort(collect_ttfts(result))
        axes[0].step(values, 100 * np.arange(1, len(values) + 1) / max(1, len(values)), where="post", label=name)
        times, _, so_far = collect_cached_shares(result)
        axes[1].plot(times, 100 * so_far, label=name)
    axes[0].set(xlabel="time to first token, ms", ylabel="% of requests", xlim=(0, None), ylim=(0, 103))
    axes[1].set(xlabel="sent after, s", ylabel="cached so far, % of prompt tokens", ylim=(-3, 103))
    axes[0].legend(frameon=False)
    save_figure(figure, path)


def collect_ttfts(result: Mapping[str, Any]) -> NDArray[np.float64]:
    """Milliseconds of the requests that succeeded."""
    ttfts, errors = _list(result, "ttfts"), _list(result, "errors")
    errors = errors or [""] * len(ttfts)
    return np.array([value * 1000 for value, error in zip(ttfts, errors, strict=False) if not error], np.float64)


def collect_cached_shares(
    result: Mapping[str, Any],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Of the requests that succeeded and report cached tokens, by sending: seconds after the start, cached share, and
    share of all tokens so far."""
    columns = [_list(result, name) for name in ("start_times", "cached_tokens", "input_lens", "errors")]
    rows = sorted(
        (start, cached, length)
        for start, cached, length, error in zip(*columns, strict=False)
        if cached is not None and length and not error
    )
    times, cached, lengths = np.array(rows, np.float64).reshape(-1, 3).T
    return times, cached / np.maximum(lengths, 1), np.cumsum(cached) / np.maximum(np.cumsum(lengths), 1)


def _list(result: Mapping[str, Any], name: str) -> list[Any]:
    value = result.get(name)
    return value if isinstance(value, list) else []


def new_figure(count: int = 1, flag: str = "") -> "tuple[Figure, list[Axes]]":
    """An empty figure of `count` axes. Raises ConfigError with the fix, after `flag`, where matplotlib is not there."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"{flag}plots need matplotlib: pip install 'cairn-serve[bench]'") from error
    figure = Figure(figsize=(6.4 * count, 4), layout="constrained", dpi=120)
    return figure, [figure.add_subplot(1, count, number + 1) for number in range(count)]


def save_figure(figure: "Figure", path: Path, flag: str = "the plot") -> None:
    """Write it, in the format that the path ends in. Raises ConfigError naming `flag` and the path."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error}") from error
