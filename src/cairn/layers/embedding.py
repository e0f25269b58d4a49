"""Token ids to vectors."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

__all__ = ["Embedding"]


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight [vocab, hidden]."""

    weight: Tensor

    def __call__(self, tokens: Tensor) -> Tensor:
        """[rows] int64 -> [rows, hidden]."""
        return F.embedding(tokens, self.weight)
