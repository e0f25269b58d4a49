"""A pytest plugin for runs on a machine that is lent for minutes: tests that have passed are not run again, a run ends
before it is cut off, and one whose CUDA has ended does not go on to fail in every other test. `gpu_run` starts several.

    GPU_TESTS_PASSED=FILE GPU_TESTS_SECONDS=450 python3 -m pytest -p kernels.gpu_progress ...

GPU_TESTS_FAILED=FILE: tests that have failed are written there, and not run again either. GPU_TESTS_SHARD=2/8: of what
is left every eighth, the third one first.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

CUDA_HAS_ENDED = 75
"""Exit code: after an illegal access or an assertion on the device every call of the process fails."""

_ENDS = ("CUDA error", "Triton Error [CUDA]")


class Progress:
    """`passed`: where the ids of tests that have passed are kept, a line each, and `failed` those of the others, if
    that is wanted. `seconds`: after how many of `clock` no further test begins. `shard`: which part, and of how many.
    """

    def __init__(
        self,
        passed: Path,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        failed: Path | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self._path, self._failed_path = passed, failed
        self._clock = clock
        self._end = clock() + seconds
        self._shard, self._num_shards = shard
        self._passed, failures = _lines_of(passed), _lines_of(failed)
        self._done = self._passed | failures
        self._num_left = 0
        self._session: pytest.Session | None = None
        self._cuda_has_ended = False

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        part = [item for place, item in enumerate(items) if place % self._num_shards == self._shard]
        chosen = {item.nodeid for item in part} - self._done
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session, self._num_left = session, len(session.items)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._clock() >= self._end:
            pytest.exit(f"the time is over, {self._num_left} tests are left: run it again", returncode=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Those that fail as expected have passed, too."""
        if report.failed:
            _add_line(self._failed_path, report.nodeid)
            if any(each in report.longreprtext for each in _ENDS) and self._session is not None:
                self._cuda_has_ended = True
                self._session.shouldstop = f"CUDA has ended in {report.nodeid}"
        if report.when != "call":
            return
        self._num_left -= 1
        if report.passed or hasattr(report, "wasxfail"):
            _add_line(self._path, report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Nothing left to run is no failure, unless nothing has ever been run."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed:
            session.exitstatus = pytest.ExitCode.OK
        if self._cuda_has_ended:
            session.exitstatus = CUDA_HAS_ENDED


def _lines_of(path: Path | None) -> frozenset[str]:
    return frozenset(path.read_text().splitlines()) if path is not None and path.exists() else frozenset()


def _add_line(path: Path | None, line: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{line}\n")


def pytest_configure(config: pytest.Config) -> None:
    failed = os.environ.get("GPU_TESTS_FAILED")
    shard, num_shards = map(int, os.environ.get("GPU_TESTS_SHARD", "0/1").split("/"))
    progress = Progress(
        Path(os.environ["GPU_TESTS_PASSED"]),
        float(os.environ["GPU_TESTS_SECONDS"]),
        failed=None if failed is None else Path(failed),
        shard=(shard, num_shards),
    )
    config.pluginmanager.register(progress)
