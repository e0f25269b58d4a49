"""Collective operations among the tensor-parallel ranks of one model.

Every mixer of a rank gives a *partial sum* of [rows, hidden]. On the CPU, and with `--exact` everywhere, the ranks'
partial sums are gathered and added in rank order: the order of a ring's additions depends on where in the buffer a
number stands, and then a row's bits would depend on its batch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Communicator(Protocol):
    """One rank's collective operations. All ranks make the same calls in the same order, with tensors of one shape on
    the devices of their own.

    Where the host carries them out, every call waits for all ranks, at most as long as the implementation states, and
    raises EngineDead when one of them does not come. Where devices do, no call waits, and a rank that is lost is
    missed by whoever waits for the step. The result has the same bits on every rank and belongs to the caller; it may
    be the argument itself.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: "Tensor") -> "Tensor":
        """The sum over ranks; same shape and dtype as `partial`. In rank order and at least in float32 where a row's
        bits must not depend on its batch."""

    def gather_columns(self, part: "Tensor") -> "Tensor":
        """[..., n] -> [..., n * size], the ranks' columns in rank order."""

    def broadcast(self, numbers: "Tensor") -> "Tensor":
        """Rank 0's numbers, of any dtype. Those of the other ranks are ignored."""


@dataclass(frozen=True, slots=True)
class SingleRank:
    """The only rank: every call returns its argument."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, partial: "Tensor") -> "Tensor":
        return partial

    def gather_columns(self, part: "Tensor") -> "Tensor":
        return part

    def broadcast(self, numbers: "Tensor") -> "Tensor":
        return numbers


SINGLE_RANK: Final = SingleRank()
