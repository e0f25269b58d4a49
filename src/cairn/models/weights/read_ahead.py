"""Files that are mapped into memory, fetched from the disk before they are read.

Where a page is touched that is not there, the system fetches it with few that follow, often 128 KiB, and the thread
that touched it waits. So another thread has what will be wanted next sent to nowhere, and the disk works while weights
are packed. For what is sent Linux takes large pages, as for what is read and other than for what `posix_fadvise` asks
for, nothing is copied, and a call is for megabytes: the thread hardly needs Python, which others run meanwhile.
"""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from mmap import MADV_RANDOM, mmap
from operator import itemgetter
from pathlib import Path
from threading import Condition, Thread
from typing import BinaryIO, NamedTuple

_WINDOW = 256 << 20
"""Bytes that are fetched before they are wanted: the system may need the memory for something else."""

_PIECE = 16 << 20
"""Bytes that are fetched by one call, after which the thread may have to wait for Python."""

_FIRST_BATCH, _BATCH = 2 << 20, 32 << 20
"""Bytes of tensors that are read in the order in which files have them: pages are the larger, the longer what is read
follows what was. Each batch is twice as large as the one before, as nobody can begin without the first, and at most
half of what is left, as what was read last is still to be packed when the disk is done."""

_BLIND_PIECE, _MOST_BLIND = 16 << 20, 64 << 20
"""Bytes of a file's beginning that are fetched by one call, and by all, while nobody knows yet what will be wanted
first."""

_PATIENCE = 600.0
"""Seconds that the thread waits for whoever reads. Then it ends: what is left is fetched by who touches it."""


class FileRange(NamedTuple):
    """`num_bytes` bytes of a file, from `begin` on."""

    file: Path
    begin: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Begin and bytes of each."""
        for begin in range(self.begin, self.end, _PIECE):
            yield begin, min(_PIECE, self.end - begin)


_NOTHING = FileRange(Path(), 0, 0)

Places = list[tuple[str, FileRange]]
"""Tensors by their names, and where they are."""

_PLACE = itemgetter(1)


class ReadAhead:
    """Fetches the bytes of tensors in the order in which they will be read, and no further than the window. A file that
    cannot be read is not: whoever wants what is in it learns why."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}
        self._fetched = self._done = 0
        self._changed, self._waits, self._stopped = Condition(), False, False
        self._order: tuple[Iterable[tuple[str, FileRange]], Collection[Path]] | None = None
        self._thread: Thread | None = None

    def begin_blindly(self, file: Path) -> None:
        """Fetches a file from its beginning on until `begin` says what is wanted: the disk has work while headers are
        parsed and accounted for."""
        self._start(file)

    def begin(self, places: Iterable[tuple[str, FileRange]], files: Collection[Path]) -> None:
        """`places`: by the tensors' names, taken as they are needed, on the thread that reads. OSError,
        ValueError, LookupError or TypeError from there ends it. `files`: that they are in. Nothing, where it has
        begun before."""
        if self._order is None:
            with self._changed:
                self._order = places, files
                self._changed.notify()
            self._start(None)

    def _start(self, file: Path | None) -> None:
        if self._thread is not None:
            return
        # Not on the thread, which would wait for Python after each of these.
        files, blind, descriptor = ExitStack(), _NOTHING, -1
        nowhere = open(os.devnull, "wb", buffering=0)  # noqa: SIM115 - the thread closes it
        if file is not None:
            with suppress(OSError):
                descriptor = files.enter_context(file.open("rb", buffering=0)).fileno()
                blind = FileRange(file, 0, min(os.fstat(descriptor).st_size, _MOST_BLIND))
        work = nowhere, files, blind, descriptor
        self._thread = Thread(target=self._run, args=work, name="cairn-read-ahead", daemon=True)
        self._thread.start()

    @property
    def has_begun(self) -> bool:
        """Whether what is wanted is being fetched."""
        return self._order is not None

    def reached(self, name: str) -> None:
        """A tensor will be read now or soon. To be called by one thread."""
        self._done = max(self._done, self._ends.get(name, 0))
        # Whoever waits has said so before it looked at what is done: a lock for each tensor is not needed.
        if self._waits:
            with self._changed:
                self._changed.notify()

    def close(self) -> None:
        """Nothing more is fetched."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self, nowhere: BinaryIO, files: ExitStack, blind: FileRange, descriptor: int) -> None:
        """`blind`: what is fetched until it is known what is wanted, and `descriptor` its file's. Closes the files."""
        opened = blind.file
        with suppress(OSError, ValueError, LookupError, TypeError), nowhere, files:
            for place in self._ranges(blind):
                if place.file != opened:
                    # One at a time: where files take turns, each turn opens one.
                    files.close()
                    opened, descriptor = place.file, files.enter_context(place.file.open("rb", buffering=0)).fileno()
                for begin, num_bytes in place.pieces():
                    if not self._wait_for_room(num_bytes):
                        return
                    os.sendfile(nowhere.fileno(), descriptor, begin, num_bytes)

    def _ranges(self, blind: FileRange) -> Iterator[FileRange]:
        """All that is to be fetched."""
        begun = FileRange(blind.file, 0, 0)
        while self._order is None and not self._stopped and begun.end < blind.end:
            piece = FileRange(blind.file, begun.end, min(_BLIND_PIECE, blind.end - begun.end))
            yield piece
            begun = FileRange(blind.file, 0, piece.end)
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None or self._stopped, _PATIENCE)
        if self._order is not None:
            places, files = self._order
            total = sum(each.stat().st_size for each in files)
            for batch in _batches(places, total):
                yield from _runs(self._note_ends(batch, begun))

    def _note_ends(self, batch: Places, begun: FileRange) -> Iterator[FileRange]:
        """Where what is not in `begun` is."""
        end = self._fetched
        for name, place in batch:
            is_there = place.file == begun.file and place.end <= begun.end
            end += 0 if is_there else place.num_bytes
            self._ends[name] = end
            if not is_there:
                yield place

    def _wait_for_room(self, num_bytes: int) -> bool:
        """Whether to go on; if so, so many more bytes are fetched."""
        if self._fetched >= self._done + _WINDOW:
            with self._changed:
                self._waits = True
                self._changed.wait_for(lambda: self._stopped or self._fetched < self._done + _WINDOW, _PATIENCE)
                self._waits = False
            if self._fetched >= self._done + _WINDOW:
                return False
        self._fetched += num_bytes
        return not self._stopped


def map_file(path: Path, access: int, ahead: ReadAhead) -> mmap:
    """A file, mapped into memory. `access`: as mmap has it. A page that is touched before `ahead` has fetched it comes
    alone: else the system would fetch megabytes around it, in small pages, before what is wanted next."""
    with path.open("rb") as file:
        mapped = mmap(file.fileno(), 0, access=access)
    if ahead.has_begun:
        mapped.madvise(MADV_RANDOM)
    return mapped


def _batches(places: Iterable[tuple[str, FileRange]], total: int) -> Iterator[Places]:
    """Each in the order of its files. `total`: bytes of all places, roughly."""
    batch: Places = []
    least = min(_FIRST_BATCH, _BATCH)
    num_bytes, enough, left = 0, least, total
    for each in places:
        batch.append(each)
        num_bytes += each[1].num_bytes
        if num_bytes >= enough:
            yield sorted(batch, key=_PLACE)
            left -= num_bytes
            batch, num_bytes, enough = [], 0, max(min(2 * enough, _BATCH, left // 2), least)
    yield sorted(batch, key=_PLACE)


def _runs(places: Iterable[FileRange]) -> Iterator[FileRange]:
    """Neighbours of a file as one."""
    run: FileRange | None = None
    for place in places:
        if run is None:
            run = place
        elif place.begin == run.end and place.file == run.file:
            run = FileRange(run.file, run.begin, run.num_bytes + place.num_bytes)
        else:
            yield run
            run = place
    if run is not None:
        yield run
