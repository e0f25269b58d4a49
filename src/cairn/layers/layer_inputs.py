"""Inputs of every layer that are not hidden states (Gemma 3n's and Gemma 4's per-layer embeddings): of each token a
small vector a layer, of an embedding of their own and of the embedding that the first layer gets. They are made once a
pass; a layer takes them in behind its feed-forward.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory
from cairn.layers.norms import RMSNorm


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """scale * (norm(projection_scale * projection(x)) + embedding(token)), where x is what the first layer gets.
    `embedding` and `projection` have all layers' vectors side by side; `norm` is over one."""

    embedding: Callable[[Tensor], Tensor]
    projection: Linear
    norm: RMSNorm
    num_layers: int
    projection_scale: float
    scale: float

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        """[rows, hidden] -> [layers, rows, width]."""
        projected = self.projection(hidden, batch).mul_(self.projection_scale)
        inputs = self.norm(projected.view(len(hidden), self.num_layers, -1))
        inputs.add_(self.embedding(batch.tokens).view(inputs.shape)).mul_(self.scale)
        return inputs.transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class LayerInputMixer:
    """out(gelu(gate x) * input), one rank's `columns` of the input of layer `layer`."""

    kernels: Kernels
    gate: Linear
    out: Linear
    layer: int
    columns: slice

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        assert batch.layer_inputs is not None
        inputs = batch.layer_inputs[self.layer][:, self.columns]
        return self.out(self.kernels.gelu_mul(self.gate(hidden, batch), inputs), batch)
