"""What a newcomer waits for: a server's first start on a machine, its later ones, and the first minute's requests.

    python -m benchmarks.first_start [--model FOLDER] [--size small] [--rounds 3] [--tokens 600] [--serve-args "..."]
                                     [--json FILE] [--plot FILE] [--seed N]

A start counts from the command to the first healthy answer. The first one finds an empty folder for compiled kernels,
and a later one finds what the first has left, in the same round. After each first start cold prompts are asked one
after another, and more of the same length when the server has been up for --minute seconds: `first minute` is the
median time to the first token of the former over that of the latter.
"""

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from benchmarks.made_model import PEER_SHAPES, make_peer_model
from benchmarks.reporting import add_output_flags, as_json, circumstances, make_console, save_figure
from demo.server import running, serve_command
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

PROMPTS = 5
"""Of each kind a round."""


def first_token_seconds(url: str, prompt: list[int]) -> float:
    """Of an answer of one token. Raises RuntimeError where anything of the prompt was cached."""
    begin = time.perf_counter()
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False)
    seconds = time.perf_counter() - begin
    if cached := answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]:
        raise RuntimeError(f"{cached} tokens of a prompt that is cold were cached")
    return seconds


def start(model: Path, folder: Path, name: str, arguments: argparse.Namespace, prompts: list[list[int]]) -> dict:
    """Seconds until a server is healthy, and until the first tokens of prompts early and late."""
    flags = ("--served-model-name", "model", *shlex.split(arguments.serve_args))
    variables = {"XDG_CACHE_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    begin = time.perf_counter()
    with running(serve_command(model, *flags), folder / f"{name}.log", variables, 600) as server:
        healthy = time.perf_counter()
        early = [first_token_seconds(server.url, prompt) for prompt in prompts[:PROMPTS]]
        late = []
        if prompts[PROMPTS:]:
            time.sleep(max(0.0, arguments.minute - (time.perf_counter() - healthy)))
            late = [first_token_seconds(server.url, prompt) for prompt in prompts[PROMPTS:]]
    return {"seconds": healthy - begin, "early": early, "late": late}


def run(arguments: argparse.Namespace, scratch: Path) -> dict:
    model = arguments.model or scratch / "model"
    if arguments.model is None:
        make_peer_model(model, size=arguments.size, vocab_size=None, seed=arguments.seed)
    rng, rounds = np.random.default_rng(arguments.seed), []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("starts", total=2 * arguments.rounds)
        for number in range(arguments.rounds):
            folder = scratch / f"round-{number}"
            folder.mkdir()
            prompts = rng.integers(300, 4000, (2 * PROMPTS, arguments.tokens)).tolist()
            first = start(model, folder, "first", arguments, prompts)
            progress.advance(task)
            later = start(model, folder, "later", arguments, [])
            progress.advance(task)
            rounds.append({"first": first, "later": later["seconds"]})
    first, later = (
        statistics.median(values)
        for values in ([each["first"]["seconds"] for each in rounds], [each["later"] for each in rounds])
    )
    early, late = (
        statistics.median(seconds for each in rounds for seconds in each["first"][kind]) for kind in ("early", "late")
    )
    return {
        **circumstances(),
        "size": arguments.size if arguments.model is None else str(arguments.model.name),
        "serve_args": arguments.serve_args,
        "tokens": arguments.tokens,
        "seed": arguments.seed,
        "rounds": rounds,
        "first_start_seconds": round(first, 2),
        "later_start_seconds": round(later, 2),
        "first_over_later": round(first / later, 2),
        "first_minute_ttft_seconds": round(early, 3),
        "later_ttft_seconds": round(late, 3),
        "first_minute_over_later": round(early / late, 3),
    }


def show(found: dict) -> None:
    table = Table("", "first", "later", "first over later", title=f"{found['size']}, {found['machine']}")
    for name, columns in (
        ("start, s", ("first_start_seconds", "later_start_seconds", "first_over_later")),
        (
            f"first token of {found['tokens']} cold, s",
            ("first_minute_ttft_seconds", "later_ttft_seconds", "first_minute_over_later"),
        ),
    ):
        table.add_row(name, *(str(found[column]) for column in columns))
    make_console().print(table)


def plot(found: dict, path: Path) -> None:
    rounds = found["rounds"]
    starts = {
        "first start": [each["first"]["seconds"] for each in rounds],
        "later start": [each["later"] for each in rounds],
    }
    with save_figure(path) as figure:
        axes = figure.subplots()
        for offset, (name, values) in enumerate(starts.items()):
            axes.bar([number + 0.4 * offset for number in range(len(values))], values, width=0.38, label=name)
        axes.set_xticks([number + 0.2 for number in range(len(rounds))], range(1, len(rounds) + 1))
        axes.set_xlabel("round")
        axes.set_ylabel("seconds until healthy")
        axes.legend()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--size", choices=tuple(PEER_SHAPES), default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--minute", type=float, default=60.0)
    parser.add_argument("--serve-args", default="")
    add_output_flags(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cairn-start-") as folder:
        found = run(arguments, Path(folder))
    show(found)
    if arguments.json is not None:
        arguments.json.write_text(as_json(found))
    if arguments.plot is not None:
        plot(found, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
