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
class GatedDeltaNet:
    """One rank's heads. A key head serves num_value_heads / num_key_heads consecutive value heads.

    `in_proj` gives q | k | v | output gate | beta | time step. All float32: `conv` [W, q | k | v] (taps oldest first),
    `a` = -exp(A_log) and `dt_bias` [value heads]. `norm` is over one value head. `output_slice`: the value channels
    that this rank contributes where other ranks have the same heads, None for all. `layer` counts the model's recurrent
    layers. `beta_scale`: see `Kernels.gdn`.
    """

    kernels: Kernels
    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    in_proj: Linear
    conv: Tensor
    a: Tensor
    dt_bias: Tensor
    norm: RMSNorm
    out_proj: Linear
    layer: int
    output_slice: slice | None = None
    beta_scale: float = 1.0

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]. Moves the live states of the batch's slots on by
        its tokens."""
        projected = self.in_proj(hidden, batch)
        if batch.host.num_verifies:
            memory.keep_inputs(projected, self._scan)
        y, gate = self._scan(projected, batch, memory)
        out = self.kernels.rms_norm_then_gate(y, gate, self.norm.weight, self.norm.eps)
        return self.out_proj(out if self.output_slice is None else out[:, self.output_slice].contiguous(), batch)

    def _scan(self, projected: Tensor, batch: Batch, memory: Memory) -> tuple[Tensor, Tensor]:
        """Of what `in_proj` gave: y [rows, value heads, value dim], output gate [rows, value heads * value dim]."""
        rows, states = projected.shape[0], memory.recurrent[self.layer]
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        widths = [2 * keys + values, values, self.num_value_heads, self.num_value_heads]
        channels, gate, beta, dt = torch.split(projected, widths, dim=-1)
        channels, conv_snapshots = self.kernels.conv(channels, self.conv, None, states.conv, batch)
        q, k, v = torch.split(channels, [keys, keys, values], dim=-1)
        y, state_snapshots = self.kernels.gdn(
            q.view(rows, self.num_key_heads, self.key_dim),
            k.view(rows, self.num_key_heads, self.key_dim),
            v.view(rows, self.num_value_heads, self.value_dim),
            beta,
            dt,
            self.a,
            self.dt_bias,
            states.state,
            batch,
            self.beta_scale,
        )
        memory.write_snapshots(self.layer, conv_snapshots, state_snapshots)
        return y, gate
