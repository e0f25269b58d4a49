"""What draws tokens, and the counts that it keeps, as each kernel backend has them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from cairn.kernels.sampling.metadata import SamplingMetadata, TokenHistory
from cairn.kernels.staging import Staging


class TokenCounts(Protocol):
    """How often each slot's sequence has each token, for penalties: on the device. Memory of one sampler alone."""

    def admit(self, histories: Sequence[TokenHistory], staging: Staging) -> Callable[[], None]:
        """Sequences begin, or begin again, in slots that are all different. What is returned is to be called once
        `staging` has been sent."""


class Sampler(Protocol):
    """Draws the tokens of one step. `has_processors`: whether parameters of any row change logits."""

    has_processors: bool

    def sample(self, logits: Tensor, slots: Sequence[int], samples: Sequence[SamplingMetadata], counts: Any) -> Tensor:
        """Tokens, int64 [n], from float32 [n, vocab], which is not changed. `samples`: of each row, or empty where no
        row has a logits processor. `slots`: of each row, in `counts` (the `TokenCounts` of the same backend), to which
        new tokens of rows with penalties are added.

        What processors need of the host is one copy of its own. Raises ValueError for a mask that does not fit.
        """
