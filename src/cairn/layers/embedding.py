"""Token ids to vectors."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.layers.communicator import Communicator


class TokenVectors(Protocol):
    """Token ids to vectors."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """[rows] int64 -> [rows, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight [vocab, hidden]."""

    kernels: Kernels
    weight: Tensor

    def __call__(self, tokens: Tensor) -> Tensor:
        """See `TokenVectors`."""
        return self.kernels.embed(tokens, self.weight)


@dataclass(frozen=True, slots=True)
class SpreadEmbedding:
    """A vocabulary that is spread over ranks: `weight` [rows, hidden] has the tokens from `first` on.

    A token's vector comes from one rank and zeros from all others, so their sum is exact.
    """

    kernels: Kernels
    weight: Tensor
    first: int
    communicator: Communicator

    def __call__(self, tokens: Tensor) -> Tensor:
        """See `TokenVectors`."""
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        vectors = self.kernels.embed(local.masked_fill(elsewhere, 0), self.weight)
        return self.communicator.gather_add(vectors.masked_fill_(elsewhere[:, None], 0.0))
