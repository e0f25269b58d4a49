"""Who is told what the scheduler does with requests, right after it has: `cairn.engine.request_log.log.RequestLog`."""

from typing import Protocol

from cairn.scheduler.plan_builder import PlanBuilder
from cairn.scheduler.request import Request


class RequestObserver(Protocol):
    """Called by the scheduler's thread. Must neither block nor call back."""

    def submitted(self, request: Request) -> None: ...

    def planned(self, builder: PlanBuilder) -> None:
        """A step is complete: its rows, and the files for the checkpoints that they keep."""
        ...

    def ended(self, request: Request) -> None:
        """It holds nothing any more, and no step names it."""
        ...
