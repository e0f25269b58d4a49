"""The tests of `gpu_progress` in several processes on one GPU: compiling takes most of their time, and that is the
processors'. One whose CUDA has ended is started again with the tests that it has not run.

    GPU_TESTS_PASSED=FILE GPU_TESTS_SECONDS=450 python3 tests/kernels/gpu_run.py --workers 8 PYTEST_ARGUMENT ...

What each has said is in a file beside FILE; failures are repeated at the end.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.gpu_progress import CUDA_HAS_ENDED

NOTHING_COLLECTED = 5
"""Of a part without tests."""


def run_shard(arguments: Sequence[str], passed: Path, seconds: float, shard: int, num_shards: int) -> tuple[int, str]:
    """The exit code of the last of the processes that a part has taken, and what all of them have printed."""
    end, said = time.monotonic() + seconds, ""
    failed = passed.with_suffix(f".failed-{shard}")
    failed.unlink(missing_ok=True)
    while True:
        environ = {
            "GPU_TESTS_PASSED": str(passed),
            "GPU_TESTS_FAILED": str(failed),
            "GPU_TESTS_SECONDS": str(max(0.0, end - time.monotonic())),
            "GPU_TESTS_SHARD": f"{shard}/{num_shards}",
        }
        command = [sys.executable, "-m", "pytest", "-p", "kernels.gpu_progress", *arguments]
        done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
        said += done.stdout + done.stderr
        passed.with_suffix(f".log-{shard}").write_text(said)
        if done.returncode != CUDA_HAS_ENDED or time.monotonic() >= end:
            break
    code = 0 if done.returncode == NOTHING_COLLECTED else done.returncode
    return (1 if failed.exists() else code), said


def main() -> int:
    """Returns 1 if a test has failed or is left."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    asked, arguments = parser.parse_known_args()
    passed, seconds = Path(os.environ["GPU_TESTS_PASSED"]), float(os.environ["GPU_TESTS_SECONDS"])
    passed.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(asked.workers) as pool:
        runs = [
            pool.submit(run_shard, arguments, passed, seconds, shard, asked.workers) for shard in range(asked.workers)
        ]
        results = [run.result() for run in runs]
    for code, said in results:
        print(said if code else said.rstrip().rpartition("\n")[2])
    num_passed = len(set(passed.read_text().splitlines())) if passed.exists() else 0
    failures = [
        line
        for shard in range(asked.workers)
        if (path := passed.with_suffix(f".failed-{shard}")).exists()
        for line in path.read_text().splitlines()
    ]
    print(f"{num_passed} tests have passed so far, {len(failures)} have failed now", *failures, sep="\n  ")
    return int(any(code for code, _ in results))


if __name__ == "__main__":
    sys.exit(main())
