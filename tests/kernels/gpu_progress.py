"""A pytest plugin for runs on a machine that is lent for minutes: tests that have passed are not run again, and a run
ends before it is cut off.

    GPU_TESTS_PASSED=FILE GPU_TESTS_SECONDS=450 python3 -m pytest -p kernels.gpu_progress ...
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest


class Progress:
    """`path`: where the ids of tests that have passed are kept, a line each. `seconds`: after how many of `clock` no
    further test begins."""

    def __init__(self, path: Path, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._end = clock() + seconds
        self._passed = frozenset(path.read_text().splitlines()) if path.exists() else frozenset()
        self._num_left = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._passed])
        items[:] = [item for item in items if item.nodeid not in self._passed]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._num_left = len(session.items)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._clock() >= self._end:
            pytest.exit(f"the time is over, {self._num_left} tests are left: run it again", returncode=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Those that fail as expected have passed, too."""
        if report.when != "call":
            return
        self._num_left -= 1
        if report.passed or hasattr(report, "wasxfail"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Nothing left to run is no failure, unless nothing has ever been run."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed:
            session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
    path = Path(os.environ["GPU_TESTS_PASSED"])
    config.pluginmanager.register(Progress(path, float(os.environ["GPU_TESTS_SECONDS"])))
