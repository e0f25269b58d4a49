"""A decoder of pre-norm residual layers, executed: each layer is x + mixer(norm(x)), so that a block of attention and
feed-forward is two of them. On each of several ranks a mixer gives a partial sum.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels, Weight
from cairn.layers.blend import Mixer
from cairn.layers.communicator import Communicator
from cairn.layers.embedding import TokenVectors
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory, MemorySpec
from cairn.layers.norms import RMSNorm
from cairn.layers.rotary import Rotary

Layer = tuple[RMSNorm, Mixer]


@dataclass(frozen=True, slots=True)
class Decoder:
    """The model, or one rank's share. `lm_head`: the output's weight, packed. `linears`: every matrix
    product. `rotary`: turns queries and keys, None where nothing does. `embedding_scale`, `logit_scale`: what a family
    multiplies with."""

    kernels: Kernels
    spec: MemorySpec
    exact: bool
    vocab_size: int
    communicator: Communicator
    embedding: TokenVectors
    layers: tuple[Layer, ...]
    final_norm: RMSNorm
    lm_head: Weight
    linears: tuple[Linear, ...]
    rotary: Rotary | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0

    def forward(self, batch: Batch, memory: Memory) -> Tensor:
        """See `Model.forward`."""
        hidden = self.embedding(batch.tokens)
        if self.embedding_scale != 1.0:
            hidden.mul_(self.embedding_scale)
        if batch.multimodal_embeddings is not None:
            hidden[batch.multimodal_embeddings.rows] = batch.multimodal_embeddings.values.to(hidden.dtype)
        if self.rotary is not None:
            cos, sin = self.rotary.at(batch.positions)
            batch = replace(batch, cos=cos, sin=sin)
        normed = self.layers[0][0](hidden)
        # A layer's sum and the next one's norm go through memory once.
        norms = [*(norm for norm, _ in self.layers[1:]), self.final_norm]
        for (_, mixer), norm in zip(self.layers, norms, strict=True):
            normed = norm.of_sum(hidden, self.communicator.gather_add(mixer(normed, batch, memory)))
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        mine = self.kernels.lm_head(hidden, self.lm_head)
        logits = self.communicator.gather_columns(mine)[:, : self.vocab_size]
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale
