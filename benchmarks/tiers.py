"""The time to the first token from the tiers below the pool, beside computing, and what a tier's disk carries.

    python -m benchmarks.tiers MODEL [--lengths 8192,32000] [--ranks N] [--folder DIR] [--json FILE] [--seed N]

A real server with both tiers is asked over HTTP, one request at a time, for prompts of random tokens:
  computed   nothing is cached
  pool       the same prompt again
  host       again, after the pool was emptied
  disk       again, by a server that was started on the folder after the first one was killed with SIGKILL; the
             folder's files are not in the page cache
The plain speed of the disk is a file of 256 MiB, written and synchronized, and read from the disk.
"""

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from benchmarks.reporting import add_output_flags, as_json, circumstances, make_console
from demo.server import Child, running, serve_command
from rich.table import Table

from cairn.http.cookies import no_cookies

PLAIN_BYTES = 256 << 20
SETTLE_SECONDS = 1.0
HOST_BYTES = "4GiB"


class Server:
    """One server, asked one request at a time."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._client = httpx.Client(base_url=child.url, timeout=1200, trust_env=False, cookies=no_cookies())

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens came from a tier."""
        began = time.perf_counter()
        answer = self._client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "ignore_eos": True})
        seconds = time.perf_counter() - began
        return seconds, int(answer.raise_for_status().json()["cairn"]["cache"]["tier_tokens"])

    def metric(self, name: str, tier: str) -> float:
        text = self._client.get("/metrics").text
        found = re.search(rf'^cairn:{name}{{[^}}]*tier="{tier}"[^}}]*}} (\S+)', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def settle(self) -> None:
        """Until nothing more is written to the disk."""
        before, since = -1.0, time.monotonic()
        while time.monotonic() - since < SETTLE_SECONDS:
            written = self.metric("tier_written_bytes_total", "disk")
            if written != before:
                before, since = written, time.monotonic()
            time.sleep(0.05)

    def empty_pool(self) -> None:
        self._client.post("/reset_prefix_cache").raise_for_status()


def forget_pages(folder: Path) -> None:
    """Have the operating system read the files from the disk next time."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def seconds_of(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def plain_speeds(folder: Path) -> dict[str, float]:
    """MB/s of writing with a synchronization, and of reading from the disk."""
    file, content = folder / "plain", np.random.default_rng(0).bytes(PLAIN_BYTES)

    def write() -> None:
        with file.open("wb") as output:
            output.write(content)
            output.flush()
            os.fsync(output.fileno())

    speeds = {"plain_write": PLAIN_BYTES / seconds_of(write) / 1e6}
    forget_pages(folder)
    speeds["plain_read"] = PLAIN_BYTES / seconds_of(file.read_bytes) / 1e6
    file.unlink()
    return speeds


@contextmanager
def served(arguments: argparse.Namespace, folder: Path, name: str, *flags: str) -> Iterator[Server]:
    flags = ("--tensor-parallel-size", str(arguments.ranks), "--disk-cache", str(folder / "cache"), *flags)
    command = serve_command(arguments.model, *flags)
    with running(command, folder / f"{name}.log", start_seconds=600) as child:
        yield Server(child)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    random = np.random.default_rng(arguments.seed)
    prompts = {length: random.integers(300, 4000, length).tolist() for length in arguments.lengths}
    rows: dict[int, dict[str, float]] = {length: {} for length in prompts}
    warm_up, speeds = random.integers(300, 4000, 2048).tolist(), plain_speeds(folder)
    with served(arguments, folder, "first", "--host-cache-bytes", HOST_BYTES) as server:
        server.first_token(warm_up)
        for length, prompt in prompts.items():
            rows[length]["computed"] = server.first_token(prompt)[0]
            rows[length]["pool"] = statistics.median(server.first_token(prompt)[0] for _ in range(3))
            server.settle()
        for length, prompt in prompts.items():
            times = []
            for _ in range(3):
                server.empty_pool()
                seconds, num_tokens = server.first_token(prompt)
                assert num_tokens == length, f"{num_tokens} tokens came from the host, not {length}"
                times.append(seconds)
            rows[length]["host"] = statistics.median(times)
        for tier in ("host", "disk"):
            written = server.metric("tier_written_bytes_total", tier)
            speeds[f"{tier}_write"] = written / server.metric("tier_write_seconds_total", tier) / 1e6
        server.settle()
        server.child.kill()
    forget_pages(folder / "cache")
    with served(arguments, folder, "second") as server:
        server.first_token(random.integers(300, 4000, 2048).tolist())
        for length, prompt in prompts.items():
            seconds, num_tokens = server.first_token(prompt)
            assert num_tokens == length, f"{num_tokens} tokens came from the disk, not {length}"
            rows[length]["disk"] = seconds
        read, seconds = (server.metric(f"tier_read_{what}_total", "disk") for what in ("bytes", "seconds"))
        speeds["disk_read"] = read / seconds / 1e6
    return {"seconds": rows, "speeds": speeds, **circumstances()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[8192, 32000])
    parser.add_argument("--ranks", type=int, default=1, help="processes that the model is cut among")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary one unless given")
    add_output_flags(parser, with_plot=False)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = measure(arguments, Path(folder))
    if arguments.json:
        arguments.json.write_text(as_json(results))
    console, rows = make_console(), results["seconds"]
    assert isinstance(rows, dict)
    table = Table("tokens", "computed, s", "pool", "host", "disk", "host / computed", "disk / computed")
    for length, row in rows.items():
        parts = [row[name] / row["computed"] for name in ("host", "disk")]
        table.add_row(str(length), *(f"{row[name]:.3f}" for name in row), *(f"{part:.3f}" for part in parts))
    console.print(table)
    console.print({name: f"{value:.0f} MB/s" for name, value in results["speeds"].items()})  # type: ignore[attr-defined]
    console.print(circumstances())


if __name__ == "__main__":
    main()
