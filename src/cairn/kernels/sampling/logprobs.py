"""Log-probabilities of tokens, in torch."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class LogprobTensors(NamedTuple):
    """A `cairn.step.Logprobs` on the device."""

    token_ids: Tensor
    values: Tensor
    ranks: Tensor


class ComputeLogprobs(Protocol):
    """See `Kernels.logprobs`."""

    def __call__(
        self, logits: Tensor, tokens: Tensor, num_top: int, listed: Tensor | None = None, rows: Tensor | None = None, /
    ) -> LogprobTensors: ...


def compute_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, listed: Tensor | None = None, rows: Tensor | None = None
) -> LogprobTensors:
    """See `Kernels.logprobs`."""
    logits = logits if rows is None else logits[rows]
    values = logits.log_softmax(-1)
    token_values = values.gather(1, tokens[:, None])
    ranks = (values > token_values).sum(-1) + 1
    if listed is None:
        other_values, listed = values.topk(min(num_top, values.shape[1]), dim=-1)
    else:
        other_values = values.gather(1, listed)
    token_ids = torch.cat([tokens[:, None], listed], dim=1)
    return LogprobTensors(token_ids.int(), torch.cat([token_values, other_values], dim=1), ranks.int())
