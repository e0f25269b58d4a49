"""Paths among the settings: text that this process can write and read back, files that can be written, and secrets.

Everything is looked at before anything is loaded: what is wrong with a path is said within a second.
"""

import errno
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from cairn.errors import ConfigError

_MIN_SECRET, _MAX_SECRET = 16, 4096


def check_encoding(value: object) -> None:
    """Raises ValueError for text, or a path, that is not the same bytes for the operating system as in UTF-8, which
    the libraries that open files and the other processes take. Lists and mappings: of each entry; other values pass.
    """
    if isinstance(value, Mapping):
        check_encoding([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for entry in value:
            check_encoding(entry)
    elif isinstance(value, str | Path):
        problem = _encoding_problem(str(value))
        if problem is not None:
            raise ValueError(problem)


def is_unicode(text: str) -> bool:
    """Whether it has no lone surrogate: JSON and YAML can spell them, and bytes that are no UTF-8 become some."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encoding_problem(text: str) -> str | None:
    if "\0" in text:
        return "must not have a NUL character"
    try:
        if is_unicode(text) and os.fsencode(text) == text.encode():
            return None
    except UnicodeEncodeError:
        # the locale has no such character
        pass
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return "must be valid UTF-8 (rename the file or folder that it names)"
    return f"must be ASCII where the system's encoding is {encoding} (set LC_ALL=C.UTF-8 and leave PYTHONUTF8 unset)"


def check_working_folder() -> None:
    """Raises ConfigError where the working directory has been removed: libraries fail there as they are loaded."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the working directory cannot be used: {error.strerror}; change to another") from None


def check_output_file(flag: str, path: Path) -> None:
    """Raises ConfigError naming the flag unless the file can be written. What is there stays as it is."""
    try:
        target = os.path.realpath(path)
        if not os.path.isdir(folder := os.path.dirname(target)):
            raise OSError(errno.ENOENT, f"there is no folder {folder}")
        if not os.path.exists(target):
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            os.unlink(target)
        elif os.path.isdir(target):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        elif not os.access(target, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from error


def read_secret_file(path: Path) -> bytes:
    """The secret that servers share. Raises ConfigError unless it is a file of 16 to 4096 bytes, a line's end not
    counted, that is not everybody's.

    The group may read it: that is how containers are given their secrets.
    """
    try:
        # A pipe without a writer must not hold the start up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"--kv-secret-file {path}: cannot be read: {error.strerror}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"--kv-secret-file {path}: must be a file")
        if mode & stat.S_IRWXO:
            raise ConfigError(f"--kv-secret-file {path}: must not be accessible to all users: chmod o= {path}")
        secret = os.read(descriptor, _MAX_SECRET + 3).removesuffix(b"\n").removesuffix(b"\r")
    finally:
        os.close(descriptor)
    size = len(secret)
    if not _MIN_SECRET <= size <= _MAX_SECRET:
        more = "or more " if size > _MAX_SECRET else ""
        raise ConfigError(
            f"--kv-secret-file {path}: holds {size} bytes {more}without the line's end; "
            f"{_MIN_SECRET} to {_MAX_SECRET} are taken: head -c 32 /dev/urandom | base64 makes good ones"
        )
    return secret
