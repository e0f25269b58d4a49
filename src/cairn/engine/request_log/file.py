"""Where the request log is written: a thread of its own, a bounded queue before it, and two files at most.

FILE is readable by its owner alone. What was there at the start, and FILE once it has `max_bytes`, becomes FILE.1, and
what was FILE.1 is gone. Every file begins with the header and can be replayed by itself.
"""

import contextlib
import logging
import os
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from cairn.engine.request_log.lines import LogEntry, LogLines
from cairn.errors import ConfigError

MAX_ENTRIES = 1024
MAX_TOKENS = 1 << 24
"""What may wait for the thread: requests, and tokens of theirs (8 bytes each)."""

_NO_FILE = "it is there, and no regular file"
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 1.0

logger = logging.getLogger(__name__)


def check_log_file(path: Path) -> None:
    """Raises ConfigError where no log can be begun. What is there stays as it is."""
    try:
        # the file gets another name, and a new one takes its place: both are up to the folder
        with tempfile.TemporaryFile(dir=path.parent):
            folder = os.stat(path.parent)
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, _NO_FILE)
            if folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, folder.st_uid, status.st_uid):
                raise OSError(0, "it is another user's, and the folder lets only its owner rename it")
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(f"{path}.1").st_mode):
                raise OSError(0, f"{path}.1 is a folder")
    except OSError as error:
        raise ConfigError(f"--request-log {path}: cannot be written: {error.strerror}") from error


class LogFile:
    """Takes entries away. `make_lines` is called for each file that is begun."""

    def __init__(self, path: Path, max_bytes: int, make_lines: Callable[[], LogLines]) -> None:
        """Begins the file and the thread. Raises ConfigError when there can be no such file."""
        self._path = path
        self._max_bytes = max_bytes
        self._make_lines = make_lines
        self._waiting: deque[LogEntry] = deque()
        self._waiting_tokens = 0
        self._changed = threading.Condition()
        self._closing = False
        self._refused = 0
        self._unwritten = 0
        self._losing = False
        self._file = -1
        try:
            self._begin()
        except OSError as error:
            raise ConfigError(f"--request-log {path}: cannot be written: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="cairn-request-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Entries that found no room in the queue, and those that could not be written."""
        return self._refused + self._unwritten

    def put(self, entry: LogEntry) -> bool:
        """False, at once, when there is no room for it: never waits for the disk."""
        with self._changed:
            full = len(self._waiting) >= MAX_ENTRIES or self._waiting_tokens + entry.num_tokens > MAX_TOKENS
            if self._closing or (full and self._waiting):
                self._refused += 1
                return False
            self._waiting.append(entry)
            self._waiting_tokens += entry.num_tokens
            self._changed.notify()
        return True

    def close(self) -> None:
        """Write what is queued, then end the thread; it is given five seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("--request-log %s: still being written; the rest is lost", self._path)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while entries := self._take():
            for entry in entries:
                try:
                    self._write(entry)
                except OSError as error:
                    self._lose(str(error.strerror))
        self._end_file()

    def _take(self) -> list[LogEntry]:
        """All that waits; nothing when this is the end."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait(_LOOK_SECONDS)
            entries = list(self._waiting)
            self._waiting.clear()
            self._waiting_tokens = 0
        return entries

    def _write(self, entry: LogEntry) -> None:
        """Raises OSError; then the line is not in the file."""
        if self._file < 0:
            self._begin()
        line = self._lines.line(entry)
        if self._size + len(line) > self._max_bytes and self._size > self._header_size:
            self._end_file()
            self._begin()
            line = self._lines.line(entry)
        if self._size + len(line) > self._max_bytes:
            self._lose(f"one line of {len(line)} bytes does not fit {self._max_bytes}: raise --request-log-bytes")
            return
        self._append(line)
        self._losing = False

    def _lose(self, why: str) -> None:
        if not self._losing:
            logger.warning("--request-log %s: lines are lost: %s", self._path, why)
        self._unwritten += 1
        self._losing = True
        self._lines.lost()

    def _begin(self) -> None:
        """A new file with a header. Raises OSError; then there is none."""
        if os.path.lexists(self._path):
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise OSError(0, _NO_FILE)
            os.replace(self._path, f"{self._path}.1")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        self._lines = self._make_lines()
        self._size = 0
        try:
            self._append(self._lines.header())
        except OSError:
            self._end_file()
            os.unlink(self._path)
            raise
        self._header_size = self._size

    def _end_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _append(self, line: bytes) -> None:
        """A whole line or nothing. Raises OSError."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(line)
