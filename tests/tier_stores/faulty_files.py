"""Files that fail when a test says so: a full disk, broken reads and writes, slow ones, and a process that ends."""

import errno
import os
import time

from cairn.tiers.files import Files


class Killed(BaseException):
    """The process ends here: nothing that it would have done afterwards is done."""


class FaultyFiles(Files):
    """`fail`: the calls that fail from now on, by name, and with which errno; `budget`: bytes that may still be written
    until the disk is full; `slow`: seconds that each read and write takes; `calls_left`: calls that change something
    until the process ends, in the middle of a write half of whose bytes are there."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.budget: int | None = None
        self.slow = 0.0
        self.calls_left: int | None = None
        self.num_calls = 0

    def _check(self, call: str) -> None:
        if call in self.fail:
            raise OSError(self.fail[call], os.strerror(self.fail[call]))

    def _changes(self, call: str) -> None:
        self._check(call)
        self.num_calls += 1
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise Killed

    def open(self, path):
        self._check("open")
        return super().open(path)

    def read(self, path, offset, length):
        self._check("read")
        return super().read(path, offset, length)

    def read_into(self, descriptor, rows, offset):
        self._check("read_into")
        time.sleep(self.slow)
        return super().read_into(descriptor, rows, offset)

    def create(self, path):
        self._changes("create")
        return super().create(path)

    def write_all(self, descriptor, parts, offset):
        time.sleep(self.slow)
        size = sum(map(len, parts))
        if self.budget is not None:
            self.budget -= size
            if self.budget < 0:
                super().write_all(descriptor, [memoryview(b"".join(parts))[: size + self.budget]], offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            self._changes("write_all")
        except Killed:
            super().write_all(descriptor, [memoryview(b"".join(parts))[: size // 2]], offset)
            raise
        super().write_all(descriptor, parts, offset)

    def sync(self, descriptor):
        self._changes("sync")
        super().sync(descriptor)

    def rename(self, old, new):
        self._changes("rename")
        super().rename(old, new)

    def remove(self, path):
        self._changes("remove")
        super().remove(path)
