"""What a decode step costs beside the kernels, and what the HTTP side can stream: no model computes anything.

    python -m benchmarks.step_overhead [--parts step stream] [--sequences 1 8 64 256] [--contexts 16 32000]
                                       [--windows 5] [--streams 256] [--tokens 200] [--json FILE] [--plot FILE]

Scheduler, cache, runner, sampler and texts are the real ones, in one process and one thread; the model's forward pass
returns zeros, and its logits were drawn before.

Part `step`: processor time of a decode step in microseconds, by number of sequences and length of their contexts:
  plan    the scheduler's plan
  batch   the runner, until the forward pass begins: checks, tables, the batch
  sample  the runner, from the end of the forward pass on: drawing a token for each sequence (greedy, 4,096 logits)
  apply   the scheduler takes the result in
  text    what is left of a step of the core: detokenizing, stop strings, the records for the client
  encode  the records as bytes for the HTTP process; `decode` is what that takes to read them
Less what it takes to read the clock for that. Means over 64 steps, in which every cost that comes once a page or a
checkpoint is there; medians of --windows such means. The baseline is the same number of sequences with the shortest
contexts, measured in turn with the longest: what a step costs must not grow with contexts. Long prompts come in groups,
a step's prefill each, and so are not at the ends of their pages all at once; where there are several groups, the
baseline has as many (its row says so), each a token further than the one before: otherwise its pages and checkpoints
would all be asked for in a few steps of 64, which is cheaper.

Part `stream`: a real `cairn serve`, a process for HTTP and one for the core, and --streams answers at a time. As fast
as it can go (what has not been read yet is then put together: several tokens an event), and with steps of 50 ms, where
every token is an event. Tokens a second, and processor time (user and system) a token of either process. Beside them as
many streams of events that are ready-made (`ready_stream`), from the same web server without an engine: what the
processor time of HTTP cannot go below.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from benchmarks.made_model import make_thin_model
from benchmarks.no_model import STEP_SECONDS, NoModelEngine, build_engine
from benchmarks.ready_stream import PACE_SECONDS
from benchmarks.reporting import (
    add_output_flags,
    as_json,
    check_positive,
    circumstances,
    cpu_seconds,
    make_console,
    save_figure,
)
from demo.server import running
from rich.progress import track
from rich.table import Table

from cairn.engine.contract import EngineConfig, GenerateRequest, StopConditions
from cairn.engine.wire import Outputs, frames_from_core
from cairn.errors import CairnError
from cairn.types import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 64
"""Steps of a mean: a page of 16 tokens comes four times, a point of the grid once."""

WARM_UP = 8
PARTS = ("plan", "batch", "sample", "apply", "text", "encode", "decode")
OF_CORE = PARTS[:-1]
RUNNER_CALLS = ("launch", "sample", "collect")
CLOCK_READS = {"plan": 1, "batch": 1, "sample": 5, "apply": 1, "text": 4}
"""How often the clock, a system call of some 2 µs, is read within a part: that is no part of a step."""

CORE_BYTES = 1 << 30
FIRST_TOKEN = 64
PREFILL_TOKENS = 1 << 18
"""Of a step: prefill is not measured, and answers would grow while others are in it."""

SPARE_STEPS = 8
STREAM_SECONDS = 600.0
SERVE = "import sys; from cairn.cli import main; sys.exit(main(core='benchmarks.no_model:build_core'))"
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
EVENT, END = b"data: ", b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class StepRow:
    """One case: microseconds a step by part. `groups`: so many of the sequences' contexts are of different lengths."""

    sequences: int
    context: int
    us: dict[str, float]
    groups: int = 1

    @property
    def core_us(self) -> float:
        """All that the core's thread does in a step beside the kernels."""
        return sum(self.us[part] for part in OF_CORE)


class Stopwatch:
    """When calls of a step began first and ended last, by name; seconds of `clock`, the thread's processor time."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.clock = clock
        times = [clock() for _ in range(10_000)]
        self._read_seconds = (times[-1] - times[0]) / (len(times) - 1)
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def watch(self, name: str, target: Any, *calls: str) -> None:
        """Have the methods `calls` of `target`, those that it has, stand for `name`. Raises ValueError if it has
        none."""
        there = [call for call in calls if hasattr(target, call)]
        if not there:
            raise ValueError(f"{type(target).__name__} has none of {', '.join(calls)}")
        for call in there:
            setattr(target, call, self._watched(name, getattr(target, call)))

    def begin(self) -> None:
        """A step begins."""
        self.began, self.ended = {}, {}

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.began.setdefault(name, self.clock())
            try:
                return call(*arguments, **named)
            finally:
                self.ended[name] = self.clock()

        return watched

    def parts(self, step: tuple[float, float], forward: tuple[float, float]) -> dict[str, float]:
        """Seconds of the core's parts of a step that went from `step[0]` to `step[1]`, with a forward pass in it."""
        plan, apply = (self.ended[name] - self.began[name] for name in ("plan", "apply"))
        batch, sample = forward[0] - self.began["run"], self.ended["run"] - forward[1]
        text = step[1] - step[0] - (forward[1] - forward[0]) - plan - apply - batch - sample
        seconds = {"plan": plan, "batch": batch, "sample": sample, "apply": apply, "text": text}
        return {part: own - CLOCK_READS[part] * self._read_seconds for part, own in seconds.items()}


def config_of(model: Path, sequences: int, context: int, steps: int) -> EngineConfig:
    """An engine in which so many sequences fit, each with its context and an answer of `steps` tokens."""
    pages = sequences * (2 * (context + steps) // 16 + 512)
    return EngineConfig(
        model=str(model),
        kv_cache_memory_bytes=max(CORE_BYTES, 1024 * pages),
        max_num_seqs=sequences,
        max_num_batched_tokens=PREFILL_TOKENS,
    )


def requests_of(sequences: int, context: int, answer: int, seed: int, groups: int = 1) -> list[GenerateRequest]:
    """Prompts that share nothing, in so many groups, each of which has a token more than the one before."""
    rng = np.random.default_rng(seed)
    return [
        GenerateRequest(
            request_id=str(number),
            prompt=rng.integers(FIRST_TOKEN, 4_000, context + number * groups // sequences).astype(np.int64).tobytes(),
            sampling=SamplingParams(temperature=0.0),
            stop_conditions=StopConditions(max_tokens=answer, ignore_eos=True),
        )
        for number in range(sequences)
    ]


def prefill_steps(sequences: int, context: int) -> int:
    """Steps after which all of them decode, at most. The first ones decode while the last ones are still in prefill."""
    return prefill_groups(sequences, context) + SPARE_STEPS


def prefill_groups(sequences: int, context: int) -> int:
    """In how many steps the prompts of all of them come in."""
    return -(-sequences * context // PREFILL_TOKENS)


class Decoding:
    """An engine whose sequences all decode; a window of steps at a time is measured."""

    def __init__(
        self, engine: NoModelEngine, sequences: int, context: int, windows: int, seed: int, groups: int = 1
    ) -> None:
        """So many windows can be measured. Raises RuntimeError if not all sequences come in."""
        self.sequences, self.context, self.groups = sequences, context, groups
        self.windows: list[dict[str, float]] = []
        self._core, self._model, self._frames = engine.core, engine.model, frames_from_core()
        rounds = prefill_steps(sequences, context)
        answer = rounds + WARM_UP + windows * WINDOW + 1
        self._core.submit(*requests_of(sequences, context, answer, seed, groups))
        self._watch = Stopwatch()
        self._watch.watch("plan", engine.scheduler, "plan")
        self._watch.watch("apply", engine.scheduler, "apply")
        self._watch.watch("run", engine.runner, *RUNNER_CALLS)
        if not any(len(self._core.step()) == sequences for _ in range(rounds)):
            raise RuntimeError(f"{sequences} sequences of {context} tokens do not all decode after {rounds} steps")
        for _ in range(WARM_UP):
            self._step()

    def measure(self) -> None:
        """Append the mean seconds of WINDOW steps, by part, to `windows`."""
        steps = [self._step() for _ in range(WINDOW)]
        self.windows.append({part: statistics.fmean(step[part] for step in steps) for part in PARTS})

    def row(self) -> StepRow:
        """Medians over the windows, and the core is closed."""
        self._core.close()
        medians = {part: 1e6 * statistics.median(window[part] for window in self.windows) for part in PARTS}
        return StepRow(self.sequences, self.context, medians, self.groups)

    def _step(self) -> dict[str, float]:
        clock = self._watch.clock
        self._watch.begin()
        start = clock()
        outputs = self._core.step()
        end = clock()
        if len(outputs) != self.sequences:
            raise RuntimeError(f"a step had {len(outputs)} of {self.sequences} sequences")
        parts = self._watch.parts((start, end), (self._model.entered, self._model.left))
        start = clock()
        frame = self._frames.encode(Outputs(outputs))
        end = clock()
        self._frames.decode(frame)
        return parts | {"encode": end - start, "decode": clock() - end}


def measure_steps(model: Path, sequences: int, contexts: Sequence[int], windows: int, seed: int) -> list[Decoding]:
    """An engine for each length of contexts, and one for the baseline where that is another; window after window is
    measured in turn, so that whatever else the machine does is in all of them."""
    cases, wanted = [], [(context, 1) for context in contexts]
    groups = prefill_groups(sequences, max(contexts))
    if len(contexts) > 1 and groups > 1:
        wanted.append((min(contexts), groups))
    for context, num_groups in wanted:
        engine = build_engine(config_of(model, sequences, context, WARM_UP + windows * WINDOW))
        cases.append(Decoding(engine, sequences, context, windows, seed, num_groups))
    for _ in range(windows):
        for case in cases:
            case.measure()
    return cases


def core_seconds(window: dict[str, float]) -> float:
    return sum(window[part] for part in OF_CORE)


def context_ratios(cases: Sequence[Decoding]) -> list[float]:
    """What a step of the core costs with the longest contexts, over what it costs in the baseline, window by window."""
    longest = max(cases, key=lambda case: case.context)
    baseline = min(cases, key=lambda case: (case.context, -case.groups))
    return [
        core_seconds(one) / core_seconds(other) for one, other in zip(longest.windows, baseline.windows, strict=True)
    ]


# -- the HTTP side ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamRow:
    """`step_seconds`: how long the core's steps were made to take, 0 for as short as they are. Microseconds of
    processor time a token: of the process that speaks HTTP, and of the core's; None for events that were ready-made."""

    streams: int
    step_seconds: float
    tokens: int
    events: int
    seconds: float
    http_us: float
    core_us: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_ms(self) -> float:
        """Milliseconds of processor time of all processes for a token of each stream."""
        return (self.http_us + (self.core_us or 0.0)) * self.streams / 1000


def stream(model: Path, streams: int, tokens: int, step_seconds: float, seed: int, folder: Path) -> StreamRow:
    """So many answers at a time, from a server of its own."""
    command = [sys.executable, "-c", SERVE, "serve", str(model), "--host", "127.0.0.1", "--port", "0"]
    command += ["--served-model-name", "none", "--max-num-seqs", str(streams), "--max-waiting", str(2 * streams)]
    command += ["--max-num-batched-tokens", str(max(2_048, streams + 64))]
    return _measure_streams(command, streams, tokens, step_seconds, seed, folder)


def ready_stream(streams: int, tokens: int, seed: int, folder: Path) -> StreamRow:
    """As many events, which are ready-made, at the pace of PACE_SECONDS."""
    command = [sys.executable, "-m", "benchmarks.ready_stream", str(PACE_SECONDS)]
    return _measure_streams(command, streams, tokens, PACE_SECONDS, seed, folder)


def _measure_streams(
    command: Sequence[str], streams: int, tokens: int, step_seconds: float, seed: int, folder: Path
) -> StreamRow:
    variables = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", STEP_SECONDS: str(step_seconds), "OMP_NUM_THREADS": "1"}
    with running(command, folder / "server.log", variables) as server:
        processes = [psutil.Process(server.process.pid)]
        processes += processes[0].children()  # the core, where there is one
        asyncio.run(stream_all(server.url, streams, 8, seed))
        before, start = [cpu_seconds(process) for process in processes], time.monotonic()
        bodies = asyncio.run(stream_all(server.url, streams, tokens, seed + 1))
        seconds = time.monotonic() - start
        used = [cpu_seconds(process) - since for process, since in zip(processes, before, strict=True)]
    counts = [count_body(body) for body in bodies]
    total = sum(own for own, _ in counts)
    if total != streams * tokens:
        raise RuntimeError(f"{total} tokens came, and {streams * tokens} were asked for:\n{bodies[0][-500:]!r}")
    http_us, core_us = [*(1e6 * own / total for own in used), None][:2]
    assert http_us is not None
    return StreamRow(streams, step_seconds, total, sum(events for _, events in counts), seconds, http_us, core_us)


async def stream_all(url: str, streams: int, tokens: int, seed: int) -> list[bytes]:
    """Whole answers as they come, read by a client that looks into nothing: the machine is the server's."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(FIRST_TOKEN, 4_000, (streams, 16)).tolist()
    async with asyncio.timeout(STREAM_SECONDS):
        return await asyncio.gather(*(_stream_one(url, prompt, tokens) for prompt in prompts))


async def _stream_one(url: str, prompt: list[int], tokens: int) -> bytes:
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = {"model": "none", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return await reader.read(-1)
    finally:
        writer.close()


def count_body(body: bytes) -> tuple[int, int]:
    """(tokens by the answer's usage, events with text) of an answer; 0 tokens of one that is not whole."""
    said = COMPLETION_TOKENS.findall(body)
    # its usage and the end are events as well
    return (int(said[-1]) if said and END in body else 0), max(0, body.count(EVENT) - 2)


# -- what is shown ----------------------------------------------------------------------------------------------------


def context_name(row: StepRow) -> str:
    return f"{row.context:,}" if row.groups == 1 else f"{row.context:,}, {row.groups} groups"


def step_table(rows: Sequence[StepRow]) -> Table:
    headings = ("sequences", "context", *PARTS[:-2], "encode", "core, all", "a token", "decode")
    table = Table(*headings, title="a decode step beside the kernels, microseconds of processor time")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        of_core = [f"{row.us[part]:,.0f}" for part in OF_CORE]
        sums = (f"{row.core_us:,.0f}", f"{row.core_us / row.sequences:,.1f}", f"{row.us['decode']:,.0f}")
        table.add_row(f"{row.sequences}", context_name(row), *of_core, *sums)
    return table


def stream_table(rows: Sequence[StreamRow]) -> Table:
    headings = ("streams", "step", "tokens/s", "tokens an event", "HTTP µs a token", "core µs a token", "ms a step")
    table = Table(*headings, title="streaming")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        step = f"{1000 * row.step_seconds:g} ms" if row.step_seconds else "free"
        core = "ready-made" if row.core_us is None else f"{row.core_us:,.1f}"
        figures = (f"{row.tokens / max(1, row.events):,.1f}", f"{row.http_us:,.1f}", core, f"{row.step_ms:,.1f}")
        table.add_row(f"{row.streams}", step, f"{row.tokens_per_s:,.0f}", *figures)
    return table


def plot(rows: Sequence[StepRow], path: Path) -> None:
    """Microseconds a token by part, one bar a case."""
    with save_figure(path, 7, 0.4 * len(rows) + 1.2) as figure:
        axes = figure.subplots()
        names = [f"{row.sequences} x {context_name(row)}" for row in rows][::-1]
        left = np.zeros(len(rows))
        for part in OF_CORE:
            widths = np.array([row.us[part] / row.sequences for row in rows][::-1])
            axes.barh(names, widths, left=left, label=part)
            left += widths
        axes.set(xlabel="microseconds a token beside the kernels", ylabel="sequences x context")
        axes.legend(frameon=False)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("step", "stream"), default=["step", "stream"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[16, 32_000], help="tokens")
    parser.add_argument("--windows", type=int, default=5, help="of 64 steps each")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    add_output_flags(parser)
    arguments = parser.parse_args(words)
    check_positive(parser, arguments, "sequences", "contexts", "windows", "streams", "tokens")
    return arguments


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    steps: list[StepRow] = []
    ratios: dict[str, list[float]] = {}
    streams: list[StreamRow] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cairn-step-")))
        model = folder / "model"
        make_thin_model(model, seed=0)
        if "step" in arguments.parts:
            for count in track(arguments.sequences, "steps", transient=True):
                try:
                    cases = measure_steps(model, count, arguments.contexts, arguments.windows, arguments.seed)
                except CairnError as error:
                    raise SystemExit(f"step_overhead: {error}") from error
                steps += [case.row() for case in cases]
                ratios[str(count)] = context_ratios(cases)
        if "stream" in arguments.parts:
            for pace in (0.0, PACE_SECONDS):
                own = (arguments.streams, arguments.tokens, pace, arguments.seed)
                streams.append(stream(model, *own, folder))
            streams.append(ready_stream(arguments.streams, arguments.tokens, arguments.seed, folder))
    console = make_console()
    if steps:
        console.print(step_table(steps))
        for count, own in ratios.items():
            spread = f"{statistics.median(own):.2f} ({min(own):.2f} to {max(own):.2f})"
            console.print(f"{count} sequences, longest contexts over the baseline: {spread}")
    if streams:
        console.print(stream_table(streams))
    if arguments.json:
        result = {
            **circumstances(),
            "seed": arguments.seed,
            "windows": arguments.windows,
            "steps": [{**asdict(row), "core_us": row.core_us} for row in steps],
            "baseline": f"the same number of sequences with contexts of {min(arguments.contexts)} tokens, in as many "
            "groups as the longest come in",
            "ratio_to_baseline": {count: statistics.median(own) for count, own in ratios.items()},
            "ratios_by_window": ratios,
            "streams": [{**asdict(row), "tokens_per_s": row.tokens_per_s} for row in streams],
        }
        arguments.json.write_text(as_json(result))
    if arguments.plot and steps:
        plot(steps, arguments.plot)


if __name__ == "__main__":
    main()
