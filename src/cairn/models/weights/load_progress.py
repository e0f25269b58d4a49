"""How far loading weights is: a bar on a terminal, and a line in the log at the end."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from cairn.types import Clock, SystemClock

logger = logging.getLogger(__name__)

_STEP_BYTES = 16 << 20
"""The bar is told of so many at once: a checkpoint may have a hundred thousand tensors."""


@contextmanager
def load_progress(
    what: str, total: int | None, where: str, show: bool = True, clock: Clock | None = None
) -> Iterator[Callable[[int], None]]:
    """Yields a function that is to be called with the number of bytes of each piece that was read. `total`: bytes of
    all of them, None if that is not known; `what`, `where`: what is loaded, and to where; `show`: whether there may be
    a bar."""
    clock = clock or SystemClock()
    started, done = clock.now(), 0
    with _bar(f"{what} to {where}", total) if show and sys.stderr.isatty() else _no_bar() as update:

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            update(done)

        yield advance
    seconds = clock.now() - started
    rate = done / seconds / 1e9 if seconds > 0 else 0.0
    logger.info("%s: %d bytes read to %s in %.1f s (%.2f GB/s)", what, done, where, seconds, rate)


@contextmanager
def _no_bar() -> Iterator[Callable[[int], None]]:
    yield lambda done: None


@contextmanager
def _bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, shown = progress.add_task(title, total=total), 0

        def update(done: int) -> None:
            nonlocal shown
            if done - shown >= _STEP_BYTES or done == total:
                shown = done
                progress.update(task, completed=done)

        yield update
