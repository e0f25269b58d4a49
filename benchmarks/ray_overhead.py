"""What Ray Serve adds to a server: time to first token, throughput and processor time, beside the same server alone.

    make build/ray/.installed    # once: an environment with Ray
    build/ray/bin/python -m benchmarks.ray_overhead [--clients 16] [--requests 6] [--tokens 50] [--step 0.02]
        [--rounds 4] [--replicas 1] [--burst] [--plain] [--json FILE] [--plot FILE] [--seed N]

Both are the real thing around an engine whose model computes nothing and whose steps take --step seconds
(benchmarks/no_model.py): `cairn serve`, and the application of cairn.deploy.ray. Both run all the time, and round by
round the same clients ask first the one, then the other: --clients at a time stream answers of half to one and a half
times --tokens tokens, one event a step, begin at any moment of such an answer's time, and pause for a random part of
two steps before they ask again, so that requests come one by one, at any moment of a step. --burst: all begin at once,
and all answers have --tokens tokens, so that all requests of a round come in bursts of --clients. The client looks
into nothing but the first event.

Ray Serve runs as docs/scale-out.md advises, with Ray's HAProxy and a replica's parts in one thread; --plain: as Ray
does unless told.

TTFT is from the request's first byte to the first event. A chunk is an event with text. Processor time is user and
system time of all processes of a group, over the chunks of the rounds that they served.
Exit code 1 when the median TTFT grows by more than --most-ms, or the throughput is less than --least of the server's.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import psutil
from benchmarks.made_model import make_thin_model
from benchmarks.no_model import STEP_SECONDS
from benchmarks.reporting import (
    add_output_flags,
    as_json,
    check_positive,
    circumstances,
    cpu_seconds,
    make_console,
    save_figure,
)
from demo.local_ray import local_ray, runs_actor
from demo.server import running
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CORE = "benchmarks.no_model:build_core"
SERVE = f"import sys; from cairn.cli import main; sys.exit(main(core={CORE!r}))"
NAME = "none"
FIRST_TOKEN, LAST_TOKEN, PROMPT_TOKENS = 20, 4_000, 64
REQUEST_SECONDS = 120.0
EVENT, END = b"data: ", b"data: [DONE]"
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
ALONE, RAY = "alone", "Ray Serve"
REST = "rest of Ray"
ADVISED = MappingProxyType({"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"})
"""Variables that docs/scale-out.md tells people to set."""

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Answer:
    """`chunks`: events with text."""

    ttft: float
    tokens: int
    chunks: int


@dataclass(slots=True)
class Way:
    """One way to the engine, at `url`. `processes`: by group, those whose processor time counts."""

    name: str
    url: str
    processes: Callable[[], Mapping[str, list[psutil.Process]]]
    answers: list[Answer] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=dict)

    def measure(self, load: "Load", seed: int) -> None:
        """One round. Raises RuntimeError for an answer that is not whole."""
        before = {group: sum(map(cpu_seconds, own)) for group, own in self.processes().items()}
        start = time.monotonic()
        answers = asyncio.run(load.run(self.url, seed))
        seconds = time.monotonic() - start
        for group, own in self.processes().items():
            self.used[group] = self.used.get(group, 0.0) + sum(map(cpu_seconds, own)) - before[group]
        self.answers += answers
        self.rates.append(sum(answer.tokens for answer in answers) / seconds)

    def ttft_ms(self, quantile: float) -> float:
        return 1e3 * float(np.quantile([answer.ttft for answer in self.answers], quantile))

    @property
    def tokens_per_s(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rates)

    def us_a_chunk(self) -> dict[str, float]:
        chunks = sum(answer.chunks for answer in self.answers)
        return {group: 1e6 * used / chunks for group, used in self.used.items()}


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loops: `clients` of them, each with `requests` answers of `tokens` tokens, more or less unless `burst`."""

    clients: int
    requests: int
    tokens: int
    step: float
    burst: bool = False

    async def run(self, url: str, seed: int) -> list[Answer]:
        loops = (self._client(url, random.Random(1_000 * seed + number)) for number in range(self.clients))
        return [answer for answers in await asyncio.gather(*loops) for answer in answers]

    async def _client(self, url: str, rng: random.Random) -> list[Answer]:
        answers = []
        least, most = (self.tokens, self.tokens) if self.burst else (max(2, self.tokens // 2), self.tokens * 3 // 2)
        await asyncio.sleep(0 if self.burst else rng.uniform(0, self.tokens * self.step))
        for _ in range(self.requests):
            await asyncio.sleep(rng.uniform(0, 2 * self.step))
            prompt = [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(PROMPT_TOKENS)]
            async with asyncio.timeout(REQUEST_SECONDS):
                answers.append(await ask(url, prompt, rng.randint(least, most)))
        return answers


async def ask(url: str, prompt: Sequence[int], tokens: int) -> Answer:
    """One streamed answer. Raises RuntimeError when it is not whole."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        start = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = bytearray()
        while EVENT not in answer:
            if not (part := await reader.read(1 << 16)):
                raise RuntimeError(f"no event came: {bytes(answer[-500:])!r}")
            answer += part
        ttft = time.perf_counter() - start
        answer += await reader.read(-1)
    finally:
        writer.close()
    said = COMPLETION_TOKENS.findall(answer)
    if END not in answer or not said or int(said[-1]) != tokens:
        raise RuntimeError(f"{tokens} tokens were asked for, and this came: {bytes(answer[-500:])!r}")
    # its usage and the end are events as well
    return Answer(ttft, tokens, answer.count(EVENT) - 2)


# -- the two ways ------------------------------------------------------------------------------------------------------


def settings_of(clients: int) -> dict[str, object]:
    """Of both."""
    return {"served_model_name": NAME, "max_num_seqs": 2 * clients, "kv_cache_memory_bytes": "256MiB"}


@contextmanager
def serve_alone(model: Path, settings: Mapping[str, object], step: float, folder: Path) -> Iterator[Way]:
    command = [sys.executable, "-c", SERVE, "serve", str(model), "--host", "127.0.0.1", "--port", "0"]
    variables = {f"CAIRN_{name.upper()}": str(value) for name, value in settings.items()}
    variables |= {"PYTHONPATH": str(ROOT), STEP_SECONDS: str(step), "OMP_NUM_THREADS": "1"}
    with running(command, folder / "alone.log", variables) as server:
        http = psutil.Process(server.process.pid)
        yield Way(ALONE, server.url, lambda: {"server": [http], "core": http.children(recursive=True)})


@contextmanager
def serve_on_ray(arguments: argparse.Namespace, model: Path, settings: Mapping[str, object]) -> Iterator[Way]:
    # Ray reads them when it is imported, and what it starts has this process's variables
    os.environ |= {"PYTHONPATH": str(ROOT), STEP_SECONDS: str(arguments.step), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {} if arguments.plain else ADVISED
    from ray import serve

    from cairn.deploy.ray.application import build_application
    from cairn.deploy.ray.settings import load_ray_settings

    with local_ray() as url:
        args = {"model": str(model), "num_cpus": 0, "num_replicas": arguments.replicas, **settings}
        serve.run(build_application(load_ray_settings(args), CORE), name=NAME)
        yield Way(RAY, url, ray_processes)


def ray_processes() -> dict[str, list[psutil.Process]]:
    """Of the Ray that this process has started, by what they do."""
    actors = {
        "ingress": f"ServeReplica:{NAME}:ingress",
        "replica": f"ServeReplica:{NAME}:replica",
        "proxy": "ProxyActor",
    }
    groups: dict[str, list[psutil.Process]] = {group: [] for group in (*actors, "core", REST)}
    cores = set()
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
            group = next((name for name, actor in actors.items() if runs_actor(command, actor)), REST)
            if command[0].endswith("haproxy"):
                group = "proxy"
            if group == "replica":
                cores |= set(process.children(recursive=True))
        except (psutil.NoSuchProcess, IndexError):
            continue
        groups[group].append(process)
    groups[REST] = [process for process in groups[REST] if process not in cores]
    groups["core"] = list(cores)
    return groups


# -- what is shown ----------------------------------------------------------------------------------------------------


def added_ms(ways: Sequence[Way], quantile: float) -> float:
    alone, ray = ways
    return ray.ttft_ms(quantile) - alone.ttft_ms(quantile)


def throughput_ratio(ways: Sequence[Way]) -> float:
    """Of each pair of rounds, the median."""
    alone, ray = ways
    return statistics.median(mine / other for mine, other in zip(ray.rates, alone.rates, strict=True))


def figures(ways: Sequence[Way]) -> dict[str, object]:
    return {
        "ways": {
            way.name: {
                "answers": len(way.answers),
                "ttft_ms": {f"p{100 * quantile:g}": way.ttft_ms(quantile) for quantile in QUANTILES},
                "tokens_per_s": way.tokens_per_s,
                "tokens_per_s_by_round": way.rates,
                "tokens_a_chunk": sum(one.tokens for one in way.answers) / sum(one.chunks for one in way.answers),
                "processor_us_a_chunk": way.us_a_chunk(),
            }
            for way in ways
        },
        "added_ttft_ms": {f"p{100 * quantile:g}": added_ms(ways, quantile) for quantile in QUANTILES},
        "throughput_ratio": throughput_ratio(ways),
    }


def table_of(ways: Sequence[Way]) -> Table:
    table = Table("", "TTFT p50", "p90", "p99", "tokens/s", "tokens a chunk", "processor µs a chunk")
    for way in ways:
        own = way.us_a_chunk()
        used = ", ".join(f"{group} {us:,.0f}" for group, us in own.items())
        shares = sum(one.tokens for one in way.answers) / sum(one.chunks for one in way.answers)
        times = (f"{way.ttft_ms(quantile):.1f} ms" for quantile in QUANTILES)
        table.add_row(
            way.name, *times, f"{way.tokens_per_s:,.0f}", f"{shares:.2f}", f"{sum(own.values()):,.0f} ({used})"
        )
    return table


def plot(ways: Sequence[Way], path: Path) -> None:
    """Left the times to first token, right the processor time a chunk by group."""
    with save_figure(path, 9, 3.5) as figure:
        times, used = figure.subplots(1, 2)
        for way in ways:
            sorted_ms = np.sort([1e3 * answer.ttft for answer in way.answers])
            times.plot(sorted_ms, np.arange(1, len(sorted_ms) + 1) / len(sorted_ms), label=way.name)
            left = 0.0
            for group, us in way.us_a_chunk().items():
                used.barh(way.name, us, left=left)
                used.annotate(group, (left + us / 2, way.name), ha="center", va="center", fontsize=7, rotation=90)
                left += us
        times.set(xlabel="time to first token, ms", ylabel="share of answers", ylim=(0, 1))
        times.legend(frameon=False)
        used.set(xlabel="processor time a chunk, microseconds")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16, help="at a time")
    parser.add_argument("--requests", type=int, default=6, help="of each client in a round")
    parser.add_argument("--tokens", type=int, default=50, help="of an answer")
    parser.add_argument("--step", type=float, default=0.02, help="seconds")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1, help="on Ray; all share this machine")
    parser.add_argument("--burst", action="store_true", help="requests come --clients at a time")
    parser.add_argument("--plain", action="store_true", help="Ray Serve without the variables that are advised")
    parser.add_argument("--most-ms", type=float, default=10.0, help="added to the median TTFT")
    parser.add_argument("--least", type=float, default=0.9, help="of the throughput")
    add_output_flags(parser)
    arguments = parser.parse_args(words)
    check_positive(parser, arguments, "clients", "requests", "tokens", "rounds", "replicas")
    return arguments


def measure(arguments: argparse.Namespace) -> list[Way]:
    """Both ways, after a round of each that does not count."""
    load = Load(arguments.clients, arguments.requests, arguments.tokens, arguments.step, arguments.burst)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cairn-ray-")))
        model = folder / "model"
        make_thin_model(model, seed=0)
        settings = settings_of(arguments.clients)
        alone = stack.enter_context(serve_alone(model, settings, arguments.step, folder))
        ray = stack.enter_context(serve_on_ray(arguments, model, settings))
        ways = [alone, ray]
        for way in ways:
            asyncio.run(Load(arguments.clients, 1, 8, arguments.step).run(way.url, -1))
        for number in range(arguments.rounds):
            for way in ways:
                way.measure(load, 1_000 * arguments.seed + number)
        return ways


def main() -> int:
    arguments = parse()
    ways = measure(arguments)
    found = figures(ways)
    added, ratio = added_ms(ways, 0.5), throughput_ratio(ways)
    kept = added <= arguments.most_ms and ratio >= arguments.least
    console = make_console()
    console.print(table_of(ways))
    console.print(
        f"Ray Serve adds {added:.1f} ms to the median TTFT (at most {arguments.most_ms:g}), {added_ms(ways, 0.99):.1f} "
        f"to P99; {ratio:.1%} of the throughput (at least {arguments.least:.0%}): {'met' if kept else 'MISSED'}"
    )
    if arguments.json:
        names = ("clients", "requests", "tokens", "step", "rounds", "burst", "plain")
        settings = {name: getattr(arguments, name) for name in names}
        arguments.json.write_text(as_json({**circumstances(), "seed": arguments.seed, **settings, **found}))
    if arguments.plot:
        plot(ways, arguments.plot)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
