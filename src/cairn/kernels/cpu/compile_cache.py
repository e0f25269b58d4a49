"""Where compiled kernels are kept from one process to the next: a private folder of this machine's user.

What is in the folder is executed, so nobody else may be able to write there. Its name says for which sources, which
versions and which CPU it was made; a folder that is not wanted any more can simply be deleted.
"""

import fcntl
import hashlib
import logging
import os
import platform
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import llvmlite
import llvmlite.binding
import numba
from numba.core.caching import FunctionCache

from cairn.kernels.cpu.features import features_text

_POLL_SECONDS = 0.02

logger = logging.getLogger(__name__)


class CompileCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of compiled functions, told apart by the types of their arguments, too.

    Each variant of a function has a folder of its own. In one folder variants would be numbered in the order in which
    they were compiled: of two processes that compile different ones at once, each would take the other's for its own.

    `lock`: see `lock_path`.
    """

    def __init__(self, function: Any, argument_types: tuple[Any, ...], folder: Path) -> None:
        self._argument_types = argument_types
        self.lock = lock_path(function, argument_types, folder)
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(self.lock.parent)
        try:
            super().__init__(function)
        finally:
            numba.config.CACHE_DIR = before

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return *super()._index_key(sig, codegen), str(self._argument_types)

    @contextmanager
    def claimed(self, seconds: float) -> Iterator[bool]:
        """This process alone compiles the variant inside, and others load what it has saved. Yields False where another
        process had it for so many seconds, or where nobody can be locked out."""
        with ExitStack() as stack:
            try:
                self.lock.parent.mkdir(mode=0o700, exist_ok=True)
                descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, descriptor)
                free = _lock_within(descriptor, seconds)
            except OSError as error:
                logger.warning("several processes may compile %s: %s", self.lock.stem, error)
                free = False
            yield free


def lock_path(function: Any, argument_types: tuple[Any, ...], folder: Path) -> Path:
    """The file that is locked while a variant is compiled, in the folder of all variants with these types. It is there
    from the first time on."""
    variants = folder / hashlib.sha256(str(argument_types).encode()).hexdigest()[:16]
    return variants / f"{function.__module__}.{function.__qualname__}.lock"


def _lock_within(descriptor: int, seconds: float) -> bool:
    """Whether the file could be locked; the lock ends with the descriptor, also where the process is killed."""
    end = monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() >= end:
                return False
            sleep(_POLL_SECONDS)
        else:
            return True


@cache
def cache_folder() -> Path | None:
    """The folder, made if it is not there; None where there can be none: then kernels are compiled once a process."""
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cairn"
        folder = parent / f"kernels-{_fingerprint()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
    except (OSError, RuntimeError) as error:
        logger.warning("compiled kernels are not kept for the next start: %s", error)
        return None
    return folder


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} is no folder")
    if status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to user {status.st_uid}")
    if status.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to others (mode {stat.S_IMODE(status.st_mode):o}, wanted 700)")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for part in (
        platform.python_version(),
        numba.__version__,
        llvmlite.__version__,
        llvmlite.binding.get_host_cpu_name(),
        features_text(),
    ):
        digest.update(f"{part}\n".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
