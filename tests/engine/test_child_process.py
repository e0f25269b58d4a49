"""A child process of the engine."""

import signal
import subprocess
import sys

CRASHES = """
import ctypes, sys
from cairn.engine.child_process import run_child

def read_nothing(parent):
    ctypes.string_at(0)

run_child(sys.argv[1:], "core", read_nothing)
"""


def test_a_child_that_crashes_says_where_each_thread_was(tmp_path):
    command = [sys.executable, "-c", CRASHES, f"ipc://{tmp_path}/core", "INFO"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        # until it has ended its standard input stays open, at whose end it would exit by itself
        log = child.stderr.read()
    assert child.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in log
    assert " in read_nothing" in log and " in _exit_with_parent" in log
