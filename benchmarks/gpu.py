"""The engine on a GPU, end to end, at published shapes with random weights that are made on the device.

    python -m benchmarks.gpu [--models NAME ...] [--parts engine server pd] [--seconds 450] [--flags "--block-size 64"]
                             [--json build/benchmarks/gpu.json] [--plot build/benchmarks/gpu.svg] [--dry-run]

Models are Nemotron-3-Nano-30B-A3B and Qwen3.5-35B-A3B, in bfloat16, or as many of their layers as take four fifths of
the GPU (of P/D, whose two servers are on the same one, 35 % each); every row says how many. Parts:
  engine  a core in this process, turned by hand. Prompts of 2,048, 8,192 and 32,768 tokens, cold, with checkpoints by
          `auto` and without: tokens a second, milliseconds to the first token, the same again as a full hit, and what
          checkpoints cost in percent. Decode of 1, 32 and 128 sequences with contexts of 1,024: tokens a second, beside
          the time that reading weights, keys, values and states takes at the bandwidth measured here (experts: those
          that as many tokens choose of evenly used ones); processor time of the host a step; and the share of a step in
          which the GPU has nothing to do: 1 - device time / step, where device time is that between CUDA events around
          a step that was sent while the GPU was held up, so that it never waits for the host
  server  `cairn serve` under ten times the lengths of benchmarks.bench_serve_matrix: 10 prefixes of 6,000 tokens with
          100 suffixes of 2,000 behind them, answers of 1,000 tokens, 10 requests at a time; with the cache and without
  pd      the same through a prefill server, a decode server and `cairn proxy`
After --seconds nothing new is begun, nor servers that would not be done by then, going by the slowest so far; what is
in the JSON file is not measured again, so that the next run goes on from there. A row that could not be measured has an
error instead of figures, and is tried again. --flags are given to every engine. --dry-run: tiny models and lengths, on
the CPU unless --device says otherwise: whether all of it works.
"""

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from benchmarks.bench_serve_matrix import FIGURES
from benchmarks.gpu_model import SHAPES, build_core, open_random, write_folder
from benchmarks.hand_turned import Figures, HandTurned, decode, prefill
from benchmarks.pd_servers import SECONDS, TRANSFER_FLAGS, metric, pair
from benchmarks.reporting import as_json, circumstances, make_console, save_figure
from demo.server import Child, DemoError, running
from rich.table import Table

from cairn.engine.contract import EngineConfig
from cairn.errors import CairnError
from cairn.http.cookies import no_cookies

PARTS = ("engine", "server", "pd")
SERVE = "import sys; from cairn.cli import main; sys.exit(main(core='benchmarks.gpu_model:build_core'))"
GPU_SHARE, PD_SHARE = 0.8, 0.35
ALONE = 0.95
"""Of the GPU, for an engine in this process: 128 sequences take 7.5 GB of states and 3.4 GB of keys and values of 36 of
Qwen3.5's layers, beside 63 GB of weights."""
START_SECONDS = 300.0
"""For a server to come up where no kernel has been compiled yet."""
FIRST_SECONDS = {"server": 180.0, "pd": 240.0}
"""What a row is taken to last before one of its part has been measured."""
FAILURES = (CairnError, DemoError, RuntimeError, httpx.HTTPError)
"""What a row may end with while the others go on; too little memory on the GPU is one of them."""


@dataclass(frozen=True)
class Scale:
    """Lengths in tokens. `window`: steps that are timed; `held`: those sent while the GPU is held up. `repetition`:
    prefix, suffix, answer, number of prefixes, and of prompts."""

    models: tuple[str, ...] = ("nemotron-3-nano-30b-a3b", "qwen3.5-35b-a3b")
    prompts: tuple[int, ...] = (2_048, 8_192, 32_768)
    repeats: int = 3
    sequences: tuple[int, ...] = (1, 32, 128)
    context: int = 1_024
    window: int = 64
    held: int = 16
    batched_tokens: int = 8_192
    repetition: tuple[int, int, int, int, int] = (6_000, 2_000, 1_000, 10, 100)
    pool: str | None = None


DRY = Scale(("tiny-nemotron", "tiny-qwen"), (64, 192), 1, (1, 2), 32, 8, 2, 256, (64, 16, 4, 2, 4), "64MiB")


@dataclass(frozen=True)
class Settings:
    """What a run is asked for."""

    scale: Scale
    device: str
    flags: tuple[str, ...]
    folder: Path

    @property
    def has_gpu(self) -> bool:
        return self.device == "cuda" and torch.cuda.is_available()

    def model(self, name: str, share: float) -> tuple[Path, int]:
        """The folder of a model that takes up to `share` of the GPU, and its number of layers."""
        folder = self.folder / f"{name}-{share}"
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            most = torch.cuda.get_device_properties(0).total_memory * share if self.has_gpu else None
            write_folder(folder, name, most)
        return folder, len(json.loads((folder / "config.json").read_text())[SHAPES[name].layers[0]])

    def server_flags(self, share: float) -> tuple[str, ...]:
        pool = () if self.scale.pool is None else ("--kv-cache-memory-bytes", self.scale.pool)
        shared = ("--gpu-memory-utilization", f"{share:g}")
        batched = ("--max-num-batched-tokens", str(self.scale.batched_tokens))
        return ("--device", self.device, *shared, *batched, "--language-model-only", *pool, *self.flags)


class Rows:
    """Figures by model and case, kept in a file. `seconds`: after how many nothing new is begun."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._end = time.monotonic() + seconds
        self._num_begun = 0
        self.found: dict[str, dict[str, Figures | str]] = {}
        self.num_left = 0
        if path.exists():
            self.found = json.loads(path.read_text())["rows"]

    def may_begin(self, model: str, case: str, seconds: float = 0.0) -> bool:
        """Whether there is a row to measure and time for it. `seconds`: what it takes; the first row of a run that has
        any time may take more than there is, or it would never be measured."""
        is_missing = not isinstance(self.found.setdefault(model, {}).get(case), dict)
        left = self._end - time.monotonic()
        is_over = left < (seconds if self._num_begun else 0.0)
        self.num_left += is_missing and is_over
        return is_missing and not is_over

    def measure(self, model: str, case: str, measure: Callable[[], Figures], seconds: float = 0.0) -> None:
        """Unless it is there already, or the time is over. `seconds`: see `may_begin`."""
        if self.may_begin(model, case, seconds):
            self._num_begun += 1
            try:
                self.write(model, case, measure())
            except FAILURES as error:
                self.write(model, case, describe(error))

    def write(self, model: str, case: str, row: Figures | str) -> None:
        self.found[model][case] = row
        self.save()

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(as_json({**circumstances(), **device_facts(), "rows": self.found}))

    def slowest(self, part: str) -> float:
        """Seconds of a row of this part, of any model."""
        found = [
            self.figure(model, case, "seconds")
            for model, cases in self.found.items()
            for case in cases
            if case.startswith(f"{part} ")
        ]
        return max((seconds for seconds in found if seconds), default=FIRST_SECONDS[part])

    def figure(self, model: str, case: str, name: str) -> float | None:
        row = self.found.get(model, {}).get(case)
        return row.get(name) if isinstance(row, dict) else None


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def device_facts() -> dict[str, object]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda}


# -- cores in this process -------------------------------------------------------------------------------------------


@contextmanager
def hand_turned(settings: Settings, folder: Path, mode: str) -> Iterator[HandTurned]:
    scale = settings.scale
    most = max(2 * scale.context, *scale.prompts) + 2 * (scale.window + scale.held) + 64
    asked = parse_flags(settings.flags)
    pool = {} if scale.pool is None else {"kv_cache_memory_bytes": scale.pool}
    config = EngineConfig.model_validate(
        {
            "model": str(folder),
            "device": settings.device,
            "mamba_cache_mode": mode,
            "max_num_seqs": max(scale.sequences),
            "max_num_batched_tokens": max(scale.batched_tokens, max(scale.sequences) + 64),
            "max_model_len": most,
            "gpu_memory_utilization": ALONE,
            "language_model_only": True,
            "kv_cache_memory_bytes": None,
            **pool,
            **asked,
        }
    )
    engine = HandTurned(build_core(config))
    try:
        yield engine
    finally:
        engine.core.close()
        del engine.core  # and with it its pool, whoever still has the engine
        give_back(settings)


def give_back(settings: Settings) -> None:
    """What nobody here has any more goes back to the GPU, for other processes to take."""
    gc.collect()
    if settings.has_gpu:
        torch.cuda.empty_cache()


def parse_flags(flags: Sequence[str]) -> dict[str, str]:
    """Flags with one value each, as settings."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return {name.removeprefix("--").replace("-", "_"): value for name, value in pairs}


def decode_bytes(folder: Path, name: str, count: int, context: int, block_size: int = 16) -> float:
    """Bytes that a decode step has to read and write: weights once (of an embedding a row a token, of routed experts
    those that `count` tokens choose if all are used evenly), keys and values, and states twice."""
    shape, opened = SHAPES[name], open_random(folder)
    chosen = 1 - (1 - shape.experts_per_token / shape.experts) ** count
    total = 0.0
    for tensor, sizes in opened.family.tensors(opened.config).items():
        share = chosen if ".experts." in tensor else 0.0 if "embed" in tensor else 1.0
        total += share * float(np.prod(sizes)) * opened.dtype.itemsize
    layout = opened.layout(block_size)
    return total + count * (context * layout.bytes_per_token + 2 * layout.state_bytes)


def peaks() -> Figures:
    """Bytes and products a second, see `benchmarks.gpu_kernels`."""
    from benchmarks.gpu_kernels import Peaks, Timer

    found = Peaks.measured(Timer(10))
    torch.cuda.empty_cache()
    return {"bytes_per_s": found.bandwidth, "flops_per_s": found.flops}


def engine_part(settings: Settings, rows: Rows, name: str) -> None:
    scale = settings.scale
    if settings.has_gpu:
        rows.measure("gpu", "peaks", peaks)
    folder, layers = settings.model(name, GPU_SHARE)
    cases: dict[str, list[tuple[str, Callable[[HandTurned], Figures]]]] = {"none": [], "auto": []}
    for mode, known in cases.items():
        for length in scale.prompts:
            known.append((f"prefill {length} {mode}", lambda engine, n=length: prefill(engine, n, scale.repeats)))
    sizes = scale.context, scale.window, scale.held, settings.has_gpu
    for count in scale.sequences:
        cases["auto"].append((f"decode {count}", lambda engine, n=count: decode(engine, n, *sizes)))
    for mode, known in cases.items():
        missing = [case for case in known if rows.may_begin(name, case[0])]
        try:
            with hand_turned(settings, folder, mode) if missing else nullcontext() as engine:
                for case, measure in missing:
                    rows.measure(name, case, lambda m=measure, e=engine: {**m(e), "layers": layers})
        except FAILURES as error:  # there is no engine to measure
            for case, _ in missing:
                rows.write(name, case, describe(error))
    derive(settings, rows, name, folder)


def derive(settings: Settings, rows: Rows, name: str, folder: Path) -> None:
    """What follows from several rows: the cost of checkpoints, and bounds."""
    scale, found = settings.scale, rows.found.get(name, {})
    for length in scale.prompts:
        plain, kept = (rows.figure(name, f"prefill {length} {mode}", "ttft_ms") for mode in ("none", "auto"))
        if plain and kept:
            found[f"prefill {length} auto"]["checkpoints_percent"] = 100 * (kept / plain - 1)
    bandwidth = rows.figure("gpu", "peaks", "bytes_per_s")
    for count in scale.sequences:
        row = found.get(f"decode {count}")
        if isinstance(row, dict):
            row["bytes"] = decode_bytes(folder, name, count, scale.context)
            if bandwidth:
                row["bound_us"] = 1e6 * row["bytes"] / bandwidth
                row["of_bound"] = row["bound_us"] / row["step_us"]


# -- servers ----------------------------------------------------------------------------------------------------------


def serve_command(model: Path, *flags: str) -> list[str]:
    # The engine's process has to find this package, too.
    path = f"PYTHONPATH={os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}"
    return ["env", path, sys.executable, "-c", SERVE, "serve", str(model), "--host", "127.0.0.1", "--port", "0", *flags]


@contextmanager
def servers_of(settings: Settings, part: str, folder: Path, flags: Sequence[str], logs: Path) -> Iterator[Any]:
    logs.mkdir(parents=True, exist_ok=True)
    if part == "pd":
        # What the first one takes is taken, and counts for the second one as anybody's.
        first, second = ((*settings.server_flags(share), *TRANSFER_FLAGS, *flags) for share in (0.45, 0.9))
        started = {"with_proxy": True, "decode_flags": second, "start_seconds": START_SECONDS}
        with pair(folder, first, logs, command_of=serve_command, **started) as servers:
            assert servers.proxy is not None
            yield servers.proxy.url, [servers.prefill, servers.decode]
    else:
        command = serve_command(folder, *settings.server_flags(0.9), *flags)
        with running(command, logs / "server.log", start_seconds=START_SECONDS) as server:
            yield server.url, [server]


def repetition(settings: Settings, part: str, name: str, flags: Sequence[str]) -> Figures:
    """prefix_repetition by `cairn bench serve` in a process of its own."""
    begin = time.monotonic()
    folder, layers = settings.model(name, PD_SHARE if part == "pd" else GPU_SHARE)
    prefix, suffix, answer, prefixes, prompts = settings.scale.repetition
    logs = settings.folder / f"{part}-{name}-{len(flags)}"
    servers: list[Child]
    with (
        servers_of(settings, part, folder, flags, logs) as (url, servers),
        httpx.Client(timeout=SECONDS, trust_env=False, cookies=no_cookies()) as http,
    ):
        command = [sys.executable, "-m", "cairn", "bench", "serve", "--base-url", url, "--disable-tqdm"]
        command += ["--temperature", "0", "--extra-body", '{"return_token_ids": true}', "--ignore-eos"]
        command += ["--save-result", "--result-dir", str(logs), "--result-filename", "result.json"]
        command += ["--dataset-name", "prefix_repetition", "--num-prompts", str(prompts), "--max-concurrency", "10"]
        command += ["--prefix-repetition-prefix-len", str(prefix), "--prefix-repetition-suffix-len", str(suffix)]
        command += ["--prefix-repetition-num-prefixes", str(prefixes), "--prefix-repetition-output-len", str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
        if done.returncode:
            raise RuntimeError(f"cairn bench ended with {done.returncode}: {done.stdout[-200:]}{done.stderr[-200:]}")
        computed = sum(metric(http, server, "cairn:computed_prompt_tokens_total") for server in servers)
    result = json.loads((logs / "result.json").read_text())
    figures = {figure: result[figure] for figure in FIGURES if result.get(figure) is not None}
    return {**figures, "computed_prompt_tokens": computed, "layers": layers, "seconds": time.monotonic() - begin}


# -- what comes of it -------------------------------------------------------------------------------------------------


def table_of(rows: Rows) -> Table:
    table = Table("model", "case", "figures")
    for model, cases in rows.found.items():
        for case, row in cases.items():
            text = row if isinstance(row, str) else ", ".join(f"{name} {value:,.4g}" for name, value in row.items())
            table.add_row(model, case, text)
    return table


def plot(rows: Rows, models: Sequence[str], scale: Scale, path: Path) -> None:
    """Prefill and decode in tokens a second, and where a decode step's time goes: what there is of it."""
    with save_figure(path, 12, 3.6) as figure:
        left, middle, right = figure.subplots(1, 3)

        def draw(axes: Any, name: str, cases: dict[int, str], what: str, style: str, label: str) -> None:
            found = {place: rows.figure(name, case, what) for place, case in cases.items()}
            points = {place: value for place, value in found.items() if value}
            if points:
                axes.plot(*zip(*points.items(), strict=True), style, marker=".", color=colours[name], label=label)
                axes.set(xscale="log", yscale="log")
                axes.legend(fontsize=6)

        colours = {name: f"C{number}" for number, name in enumerate(models)}
        steps = {count: f"decode {count}" for count in scale.sequences}
        for name in models:
            for mode, style in (("none", "--"), ("auto", "-")):
                cases = {length: f"prefill {length} {mode}" for length in scale.prompts}
                draw(left, name, cases, "tokens_per_s", style, f"{name}, {mode}")
            draw(middle, name, steps, "tokens_per_s", "-", name)
            for part, style in (("step_us", "-"), ("device_us", "--"), ("bound_us", ":"), ("host_us", "-.")):
                draw(right, name, steps, part, style, f"{part}, {name}")
        left.set(xlabel="tokens of a prompt", ylabel="prefill tokens a second")
        middle.set(xlabel="sequences", ylabel="decode tokens a second")
        right.set(xlabel="sequences", ylabel="microseconds of a decode step")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", choices=SHAPES, nargs="+", help="default: the two published ones")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda, and cpu with --dry-run")
    parser.add_argument("--flags", type=shlex.split, default=[], help="for every engine, each with a value")
    parser.add_argument("--seconds", type=float, default=450.0, help="after which nothing new is begun")
    parser.add_argument("--keep", type=Path, help="keep what models have besides weights, and servers' logs, here")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu.json"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny models and lengths")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 while anything is left to measure or could not be measured."""
    asked = parse(arguments)
    scale = DRY if asked.dry_run else Scale()
    rows = Rows(asked.json, asked.seconds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.keep or Path(scratch)
        device = asked.device or ("cpu" if asked.dry_run else "cuda")
        settings = Settings(scale, device, tuple(asked.flags), folder)
        models = asked.models or scale.models
        for part in asked.parts:
            for name in models:
                if part == "engine":
                    engine_part(settings, rows, name)
                    open_random.cache_clear()  # the next model wants the memory of this one, and so do servers
                    give_back(settings)
                    continue
                for way, flags in (("cached", ()), ("uncached", ("--no-enable-prefix-caching",))):
                    rows.measure(
                        name,
                        f"{part} {way}",
                        lambda p=part, n=name, f=flags: repetition(settings, p, n, f),
                        rows.slowest(part),
                    )
    rows.save()
    console = make_console()
    console.print(table_of(rows))
    if asked.plot is not None:
        plot(rows, models, scale, asked.plot)
    failed = sum(isinstance(row, str) for cases in rows.found.values() for row in cases.values())
    if rows.num_left or failed:
        console.print(f"{rows.num_left} rows are left and {failed} could not be measured: run it again")
    return int(bool(rows.num_left or failed))


if __name__ == "__main__":
    sys.exit(main())
