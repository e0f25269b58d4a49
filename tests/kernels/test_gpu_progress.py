"""Runs that are cut off: what has passed is remembered, what has not is run again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.outcomes import Exit

from kernels.gpu_progress import Progress


def report(nodeid: str, outcome: str = "passed", when: str = "call", **more: str) -> Any:
    return SimpleNamespace(nodeid=nodeid, when=when, passed=outcome == "passed", **more)


def left_of(progress: Progress, *nodeids: str) -> list[str]:
    """What is run of these tests."""
    deselected: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    items: Any = [SimpleNamespace(nodeid=nodeid) for nodeid in nodeids]
    progress.pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)  # type: ignore[arg-type]
    progress.pytest_collection_finish(SimpleNamespace(items=items))  # type: ignore[arg-type]
    assert len(items) + len(deselected) == len(nodeids)
    return [item.nodeid for item in items]


def finished(progress: Progress, exitstatus: int) -> int:
    session = SimpleNamespace(exitstatus=exitstatus)
    progress.pytest_sessionfinish(session, exitstatus)  # type: ignore[arg-type]
    return session.exitstatus


def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "made" / "passed"
    first = Progress(path, 60)
    assert left_of(first, "a", "b[1 2]", "c", "d") == ["a", "b[1 2]", "c", "d"]
    first.pytest_runtest_logreport(report("a", when="setup"))
    first.pytest_runtest_logreport(report("b[1 2]"))
    first.pytest_runtest_logreport(report("c", "failed"))
    first.pytest_runtest_logreport(report("d", "skipped", wasxfail="a known limit"))
    second = Progress(path, 60)
    assert left_of(second, "a", "b[1 2]", "c", "d") == ["a", "c"]
    second.pytest_runtest_logreport(report("a"))
    second.pytest_runtest_logreport(report("c"))
    assert left_of(Progress(path, 60), "a", "b[1 2]", "c", "d") == []


def test_no_test_begins_behind_the_end(tmp_path: Path) -> None:
    now = [100.0]
    progress = Progress(tmp_path / "passed", 60, lambda: now[0])
    left_of(progress, "a", "b", "c")
    item: Any = SimpleNamespace(nodeid="a")
    now[0] = 159
    progress.pytest_runtest_setup(item)
    progress.pytest_runtest_logreport(report("a"))
    now[0] = 160
    with pytest.raises(Exit, match="2 tests are left") as end:
        progress.pytest_runtest_setup(item)
    assert end.value.returncode == 1


def test_nothing_left_to_run_is_a_success_and_nothing_to_run_is_not(tmp_path: Path) -> None:
    path = tmp_path / "passed"
    assert finished(Progress(path, 60), pytest.ExitCode.NO_TESTS_COLLECTED) == pytest.ExitCode.NO_TESTS_COLLECTED
    path.write_text("a\n")
    assert finished(Progress(path, 60), pytest.ExitCode.NO_TESTS_COLLECTED) == pytest.ExitCode.OK
    assert finished(Progress(path, 60), pytest.ExitCode.TESTS_FAILED) == pytest.ExitCode.TESTS_FAILED
