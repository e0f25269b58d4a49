"""The flags of `cairn replay`, and their values in a trace's terms."""

import argparse
from pathlib import Path
from types import MappingProxyType

from cairn.replay.layouts import LAYOUT_NAMES

POLICIES = MappingProxyType(
    {
        "auto": ("auto", "value"),
        "align": ("align", "value"),
        "all": ("all", "value"),
        "junction": ("junction", "value"),
        "lru": ("auto", "lru"),
    }
)
"""Name to placement and eviction."""

DEFAULT_LAYOUT = "nemotron-3-nano"
DEFAULT_SHARE = 0.1
PLOT_FORMATS = (".svg", ".png")
MAX_BUDGET = 1 << 50
MAX_SWEEP = 64
_UNITS = MappingProxyType(
    {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    | {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
)


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of `cairn replay`."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines, plain or gzip: see docs/replay.md")
    parser.add_argument(
        "--layout",
        help=f"{', '.join(LAYOUT_NAMES)}, or the path of a config.json; default: {DEFAULT_LAYOUT}, or what a server's "
        "own log says",
    )
    parser.add_argument("--state-dtype", help="of the recurrent state: float32, bfloat16; default: the model's")
    _add_budget_flags(parser)
    parser.add_argument(
        "--policy",
        type=_policies,
        metavar="NAMES",
        help=f"one or several of {','.join(POLICIES)}; lru is the placement of auto with LRU eviction; default: auto, "
        "or what a server's own log says",
    )
    parser.add_argument("--block-size", type=int, help="tokens per page; default: 16, or what a server's own log says")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help="tokens of a prefill chunk; default: 8192, or what a server's own log says",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--per-request", action="store_true", help="write cached tokens by request into the JSON, too")
    parser.add_argument(
        "--plot",
        type=_plot,
        metavar="FILE",
        help="draw hit rate over budget there, as SVG or PNG; needs matplotlib, which the extra `bench` brings",
    )
    parser.add_argument("--no-bounds", action="store_true", help="leave the line `unlimited` out")


def _add_budget_flags(parser: argparse.ArgumentParser) -> None:
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--budget", type=_size, metavar="BYTES", help="the cache's memory: 40GiB, 50GB or plain bytes")
    budget.add_argument(
        "--budget-fraction",
        type=_share,
        metavar="SHARE",
        help=f"the same as a share of the trace's footprint: 0.1 or 10%%; default: {DEFAULT_SHARE}, or what a server's "
        "own log says",
    )
    budget.add_argument("--sweep", type=_shares, metavar="SHARES", help="several shares: 2%%,5%%,10%%,20%%")


def _size(text: str) -> int:
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = _UNITS.get(text.strip()[len(digits) :].lower())
    try:
        size = int(float(digits) * unit) if unit is not None else 0
    except (ValueError, OverflowError):
        size = 0
    if not 1 <= size <= MAX_BUDGET:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 40GiB, 50GB or plain bytes, up to 1024TiB")
    return size


def _share(text: str) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of the footprint: write it as 0.1 or 10%")
    return share


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(_share(part) for part in text.split(","))
    if len(shares) > MAX_SWEEP:
        raise argparse.ArgumentTypeError(f"{len(shares)} shares are more than {MAX_SWEEP}")
    return shares


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(POLICIES)}")
    return names


def _plot(text: str) -> Path:
    path = Path(text)
    if path.suffix not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(PLOT_FORMATS)}")
    return path
