"""`cairn replay`: a trace through the cache under several policies and budgets, as a table, as JSON and as a plot."""

import argparse
import json
import sys
import time
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.filesize import decimal
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cairn.bench.plots import new_figure
from cairn.cache.eviction import eviction_for
from cairn.cache.layout import CacheLayout
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy
from cairn.engine.request_log.header import LoggedPolicy
from cairn.errors import ConfigError
from cairn.models.layer_sizes import ForwardSizes
from cairn.paths import check_output_file
from cairn.replay.bounds import footprint_bytes, unlimited_hits
from cairn.replay.layouts import LAYOUT_NAMES, layout_for, sizes_for
from cairn.replay.replay import Replay
from cairn.replay.report import UNLIMITED, Report, Row, draw_plot, make_table
from cairn.replay.trace import ReplayedServer
from cairn.replay.traces import read_trace
from cairn.setting_types import size_flag

_FILE_WIDTH = 220
_LOGGED = "logged"
"""The policy, or the layout, of the server whose log is replayed."""

_SWITCHED_OFF = "none"
"""The placement in the log of a server without prefix caching."""

_BLOCK_SIZE, _MAX_NUM_BATCHED_TOKENS = 16, 8192

POLICIES = MappingProxyType(
    {name: LoggedPolicy(name, "value", exact=False) for name in ("auto", "align", "all", "junction")}
    | {"lru": LoggedPolicy("auto", "lru", exact=False)}
)

_DEFAULT_LAYOUT = "nemotron-3-nano"
_DEFAULT_SHARE = 0.1
_PLOT_FORMATS = (".svg", ".png")
_MAX_SWEEP = 64


class _ThreadClock:
    """Processor time of this thread: what else the machine does is not measured."""

    def now(self) -> float:
        return time.thread_time()


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay, print the table and write the files; returns the exit code 0.

    `arguments`: as `add_replay_flags` parses them. Raises ConfigError naming the flag, the file or the field.
    """
    figure = new_figure(flag="--plot: ")[0] if arguments.plot is not None else None
    if arguments.per_request and arguments.json is None:
        raise ConfigError("--per-request goes into a file: name it with --json FILE")
    for flag, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None:
            check_output_file(flag, path)
    trace = read_trace(arguments.trace)
    log, max_tokens = trace.header, arguments.max_num_batched_tokens
    if max_tokens is None:
        max_tokens = log.max_num_batched_tokens if log is not None else _MAX_NUM_BATCHED_TOKENS
    if not 64 <= max_tokens <= 1 << 24:
        raise ConfigError(f"--max-num-batched-tokens must be from 64 to {1 << 24}, not {max_tokens}")
    layout_name, layout, sizes = _choose_layout(arguments, log)
    footprint = footprint_bytes(trace, layout)
    report, rows = Report(trace, layout_name, sizes, footprint), list[Row]()
    policies = POLICIES if log is None else {_LOGGED: log.policy, **POLICIES}
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*bars, console=Console(stderr=True), transient=True) as progress:
        for budget in _choose_budgets(arguments, log, footprint, layout):
            for name in arguments.policy or [next(iter(policies))]:
                task = progress.add_task(f"{name} {decimal(budget)}", total=len(trace.requests))
                policy = _make_policy(policies[name], layout.block_size, trace.name)
                tiers = {"host": arguments.host or 0, "disk": arguments.disk or 0}
                scheduling = arguments.scheduling_policy
                replay = Replay(
                    layout, budget, policy, max_tokens, _ThreadClock(), log, tiers=tiers, scheduling=scheduling
                )
                outcome = replay.run(trace, lambda done: progress.update(progress.task_ids[-1], completed=done))
                progress.remove_task(task)
                rows.append(report.row(name, budget, outcome.hits, outcome, arguments.per_request))
            if not arguments.no_bounds:
                rows.append(report.row(UNLIMITED, budget, unlimited_hits(trace), per_request=arguments.per_request))
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {arguments.json} cannot be written: {error}") from error
    if figure is not None:
        draw_plot(figure, arguments.plot, rows)
    _print_table(make_table(rows))
    return 0


def _print_table(table: Table) -> None:
    """To a terminal as wide as that is, unless figures would be cut; into a file or a pipe all of it."""
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, markup=False, emoji=False, highlight=False)
    needed = Measurement.get(console, console.options.update(max_width=_FILE_WIDTH), table).minimum
    console.width = max(console.width, needed)
    console.print(table)


def _choose_layout(arguments: argparse.Namespace, log: ReplayedServer | None) -> tuple[str, CacheLayout, ForwardSizes]:
    """Name, layout and forward sizes: those of the flags, else those of the log."""
    if log is not None and arguments.layout is None:
        for name in ("state_dtype", "checkpoint_dtype", "block_size"):
            flag = f"--{name.replace('_', '-')}"
            if getattr(arguments, name) is not None:
                raise ConfigError(f"{flag} needs --layout: a server's own log has the sizes that its layout had")
        return _LOGGED, log.layout, log.forward_sizes
    name, block_size = _DEFAULT_LAYOUT if arguments.layout is None else arguments.layout, arguments.block_size
    if block_size is None:
        block_size = log.layout.block_size if log is not None else _BLOCK_SIZE
    return name, layout_for(name, block_size, arguments.state_dtype, arguments.checkpoint_dtype), sizes_for(name)


def _choose_budgets(
    arguments: argparse.Namespace, log: ReplayedServer | None, footprint: int, layout: CacheLayout
) -> tuple[int, ...]:
    """Bytes: those of the flags, else that of the log, else the default share of the footprint."""
    if arguments.budget is not None:
        budgets: tuple[int, ...] = (arguments.budget,)
    elif log is not None and arguments.sweep is None and arguments.budget_fraction is None:
        budgets = (log.budget_bytes,)
    else:
        shares = arguments.sweep or (arguments.budget_fraction or _DEFAULT_SHARE,)
        budgets = tuple(int(footprint * share) for share in shares)
    for budget in budgets:
        if not 1 <= budget // layout.page_bytes < 1 << 31:
            raise ConfigError(
                f"a budget of {budget} bytes is {budget // layout.page_bytes} pages, but must be from 1 to 2**31 - 1: "
                "change --budget, --budget-fraction or --sweep"
            )
    return budgets


def _make_policy(policy: LoggedPolicy, block_size: int, trace_name: str) -> CachePolicy:
    try:
        enabled = policy.placement != _SWITCHED_OFF
        placement = placement_for(policy.placement, block_size, policy.exact) if enabled else None
        return CachePolicy(placement, eviction_for(policy.eviction), policy.exact)
    except ValueError as error:
        raise ConfigError(f"{trace_name}: its policy is not known here, name one with --policy: {error}") from error


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of `cairn replay`."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines, plain or gzip: see docs/replay.md")
    parser.add_argument(
        "--layout",
        help=f"{', '.join(LAYOUT_NAMES)}, or the path of a config.json; default: {_DEFAULT_LAYOUT}, or what a "
        "server's own log says",
    )
    states = parser.add_mutually_exclusive_group()
    states.add_argument(
        "--state-dtype",
        help="of recurrent states while they run, as --mamba-ssm-cache-dtype of `cairn serve`: float32, bfloat16, "
        "float16; default: the model's",
    )
    states.add_argument(
        "--checkpoint-dtype",
        help="form in which checkpoints have the recurrent state, as that of `cairn serve`: float32, float16, int8; "
        "default: the state's own",
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--budget", type=size_flag, metavar="BYTES", help="the cache's memory: 40GiB, 50GB or plain bytes"
    )
    budget.add_argument(
        "--budget-fraction",
        type=_share,
        metavar="SHARE",
        help=f"the same as a share of the trace's footprint: 0.1 or 10%%; default: {_DEFAULT_SHARE}, or what a "
        "server's own log says",
    )
    budget.add_argument("--sweep", type=_shares, metavar="SHARES", help="several shares: 2%%,5%%,10%%,20%%")
    for tier, flag in (("host", "--host-cache-bytes"), ("disk", "--disk-cache-bytes")):
        parser.add_argument(
            f"--{tier}",
            type=size_flag,
            metavar="BYTES",
            help=f"a tier below it, as {flag} of `cairn serve`; default: none",
        )
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
    parser.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority", "session"),
        help="who of those that wait in a server's own log goes first, as that of `cairn serve`; default: what the log "
        "says. Nobody waits in other traces",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--per-request", action="store_true", help="write cached tokens by request into the JSON, too")
    parser.add_argument(
        "--plot",
        type=_plot_path,
        metavar="FILE",
        help="draw hit rate over budget there, as SVG or PNG; needs matplotlib, which the extra `bench` brings",
    )
    parser.add_argument("--no-bounds", action="store_true", help="leave the line `unlimited` out")


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
    if len(shares) > _MAX_SWEEP:
        raise argparse.ArgumentTypeError(f"{len(shares)} shares are more than {_MAX_SWEEP}")
    return shares


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(POLICIES)}")
    return names


def _plot_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(_PLOT_FORMATS)}")
    return path
