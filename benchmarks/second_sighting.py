"""What the second sighting of a shared beginning hits once the pool is full, as it is from a server's first hour on.

    python -m benchmarks.second_sighting [--model FOLDER] [--states 80] [--between 0,4,16] [--pairs 6]
                                         [--json FILE] [--plot FILE] [--seed N]

A real server is asked over HTTP, one request at a time. Its pool has room for --states state checkpoints and nothing
else, and is filled first: with prompts of 300 to 4,000 random tokens, which nobody asks again, until checkpoints of
them have been evicted for a while. Then
  pairs          two prompts of 2,200 tokens that share 1,500 and say so nowhere, with other requests in between
  system prompt  chats of other users with the same system message
  growing chat   a chat's next turn, with other requests in between
  five images    four images and a text, then a fifth image put in before the same text
The baselines are the same with a pool that is never full (`idle`) and with checkpoints where vLLM's `align` takes them.
Each number of requests in between has a server of its own, which has learned from the pairs before each one alone: so
the cached tokens of each pair are told.
"""

import argparse
import base64
import io
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import httpx
import numpy as np
from benchmarks.made_model import make_heavy_model
from benchmarks.reporting import add_output_flags, as_json, circumstances, make_console, save_figure
from demo.server import running, serve_command
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cairn.http.cookies import no_cookies

PROMPT, SHARED = 2_200, 1_500
FILL = 300, 4_000
"""Tokens of a prompt that only fills the pool."""
FULL_POOLS = 4
"""So many times what fits has been put in before anything is measured."""
SERVERS = {"full": (), "idle": (), "align": ("--mamba-cache-mode", "align")}
TURNS, IMAGES = 4, 4
WORDS = "the state after each token is what a hybrid model remembers of all that were before it and it has no pages"


class Asker:
    """One server, asked one request at a time. `others` are requests of other users."""

    def __init__(self, url: str, seed: int) -> None:
        self._client = httpx.Client(base_url=url, timeout=600, trust_env=False, cookies=no_cookies())
        self._rng = np.random.default_rng(seed)
        self.cache: dict = self._client.get("/cache").raise_for_status().json()["server"]

    def tokens(self, number: int) -> list[int]:
        return self._rng.integers(300, 600, number).tolist()

    def words(self, number: int) -> str:
        return " ".join(self._rng.choice(WORDS.split(), number).tolist())

    def picture(self) -> dict:
        """A message's part: an image of noise."""
        file = io.BytesIO()
        Image.fromarray(self._rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)).save(file, "png")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    def complete(self, prompt: list[int]) -> int:
        """The cached tokens of a prompt of token ids."""
        return self._cached("/v1/completions", {"prompt": prompt, "max_tokens": 1})[0]

    def chat(self, messages: list[dict]) -> tuple[int, str]:
        """The cached tokens of a chat, and its answer."""
        cached, answer = self._cached("/v1/chat/completions", {"messages": messages, "max_tokens": 8})
        return cached, answer["choices"][0]["message"]["content"] or ""

    def others(self, number: int) -> None:
        for _ in range(number):
            self.complete(self.tokens(int(self._rng.integers(*FILL))))

    def _cached(self, path: str, fields: dict) -> tuple[int, dict]:
        answer = self._client.post(path, json={"model": "model", "temperature": 0, **fields}).raise_for_status().json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer


def ask_pairs(asker: Asker, between: int, pairs: int) -> list[int]:
    """Cached tokens of the second prompt of each pair."""
    found = []
    for _ in range(pairs):
        first = asker.tokens(PROMPT)
        asker.complete(first)
        asker.others(between)
        found.append(asker.complete([*first[:SHARED], *asker.tokens(PROMPT - SHARED)]))
    return found


def ask_chats(asker: Asker, between: int) -> dict[str, list[int]]:
    """Cached tokens of each request that comes after the first of its kind."""
    system = {"role": "system", "content": asker.words(600)}

    def user(words: int) -> dict:
        return {"role": "user", "content": asker.words(words)}

    found: dict[str, list[int]] = {"system prompt": [], "growing chat": [], "five images": []}
    for _ in range(TURNS):
        found["system prompt"].append(asker.chat([system, user(100)])[0])
        asker.others(between)
    chat = [user(300)]
    for _ in range(TURNS):
        cached, answer = asker.chat(chat)
        found["growing chat"].append(cached)
        chat += [{"role": "assistant", "content": answer}, user(100)]
        asker.others(between)
    pictures, text = [asker.picture() for _ in range(IMAGES + 1)], {"type": "text", "text": asker.words(300)}
    for number in (IMAGES, IMAGES + 1):
        found["five images"].append(asker.chat([{"role": "user", "content": [*pictures[:number], text]}])[0])
        asker.others(between)
    return {name: cached[1:] for name, cached in found.items()}


def measure(folder: Path, arguments: argparse.Namespace, scratch: Path) -> list[dict]:
    """One row for each server, workload and number of requests in between."""
    rows, pool = [], ""
    flags = ("--served-model-name", "model", *shlex.split(arguments.serve_args))
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("servers", total=3 * len(arguments.between))
        for name, between in product(("idle", "full", "align"), arguments.between):
            size = ("--kv-cache-memory-bytes", "4GiB" if name == "idle" else pool)
            command = serve_command(folder, *flags, *size, *SERVERS[name])
            with running(command, scratch / f"{name}-{between}.log", start_seconds=600) as server:
                asker = Asker(server.url, arguments.seed)
                pool = str(arguments.states * asker.cache["checkpoint_bytes"])
                if name != "idle":
                    fill(asker, int(pool))
                found = {"pairs": ask_pairs(asker, between, arguments.pairs), **ask_chats(asker, between)}
            rows += [
                {"server": name, "between": between, "workload": workload, "cached": cached}
                for workload, cached in found.items()
            ]
            progress.advance(task)
    return rows


def fill(asker: Asker, pool_bytes: int) -> None:
    """Put in several times what fits, of which nothing is asked again."""
    per_prompt = asker.cache["checkpoint_bytes"] + sum(FILL) / 2 * asker.cache["bytes_per_token"]
    asker.others(int(FULL_POOLS * pool_bytes / per_prompt))


def show(rows: Sequence[dict]) -> None:
    table = Table("workload", "requests in between", *(f"{name}\ncached tokens" for name in SERVERS), "full / idle")
    for workload, between in dict.fromkeys((row["workload"], row["between"]) for row in rows):
        cells = {
            row["server"]: row["cached"] for row in rows if (row["workload"], row["between"]) == (workload, between)
        }
        ratio = sum(cells["full"]) / max(1, sum(cells["idle"]))
        table.add_row(
            workload, str(between), *(" ".join(f"{n:,}" for n in cells[name]) for name in SERVERS), f"{ratio:.2f}"
        )
    make_console(160).print(table)


def plot(rows: Sequence[dict], path: Path) -> None:
    """The median of the cached tokens: one group a workload and distance, one bar a server."""
    groups = list(dict.fromkeys((row["workload"], row["between"]) for row in rows))
    with save_figure(path, 10, 3.5) as figure:
        axes = figure.subplots()
        for index, name in enumerate(SERVERS):
            heights = [statistics.median(row["cached"]) for group in groups for row in rows if _is(row, name, group)]
            axes.bar([place + (index - 1) * 0.27 for place in range(len(groups))], heights, width=0.25, label=name)
        axes.axhline(SHARED, color="gray", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(groups)), [f"{workload}\n{between}" for workload, between in groups], fontsize=7)
        axes.set_ylabel("tokens cached, median")
        axes.legend(frameon=False)


def _is(row: dict, server: str, group: tuple[str, int]) -> bool:
    return row["server"] == server and (row["workload"], row["between"]) == group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder that takes images; a small one is made otherwise")
    parser.add_argument("--states", type=int, default=80)
    parser.add_argument("--between", type=lambda text: [int(word) for word in text.split(",")], default=[0, 4, 16])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--serve-args", default="")
    add_output_flags(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or Path(scratch) / "model"
        if arguments.model is None:
            make_heavy_model(folder, seed=arguments.seed)
        rows = measure(folder, arguments, Path(scratch))
    show(rows)
    if arguments.json:
        how = {"model": str(arguments.model or "made"), "states": arguments.states, "seed": arguments.seed}
        arguments.json.write_text(as_json({**circumstances(), **how, "rows": rows}))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
