"""An event loop that a test turns by hand, with a clock that stands still unless told."""

from cairn.engine.transfers.loop import ClockedLoop


class TurnedLoop(ClockedLoop):
    """`spin` does all that can be done without time passing. Goes with its world, whatever waits in it."""

    def spin(self, most=10_000) -> None:
        for _ in range(most):
            self.call_soon(self.stop)
            self.run_forever()
            due = self._scheduled and not self._scheduled[0]._cancelled and self._scheduled[0]._when <= self.time()
            if not self._ready and not due:
                return
        raise AssertionError("no end in sight")

    def create_task(self, coro, **arguments):
        task = super().create_task(coro, **arguments)
        task._log_destroy_pending = False
        return task

    def _check_closed(self) -> None:
        """What waits in it may come to its end later than the loop."""

    def __del__(self) -> None:
        if not self.is_closed():
            self.close()
