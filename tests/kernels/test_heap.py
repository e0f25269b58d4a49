"""Memory that steps free comes again without the system."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from cairn.kernels.cpu.heap import keep_freed_memory

def layer():
    return [torch.ones(12 << 20, dtype=torch.uint8) for _ in range(3)]

if sys.argv[1] == "kept":
    keep_freed_memory()
layer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_blocks_of_activations_are_used_again() -> None:
    faults = {}
    for kept in ("kept", "given back"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, kept], capture_output=True, text=True, check=True)
        faults[kept] = int(done.stdout)
    pages = 10 * 3 * (12 << 20) // 4096
    assert faults["kept"] < pages // 20 < faults["given back"]
