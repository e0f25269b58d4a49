"""Memory that steps free comes again without the system."""

import os
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
for _ in range(40):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_blocks_of_activations_are_used_again() -> None:
    # As glibc begins; it may come to keep blocks by itself, which depends on what lies between them.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    faults = {}
    for kept in ("kept", "given back"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, kept], capture_output=True, text=True, check=True, env=environ
        )
        faults[kept] = int(done.stdout)
    assert 4 * faults["kept"] < faults["given back"]
