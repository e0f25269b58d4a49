"""What the set-up of another server's environment is made of: commands that say what failed."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["CHECK_SECONDS", "PeerError", "make_environment", "run", "said"]

INSTALL_SECONDS = 3_600.0
CHECK_SECONDS = 300.0
READY = ".installed"
"""A file of an environment that is finished: which version it is."""


class PeerError(Exception):
    """A server cannot be set up, did not start, or did not do what it was asked. The message says what to do, or shows
    the end of its log."""


def make_environment(folder: Path, maker: str) -> Path:
    """An empty virtual environment in `folder`, by the interpreter `maker`: its own interpreter. Raises PeerError."""
    run([maker, "-m", "venv", "--clear", str(folder)], "the virtual environment cannot be made")
    return folder / "bin" / "python"


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
