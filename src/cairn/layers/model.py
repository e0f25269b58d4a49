"""A model as the runner sees it, whatever its family."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels
from cairn.layers.communicator import Communicator
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory, MemorySpec


class Model(Protocol):
    """A causal language model that runs flattened batches. `exact`: on a backend where a row's bits do not depend on
    the batch.

    Where a model is cut among ranks, this is one rank's share. All of them run the same batches, each on its own
    memory, and have the same hidden states and logits.
    """

    @property
    def spec(self) -> MemorySpec:
        """What this rank remembers."""
        ...

    @property
    def communicator(self) -> Communicator: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def exact(self) -> bool: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def linears(self) -> Sequence[Linear]:
        """Every matrix product of this rank, for the self test of exact mode."""
        ...

    def forward(self, batch: Batch, memory: Memory) -> Tensor:
        """The hidden states after the final norm, [rows, hidden]. Updates the live states of the batch's slots,
        writes its keys and values, and hands over its snapshots."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        ...
