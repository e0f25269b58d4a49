"""An event loop in which no time passes but what is waited for."""

import asyncio
import selectors


class _NoWaiting(selectors.SelectSelector):
    """Where a selector would wait, the clock is put forward."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        found = super().select(0)
        if not found:
            assert timeout is not None, "everything waits, and nothing will ever happen"
            self.now += max(timeout, 0.0)
        return found


class VirtualTime(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and jumps from one timer to the next. Nothing in it may wait for threads or sockets."""

    def __init__(self):
        self._virtual = _NoWaiting()
        super().__init__(self._virtual)

    def time(self):
        return self._virtual.now


def run(coroutine):
    """What `coroutine` returns, as asyncio.run, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(coroutine)
