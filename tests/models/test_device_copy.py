"""Weights that are copied to a device as they are read: the numbers of the plain loader, through two buffers."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cairn.errors import EngineDead, ModelError
from cairn.models.random_weights.make_model import MADE_FAMILIES
from cairn.models.registry import open_model
from cairn.models.sharding import TensorShard
from cairn.models.weights import device_copy
from cairn.models.weights.device_copy import CudaCopyStream, DeviceCopy
from cairn.models.weights.load_progress import load_progress
from cairn.models.weights.loader import WeightReader
from cairn.models.weights.tensor_headers import read_offsets
from cairn.models.weights.tensor_source import PartRecorder
from cairn.types import ManualClock
from doubles.copy_stream import LateCopyStream
from doubles.thread_ranks import thread_ranks
from models.fp8_checkpoints import write_modelopt_fp8, write_qwen_fp8
from models.test_served_int8 import parts_of
from tiers import first_of

INDEX = "model.safetensors.index.json"


def same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def check_model(folder: Path, dtype: Any, num_ranks: int, caplog: pytest.LogCaptureFixture) -> list[LateCopyStream]:
    """Every tensor of every rank is that of the plain loader. Returns each rank's stream."""
    streams = []
    for communicator in thread_ranks(num_ranks):
        stream, opened = LateCopyStream(), open_model(folder, dtype)
        ranks = {"exact": False, "backend": "reference", "communicator": communicator}
        plain, copied = opened.build(**ranks), opened.build(**ranks, stream=stream)
        expected, found = parts_of(plain, Tensor), parts_of(copied, Tensor)
        assert len(found) == len(expected) > 20
        assert all(same_bytes(*each) for each in zip(found, expected, strict=True))
        assert [len(buffer) for buffer in stream.buffers] == [stream.buffer_bytes] * 2
        streams.append(stream)
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "not all was foreseen"
    return streams


@pytest.mark.parametrize(
    ("family", "dtype", "num_ranks"),
    first_of(
        [
            *((family, "bfloat16", 1) for family in ("gpt_oss", "lfm2", "nemotron_h", "qwen3_5_vl")),
            *((family, "float32", 2) for family in ("qwen3_5_moe", "olmo_hybrid")),
        ],
        sorted(MADE_FAMILIES),
        ("float32", "bfloat16"),
        (1, 2),
    ),
)
def test_every_family_has_the_plain_loaders_weights(family, dtype, num_ranks, made_model, caplog):
    (stream, *_) = check_model(made_model(family), dtype, num_ranks, caplog)
    # As many as it takes to fill the buffers, and one for each tensor that is drawn: what was read ahead has come.
    assert stream.num_waits > 10


@pytest.mark.parametrize(
    ("write", "num_ranks"),
    first_of([(write_qwen_fp8, 1), (write_modelopt_fp8, 2)], (write_qwen_fp8, write_modelopt_fp8), (1, 2)),
)
def test_fp8_checkpoints_too(write, num_ranks, made_model, tmp_path, caplog):
    plain = made_model("qwen3_5_moe" if write is write_qwen_fp8 else "nemotron_h")
    write(plain, tmp_path / "fp8", tmp_path / "same")
    check_model(tmp_path / "fp8", "bfloat16", num_ranks, caplog)


def test_shards_in_another_order_than_the_models(made_model, tmp_path, caplog):
    """The last tensors in the first file, and float16 among them: what comes early is kept until it is drawn."""
    plain = made_model("nemotron_h")
    tensors = {name: tensor for path in sorted(plain.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    shutil.copytree(plain, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    names = [*reversed(tensors)]
    weight_map = {}
    for number, begin in enumerate(range(0, len(names), 40)):
        file = f"model-{number}.safetensors"
        weight_map |= dict.fromkeys(names[begin : begin + 40], file)
        part = {name: tensors[name].half() if number == 1 else tensors[name] for name in names[begin : begin + 40]}
        save_file(part, tmp_path / "model" / file)
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    check_model(tmp_path / "model", "bfloat16", 2, caplog)


# -- parts -------------------------------------------------------------------------------------------------------------

SHAPES = {"rows": (300, 70), "stack": (5, 60, 33), "wide": (4, 9000), "bias": (7,), "one": (), "none": (0, 3)}
PARTS = [
    ("rows", TensorShard(0, ((3, 100), (200, 300)))),
    ("rows", TensorShard(1, ((10, 45),))),
    ("stack", TensorShard(1, ((0, 20), (30, 50)))),
    ("stack", TensorShard(2, ((32, 33),))),
    ("stack", TensorShard(0, ((4, 5),))),
    ("wide", TensorShard(1, ((100, 8900),))),
    ("wide", TensorShard(1, ((8999, 9000),))),
    ("bias", TensorShard(0, ((2, 2), (3, 6)))),
    *((name, None) for name in SHAPES),
]
"""Byte ranges of a row, below and above what is read range by range, and rows of more and less than a buffer."""


@pytest.fixture(scope="module")
def parts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, generator = tmp_path_factory.mktemp("parts"), torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    save_file(tensors | {"half": tensors["rows"].half()}, folder / "model.safetensors")
    return folder


def copies(
    folder: Path, module: ModuleType, stream: Any, dtype: torch.dtype, parts: Any, twice: bool = False
) -> list[Tensor]:
    """`parts` as `module` copies them, read in an order of their own; half of what was announced, if `twice`."""
    with WeightReader(folder, dtype) as reader:
        recorder = PartRecorder(reader.headers)
        with reader.read_from(recorder):
            for name, shard in parts * (1 + twice):
                reader.load(name, SHAPES[name], shard)
        with (
            module.DeviceCopy(folder, reader.headers, recorder.parts, stream) as copy,
            reader.read_from(copy),
        ):
            found = [reader.load(name, SHAPES[name], shard) for name, shard in parts * (1 + twice)]
            assert copy.num_left == copy.num_unforeseen == 0
        return found


def plain(folder: Path, dtype: torch.dtype, parts: Any) -> list[Tensor]:
    with WeightReader(folder, dtype) as reader:
        return [reader.load(name, SHAPES[name], shard) for name, shard in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffer_bytes", [1 << 12, 100_000, 1 << 20])
def test_any_part_through_buffers_of_any_size(parts_folder, dtype, buffer_bytes):
    expected = plain(parts_folder, dtype, PARTS) * 2
    found = copies(parts_folder, device_copy, LateCopyStream(buffer_bytes), dtype, PARTS, twice=True)
    assert all(same_bytes(*each) for each in zip(found, expected, strict=True))


def test_the_host_waits_only_where_a_buffer_is_full(parts_folder):
    stream = LateCopyStream(1 << 16)
    with WeightReader(parts_folder, torch.float32) as reader:
        recorder = PartRecorder(reader.headers)
        with reader.read_from(recorder):
            reader.load("wide", SHAPES["wide"])
            reader.load("rows", SHAPES["rows"])
        stream.join = lambda: None
        read: list[int] = []
        with DeviceCopy(parts_folder, reader.headers, recorder.parts, stream, read.append) as copy:
            copy.read("rows", (slice(0, 300), slice(0, 70)), torch.float32)
            assert stream.num_waits == 0 and sum(read) == 300 * 70 * 4
            copy.read("wide", (slice(0, 4), slice(0, 9000)), torch.float32)
            # 228,000 bytes fill 64 KiB three times, and the third is where the first one is written again
            assert stream.num_waits == 2 and sum(read) == (300 * 70 + 4 * 9000) * 4


def test_what_nobody_has_announced_is_read_all_the_same(parts_folder):
    with WeightReader(parts_folder, torch.float32) as reader:
        expected = reader.load("rows", SHAPES["rows"])
        with DeviceCopy(parts_folder, reader.headers, (), LateCopyStream()) as copy, reader.read_from(copy):
            assert same_bytes(reader.load("rows", SHAPES["rows"]), expected) and copy.num_unforeseen == 1
        assert reader.load("rows", SHAPES["rows"]).device.type == "cpu"  # from the files again


def test_nothing_is_given_back_before_all_copies_are_made(parts_folder):
    """What was read ahead is left behind when building a model fails."""
    stream = LateCopyStream()
    stream.join = lambda: None
    with WeightReader(parts_folder, torch.float32) as reader:
        recorder = PartRecorder(reader.headers)
        with reader.read_from(recorder):
            plain_order = [reader.load(name, SHAPES[name]) for name in ("wide", "rows")]
        with (
            pytest.raises(KeyError),
            DeviceCopy(parts_folder, reader.headers, recorder.parts, stream) as copy,
            reader.read_from(copy),
        ):
            reader.load("wide", SHAPES["wide"])
            assert len(plain_order) == 2 and stream.num_pending > 0
            raise KeyError
    assert stream.num_pending == 0


class Device:
    """What `torch.cuda` has of streams, which writes down who waits for whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.inside = "compute"
        self.current = self.make("compute")
        cuda = SimpleNamespace(
            Stream=lambda device: self.make("copies"), current_stream=lambda device: self.current, stream=self.enter
        )
        monkeypatch.setattr(device_copy.torch, "cuda", cuda)

    def make(self, name: str) -> Any:
        def wait_stream(other: Any) -> None:
            self.calls.append((name, "waits for", other.name))

        return SimpleNamespace(name=name, wait_stream=wait_stream, record_event=lambda: Late(3))

    @contextmanager
    def enter(self, stream: Any) -> Any:
        self.inside = stream.name
        yield
        self.inside = "compute"

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        self.calls.append((self.inside, "copies", "later" if non_blocking else "now"))


class Late:
    """An event that is complete when it has been asked so often."""

    def __init__(self, times: int) -> None:
        self.left = times

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_gpus_two_streams_wait_for_each_other(monkeypatch):
    """Memory may be written to when those who had it before are done, and read when it has been written."""
    device = Device(monkeypatch)
    stream = CudaCopyStream(torch.device("cpu"))
    stream.empty((3,), torch.float32)
    stream.copy(device, torch.zeros(3))
    stream.join()
    assert device.calls == [
        ("copies", "waits for", "compute"),
        ("copies", "copies", "later"),
        ("compute", "waits for", "copies"),
    ]
    event = stream.record()
    stream.wait(event)
    assert event.left < 0
    monkeypatch.setattr(device_copy, "_COPY_SECONDS", 0.0)
    with pytest.raises(EngineDead, match="has not copied"):
        stream.wait(Late(10**9))


# -- what goes wrong with files ----------------------------------------------------------------------------------------


def damaged(parts_folder: Path, folder: Path, change: Callable[[Path], None]) -> None:
    """Read a copy of the parts, which is changed when its headers have been read."""
    shutil.copytree(parts_folder, folder)
    with WeightReader(folder, torch.float32) as reader:
        recorder = PartRecorder(reader.headers)
        with reader.read_from(recorder):
            for name, shape in SHAPES.items():
                reader.load(name, shape)
        with DeviceCopy(folder, reader.headers, recorder.parts, LateCopyStream()) as copy, reader.read_from(copy):
            change(folder / "model.safetensors")
            reader.load("rows", SHAPES["rows"])


def test_a_file_that_is_cut_short_or_gone_is_named(parts_folder, tmp_path):
    with pytest.raises(ModelError, match=r"model\.safetensors: \w+ cannot be read: the file was cut short"):
        damaged(parts_folder, tmp_path / "short", lambda path: os.truncate(path, 1000))
    with pytest.raises(ModelError, match=r"model\.safetensors: \w+ cannot be read: .*No such file"):
        damaged(parts_folder, tmp_path / "gone", lambda path: path.unlink())
    with WeightReader(parts_folder, torch.float32) as reader:
        headers = dict(reader.headers, rows=replace(reader.headers["rows"], shape=(300, 71)))
        rows = (slice(0, 300), slice(0, 71))
        with (
            DeviceCopy(parts_folder, headers, (), LateCopyStream()) as copy,
            pytest.raises(ModelError, match="rows has changed since its header was read"),
        ):
            copy.read("rows", rows, torch.float32)


def test_too_little_memory_is_not_taken_for_a_broken_file(parts_folder):
    stream = LateCopyStream()

    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to")

    with WeightReader(parts_folder, torch.float32) as reader:
        copy = DeviceCopy(parts_folder, reader.headers, (), stream)
        stream.empty = full
        with pytest.raises(torch.OutOfMemoryError), copy, reader.read_from(copy):
            reader.load("rows", SHAPES["rows"])


# -- progress ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("total", [1000 << 20, None])
def test_a_bar_on_a_terminal_alone_and_a_line_always(monkeypatch, caplog, total):
    caplog.set_level("INFO")
    for shows, file in ((True, Terminal()), (False, io.StringIO())):
        monkeypatch.setattr(sys, "stderr", file)
        clock = ManualClock()
        with load_progress("weights", total, "cuda:0", clock=clock) as advance:
            clock.advance(4.0)
            for _ in range(10):
                advance(100 << 20)
        assert ("weights to cuda:0" in file.getvalue()) == shows
        assert ("1000.0" in file.getvalue() or "MiB" in file.getvalue()) == shows
    assert [record.message for record in caplog.records] == [
        "weights: 1048576000 bytes read to cuda:0 in 4.0 s (0.26 GB/s)"
    ] * 2
    monkeypatch.setattr(sys, "stderr", Terminal())
    with load_progress("weights", total, "cuda:0", show=False):
        pass
    assert sys.stderr.getvalue() == ""


def test_all_bytes_are_counted_on_host_and_device(made_model, caplog):
    """Of a model on one rank: what its files have."""
    caplog.set_level("INFO")
    folder = made_model("qwen3_5")
    stored = sum(map(tensor_bytes, folder.glob("*.safetensors")))
    for stream in (None, LateCopyStream()):
        open_model(folder).build(exact=False, backend="reference", stream=stream)
    told = [record.message.split(" in ")[0] for record in caplog.records if "bytes read" in record.message]
    assert told == [f"weights: {stored} bytes read to the host", f"weights: {stored} bytes read to cpu"]


def tensor_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return sum(length for _, length in read_offsets(file).values())


# -- mutants -----------------------------------------------------------------------------------------------------------

MUTANTS = [
    ("self._stream.wait(self._copied[self._number])", "pass"),
    ("self._copied[self._number] = self._stream.record()", "pass"),
    ("self._stream.join()", "pass"),
    ("offset + runs.first + run", "offset + run"),
    ("divmod(done + filled, runs.num_bytes)", "divmod(filled, runs.num_bytes)"),
    ("landed[:, before : before + width]", "landed[:, :width]"),
    ("offset + row * runs.stride", "offset"),
    ("flat[begin:end]", "flat[:end - begin]"),
    ("if runs.dtype == target.dtype else", "if True else"),
]


def mutant(text: str, replacement: str) -> ModuleType:
    path = Path(device_copy.__file__)
    source = path.read_text()
    assert source.count(text) == 1, f"{text} stands there {source.count(text)} times"
    spec = spec_from_file_location("cairn.models.weights.device_copy_mutant", path)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[module.__name__] = module  # its dataclasses look for it
    exec(compile(source.replace(text, replacement), str(path), "exec"), module.__dict__)
    return module


def is_right(folder: Path, module: ModuleType) -> bool:
    for dtype in (torch.float32, torch.bfloat16):
        stream = LateCopyStream(1 << 12)
        try:
            found = copies(folder, module, stream, dtype, PARTS)
        except AssertionError:
            return False
        if not all(map(same_bytes, found, plain(folder, dtype, PARTS))):
            return False
    return True


@pytest.mark.parametrize(("text", "replacement"), MUTANTS)
def test_a_copy_that_goes_wrong_is_found(text, replacement, parts_folder):
    assert is_right(parts_folder, device_copy)
    assert not is_right(parts_folder, mutant(text, replacement))
