"""What the set-up of another server's environment is made of: commands that say what failed."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["CHECK_SECONDS", "PeerError", "is_finished", "make_environment", "mark_finished", "run", "said"]

INSTALL_SECONDS = 3_600.0
CHECK_SECONDS = 300.0
_FINISHED = ".installed"
"""A file of an environment that is finished: which version it is."""


class PeerError(Exception):
    """A server cannot be set up, did not start, or did not do what it was asked. The message says what to do, or shows
    the end of its log."""


def make_environment(folder: Path, maker: str) -> Path:
    """An empty virtual environment in `folder`, by the interpreter `maker`: its own interpreter. Raises PeerError."""
    run([maker, "-m", "venv", "--clear", str(folder)], "the virtual environment cannot be made")
    return folder / "bin" / "python"


def is_finished(folder: Path, version: str) -> bool:
    """Whether `mark_finished` was called for this version."""
    file = folder / _FINISHED
    return file.is_file() and file.read_text().strip() == version


def mark_finished(folder: Path, version: str) -> None:
    """What is in `folder` is whole, and of this version."""
    (folder / _FINISHED).write_text(f"{version}\n")


def said(python: Path, program: str) -> str:
    """What a program prints. Raises PeerError."""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
    if done.returncode:
        raise PeerError(f"{python} -c {program!r} failed:\n{done.stderr[-2000:]}")
    return done.stdout.strip()


def run(
    command: Sequence[str | Path],
    why: str,
    seconds: float = INSTALL_SECONDS,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """What the command prints. Raises PeerError with `why` and the end of what it said."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{why}: {error}") from error
    if done.returncode:
        raise PeerError(f"{why}.\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout
