"""A process that compiles kernels beside the one that waits for them.

    python -m cairn.kernels.cpu.compile_worker TASK...

Started by `warm_up`, which ends it when all of the tasks are done, by whichever process.
"""

import sys
from collections.abc import Sequence

from cairn.kernels.cpu.warm_up import Task


def main(arguments: Sequence[str]) -> int:
    for task in map(Task.parse, arguments):
        task.kernel.compile_if_free(task.key)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
