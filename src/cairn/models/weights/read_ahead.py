"""Files that are mapped into memory, fetched from the disk before they are read.

Where a page is touched that is not there, the thread that touched it waits, and the system fetches megabytes around it,
in small pages, before what is wanted next. So another thread has what will be wanted next sent to nowhere, the disk
works while weights are packed, and who looks at a tensor waits until it has been fetched. For what is sent Linux takes
large pages, as for what is read and other than for what `posix_fadvise` asks for, nothing is copied, and a call is for
megabytes: the thread hardly needs Python, which others run meanwhile.
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path
from threading import Condition, Thread
from typing import BinaryIO, NamedTuple

_WINDOW = 256 << 20
"""Bytes that are fetched before they are wanted: the system may need the memory for something else."""

_PIECE = 4 << 20
"""Bytes that are fetched by one call, after which nobody waits for them any more, and the thread may have to wait for
Python."""

_FIRST_BATCH, _BATCH = 2 << 20, 16 << 20
"""Bytes of tensors that are read in the order in which files have them: pages are the larger, the longer what is read
follows what was. Each batch is twice as large as the one before, as nobody can begin without the first, and at most
half of what is left, as what was read last is still to be packed when the disk is done."""

_BLIND_PIECE, _MOST_BLIND = 4 << 20, 64 << 20
"""Bytes of a file's beginning that are fetched by one call, and by all, while nobody knows yet what will be wanted
first."""

_FEW, _NEAR, _MOST_SMALL = 4, 256 << 10, 16 << 20
"""Small tensors are fetched before all others, with what lies between them, if they are in so few places, at most so
many bytes apart there, and no more bytes in all: one by one each would take as long as a megabyte."""

_PATIENCE = 600.0
"""Seconds that the thread waits for whoever reads, and these for the thread. Then it ends: what is left is fetched by
who touches it."""


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


class ReadingOrder(NamedTuple):
    """The tensors that will be read, one after the other. `locate`: gives the places of some, as they are needed, on
    the thread that fetches, which OSError, ValueError, LookupError or TypeError from there ends. `files`: that they are
    in. `small`: those that are looked at by who asks for them, and not in the background."""

    names: Sequence[str]
    locate: Callable[[Iterable[str]], Iterable[tuple[str, FileRange]]]
    files: Collection[Path]
    small: Sequence[str] = ()


class ReadAhead:
    """Fetches the bytes of tensors in the order in which they will be read, and no further than the window. A file that
    cannot be read is not: whoever wants what is in it learns why."""

    def __init__(self) -> None:
        self._order: ReadingOrder | None = None
        self._wanted: Set[str] = frozenset()
        self._reached: list[str] = []
        self._acts: deque[tuple[list[str], Callable[[], None]]] = deque()
        self._ends: dict[str, int] = {}
        self._begun = self._fetched = self._done = 0
        self._changed, self._is_full, self._stopped = Condition(), False, False
        self._num_waiting = 0
        self._thread: Thread | None = None

    def begin_blindly(self, file: Path) -> None:
        """Fetches a file from its beginning on until `begin` says what is wanted: the disk has work while headers are
        parsed and accounted for."""
        self._start(file)

    def begin(self, order: ReadingOrder) -> None:
        """Fetches what is wanted. Nothing, where it has begun before."""
        if self._order is None:
            with self._changed:
                self._wanted, self._order = frozenset(order.names), order
                self._changed.notify_all()
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

    def reached(self, name: str) -> None:
        """A tensor will be read now or soon. To be called by one thread."""
        self._reached.append(name)
        self._done = max(self._done, self._ends.get(name, 0))
        # Whoever waits has said so before it looked at what is done: a lock for each tensor is not needed.
        if self._is_full:
            with self._changed:
                self._changed.notify_all()

    def when_there(self, act: Callable[[], None]) -> None:
        """Calls `act` once all has been fetched that was reached since the last such call, or nothing is any more, on
        this thread or another one, in the order of these calls. By the thread that calls `reached`."""
        names, self._reached = self._reached, []
        with self._changed:
            self._acts.append((names, act))
            self._changed.notify_all()
            self._act()

    def _act(self) -> None:
        """Under the lock."""
        while self._acts and (self._order is None or self._stopped or self._has(self._acts[0][0])):
            self._acts.popleft()[1]()

    def wait_for(self, names: Collection[str]) -> None:
        """Until these tensors have been fetched, or nothing is any more."""
        if self._order is None or self._has(names):
            return
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or self._has(names), _PATIENCE)
            self._num_waiting -= 1

    def _has(self, names: Collection[str]) -> bool:
        """Whether these have been fetched, but for what nobody said to be wanted."""
        ends, wanted, fetched = self._ends, self._wanted, self._fetched
        return all(ends.get(name, fetched + 1) <= fetched or name not in wanted for name in names)

    def close(self) -> None:
        """Nothing more is fetched."""
        self._stop()
        if self._thread is not None:
            self._thread.join()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._act()

    def _run(self, nowhere: BinaryIO, files: ExitStack, blind: FileRange, descriptor: int) -> None:
        """`blind`: what is fetched until it is known what is wanted, and `descriptor` its file's. Closes the files."""
        opened = blind.file
        with ExitStack() as end, suppress(OSError, ValueError, LookupError, TypeError), nowhere, files:
            end.callback(self._stop)
            for place in self._ranges(blind):
                if place.file != opened:
                    # One at a time: where files take turns, each turn opens one.
                    files.close()
                    opened, descriptor = place.file, files.enter_context(place.file.open("rb", buffering=0)).fileno()
                for begin, num_bytes in place.pieces():
                    if not self._wait_for_room(num_bytes):
                        return
                    os.sendfile(nowhere.fileno(), descriptor, begin, num_bytes)
                    with self._changed:
                        self._fetched = self._begun
                        self._changed.notify_all()
                        self._act()

    def _ranges(self, blind: FileRange) -> Iterator[FileRange]:
        """All that is to be fetched."""
        there = FileRange(blind.file, 0, 0)
        while self._order is None and not self._stopped and there.end < blind.end:
            piece = FileRange(blind.file, there.end, min(_BLIND_PIECE, blind.end - there.end))
            yield piece
            there = FileRange(blind.file, 0, piece.end)
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None or self._stopped, _PATIENCE)
        if self._order is not None:
            names, locate, files, small = self._order
            yield from self._few_small(sorted(locate(small), key=_PLACE))
            first = frozenset(self._ends)
            total = sum(each.stat().st_size for each in files)
            for batch in _batches(locate(names), total):
                yield from _runs(self._note_ends(batch, there, first))

    def _few_small(self, places: Places) -> Iterator[FileRange]:
        """These tensors, if they lie together."""
        runs = list(_runs((place for _, place in places), _NEAR))
        if len(runs) <= _FEW and sum(run.num_bytes for run in runs) <= _MOST_SMALL:
            yield from runs
            self._ends |= dict.fromkeys((name for name, _ in places), self._begun)

    def _note_ends(self, batch: Places, there: FileRange, first: Set[str]) -> Iterator[FileRange]:
        """Where what has not been fetched is. `there`: has been, and so have the tensors `first`, which are fetched
        once more where that saves a run of its own."""
        end = self._begun
        for name, place in batch:
            is_there = place.file == there.file and place.end <= there.end
            end += 0 if is_there else place.num_bytes
            if name not in first:
                self._ends[name] = self._ends.get(name, 0) if is_there else end
            if not is_there:
                yield place

    def _wait_for_room(self, num_bytes: int) -> bool:
        """Whether to go on; if so, so many more bytes are fetched."""
        if not self._has_room():
            with self._changed:
                self._is_full = True
                self._changed.wait_for(lambda: self._stopped or self._has_room(), _PATIENCE)
                self._is_full = False
            if not self._has_room():
                return False
        self._begun += num_bytes
        return not self._stopped

    def _has_room(self) -> bool:
        """Also where somebody waits, for what was not known to be wanted when it was reached."""
        return self._begun < self._done + _WINDOW or self._num_waiting > 0 or len(self._acts) > 0


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


def _runs(places: Iterable[FileRange], apart: int = 0) -> Iterator[FileRange]:
    """Neighbours of a file as one, and those that are so many bytes apart with what lies between."""
    run: FileRange | None = None
    for place in places:
        if run is None:
            run = place
        elif place.file == run.file and run.end <= place.begin <= run.end + apart:
            run = FileRange(run.file, run.begin, place.end - run.begin)
        else:
            yield run
            run = place
    if run is not None:
        yield run
