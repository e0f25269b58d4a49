"""Qwen3-Next's attention: a gate on every output channel, normed queries and keys, partial rotary positions."""

from dataclasses import dataclass

from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.layers.attention import attend
from cairn.layers.batch import Batch
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory
from cairn.layers.norms import RMSNorm
from cairn.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """One rank's heads. `query_gate` gives of each head its query and then its gate, both `head_dim` wide; the norms
    are over one head. `layer` counts the model's attention layers."""

    kernels: Kernels
    query_gate: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    rotary: Rotary
    head_dim: int
    layer: int

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        rows, tiles = hidden.shape[0], batch.tiles
        query, gate = self.query_gate(hidden, tiles).view(rows, -1, 2, self.head_dim).unbind(2)
        k, v = (each(hidden, tiles).view(rows, -1, self.head_dim) for each in (self.k_proj, self.v_proj))
        rotation = self.rotary.at(batch.positions)
        q, k = rotation(self.q_norm(query)), rotation(self.k_norm(k))
        out = attend(self.kernels, (q, k, v), batch, memory, self.layer)
        out.mul_(self.kernels.sigmoid(gate))
        return self.o_proj(out.view(rows, -1), tiles)
