"""Files are fetched in the order in which they will be read, no further than the window, whatever happens to them."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cairn.models.registry import open_model
from cairn.models.weights import loader, read_ahead
from cairn.models.weights.loader import WeightReader
from cairn.models.weights.read_ahead import FileRange, ReadAhead
from cairn.models.weights.tensor_headers import first_file
from cairn.models.weights.tensor_source import stored_bytes
from models.gguf_files import write_gguf

PIECE = 1000
WINDOW = 8 * PIECE

Fetched = list[tuple[int, int]]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """Begin and bytes of all that is fetched."""
    seen: Fetched = []

    def sendfile(to: int, descriptor: int, offset: int, count: int) -> int:
        seen.append((offset, count))
        return count

    monkeypatch.setattr(read_ahead.os, "sendfile", sendfile)
    monkeypatch.setattr(read_ahead, "_PIECE", PIECE)
    monkeypatch.setattr(read_ahead, "_WINDOW", WINDOW)
    monkeypatch.setattr(read_ahead, "_BATCH", 1)
    return seen


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(100 * PIECE))
    return path


@pytest.fixture
def ahead() -> Iterator[Callable[..., ReadAhead]]:
    made: list[ReadAhead] = []

    def make(places: Any, *files: Path) -> ReadAhead:
        made.append(ReadAhead())
        made[-1].begin(places, files)
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def tensors(file: Path, count: int, num_bytes: int) -> list[tuple[str, FileRange]]:
    return [(str(number), FileRange(file, number * num_bytes, num_bytes)) for number in range(count)]


def test_it_stays_within_the_window_and_goes_on_as_tensors_are_read(file: Path, fetched: Fetched, ahead: Any) -> None:
    reader = ahead(tensors(file, 20, 2500))
    wait_until(lambda: sum(size for _, size in fetched) >= WINDOW)
    assert fetched[:4] == [(0, 1000), (1000, 1000), (2000, 500), (2500, 1000)]
    assert sum(size for _, size in fetched) < WINDOW + PIECE
    reader.reached("2")
    wait_until(lambda: sum(size for _, size in fetched) >= 3 * 2500 + WINDOW)
    assert sum(size for _, size in fetched) < 3 * 2500 + WINDOW + PIECE


def test_a_tensor_larger_than_the_window_is_fetched_to_its_end_once_it_is_read(
    file: Path, fetched: Fetched, ahead: Any
) -> None:
    reader = ahead(tensors(file, 2, 5 * WINDOW))
    wait_until(lambda: bool(fetched))
    reader.reached("0")
    wait_until(lambda: sum(size for _, size in fetched) >= 6 * WINDOW)


def test_what_is_asked_for_before_its_turn_is_fetched_all_the_same(file: Path, fetched: Fetched, ahead: Any) -> None:
    """Whoever asks may wait until it is there."""
    gate = threading.Event()

    def places() -> Iterator[tuple[str, FileRange]]:
        gate.wait()
        yield from tensors(file, 4, PIECE)

    reader = ahead(places())
    for name in "0123":
        reader.reached(name)
    gate.set()
    wait_until(lambda: len(fetched) == 4)


def test_batches_grow(file: Path, fetched: Fetched, ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_FIRST_BATCH", PIECE)
    monkeypatch.setattr(read_ahead, "_BATCH", 4 * PIECE)
    monkeypatch.setattr(read_ahead, "_WINDOW", 100 * PIECE)
    places = dict(tensors(file, 20, PIECE // 2))
    ahead([(str(number), places[str(number)]) for number in reversed(range(20))], file)
    wait_until(lambda: sum(size for _, size in fetched) == 10 * PIECE)
    # The last two, the last four before them, eight, and what is left.
    assert fetched[0] == (9 * PIECE, PIECE)
    assert [begin // PIECE for begin, _ in fetched] == [9, 7, 8, 3, 4, 5, 6, 0, 1, 2]


def test_batches_shrink_to_the_end(file: Path, fetched: Fetched, ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fetched last is all that is still to be packed when the disk is done."""
    file.write_bytes(bytes(16 * PIECE))
    monkeypatch.setattr(read_ahead, "_FIRST_BATCH", PIECE)
    monkeypatch.setattr(read_ahead, "_BATCH", 8 * PIECE)
    monkeypatch.setattr(read_ahead, "_WINDOW", 100 * PIECE)
    places = dict(tensors(file, 16, PIECE))
    ahead([(str(number), places[str(number)]) for number in reversed(range(16))], file)
    wait_until(lambda: len(fetched) == 16)
    assert [begin // PIECE for begin, _ in fetched] == [15, 13, 14, 9, 10, 11, 12, 4, 5, 6, 7, 8, 2, 3, 1, 0]


def test_a_file_is_fetched_from_its_beginning_on_until_it_is_known_what_is_wanted(
    file: Path, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_BLIND_PIECE", PIECE)
    monkeypatch.setattr(read_ahead, "_MOST_BLIND", 4 * PIECE)
    with closing(ReadAhead()) as reader:
        reader.begin_blindly(file)
        wait_until(lambda: len(fetched) == 4)
        assert fetched == [(number * PIECE, PIECE) for number in range(4)]
        # What has been fetched is not once more.
        places = dict(tensors(file, 8, PIECE))
        reader.begin([(name, places[name]) for name in "73261"], [file])
        wait_until(lambda: len(fetched) == 6)
        assert [begin // PIECE for begin, _ in fetched[4:]] == [7, 6]


def test_nobody_waits_for_an_order_that_does_not_come(file: Path, fetched: Fetched) -> None:
    with closing(ReadAhead()) as reader:
        reader.begin_blindly(file)
        wait_until(lambda: bool(fetched))


def test_a_batch_is_in_the_order_of_its_file(
    file: Path, fetched: Fetched, ahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_FIRST_BATCH", 3 * PIECE)
    monkeypatch.setattr(read_ahead, "_BATCH", 3 * PIECE)
    places = dict(tensors(file, 5, PIECE))
    ahead([(name, places[name]) for name in "41302"])
    wait_until(lambda: len(fetched) == 5)
    assert [begin // PIECE for begin, _ in fetched] == [1, 3, 4, 0, 2]


def test_neighbours_are_fetched_together(
    file: Path, fetched: Fetched, ahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_FIRST_BATCH", 5 * PIECE)
    monkeypatch.setattr(read_ahead, "_BATCH", 5 * PIECE)
    places = dict(tensors(file, 20, PIECE // 4))
    ahead([(name, places[name]) for name in map(str, (0, 1, 3, 2, 4, 10, 11))])
    wait_until(lambda: len(fetched) == 3)
    assert fetched == [(0, PIECE), (PIECE, PIECE // 4), (10 * PIECE // 4, PIECE // 2)]


def test_the_system_has_what_was_fetched(tmp_path: Path, ahead: Any) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 << 20))
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if in_memory(path):
            pytest.skip("a folder in memory, or a system that does not forget")
        ahead([("a", FileRange(path, 0, 4 << 20))])
        wait_until(lambda: in_memory(path))


def in_memory(path: Path) -> bool:
    """Whether the system has the last page of a file."""
    with path.open("rb") as opened:
        try:
            return os.preadv(opened.fileno(), [bytearray(1)], path.stat().st_size - 1, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def test_closing_does_not_wait_for_a_window_that_is_full(file: Path, fetched: Fetched, ahead: Any) -> None:
    reader = ahead(tensors(file, 20, 2500))
    wait_until(lambda: sum(size for _, size in fetched) >= WINDOW)
    before = len(fetched)
    reader.close()
    assert len(fetched) == before


def test_a_file_that_is_not_there_is_no_matter_of_this_one(tmp_path: Path, ahead: Any) -> None:
    reader = ahead([("a", FileRange(tmp_path / "gone", 0, 10))])
    reader.reached("a")
    reader.close()


@pytest.mark.parametrize("form", ["plain", "gguf"])
def test_all_weights_of_a_model_are_fetched_where_its_files_have_them(
    form: str, made_model: Any, tmp_path: Path
) -> None:
    place = made_model("qwen3_5")
    if form == "gguf":
        place = write_gguf(place, tmp_path / "model.gguf", "Q8_0")
    model = open_model(place, keeps="codes")
    with WeightReader(place, model.dtype, model.family.float32_tensors, model.quantization) as reader:
        order = list(reader._reading_order(model.tensors(reader.names)))
        ranges = list(reader._files._places(order))
        sizes: dict[str, int] = {}
        for name, each in ranges:
            assert each.begin + each.num_bytes <= each.file.stat().st_size
            sizes[name] = sizes.get(name, 0) + each.num_bytes
        assert sizes == {name: stored_bytes(reader.headers[name]) for name in order}
    assert len(sizes) == len(reader.headers)


def test_files_that_take_turns_are_open_one_at_a_time(
    tmp_path: Path, fetched: Fetched, ahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for path in files:
        path.write_bytes(bytes(10))
    descriptors = set[int]()
    sendfile = read_ahead.os.sendfile

    def noted(to: int, descriptor: int, offset: int, count: int) -> int:
        descriptors.add(descriptor)
        return int(sendfile(to, descriptor, offset, count))

    monkeypatch.setattr(read_ahead.os, "sendfile", noted)
    ahead([(str(number), FileRange(files[number % 2], number % 10, 1)) for number in range(40)])
    wait_until(lambda: len(fetched) == 40)
    # What was closed is the next one's number again, unless another thread has taken it meanwhile.
    assert len(descriptors) < 10


@pytest.mark.parametrize("form", ["plain", "gguf"])
def test_the_disk_has_work_before_headers_are_read(
    form: str, made_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made_model("qwen3_5")
    if form == "gguf":
        place = write_gguf(place, tmp_path / "model.gguf", "Q8_0")
    done: list[str] = []
    begin_blindly, read_headers = ReadAhead.begin_blindly, loader.read_headers

    def noted_begin(ahead: ReadAhead, path: Path) -> None:
        done.append(path.name)
        begin_blindly(ahead, path)

    def noted_read(folder: Path) -> Any:
        done.append("headers")
        return read_headers(folder)

    monkeypatch.setattr(ReadAhead, "begin_blindly", noted_begin)
    monkeypatch.setattr(loader, "read_headers", noted_read)
    open_model(place, keeps="codes").build(exact=False)
    first = first_file(place)
    assert first is not None
    assert done[:2] == [first.name, "headers"]


def test_first_file_is_the_first_shard(tmp_path: Path) -> None:
    assert first_file(tmp_path) is None
    for number in (11, 1, 2):
        (tmp_path / f"model-{number:05}-of-00011.safetensors").touch()
    assert first_file(tmp_path) == tmp_path / "model-00001-of-00011.safetensors"
    (tmp_path / "model.safetensors").touch()
    assert first_file(tmp_path) == tmp_path / "model.safetensors"
