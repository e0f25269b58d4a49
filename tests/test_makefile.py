"""The Makefile's lanes: which of them may see a GPU. Nothing is made."""

import shutil
import subprocess

import pytest

from source_scan import ROOT

CPU_LANES = ("test", "test-more", "test-ui", "test-kernels", "test-clients", "test-ray", "test-long", "soak-server")
CPU_LANES += ("demo", "demo-pd", "demo-ray", "benchmarks", "bench-vllm", "bench-llama", "check-docker", "soak")
GPU_LANES = ("test-gpu", "test-gpu-engine")
HIDDEN = "CUDA_VISIBLE_DEVICES= "
RUNS = (
    " -m pytest",
    " -m demo",
    " -m benchmarks.",
    " tests/pd/soak.py",
    " tests/server/soak.py",
    " -m deploy.",
    " tests/kernels/gpu_run.py",
)
HAVE_NO_DEVICE = ("benchmarks.peer_vllm", "benchmarks.peer_llama")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def runs_of(lane: str) -> list[str]:
    """What `make lane` would have run, a command a line."""
    told = subprocess.run(["make", "-n", lane], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lines = told.stdout.replace("\\\n", " ").splitlines()
    return [
        line for line in lines if any(run in line for run in RUNS) and not any(one in line for one in HAVE_NO_DEVICE)
    ]


@pytest.mark.parametrize("lane", CPU_LANES)
def test_lanes_of_the_cpu_see_no_gpu(lane):
    """--device auto would take it."""
    runs = runs_of(lane)
    assert runs and all(HIDDEN in run for run in runs)


@pytest.mark.parametrize("lane", GPU_LANES)
def test_lanes_of_the_gpu_do(lane):
    runs = runs_of(lane)
    assert runs and not any("CUDA_VISIBLE_DEVICES" in run for run in runs)
