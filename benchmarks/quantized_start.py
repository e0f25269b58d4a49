"""How long quantized checkpoints take to be read and laid out for products, and what memory that needs.

    PYTHONPATH=tests python -m benchmarks.quantized_start [--formats AWQ GPTQ ...] [--rounds 3] [--cpu-threads N]
                                              [--growth] [--reading] [--folder DIR] [--seed N] [--json FILE]

A Qwen3.5 of 333 M random parameters is written in bfloat16, and then with the matrices of its layers in each published
form: codes are random, scales small. GGUF files are written by the tests' writer. Each load is a process of its own,
the formats by turns. Baselines of the same run and process: the same bytes of the files, which the system has in its
memory, read into new memory (`numpy.fromfile`, in huge pages), and mapped and copied by torch into new memory, by one
thread and by all; and the checkpoint in bfloat16.
  seconds   the fastest of --rounds, by the wall: `open_model` and `build`, as a server does them
  / copy    over the faster one of both copies by torch; on a machine that does other things as well, rather look at
            the processor's time over that of the copy by one thread
  memory    what the process takes more than before, at most and in the end, without pages of the files, over the
            files' bytes. It is looked at every 2 ms.
  growth    with --growth: a narrower model of as many tensors is loaded as well, a quarter of the bytes. What both have
            in common is constant (compiled loops, Python by tensor), and the rest grows with the bytes, at so many
            GB/s: to be compared with a disk's. By the wall, and by the processor's time, which other work disturbs less

With --reading something else is measured: a start from a disk, beside what any start has to do. A disk's pace differs
from minute to minute, so the same files are read and loaded in turn in one process, --rounds times within seconds of
each other, and ratios are medians over those turns. All is imported before, and compiled loops are those of the cache.
  read      the bytes of the files, read into one new buffer (`preadv`, in huge pages as weights have them); page faults
            are counted. The system has been told to forget the files before. What it says that it has read from the
            disk (/proc/self/io) is held to be all of them, so a file that another process maps, or a folder in memory,
            is an error
  cold      `open_model` and `build`, the files forgotten likewise
  warm      the same, the files in the system's memory: what a start takes besides the disk
  seconds   by the wall, less those in which the calling thread could have run and had no core (its schedstat in /proc),
            the median of all turns. What the loops' other threads wait for is not taken off: on a busy machine give
            --cpu-threads 1
  / read    cold over read: 1 is a start as fast as this disk reads
  / bound   cold over the longer one of read and warm, of which no start can be shorter: 1 where disk and processor
            work at the same time all along, up to 2 where one waits for the other. It depends little on the disk
  pace      bytes over warm: a disk that reads no faster is all that a start waits for
"""

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from benchmarks.made_model import NARROW, make_peer_model
from benchmarks.reporting import as_json, check_positive, circumstances, make_console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from cairn.engine.cpu_threads import thread_variables
from cairn.models.registry import open_model
from cairn.models.weights.packed_layouts import WHOLE, Coding, PackedLayout
from cairn.models.weights.quantization import FP8
from cairn.models.weights.quantization_config import read_quantization
from cairn.models.weights.tensor_source import TORCH_DTYPES

__all__ = ["FORMATS", "write_format"]

PLAIN, TINY = "bfloat16", "tiny"
SMALL = "small"
BLOCK = 128
WATCH_SECONDS = 0.002
_LEAST_FROM_DISK = 0.95
"""Of a file's bytes, where it is said to be cold; headers have been read before."""
GGUF = ("Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""By ggml's names."""

_NEVER_QUANTIZED = re.compile(r"(in_proj_[ab]|conv1d)\.weight$")


def _compressed(form: str, bits: int = 4, kind: str = "int", **weights: Any) -> dict[str, Any]:
    """compressed-tensors' config of one group of layers."""
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


_BY_GROUPS = {"strategy": "group", "group_size": BLOCK}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": BLOCK, "checkpoint_format": "gptq"}

FORMATS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "W4A16": _compressed("pack-quantized", **_BY_GROUPS),
        "W8A8": _compressed("int-quantized", bits=8, strategy="channel"),
        "AWQ": {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "zero_point": True, "version": "gemm"},
        "GPTQ": {**_GPTQ, "desc_act": False},
        "GPTQ desc_act": {**_GPTQ, "desc_act": True},
        "NVFP4": _compressed("nvfp4-pack-quantized", kind="float", strategy="tensor_group", group_size=16),
        "MXFP4": _compressed("mxfp4-pack-quantized", kind="float", strategy="group", group_size=32),
        "FP8": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
        "compressed FP8": _compressed("float-quantized", bits=8, kind="float", strategy="channel"),
    }
)
"""`quantization_config` by names for people."""

# -- checkpoints -------------------------------------------------------------------------------------------------------


def write_format(plain: Path, out: Path, name: str, generator: torch.Generator) -> None:
    """The checkpoint in `plain` with the matrices of its layers in one of FORMATS, whose numbers are random."""
    config = dict(FORMATS[name])
    quantization = read_quantization(out, {"quantization_config": config})
    layouts = () if quantization is None else quantization.layouts
    stored: dict[str, Tensor] = {}
    for file in plain.glob("*.safetensors"):
        for tensor_name, tensor in load_file(file).items():
            if tensor.ndim != 2 or ".layers." not in tensor_name or _NEVER_QUANTIZED.search(tensor_name):
                stored[tensor_name] = tensor
            elif layouts:
                ordered = bool(config.get("desc_act"))
                stored |= draw_matrix(tensor_name, tuple(tensor.shape), layouts[0], ordered, generator)
            else:
                stored |= draw_fp8(tensor_name, tuple(tensor.shape), "weight_block_size" in config, generator)
    shutil.copytree(plain, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((plain / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))


def draw_matrix(
    name: str, shape: tuple[int, ...], layout: PackedLayout, ordered: bool, generator: torch.Generator
) -> dict[str, Tensor]:
    """The tensors that a layout wants of a matrix. `ordered`: groups of inputs that do not lie together."""
    size = layout.sizes[0]
    coding = Coding(shape, layout.bits[0], shape[-1] if size == WHOLE else size)
    drawn = {}
    for role, wanted in layout.wanted(coding).items():
        if role == "g_idx":
            groups = torch.arange(coding.inputs) // coding.group
            mixed = torch.randperm(coding.inputs, generator=generator) if ordered else slice(None)
            tensor = groups[mixed].to(torch.int32)
        elif wanted.optional:
            continue
        else:
            tensor = draw_numbers(wanted.shapes[0], wanted.dtypes[0], generator)
        drawn[str(layout.stored_name(name, role))] = tensor
    return drawn


def draw_fp8(name: str, shape: tuple[int, ...], in_blocks: bool, generator: torch.Generator) -> dict[str, Tensor]:
    """A matrix in FP8, with a factor for each block or row."""
    scale = "weight_scale_inv" if in_blocks else "weight_scale"
    factor_shape = tuple(-(-length // BLOCK) for length in shape) if in_blocks else (shape[0], 1)
    factors = draw_numbers(factor_shape, "F32", generator)
    return {name: draw_numbers(shape, FP8, generator), f"{name.removesuffix('weight')}{scale}": factors}


def draw_numbers(shape: tuple[int, ...], dtype_name: str, generator: torch.Generator) -> Tensor:
    """Codes of any bits; scales and FP8 numbers that are finite and small. `dtype_name`: safetensors'."""
    dtype = TORCH_DTYPES[dtype_name]
    if dtype_name in ("BF16", "F16", "F32"):
        return torch.rand(shape, generator=generator).mul_(0.01).add_(0.001).to(dtype)
    drawn = torch.empty((*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).random_(generator=generator)
    # Without the bit of the largest exponents there is no NaN.
    return (drawn & 0xBF if dtype_name == FP8 else drawn).view(dtype)


def write_all(folder: Path, names: Sequence[str], seed: int, shape: str = SMALL) -> dict[str, Path]:
    """By name the folder or GGUF file of each format, and of the checkpoint in bfloat16; those that are there stay.
    `shape`: as `make_peer_model` has it."""
    folder.mkdir(exist_ok=True)
    places = {name: folder / (f"model-{name}.gguf" if name in GGUF else name) for name in (PLAIN, *names)}
    for name, size in ((PLAIN, shape), (TINY, "tiny")):
        if not (folder / name).exists():
            make_peer_model(folder / name, size=size, vocab_size=None, seed=seed)
    for name, place in places.items():
        if place.exists():
            continue
        if name in GGUF:
            from models.gguf_files import write_gguf  # of the tests

            write_gguf(places[PLAIN], place, name)
        else:
            write_format(places[PLAIN], place, name, torch.Generator().manual_seed(seed))
    return places


# -- loads -------------------------------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """That this process takes, without pages of files."""
    text = Path("/proc/self/status").read_text()
    return sum(1024 * int(kib) for kib in re.findall(r"(?:RssAnon|RssShmem):\s+(\d+)", text))


@contextmanager
def watching_memory() -> Iterator[Callable[[], int]]:
    """Gives what returns the most bytes that there were since."""
    most, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(WATCH_SECONDS):
            most[0] = max(most[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(most[0], anonymous_bytes())
    finally:
        done.set()
        thread.join()


def load_once(place: Path, first: Path) -> dict[str, float]:
    """Seconds of a copy of the files, and of `open_model` and `build`; and bytes of memory that the latter takes.
    `first`: a small checkpoint, with which all is imported that is needed."""
    open_model(first, dtype="bfloat16", keeps="codes").build(exact=False)
    files, num_bytes = files_of(place)
    seconds_of(files, lambda file: np.fromfile(file, np.uint8))  # until the system has them in its memory
    num_threads = torch.get_num_threads()
    copied_by_all = seconds_of(files, copy_mapped)
    torch.set_num_threads(1)
    begin_computing = time.process_time()
    copied = seconds_of(files, copy_mapped)
    copying = time.process_time() - begin_computing
    torch.set_num_threads(num_threads)
    # Last, and twice: into huge pages, as loads have them. A virtual machine may have given back those that are free.
    seconds_of(files, lambda file: np.fromfile(file, np.uint8))
    read = seconds_of(files, lambda file: np.fromfile(file, np.uint8))
    before = anonymous_bytes()
    with watching_memory() as most:
        begin, begin_computing = time.perf_counter(), time.process_time()
        model = open_model(place, dtype="bfloat16", keeps="codes").build(exact=False)
        seconds, computing = time.perf_counter() - begin, time.process_time() - begin_computing
        peak = most() - before
    kept = anonymous_bytes() - before
    del model
    return {
        "bytes": num_bytes,
        "read_seconds": read,
        "copy_seconds": copied,
        "threads_copy_seconds": copied_by_all,
        "copy_processor_seconds": copying,
        "seconds": seconds,
        "processor_seconds": computing,
        "peak_bytes": peak,
        "kept_bytes": kept,
    }


def files_of(place: Path) -> tuple[list[Path], int]:
    """Those of a checkpoint's weights, and their bytes."""
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    return files, sum(file.stat().st_size for file in files)


def seconds_of(files: Sequence[Path], read: Callable[[Path], object]) -> float:
    """Of reading all of them, each to memory of its own."""
    begin = time.perf_counter()
    kept = [read(file) for file in files]
    seconds = time.perf_counter() - begin
    del kept
    return seconds


def copy_mapped(file: Path) -> Tensor:
    """The file's bytes, mapped into memory and copied into new memory by torch."""
    mapped = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    return torch.empty_like(mapped).copy_(mapped)


def run_in_process(act: str, place: Path, num_threads: int, rounds: int = 1) -> Any:
    """One of ACTS in a process of its own, with the threads of a server."""
    words = "--act", act, "--place", str(place), "--folder", str(place.parent), "--rounds", str(rounds)
    command = [sys.executable, "-m", "benchmarks.quantized_start", *words]
    variables = {**os.environ, **thread_variables(num_threads, os.environ)}
    answer = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


def measure(places: Mapping[str, Path], rounds: int, num_threads: int) -> dict[str, dict[str, float]]:
    """Of each format the fastest of so many turns, beside the baselines."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in places}
    for _ in range(rounds):
        for name, place in places.items():
            turns[name].append(run_in_process("load", place, num_threads))
    best = {}
    for name, loads in turns.items():
        best[name] = min(loads, key=lambda load: load["seconds"])
        for field in (field for field in best[name] if field.endswith("_seconds")):
            best[name][field] = min(load[field] for load in loads)
    for load in best.values():
        load["over_copy"] = load["seconds"] / min(load["copy_seconds"], load["threads_copy_seconds"])
        load["processor_over_copy"] = load["processor_seconds"] / load["copy_processor_seconds"]
        load["over_read"] = load["seconds"] / load["read_seconds"]
        load["over_bfloat16"] = load["seconds"] / best[PLAIN]["seconds"]
        load["peak_over_file"] = load["peak_bytes"] / load["bytes"]
        load["kept_over_file"] = load["kept_bytes"] / load["bytes"]
    return best


# -- starts from a disk ------------------------------------------------------------------------------------------------

Turn = dict[str, dict[str, float]]
"""What `timing` tells of a reading, a cold start and a warm one."""


def read_into_memory(files: Sequence[Path], num_bytes: int) -> None:
    """All the bytes of the files into one new buffer."""
    buffer, filled = memoryview(np.empty(num_bytes, np.uint8)), 0
    for file in files:
        descriptor, begin = os.open(file, os.O_RDONLY), filled
        while count := os.preadv(descriptor, [buffer[filled:]], filled - begin):
            filled += count
        os.close(descriptor)
    assert filled == num_bytes


def start_in_turns(place: Path, first: Path, rounds: int) -> list[Turn]:
    """A checkpoint's files read and loaded in turn, so many times. `first`: see `load_once`."""

    def load(path: Path = place) -> None:
        open_model(path, dtype="bfloat16", keeps="codes").build(exact=False)

    load(first)
    files, num_bytes = files_of(place)
    acts: dict[str, Callable[[], None]] = {"read": lambda: read_into_memory(files, num_bytes), "cold": load}
    turns = []
    for number in range(rounds):
        turn = {}
        # What comes next may be given the very memory that the one before has left, which is cheaper than other memory.
        for act in sorted(acts, reverse=number % 2 == 0):
            with timing(files, cold=True) as turn[act]:
                acts[act]()
        with timing(files, cold=False) as turn["warm"]:
            load()
        turns.append(turn)
    return turns


def memory_of_start(place: Path, first: Path) -> dict[str, float]:
    """The most that loading a checkpoint takes, looked at by a thread that would hold it up if it were timed."""
    open_model(first, dtype="bfloat16", keeps="codes").build(exact=False)
    before = anonymous_bytes()
    with watching_memory() as most:
        model = open_model(place, dtype="bfloat16", keeps="codes").build(exact=False)
        peak = most() - before
    del model
    return {"peak_bytes": peak}


@contextmanager
def timing(files: Sequence[Path], cold: bool) -> Iterator[dict[str, float]]:
    """Gives what will be known at the end: by the wall, and by the processor in this process and for it. `cold`: the
    system is to have forgotten the files. Raises RuntimeError where it had not."""
    num_bytes = sum(file.stat().st_size for file in files)
    for file in files if cold else ():
        forget(file)
    timed: dict[str, float] = {}
    from_disk, used = read_from_disk(), resource.getrusage(resource.RUSAGE_SELF)
    waited, begin = seconds_without_core(), time.perf_counter()
    yield timed
    wall, now = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    seconds = wall - (seconds_without_core() - waited)
    share = (read_from_disk() - from_disk) / num_bytes
    if cold and share < _LEAST_FROM_DISK:
        raise RuntimeError(f"of {files[0]} only {share:.0%} came from a disk: give another --folder")
    user, system = now.ru_utime - used.ru_utime, now.ru_stime - used.ru_stime
    timed |= {"bytes": num_bytes, "seconds": seconds, "wall_seconds": wall}
    timed |= {"user_seconds": user, "system_seconds": system}


def forget(file: Path) -> None:
    """Has the system give up the pages of a file that it has in its memory."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def seconds_without_core() -> float:
    """In which this thread could have run, so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def read_from_disk() -> int:
    """Bytes that this process has had fetched so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


ACTS: Mapping[str, Callable[[Path, Path, int], Any]] = MappingProxyType(
    {
        "load": lambda place, first, _: load_once(place, first),
        "turns": start_in_turns,
        "memory": lambda place, first, _: memory_of_start(place, first),
    }
)
"""What a process of its own does with a checkpoint, given a small one and a number of rounds as well."""


def measure_reading(places: Mapping[str, Path], rounds: int, num_threads: int) -> dict[str, dict[str, float]]:
    """Of each format what reading and loading take."""
    found = {}
    for name, place in places.items():
        turns = run_in_process("turns", place, num_threads, rounds)
        found[name] = summary_of(turns, run_in_process("memory", place, num_threads)["peak_bytes"])
    return found


def summary_of(turns: Sequence[Turn], peak_bytes: float) -> dict[str, float]:
    """Medians of seconds and of ratios."""
    num_bytes = turns[0]["read"]["bytes"]
    summary: dict[str, float] = {"bytes": num_bytes, "peak_over_file": peak_bytes / num_bytes}
    for act in turns[0]:
        for clock in ("seconds", "wall_seconds", "user_seconds", "system_seconds"):
            summary[f"{act} {clock}"] = statistics.median(turn[act][clock] for turn in turns)
    seconds = [{act: timed["seconds"] for act, timed in turn.items()} for turn in turns]
    summary["cold_over_read"] = statistics.median(each["cold"] / each["read"] for each in seconds)
    summary["cold_over_bound"] = statistics.median(each["cold"] / max(each["read"], each["warm"]) for each in seconds)
    summary["disk_rate"] = num_bytes / summary["read seconds"]
    summary["pace"] = num_bytes / summary["warm seconds"]
    return summary


def reading_table(formats: Mapping[str, Mapping[str, float]]) -> Table:
    disk, pace = "disk, GB/s", "pace, GB/s"
    seconds, ratios = ("read, s", "cold, s", "warm, s"), ("/ read", "/ bound")
    columns = "file, MB", disk, pace, *seconds, *ratios, "processor, s: user", "system", "most memory / file"
    table = Table("", *columns, title="Start from a disk")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, load in formats.items():
        rates = (f"{load[rate] / 1e9:.2f}" for rate in ("disk_rate", "pace"))
        times = (f"{load[f'{act} seconds']:.3f}" for act in ("read", "cold", "warm"))
        over = (f"{load[ratio]:.2f}" for ratio in ("cold_over_read", "cold_over_bound"))
        processor = (f"{load[f'cold {clock}_seconds']:.3f}" for clock in ("user", "system"))
        cells = f"{load['bytes'] / 1e6:,.0f}", *rates, *times, *over, *processor, f"{load['peak_over_file']:.2f}"
        table.add_row(name, *cells)
    return table


def growth_of(narrow: Mapping[str, float], wide: Mapping[str, float]) -> dict[str, float]:
    """What is constant of two loads of a format, in seconds, and how many bytes a second the rest is."""
    num_bytes, found = wide["bytes"] - narrow["bytes"], {}
    for clock in ("seconds", "processor_seconds"):
        slope = max(wide[clock] - narrow[clock], 1e-9) / num_bytes
        found |= {f"constant_{clock}": wide[clock] - slope * wide["bytes"], f"{clock}_rate": 1 / slope}
    return found


def growth_table(formats: Mapping[str, Mapping[str, float]]) -> Table:
    columns = "constant, s", "the rest, GB/s", "constant, processor s", "the rest, GB/s of one"
    table = Table("", *columns, title="What grows with the bytes")
    for name, load in formats.items():
        cells = (
            cell
            for clock in ("seconds", "processor_seconds")
            for cell in (f"{load[f'constant_{clock}']:.2f}", f"{load[f'{clock}_rate'] / 1e9:.2f}")
        )
        table.add_row(name, *cells)
    return table


def table_of(formats: Mapping[str, Mapping[str, float]]) -> Table:
    copies, over = ("read, s", "copy, s", "by threads"), ("/ copy", "/ read", "/ bfloat16")
    columns = "file, MB", *copies, "load, s", *over, "processor, s", "/ copy's", "most memory / file", "kept"
    table = Table("", *columns, title="Start from quantized checkpoints")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, load in formats.items():
        fields = "read_seconds", "copy_seconds", "threads_copy_seconds", "seconds", "over_copy", "over_read"
        seconds = (f"{load[field]:.2f}" for field in fields)
        ratios = (f"{load[field]:.2f}" for field in ("over_bfloat16", "processor_seconds", "processor_over_copy"))
        memory = (f"{load[field]:.2f}" for field in ("peak_over_file", "kept_over_file"))
        table.add_row(name, f"{load['bytes'] / 1e6:,.0f}", *seconds, *ratios, *memory)
    return table


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = (*FORMATS, *GGUF)
    parser.add_argument("--formats", nargs="+", choices=known, default=known)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--growth", action="store_true", help="what is constant and what grows with the bytes")
    parser.add_argument("--reading", action="store_true", help="starts from a disk, beside plain reading")
    parser.add_argument("--folder", type=Path, help="for checkpoints, and looked at first; 4 GB, 5 with --growth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--act", choices=ACTS, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    check_positive(parser, arguments, "rounds", "cpu_threads")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.act is not None:
        print(json.dumps(ACTS[arguments.act](arguments.place, arguments.folder / TINY, arguments.rounds)))
        return
    with tempfile.TemporaryDirectory(prefix="cairn-start-") as scratch:
        folder = arguments.folder or Path(scratch)
        places = write_all(folder, arguments.formats, arguments.seed)
        if arguments.reading:
            formats = measure_reading(places, arguments.rounds, arguments.cpu_threads)
        else:
            formats = measure(places, arguments.rounds, arguments.cpu_threads)
        if arguments.growth:
            places = write_all(folder / NARROW, arguments.formats, arguments.seed, NARROW)
            narrow = measure(places, arguments.rounds, arguments.cpu_threads)
            formats = {name: load | growth_of(narrow[name], load) for name, load in formats.items()}
    make_console().print((reading_table if arguments.reading else table_of)(formats))
    if arguments.growth:
        make_console().print(growth_table(formats))
    if arguments.json:
        shown = {name: getattr(arguments, name) for name in ("rounds", "cpu_threads", "seed")}
        arguments.json.write_text(as_json({**circumstances(), **shown, "formats": formats}))


if __name__ == "__main__":
    main()
