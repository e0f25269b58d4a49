"""Where the engine cores of the NIXL tests come from: a process that has imported torch, and forks on request.

`python nixl_nursery.py` reads requests from the socket that is its standard input: JSON, and with it three files that
become the child's standard input, output and error. It answers with the child's process id. Each child runs the worker
of `cairn.engine` as `ProcessTransport` would have started it: only the import of torch is saved.

`build` is the core's factory in there. Its clock can be moved on from outside, so that nothing waits for a lease of 30
seconds to run out.
"""

import json
import mmap
import os
import signal
import socket
import sys
import time
import traceback

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.core import Core
from cairn.engine.worker import main as work
from cairn.models import decoder_builder

CLOCK = "CAIRN_TEST_CLOCK"
"""Names the file with the seconds that the clock is ahead: one float64."""


class ShiftedClock:
    """The system's, moved on by what the file at `path` says."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._ahead = memoryview(mmap.mmap(file.fileno(), 8)).cast("d")

    def now(self) -> float:
        return time.monotonic() + self._ahead[0]


def build(config: EngineConfig) -> Core:
    return build_core(config, ShiftedClock(os.environ[CLOCK]))


def _child(order: dict, files: list[int]) -> None:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.environ.update(order["environ"])
        code = work([order["address"], order["level"], "nixl_nursery:build"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    assert decoder_builder  # imported by now, and once
    # the forked worker imports this module by its name: it is there already
    sys.modules["nixl_nursery"] = sys.modules["__main__"]
    line = socket.socket(fileno=os.dup(0))
    line.sendall(b"ready")
    while True:
        order, files, _, _ = socket.recv_fds(line, 1 << 16, 3)
        if not order:
            return
        child = os.fork()
        if child == 0:
            line.close()
            _child(json.loads(order), files)
        for file in files:
            os.close(file)
        line.sendall(child.to_bytes(4, "little"))


if __name__ == "__main__":
    main()
