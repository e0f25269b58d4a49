"""The Mamba2 mixer (arXiv 2405.21060): projection, short convolution, state space scan, gated norm, projection."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels
from cairn.layers.linear import Projection
from cairn.layers.memory import Memory
from cairn.layers.norms import GatedNorm


@dataclass(frozen=True, slots=True)
class Mamba2:
    """One rank's heads. `in_proj` gives gate | x | B | C | dt.

    All float32: `conv` [W, x | B | C] (taps oldest first), `conv_bias` [x | B | C] or None, `a` = -exp(A_log), `d` and
    `dt_bias` [heads]. `dt_limit` bounds softplus(dt + dt_bias). `layer` counts the model's recurrent layers.
    """

    kernels: Kernels
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    dt_limit: tuple[float, float]
    in_proj: Projection
    conv: Tensor
    conv_bias: Tensor | None
    a: Tensor
    d: Tensor
    dt_bias: Tensor
    norm: GatedNorm
    out_proj: Projection
    layer: int

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]. Moves the live states of the batch's slots on by
        its tokens."""
        projected = self.in_proj(hidden, batch)
        if batch.host.num_verifies:
            memory.keep_inputs(projected, self._scan)
        y, gate = self._scan(projected, batch, memory)
        return self.out_proj(self.norm(y, gate), batch)

    def _scan(self, projected: Tensor, batch: Batch, memory: Memory) -> tuple[Tensor, Tensor]:
        """y and gate, both [rows, inner], of what `in_proj` gave."""
        rows, states = projected.shape[0], memory.recurrent[self.layer]
        inner, bc = self.num_heads * self.head_dim, self.num_groups * self.state_size
        gate, channels, dt = torch.split(projected, [inner, inner + 2 * bc, self.num_heads], dim=-1)
        channels, conv_snapshots = self.kernels.conv(channels, self.conv, self.conv_bias, states.conv, batch)
        x, b, c = torch.split(channels, [inner, bc, bc], dim=-1)
        y, state_snapshots = self.kernels.ssd(
            x.view(rows, self.num_heads, self.head_dim),
            dt,
            b.view(rows, self.num_groups, self.state_size),
            c.view(rows, self.num_groups, self.state_size),
            self.a,
            self.d,
            self.dt_bias,
            self.dt_limit,
            states.state,
            batch,
        )
        memory.write_snapshots(self.layer, conv_snapshots, state_snapshots)
        return y.flatten(1), gate
