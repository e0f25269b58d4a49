"""The gated delta net (arXiv 2412.06464): projection, short convolution, delta rule, gated norm, projection."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory
from cairn.layers.norms import RMSNorm


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of the mixer. A key head serves value_heads / key_heads consecutive value heads."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Channels of q, and of k."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of v, and of the output gate."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """All float32: conv [W, q | k | v] (taps oldest first), a = -exp(A_log) and dt_bias [value heads]."""

    conv: Tensor
    a: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """One rank's heads, all with their states. `layer` counts the model's recurrent layers.

    `in_proj` gives q | k | v | output gate | beta | time step; `norm` is over one value head. `own`: the value
    channels that this rank contributes of those it holds, None for all.
    """

    kernels: Kernels
    shape: DeltaShape
    weights: DeltaWeights
    in_proj: Linear
    norm: RMSNorm
    out_proj: Linear
    layer: int
    own: slice | None = None

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]. Moves the live states of the batch's slots on by
        its tokens."""
        shape, weights, states = self.shape, self.weights, memory.recurrent[self.layer]
        rows = hidden.shape[0]
        widths = [2 * shape.keys + shape.values, shape.values, shape.value_heads, shape.value_heads]
        channels, gate, beta, dt = torch.split(self.in_proj(hidden, batch), widths, dim=-1)
        channels, kept_conv = self.kernels.conv(channels, weights.conv, None, states.conv, batch)
        q, k, v = torch.split(channels, [shape.keys, shape.keys, shape.values], dim=-1)
        y, kept_state = self.kernels.gdn(
            q.view(rows, shape.key_heads, shape.key_dim),
            k.view(rows, shape.key_heads, shape.key_dim),
            v.view(rows, shape.value_heads, shape.value_dim),
            beta,
            dt,
            weights.a,
            weights.dt_bias,
            states.state,
            batch,
        )
        memory.write_snapshots(self.layer, kept_conv, kept_state)
        out = self.kernels.rms_norm_then_gate(y, gate, self.norm.weight, self.norm.eps)
        return self.out_proj(out if self.own is None else out[:, self.own].contiguous(), batch)
