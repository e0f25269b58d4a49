"""Files are fetched in the order in which they will be read, no further than the window, whatever happens to them."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cairn.models.registry import open_model
from cairn.models.weights import loader, read_ahead
from cairn.models.weights.loader import WeightReader
from cairn.models.weights.read_ahead import FileRange, Places, ReadAhead, ReadingOrder
from cairn.models.weights.tensor_headers import first_file, read_headers
from cairn.models.weights.tensor_source import MappedFiles, stored_bytes
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

    def make(places: Places, *files: Path, small: Sequence[str] = ()) -> ReadAhead:
        made.append(ReadAhead())
        made[-1].begin(order_of(places, *files, small=small))
        return made[-1]

    yield make
    for each in made:
        each.close()


def order_of(places: Places, *files: Path, small: Sequence[str] = ()) -> ReadingOrder:
    def locate(names: Iterable[str]) -> Places:
        wanted = set(names)
        return [each for each in places if each[0] in wanted]

    return ReadingOrder([name for name, _ in places], locate, files, small)


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

    def locate(names: Iterable[str]) -> Iterator[tuple[str, FileRange]]:
        if names:
            gate.wait()
            yield from tensors(file, 4, PIECE)

    with closing(ReadAhead()) as reader:
        reader.begin(ReadingOrder("0123", locate, []))
        for name in "0123":
            reader.reached(name)
        gate.set()
        wait_until(lambda: len(fetched) == 4)


def waiter(reader: ReadAhead, *names: str) -> threading.Thread:
    thread = threading.Thread(target=reader.wait_for, args=(names,), daemon=True)
    thread.start()
    return thread


def test_who_waits_for_tensors_has_them_fetched_beyond_the_window(file: Path, fetched: Fetched, ahead: Any) -> None:
    reader = ahead(tensors(file, 40, 2500))
    wait_until(lambda: sum(size for _, size in fetched) >= WINDOW)
    waiting = waiter(reader, "0", "30")
    waiting.join(30)
    assert not waiting.is_alive()
    assert sum(size for _, size in fetched) >= 31 * 2500


def test_nobody_waits_for_what_is_not_fetched(file: Path, tmp_path: Path, fetched: Fetched, ahead: Any) -> None:
    """Tensors that were not said to be wanted, of a file that is gone, and when nothing is fetched any more."""
    ReadAhead().wait_for(("a",))
    reader = ahead(tensors(file, 40, 2500))
    reader.wait_for(("other", "1"))
    ahead([("a", FileRange(tmp_path / "gone", 0, 10))]).wait_for(("a",))
    reader.close()
    reader.wait_for(("39",))


def test_what_waits_for_what_was_reached_is_done_once_that_is_fetched(
    file: Path, monkeypatch: pytest.MonkeyPatch, fetched: Fetched, ahead: Any
) -> None:
    gate, sendfile = threading.Semaphore(0), read_ahead.os.sendfile

    def one_by_one(*given: int) -> int:
        assert gate.acquire(timeout=30)
        return int(sendfile(*given))

    monkeypatch.setattr(read_ahead.os, "sendfile", one_by_one)
    reader = ahead(tensors(file, 4, PIECE))
    done = list[str]()
    reader.reached("0"), reader.reached("1")
    reader.when_there(lambda: done.append("both"))
    reader.when_there(lambda: done.append("nothing more"))
    gate.release()
    wait_until(lambda: len(fetched) == 1)
    assert not done
    gate.release()
    wait_until(lambda: len(done) == 2)
    assert done == ["both", "nothing more"] and len(fetched) == 2
    reader.reached("3")
    reader.when_there(lambda: done.append("last"))
    reader.reached("not wanted")
    reader.when_there(lambda: done.append("not wanted"))
    gate.release(2)
    wait_until(lambda: len(done) == 4)
    assert done[2:] == ["last", "not wanted"]
    reader.close()
    reader.reached("2")
    reader.when_there(lambda: done.append("closed"))
    assert done[4:] == ["closed"]


@pytest.mark.parametrize(("apart", "order"), [(2, [1, 10, 11, 12]), (30, [10, 11, 12, 1])])
def test_small_tensors_that_lie_together_come_first(
    apart: int, order: list[int], file: Path, fetched: Fetched, ahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of which each would be fetched alone do not."""
    monkeypatch.setattr(read_ahead, "_FEW", 1)
    monkeypatch.setattr(read_ahead, "_NEAR", 10 * PIECE)
    places = [(str(number), FileRange(file, number * PIECE, PIECE)) for number in (10, 11, 12, 1, 1 + apart)]
    reader = ahead(places, small=("1", str(1 + apart)))
    reader.reached("12"), reader.wait_for((str(1 + apart),))
    begins = [begin // PIECE for begin, _ in fetched]
    assert [number for number in dict.fromkeys(begins) if number in order] == order


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
        reader.begin(order_of([(name, places[name]) for name in "73261"], file))
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


def test_who_asks_for_a_tensor_does_not_fetch_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1 << 20), "b": torch.ones(3 << 20)}, path)
    headers = read_headers(tmp_path)
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with closing(MappedFiles(tmp_path, headers, ReadAhead())) as files:
        before = bytes_from_disk()
        tensor = files.read("b", (slice(0, 3 << 20),), None)
        asked = bytes_from_disk()
        assert (tensor == 1).all()
        if bytes_from_disk() == asked:
            pytest.skip("a folder in memory, or a system that does not forget")
        # The header's page, and what the system reads with it.
        assert asked - before <= 1 << 20


def bytes_from_disk() -> int:
    """That this process has had fetched so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def test_tensors_need_not_begin_at_multiples_of_their_numbers_bytes(tmp_path: Path) -> None:
    """safetensors' own writer has them so, the format does not."""
    numbers = torch.arange(12, dtype=torch.float32).view(3, 4)
    header = json.dumps({"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}})
    header += " " * (1 - len(header) % 4 + 4)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + numbers.numpy().tobytes())
    with closing(MappedFiles(tmp_path, read_headers(tmp_path), ReadAhead())) as files:
        assert torch.equal(files.read("a", (slice(0, 3), slice(0, 4)), None), numbers)
        assert torch.equal(files.read("a", (slice(1, 3), slice(0, 2)), None), numbers[1:, :2])


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
        order = [name for name, _ in reader._reading_order(model.tensors(reader.names))]
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
