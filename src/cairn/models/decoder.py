"""A decoder of pre-norm residual layers, executed: each layer is x + mixer(norm(x)), so that a block of attention and
feed-forward is two of them. On each of several ranks a mixer gives a partial sum.
"""

from dataclasses import dataclass

from torch import Tensor

from cairn.layers.batch import Batch
from cairn.layers.blend import Mixer
from cairn.layers.communicator import Communicator
from cairn.layers.embedding import TokenVectors
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory, MemorySpec
from cairn.layers.norms import RMSNorm

Layer = tuple[RMSNorm, Mixer]


@dataclass(frozen=True, slots=True)
class Decoder:
    """The model, or one rank's share. `linears`: every matrix product. `embedding_scale`, `logit_scale`: what a family
    multiplies with."""

    spec: MemorySpec
    exact: bool
    vocab_size: int
    communicator: Communicator
    embedding: TokenVectors
    layers: tuple[Layer, ...]
    final_norm: RMSNorm
    lm_head: Linear
    linears: tuple[Linear, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0

    def forward(self, batch: Batch, memory: Memory) -> Tensor:
        """See `Model.forward`."""
        hidden = self.embedding(batch.tokens)
        if self.embedding_scale != 1.0:
            hidden.mul_(self.embedding_scale)
        hidden = batch.replace(hidden)
        for norm, mixer in self.layers:
            hidden.add_(self.communicator.gather_add(mixer(norm(hidden), batch, memory)))
        return self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        mine = self.lm_head.row_tiled(hidden) if self.exact else self.lm_head(hidden, None)
        logits = self.communicator.gather_columns(mine)[:, : self.vocab_size].float()
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale
