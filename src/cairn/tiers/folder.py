"""The folder of `--disk-cache`: whose it is, and who may write to it.

    PATH/cairn-cache          says that the folder is one
    PATH/<identity>/lock      held by the one server that writes there
                    model     what the identity stands for, for people
                    secret    the key of the names of salted namespaces
                    *.seg     segments

Servers of other models, dtypes, block sizes or versions have folders of their own in it, and leave the others alone.
"""

import errno
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from json import dumps

from cairn.errors import ConfigError
from cairn.tiers.disk import SEGMENT
from cairn.tiers.files import Files

SECRET_BYTES = 32

_MARKER = "cairn-cache"
_MARKER_TEXT = b"A cache of cairn (--disk-cache). It may be removed while no server uses it.\n"
_NAME_CHARS = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """`path`: this identity's folder. `secret`: see above. `lock`: a descriptor to be closed at the end; None for a
    server that only reads."""

    path: str
    secret: bytes
    lock: int | None


def open_folder(
    path: str, identity: bytes, facts: Mapping[str, str | int], least_bytes: int, *, read_only: bool, files: Files
) -> OpenFolder:
    """Make `path` ready to be used. `facts`: what `identity` stands for; `least_bytes`: that have to be free on the
    disk for anything to be written. Raises ConfigError that names the flag and the fix."""
    home = f"{path}/{identity.hex()[:_NAME_CHARS]}"
    try:
        if read_only:
            _check_marker(path, files)
            secret = _read_secret(home, files)
            _name_others(path, home, files)
            return OpenFolder(home, secret, None)
        _claim(path, files)
        files.make_folder(home)
        lock = files.lock(f"{home}/lock")
    except OSError as error:
        raise _refused(path, error) from error
    if lock is None:
        raise ConfigError(
            f"--disk-cache {path}: another server writes there: name another folder, or read only what that one "
            "writes, with --disk-cache-read-only"
        )
    try:
        free, used = files.free_bytes(home), _bytes_of(home, files)
        if free + used < least_bytes:
            raise ConfigError(
                f"--disk-cache {path}: its disk has {free} bytes left, and one entry takes {least_bytes}: free some, "
                "or name a folder on another disk"
            )
        secret = _read_secret(home, files) or _new_secret(home, files)
        _write(f"{home}/model", dumps(dict(facts), indent=1, sort_keys=True).encode(), files)
        _name_others(path, home, files)
    except (OSError, ConfigError) as error:
        files.close(lock)
        raise _refused(path, error) if isinstance(error, OSError) else error from error
    return OpenFolder(home, secret, lock)


def check_folder(path: str, *, read_only: bool) -> None:
    """What can be said before a model is loaded: raises ConfigError as `open_folder` would. Changes nothing."""
    try:
        _check_marker(path, Files())
    except FileNotFoundError as error:
        if read_only:
            raise _refused(path, error) from error
        above = os.path.dirname(path)
        while not os.path.exists(above):
            above = os.path.dirname(above)
        if not os.access(above, os.W_OK | os.X_OK):
            raise _refused(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES))) from error
    except OSError as error:
        raise _refused(path, error) from error
    else:
        if not read_only and not os.access(path, os.W_OK | os.X_OK):
            raise _refused(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _claim(path: str, files: Files) -> None:
    """See to it that the folder is there and that it is one of ours."""
    try:
        names = files.names(path)
    except FileNotFoundError:
        files.make_folder(path)
        names = []
    if names and _MARKER not in names:
        raise _strange(path)
    if not names:
        _write(f"{path}/{_MARKER}", _MARKER_TEXT, files)


def _check_marker(path: str, files: Files) -> None:
    names = files.names(path)
    if names and _MARKER not in names:
        raise _strange(path)


def _strange(path: str) -> ConfigError:
    return ConfigError(
        f"--disk-cache {path}: it is no folder of a cache, and it is not empty: name an empty or a new one"
    )


def _refused(path: str, error: OSError) -> ConfigError:
    match error.errno:
        case errno.ENOENT:
            fix = "there is none; a server without --disk-cache-read-only makes it"
        case errno.ENOTDIR | errno.EEXIST:
            fix = "it is no folder: name an empty or a new one"
        case errno.ENOSPC | errno.EDQUOT:
            fix = "its disk is full: free some space, or name a folder on another disk"
        case _:
            fix = f"{error.strerror}: name a folder that this user may write to"
    return ConfigError(f"--disk-cache {path}: {fix}")


def _read_secret(home: str, files: Files) -> bytes:
    """The secret, or nothing where there is none that is whole: salted prompts are computed then."""
    with suppress(OSError):
        secret = files.read(f"{home}/secret", 0, SECRET_BYTES + 1)
        if len(secret) == SECRET_BYTES:
            return secret
    return b""


def _new_secret(home: str, files: Files) -> bytes:
    secret = os.urandom(SECRET_BYTES)
    _write(f"{home}/secret", secret, files)
    return secret


def _write(path: str, content: bytes, files: Files) -> None:
    """A small file, whole or not at all."""
    descriptor = files.create(f"{path}.new")
    try:
        files.write_all(descriptor, [memoryview(content)], 0)
        files.sync(descriptor)
    finally:
        files.close(descriptor)
    files.rename(f"{path}.new", path)


def _bytes_of(folder: str, files: Files) -> int:
    num_bytes = 0
    for name in files.names(folder):
        if name.endswith(SEGMENT):
            with suppress(OSError):
                num_bytes += files.size(f"{folder}/{name}")
    return num_bytes


def _name_others(path: str, home: str, files: Files) -> None:
    """Say what else is there, which this server neither reads nor removes."""
    for name in sorted(files.names(path)):
        folder = f"{path}/{name}"
        if folder == home or name.startswith(_MARKER):
            continue
        with suppress(OSError):
            num_bytes = _bytes_of(folder, files)
            logger.warning(
                "--disk-cache: %s (%d bytes) is of another model, dtype, block size or version and is ignored: its "
                "file `model` says of which; remove it if nobody serves that any more",
                *(folder, num_bytes),
            )
