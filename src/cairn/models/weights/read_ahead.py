"""Files that are mapped into memory, fetched from the disk before they are read.

Where a page is touched that is not there, the system fetches it with few that follow, often 128 KiB, and the thread
that touched it waits. So another thread reads what will be wanted next, and the disk works while weights are packed.
It reads, where it could ask for pages by `posix_fadvise`: for who reads Linux takes large pages, which cost a third of
the processor's time of small ones, the copy that nobody needs included.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

_WINDOW = 256 << 20
"""Bytes that are fetched before they are wanted: the system may need the memory for something else."""

_PIECE = 1 << 20
"""Bytes that are read at once, into memory that stays in a cache."""


_BATCH = 32 << 20
"""Bytes of tensors that are read in the order in which files have them, about a layer: pages are the larger, the longer
what is read follows what was."""


@dataclass(frozen=True, slots=True, order=True)
class FileRange:
    """`num_bytes` bytes of a file, from `begin` on."""

    file: Path
    begin: int
    num_bytes: int

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Begin and bytes of each."""
        end = self.begin + self.num_bytes
        for begin in range(self.begin, end, _PIECE):
            yield begin, min(_PIECE, end - begin)


class ReadAhead:
    """Fetches the bytes of tensors in the order in which they will be read, and no further than the window. A file that
    cannot be read is not: whoever wants what is in it learns why."""

    def __init__(self, places: Iterable[tuple[str, FileRange]]) -> None:
        """`places`: by the tensors' names, taken as they are needed, on the thread that reads. OSError,
        ValueError, LookupError or TypeError from there ends it."""
        self._places = places
        self._read: set[str] = set()
        self._ends: dict[str, int] = {}
        self._fetched = self._done = 0
        self._changed, self._stopped = Condition(), False
        self._thread = Thread(target=self._run, name="cairn-read-ahead", daemon=True)
        self._thread.start()

    def reached(self, name: str) -> None:
        """A tensor is going to be read now."""
        with self._changed:
            self._read.add(name)
            self._done = max(self._done, self._ends.get(name, 0))
            self._changed.notify()

    def close(self) -> None:
        """Nothing more is fetched."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError, ValueError, LookupError, TypeError), ExitStack() as stack:
            buffer, opened = memoryview(bytearray(_PIECE)), None
            for name, place in _in_file_order(self._places):
                if not self._begin(name, place):
                    continue
                if opened != place.file:
                    stack.close()
                    opened, descriptor = place.file, os.open(place.file, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                for begin, num_bytes in place.pieces():
                    if not self._wait_for_room(num_bytes):
                        return
                    if not _is_there(descriptor, begin, num_bytes):
                        os.preadv(descriptor, [buffer[:num_bytes]], begin)

    def _begin(self, name: str, place: FileRange) -> bool:
        """Whether a tensor has still to be read."""
        with self._changed:
            if name in self._read:
                return False
            self._ends[name] = self._fetched + place.num_bytes
            return True

    def _wait_for_room(self, num_bytes: int) -> bool:
        """Whether to go on; if so, so many more bytes are fetched."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._fetched < self._done + _WINDOW)
            self._fetched += num_bytes
            return not self._stopped


def _is_there(descriptor: int, begin: int, num_bytes: int) -> bool:
    """Whether the system has the first and the last byte in its memory, and so most likely what is between."""
    byte = [bytearray(1)]
    try:
        return all(os.preadv(descriptor, byte, place, os.RWF_NOWAIT) for place in (begin, begin + num_bytes - 1))
    except OSError:
        return False


def _in_file_order(places: Iterable[tuple[str, FileRange]]) -> Iterator[tuple[str, FileRange]]:
    """Batch by batch."""
    batch: list[tuple[str, FileRange]] = []
    for each in places:
        batch.append(each)
        if sum(place.num_bytes for _, place in batch) >= _BATCH:
            yield from sorted(batch, key=lambda each: each[1])
            batch.clear()
    yield from sorted(batch, key=lambda each: each[1])
