"""Attention whose queries and keys are turned by their positions."""

from dataclasses import dataclass

from torch import Tensor

from cairn.kernels.contract import Kernels, Tiles
from cairn.layers.attention import attend
from cairn.layers.batch import Batch
from cairn.layers.linear import Projection
from cairn.layers.memory import Memory
from cairn.layers.norms import RMSNorm
from cairn.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class HeadNormedLinear:
    """A projection each of whose heads is normed by itself; the norm's weight is [head dim]."""

    linear: Projection
    norm: RMSNorm

    def __call__(self, x: Tensor, tiles: Tiles | None) -> Tensor:
        """See `Projection`."""
        out = self.linear(x, tiles)
        return self.norm(out.view(out.shape[0], -1, self.norm.weight.shape[0])).view(out.shape)


@dataclass(frozen=True, slots=True)
class RotaryAttention:
    """Rotary position embeddings (arXiv 2104.09864) on queries and keys, one rank's heads. `layer` counts the model's
    attention layers."""

    kernels: Kernels
    q_proj: Projection
    k_proj: Projection
    v_proj: Projection
    o_proj: Projection
    rotary: Rotary
    head_dim: int
    layer: int

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        rows = hidden.shape[0]
        q, k, v = (
            projection(hidden, batch.tiles).view(rows, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        rotation = self.rotary.at(batch.positions)
        out = attend(self.kernels, (rotation(q), rotation(k), v), batch, memory, self.layer)
        return self.o_proj(out.view(rows, -1), batch.tiles)
