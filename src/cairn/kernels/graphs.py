"""What records the launches of a pass, so that it is made again without its host code."""

from collections.abc import Callable
from typing import Protocol

from cairn.kernels.batch import HostBatch


class Graphs(Protocol):
    """What records the launches of a pass, to be made again with the same arguments."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` launches; returns what launches it again. Memory that is allocated meanwhile is shared with
        other graphs and holds nothing from one launch to the next."""


class StepGraphs(Graphs, Protocol):
    """What records a pass while it is computed."""

    def set_lengths(self, metadata: object, host: HostBatch) -> None:
        """Bring what `Kernels.build_metadata` gave for a captured batch to the lengths of the step that comes next.
        `host`: of as many decodes, without snapshots."""


def no_step_graphs() -> None:
    """`Kernels.step_graphs` of a backend that records no steps."""
