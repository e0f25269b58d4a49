"""What moves a tier's segments between memory and a disk fastest: preadv and pwritev, or NIXL's POSIX plugin.

    python -m benchmarks.tier_movers [--folder DIR] [--segment 16] [--page 98304] [--rounds 7] [--json FILE]

One segment of --segment MiB in pages of --page bytes, as `cairn.tiers` writes and reads them: written to a new file and
synchronized, read by its pages in another order into other ones, from the page cache and from the disk. In turn, with
one thread:
  cairn   `cairn.tiers.files.Files`: pwritev and preadv, the baseline
  aio, uring, posixaio   a NIXL agent with its POSIX backend in that mode, one descriptor a page
Medians of --rounds, MB/s by the wall, and the processor's time of all threads in seconds a GB.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.reporting import add_output_flags, as_json, check_positive, circumstances, make_console
from benchmarks.tiers import forget_pages
from rich.table import Table

from cairn.tiers.files import Files
from cairn.tiers.store import PageBytes

MODES = {"aio": "use_aio", "uring": "use_uring", "posixaio": "use_posix_aio"}
PARTS = ("write", "read cached", "read disk")
POLL_SECONDS = 5e-5


class CairnMover:
    """The mover that tiers have."""

    def __init__(self) -> None:
        self._files = Files()

    def write(self, path: Path, pages: PageBytes) -> None:
        descriptor = self._files.create(str(path))
        self._files.write_all(descriptor, [pages.data.cast("B")], 0)
        self._files.sync(descriptor)
        self._files.close(descriptor)

    def read(self, path: Path, pages: PageBytes, order: list[int]) -> None:
        descriptor = self._files.open(str(path))
        for number, page in enumerate(order):
            # an entry at a time, as its checksum comes next
            assert self._files.read_into(descriptor, [pages[page]], number * pages.shape[1])
        self._files.close(descriptor)


class NixlMover:
    """NIXL's POSIX plugin in one of its modes. Raises RuntimeError or nixl's errors where it does not work here."""

    def __init__(self, mode: str) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found,import-untyped,unused-ignore]

        self._name = f"mover-{mode}"
        self._agent: Any = nixl_agent(self._name, nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {MODES[mode]: "true"})
        self._memory: dict[int, Any] = {}

    def write(self, path: Path, pages: PageBytes) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._move("WRITE", descriptor, pages, list(range(len(pages))))
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self, path: Path, pages: PageBytes, order: list[int]) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        self._move("READ", descriptor, pages, order)
        os.close(descriptor)

    def _move(self, direction: str, descriptor: int, pages: PageBytes, order: list[int]) -> None:
        agent, size, start = self._agent, pages.shape[1], pages.ctypes.data
        if start not in self._memory:
            # a server does so once, for its pool
            self._memory[start] = agent.register_memory([(start, pages.nbytes, 0, "")], "DRAM")
        file = agent.register_memory([(0, pages.nbytes, descriptor, "")], "FILE")
        memory = agent.get_xfer_descs([(start + page * size, size, 0) for page in order], "DRAM")
        places = agent.get_xfer_descs([(number * size, size, descriptor) for number in range(len(order))], "FILE")
        handle = agent.initialize_xfer(direction, memory, places, self._name, b"", ["POSIX"])
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_SECONDS)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(file)
        if state != "DONE":
            raise RuntimeError(f"a {direction} has ended as {state}")


def timed(action: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the wall, and of the processor."""
    began, processor = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - processor


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    random = np.random.default_rng(arguments.seed)
    num_pages = (arguments.segment << 20) // arguments.page
    written = random.integers(0, 256, (num_pages, arguments.page), np.uint8)
    pages = np.zeros_like(written)
    order = random.permutation(num_pages).tolist()
    movers: dict[str, CairnMover | NixlMover] = {"cairn": CairnMover()}
    failed = {}
    for mode in MODES:
        try:
            movers[mode] = NixlMover(mode)
            movers[mode].write(folder / "try", written[:1].copy())
        except Exception as error:
            # its errors have no common class
            failed[mode] = f"{type(error).__name__}: {error}"
            movers.pop(mode, None)
    times = {name: {part: list[tuple[float, float]]() for part in PARTS} for name in movers}
    for number in range(arguments.rounds):
        for name, mover in movers.items():
            path = folder / f"{name}-{number}"

            def write(mover: CairnMover | NixlMover = mover, path: Path = path) -> None:
                mover.write(path, written)

            def read(mover: CairnMover | NixlMover = mover, path: Path = path) -> None:
                mover.read(path, pages, order)

            times[name]["write"].append(timed(write))
            for part in PARTS[1:]:
                if part == "read disk":
                    forget_pages(folder)
                pages[:] = 0
                times[name][part].append(timed(read))
                assert np.array_equal(pages[order], written), f"{name} has read something else"
            path.unlink()
    rows = {
        name: {part: _figures(values, written.nbytes) for part, values in parts.items()}
        for name, parts in times.items()
    }
    return {"movers": rows, "failed": failed, **circumstances()}


def _figures(times: list[tuple[float, float]], num_bytes: int) -> dict[str, float]:
    wall, processor = (statistics.median(column) for column in zip(*times, strict=True))
    return {"MB/s": num_bytes / wall / 1e6, "processor_s_per_GB": processor / num_bytes * 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary one unless given")
    parser.add_argument("--segment", type=int, default=16, help="MiB that are moved together")
    parser.add_argument("--page", type=int, default=98304, help="bytes of a page: 16 tokens of Nemotron-3-Nano")
    parser.add_argument("--rounds", type=int, default=7)
    add_output_flags(parser, with_plot=False)
    arguments = parser.parse_args()
    check_positive(parser, arguments, "segment", "page", "rounds")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = measure(arguments, Path(folder))
    if arguments.json:
        arguments.json.write_text(as_json(results))
    console, rows = make_console(), results["movers"]
    assert isinstance(rows, dict)
    table = Table("MB/s (processor, s/GB)", *PARTS)
    for name, row in rows.items():
        cells = (f"{row[part]['MB/s']:.0f} ({row[part]['processor_s_per_GB']:.2f})" for part in PARTS)
        table.add_row(name, *cells)
    console.print(table)
    console.print(results["failed"], circumstances())


if __name__ == "__main__":
    main()
