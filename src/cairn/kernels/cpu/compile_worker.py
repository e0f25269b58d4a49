"""A process that compiles kernels beside the one that waits for them.

    python -m cairn.kernels.cpu.compile_worker [TASK...]

Started by `warm_up`, which ends it when all of the tasks are done, by whichever process. Without tasks it has all
kernels compiled, for every model and dtype, and waits for them: before tests, or when an image is made.
"""

import sys
from collections.abc import Sequence

from cairn.kernels.cpu.warm_up import Task, warm_up


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        warm_up()
    for task in map(Task.parse, arguments):
        task.kernel.compile_if_free(task.key)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
