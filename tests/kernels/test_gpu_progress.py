"""Runs that are cut off: what has passed is remembered, what has not is run again."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.outcomes import Exit

from kernels.gpu_progress import CUDA_HAS_ENDED, Progress


def report(nodeid: str, outcome: str = "passed", when: str = "call", text: str = "", **more: str) -> Any:
    is_failed = outcome == "failed"
    return SimpleNamespace(
        nodeid=nodeid, when=when, passed=outcome == "passed", failed=is_failed, longreprtext=text, **more
    )


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


def test_parts_are_all_of_it_and_share_nothing(tmp_path: Path) -> None:
    names = [f"test-{number}" for number in range(7)]
    parts = [left_of(Progress(tmp_path / "passed", 60, shard=(shard, 3)), *names) for shard in range(3)]
    assert parts[0] == ["test-0", "test-3", "test-6"]
    assert sorted(name for part in parts for name in part) == names
    # what has passed is left out of the same parts
    (tmp_path / "passed").write_text("test-3\n")
    assert left_of(Progress(tmp_path / "passed", 60, shard=(0, 3)), *names) == ["test-0", "test-6"]


def test_a_process_whose_cuda_has_ended_runs_nothing_more(tmp_path: Path) -> None:
    failed = tmp_path / "failed"
    progress = Progress(tmp_path / "passed", 60, failed=failed)
    left_of(progress, "a", "b", "c")
    session: Any = SimpleNamespace(items=[], shouldstop=False, exitstatus=2)
    progress.pytest_collection_finish(session)
    progress.pytest_runtest_logreport(report("a", "failed", text="assert 1 == 2"))
    assert not session.shouldstop
    progress.pytest_runtest_logreport(report("b", "failed", text="AcceleratorError: CUDA error: device-side assert"))
    assert session.shouldstop == "CUDA has ended in b"
    progress.pytest_sessionfinish(session, 2)
    assert session.exitstatus == CUDA_HAS_ENDED
    assert left_of(Progress(tmp_path / "passed", 60, failed=failed), "a", "b", "c") == ["c"]


TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(9))
def test_cuda(number):
    if number == 4:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert number != 7
    assert os.environ["GPU_TESTS_SHARD"] == f"{number % 2}/2"
"""


def test_several_processes_run_all_that_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    root = Path(__file__).parents[1]
    environ = {
        "PYTHONPATH": str(root),
        "GPU_TESTS_PASSED": str(tmp_path / "made" / "passed"),
        "GPU_TESTS_SECONDS": "100",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    options = ["-q", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command = [sys.executable, str(root / "kernels" / "gpu_run.py"), "--workers", "2", *options, "test_some.py"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | environ, capture_output=True, text=True, check=False, timeout=100
        )

    first = run()
    assert first.returncode == 1 and "7 tests have passed so far, 2 have failed now" in first.stdout, first.stdout
    assert "test_some.py::test_cuda[4]" in first.stdout and "illegal memory access" in first.stdout
    (tmp_path / "test_some.py").write_text(TESTS.replace("== 4", "== 40").replace("!= 7", "!= 70"))
    again = run()
    assert again.returncode == 0 and "9 tests have passed so far, 0 have failed now" in again.stdout, again.stdout
    assert "2 passed" not in again.stdout and again.stdout.count("1 passed") == 2
