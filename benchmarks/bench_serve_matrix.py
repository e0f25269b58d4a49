"""`cairn bench serve` against real servers: what the prefix cache is worth to clients, mode by mode.

    python -m benchmarks.bench_serve_matrix [--parts server pd trace] [--pd-model-sizes medium tiny] [--model FOLDER]
                                            [--trace FILE] [--speedup N] [--rounds N] [--json FILE] [--plot FILE]
                                            [--keep FOLDER] [--seed N]

Three parts, each case on servers of its own that nobody has asked anything before:
  server  prefix_repetition at a tenth of the published scale (10 prefixes of 600 tokens + 200, 100 prompts, answers of
          100, 10 at a time) with checkpoints by `auto`, `align` and `all`, each with in-flight sharing on and off where
          `cairn serve` has the flag, and with the cache off
  pd      the same through P, D and `cairn proxy`, with the cache on and off. The bar: with it, a mean TTFT of at most
          half of that without, for the first of --pd-model-sizes; the others stand beside it
  trace   the first 30 minutes of a trace (--trace) with all lengths divided by 64, sent --speedup times as fast, in the
          cases of `server`
`server` and `trace` have the tiny model.
More than one round goes through the cases forwards and backwards in turn; the table then shows medians, and the bar is
held to the median of the rounds' own ratios.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from benchmarks.made_model import MODEL_SIZES, make_sized_model
from benchmarks.pd_servers import SECONDS, TRANSFER_FLAGS, metric, pair
from benchmarks.reporting import as_json, circumstances, make_console, save_figure
from demo.server import Child, running, serve_command
from rich.progress import track
from rich.table import Table

from cairn.http.cookies import no_cookies

PARTS = ("server", "pd", "trace")
PD_SIZES = ("medium", "tiny")
MODES = ("auto", "align", "all")
SHARING = "--in-flight-sharing"
OFF = ("--no-enable-prefix-caching",)
REPETITION = (
    *("--dataset-name", "prefix_repetition", "--num-prompts", "100", "--max-concurrency", "10", "--ignore-eos"),
    *("--prefix-repetition-prefix-len", "600", "--prefix-repetition-suffix-len", "200"),
    *("--prefix-repetition-num-prefixes", "10", "--prefix-repetition-output-len", "100"),
)
TRACE_SECONDS, DIVISOR, TRACE_CONCURRENCY = 1_800, 64, 32

SLOTS = ("--max-num-seqs", "32")
"""As many as there are requests at a time: otherwise the first token waits until another request has ended, whatever is
cached."""
BENCH_SECONDS = 3_600.0
FIGURES = (
    "completed",
    "failed",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_e2el_ms",
    "output_throughput",
    "duration",
    "cached_share",
)


@dataclass(frozen=True, slots=True)
class Case:
    """`part`, the model's `size`, what the servers have of a cache and of in-flight sharing, and the flags for it."""

    part: str
    size: str
    cache: str
    sharing: str
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        words = (self.part, self.size, self.cache, self.sharing and f"sharing {self.sharing}")
        return " ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class Row:
    """One case once: figures of the result file by its names, prompt tokens that the servers computed, and how busy the
    machine was in the minute before its end."""

    case: str
    part: str
    size: str
    cache: str
    sharing: str
    round: int
    computed: int
    load: float
    figures: dict[str, float]


def cases_of(parts: Sequence[str], size: str, pd_sizes: Sequence[str], has_sharing: bool) -> list[Case]:
    """Forwards. `size`: of the model where it is not P/D. `has_sharing`: whether `cairn serve` knows the flag of
    in-flight sharing."""
    ways = (("on", (SHARING,)), ("off", (SHARING.replace("--", "--no-", 1),))) if has_sharing else (("", ()),)
    cases = []
    for part in PARTS:
        if part not in parts:
            continue
        if part == "pd":
            for own in pd_sizes:
                cases += [Case(part, own, "on", "", ()), Case(part, own, "off", "", OFF)]
            continue
        for mode in MODES:
            cases += [Case(part, size, mode, way, ("--mamba-cache-mode", mode, *flags)) for way, flags in ways]
        cases.append(Case(part, size, "off", "", OFF))
    return cases


def knows_sharing() -> bool:
    """Whether this cairn's server can be told to share what is being computed."""
    said = subprocess.run(
        [sys.executable, "-m", "cairn", "serve", "--help"], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    return re.search(rf"(?<!\S){SHARING}\b", said.stdout) is not None


@contextmanager
def servers_of(case: Case, model: Path, logs: Path) -> Iterator[tuple[str, list[Child]]]:
    """Where to send to, and the servers behind it."""
    if case.part == "pd":
        with pair(model, (*case.flags, *SLOTS, *TRANSFER_FLAGS), logs, with_proxy=True) as servers:
            assert servers.proxy is not None
            yield servers.proxy.url, [servers.prefill, servers.decode]
    else:
        logs.mkdir(parents=True, exist_ok=True)
        with running(serve_command(model, *case.flags, *SLOTS), logs / "server.log") as server:
            yield server.url, [server]


def load_flags(case: Case, arguments: argparse.Namespace) -> list[str]:
    if case.part != "trace":
        return [*REPETITION]
    return [
        *("--dataset-name", "trace", "--dataset-path", str(arguments.trace), "--trace-duration", str(TRACE_SECONDS)),
        *("--trace-length-divisor", str(DIVISOR), "--trace-speedup", str(arguments.speedup)),
        *("--max-concurrency", str(TRACE_CONCURRENCY)),
    ]


def measure(case: Case, number: int, model: Path, arguments: argparse.Namespace, folder: Path) -> Row:
    """One case on new servers, measured by `cairn bench serve` in a process of its own."""
    where = folder / f"{case.name.replace(' ', '-')}-{number}"
    with (
        servers_of(case, model, where) as (url, servers),
        httpx.Client(timeout=SECONDS, trust_env=False, cookies=no_cookies()) as http,
    ):
        # every token an event of its own, also those that are half a character
        command = [sys.executable, "-m", "cairn", "bench", "serve", "--base-url", url, "--disable-tqdm"]
        command += ["--temperature", "0", "--seed", str(arguments.seed), "--extra-body", '{"return_token_ids": true}']
        command += ["--save-result", "--result-dir", str(where), "--result-filename", "result.json"]
        command += load_flags(case, arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=BENCH_SECONDS, check=False)
        (where / "bench.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise RuntimeError(f"{case.name}: cairn bench ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        computed = sum(int(metric(http, server, "cairn:computed_prompt_tokens_total")) for server in servers)
    result = json.loads((where / "result.json").read_text())
    figures = {name: result[name] for name in FIGURES}
    load = round(os.getloadavg()[0], 2)
    return Row(case.name, case.part, case.size, case.cache, case.sharing, number, computed, load, figures)


def middle(rows: Sequence[Row], case: Case, figure: str) -> float:
    """The median over the rounds."""
    return statistics.median(row.figures[figure] for row in rows if row.case == case.name)


def ttft_ratios(rows: Sequence[Row]) -> dict[str, list[float]]:
    """By model size, round by round: mean TTFT through P and D with the cache, as a share of that without. The two
    are measured one after the other, so what else the machine does is in both."""
    ttft = {(row.size, row.round, row.cache): row.figures["mean_ttft_ms"] for row in rows if row.part == "pd"}
    ratios: dict[str, list[float]] = {}
    for size, number, cache in sorted(ttft, key=lambda known: known[1]):
        if cache == "on":
            ratio = ttft[size, number, "on"] / ttft[size, number, "off"]
            ratios.setdefault(size, []).append(round(ratio, 3))
    return ratios


def verdicts(rows: Sequence[Row], cases: Sequence[Case]) -> dict[str, bool]:
    """Whether every request was answered, and whether the cache at least halves the mean TTFT behind the proxy with
    the first of the sizes, by the median of the rounds' own ratios."""
    said = {"every request was answered": all(row.figures["failed"] == 0 for row in rows)}
    held = next((case.size for case in cases if case.part == "pd"), None)
    if held is not None:
        said[f"P/D, {held}: at most half of the mean TTFT"] = statistics.median(ttft_ratios(rows)[held]) <= 0.5
    return said


def table_of(rows: Sequence[Row], cases: Sequence[Case]) -> Table:
    columns = ("TTFT mean", "median", "P99 ms", "TPOT ms", "E2EL ms", "tok/s", "cached %", "computed")
    table = Table("part", "model", "cache", "sharing", *columns)
    for column in table.columns[4:]:
        column.justify = "right"
    names = (*FIGURES[2:5], *FIGURES[5:8])
    for index, case in enumerate(cases):
        figures = [f"{middle(rows, case, name):,.1f}" for name in names]
        computed = statistics.median(row.computed for row in rows if row.case == case.name)
        share = f"{100 * middle(rows, case, 'cached_share'):.1f}"
        after = cases[index + 1] if index + 1 < len(cases) else None
        last = after is None or (after.part, after.size) != (case.part, case.size)
        words = (case.part, case.size, case.cache, case.sharing)
        table.add_row(*words, *figures, share, f"{computed:,.0f}", end_section=last)
    return table


def plot(rows: Sequence[Row], cases: Sequence[Case], path: Path) -> None:
    """Mean TTFT and cached share, one bar a case."""
    with save_figure(path, 9, 0.45 * len(cases) + 1.4) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        places = range(len(cases))[::-1]
        for axes, name, factor, label in (
            (left, "mean_ttft_ms", 1.0, "mean time to first token, ms"),
            (right, "cached_share", 100.0, "cached, % of prompt tokens"),
        ):
            heights = [factor * middle(rows, case, name) for case in cases]
            bars = axes.barh(places, heights, color=[f"C{PARTS.index(case.part)}" for case in cases])
            axes.bar_label(bars, fmt="{:,.1f}", padding=3, fontsize=8)
            axes.set(xlabel=label, xlim=(0, 1.25 * max(heights) or 1))
        left.set_yticks(places, [case.name for case in cases], fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint folder for all parts; Nemotron-H are made if not given")
    parser.add_argument("--parts", choices=PARTS, nargs="+", help="default: all, and trace where one is given")
    parser.add_argument(
        "--pd-model-sizes",
        choices=MODEL_SIZES,
        nargs="+",
        default=PD_SIZES,
        metavar="SIZE",
        help="of P/D, the one that is held to the bar first; default: %(default)s",
    )
    parser.add_argument("--trace", type=Path, help="the trace of the part of that name")
    parser.add_argument("--speedup", type=float, default=10.0, help="of the trace; default: %(default)g")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep logs and result files here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write a PNG or SVG here")
    arguments = parser.parse_args()
    parts = arguments.parts or (PARTS if arguments.trace else PARTS[:2])
    if "trace" in parts and arguments.trace is None:
        parser.error("the part `trace` needs --trace")
    size, pd_sizes = "tiny", tuple(dict.fromkeys(arguments.pd_model_sizes))
    if arguments.model:
        size, pd_sizes = "given", ("given",)
    cases = cases_of(parts, size, pd_sizes, knows_sharing())
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = {case.size: arguments.model or scratch / case.size for case in cases}
        for own in () if arguments.model else models:
            make_sized_model(models[own], size=own, seed=arguments.seed)
        order = [
            (case, number) for number in range(arguments.rounds) for case in cases[:: 1 if number % 2 == 0 else -1]
        ]
        folder = arguments.keep or scratch / "runs"
        rows = [
            measure(case, number, models[case.size], arguments, folder) for case, number in track(order, transient=True)
        ]
    console = make_console()
    console.print(table_of(rows, cases))
    for size, ratios in ttft_ratios(rows).items():
        console.print(f"P/D, {size}: mean TTFT with the cache over that without, by round:", *ratios)
    console.print(verdicts(rows, cases))
    if arguments.json:
        how = {"seed": arguments.seed, "rounds": arguments.rounds, "trace_speedup": arguments.speedup}
        said = {"verdicts": verdicts(rows, cases), "pd_ttft_ratios": ttft_ratios(rows)}
        result = {**circumstances(), **how, **said, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(as_json(result))
    if arguments.plot:
        plot(rows, cases, arguments.plot)


if __name__ == "__main__":
    main()
