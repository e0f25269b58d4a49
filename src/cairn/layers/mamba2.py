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
class Mamba2Shape:
    """Sizes of the mixer. `dt_limit` bounds softplus(dt + dt_bias)."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner(self) -> int:
        """Channels of x and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def bc(self) -> int:
        """Channels of B, and of C."""
        return self.num_groups * self.state_size


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """All float32: conv [W, channels] (taps oldest first), conv_bias [channels] or None, a = -exp(A_log), d and
    dt_bias [heads]."""

    conv: Tensor
    conv_bias: Tensor | None
    a: Tensor
    d: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True)
class Mamba2:
    """One rank's heads, all with their states. `layer` counts the model's recurrent layers."""

    kernels: Kernels
    shape: Mamba2Shape
    weights: Mamba2Weights
    in_proj: Projection
    norm: GatedNorm
    out_proj: Projection
    layer: int

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]. Moves the live states of the batch's slots on by
        its tokens."""
        shape, weights, states = self.shape, self.weights, memory.recurrent[self.layer]
        rows = hidden.shape[0]
        widths = [shape.inner, shape.inner + 2 * shape.bc, shape.num_heads]
        gate, channels, dt = torch.split(self.in_proj(hidden, batch), widths, dim=-1)
        channels, kept_conv = self.kernels.conv(channels, weights.conv, weights.conv_bias, states.conv, batch)
        x, b, c = torch.split(channels, [shape.inner, shape.bc, shape.bc], dim=-1)
        y, kept_state = self.kernels.ssd(
            x.view(rows, shape.num_heads, shape.head_dim),
            dt,
            b.view(rows, shape.num_groups, shape.state_size),
            c.view(rows, shape.num_groups, shape.state_size),
            weights.a,
            weights.d,
            weights.dt_bias,
            shape.dt_limit,
            states.state,
            batch,
        )
        memory.write_snapshots(self.layer, kept_conv, kept_state)
        return self.out_proj(self.norm(y.flatten(1), gate), batch)
