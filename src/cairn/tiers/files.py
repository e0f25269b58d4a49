"""All that the disk tier asks of the operating system, in one place, so that tests can have it fail.

No method raises anything but OSError, and none but `lock` waits for another process.
"""

import fcntl
import logging
import os
import time
from collections.abc import Sequence

from cairn.tiers.store import PageBytes

_MOST_BUFFERS = 512
"""In one call: Linux takes 1,024."""

FOLDER_MODE, FILE_MODE = 0o700, 0o600
"""What is cached is what prompts said."""

LOCK_SECONDS = 30.0
"""How long a server waits for the one that wrote before it. One that was killed holds the lock until the kernel has
ended its core, which takes as long as a write to a busy disk that has begun."""

_LOCK_PAUSE = 0.1

logger = logging.getLogger(__name__)


class Files:
    """Files of a folder, by path."""

    def read(self, path: str, offset: int, length: int) -> bytes:
        """So many bytes from there on; fewer at the file's end."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            parts, end = [], offset + length
            while offset < end and (part := os.pread(descriptor, min(end - offset, 1 << 26), offset)):
                parts.append(part)
                offset += len(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)

    def open(self, path: str) -> int:
        """A descriptor to read from."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def create(self, path: str) -> int:
        """A descriptor of a new file, or of an empty one in the place of another, to write to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, FILE_MODE)

    def close(self, descriptor: int) -> None:
        """Give a descriptor back."""
        os.close(descriptor)

    def read_into(self, descriptor: int, rows: Sequence[PageBytes], offset: int) -> bool:
        """Fill `rows`, one after the other, from `offset` on. False where the file ends before."""
        for first in range(0, len(rows), _MOST_BUFFERS):
            group = [row.data.cast("B") for row in rows[first : first + _MOST_BUFFERS]]
            while group:
                count = os.preadv(descriptor, group, offset)
                if count == 0:
                    return False
                offset += count
                group = _rest(group, count)
        return True

    def write_all(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
        """Write `parts`, one after the other, from `offset` on."""
        for first in range(0, len(parts), _MOST_BUFFERS):
            group = list(parts[first : first + _MOST_BUFFERS])
            while group:
                count = os.pwritev(descriptor, group, offset)
                offset += count
                group = _rest(group, count)

    def sync(self, descriptor: int) -> None:
        """What was written is on the disk, also after a power cut."""
        os.fsync(descriptor)

    def sync_folder(self, path: str) -> None:
        """The same for the names in a folder."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        """At once, in the place of whatever had the new name."""
        os.replace(old, new)

    def remove(self, path: str) -> None:
        """Whoever has it open may go on reading."""
        os.unlink(path)

    def size(self, path: str) -> int:
        """In bytes."""
        return os.stat(path, follow_symlinks=False).st_size

    def names(self, path: str) -> list[str]:
        """What is in a folder."""
        return os.listdir(path)

    def make_folder(self, path: str) -> None:
        """With those above it, if need be."""
        os.makedirs(path, FOLDER_MODE, exist_ok=True)

    def free_bytes(self, path: str) -> int:
        """What is left on the disk for this process."""
        disk = os.statvfs(path)
        return disk.f_bavail * disk.f_frsize

    def lock(self, path: str) -> int | None:
        """A descriptor that holds the lock on a file, made if need be, until it is closed or the process ends; None if
        another one has held it for LOCK_SECONDS."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            for attempt in range(round(LOCK_SECONDS / _LOCK_PAUSE)):
                if self._try_lock(descriptor):
                    return descriptor
                if attempt == 0:
                    logger.info("%s: another process holds it; waiting for %g s at most", path, LOCK_SECONDS)
                self.sleep(_LOCK_PAUSE)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def sleep(self, seconds: float) -> None:
        """Between two attempts."""
        time.sleep(seconds)

    @staticmethod
    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _rest(group: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after so many bytes."""
    for place, part in enumerate(group):
        if count < len(part):
            return [part[count:], *group[place + 1 :]]
        count -= len(part)
    return []
