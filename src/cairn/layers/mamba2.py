"""The Mamba2 mixer (arXiv 2405.21060): projection, short convolution, state space scan, gated norm, projection."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.layers.batch import Batch, Span
from cairn.layers.linear import Projection
from cairn.layers.memory import Memory, RecurrentLayer
from cairn.layers.norms import GatedNorm


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Sizes of the mixer. `dt_limit` bounds softplus(dt + dt_bias); `prefill_dt_min` bounds it in prefill alone and
    exists to be compared with implementations that do so: it makes decode differ from prefill."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    prefill_dt_min: float = 0.0

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
        shape = self.shape
        projected = self.in_proj(hidden, batch.tiles)
        gate, channels, dt = torch.split(projected, [shape.inner, shape.inner + 2 * shape.bc, shape.num_heads], dim=-1)
        # In float32 this is a view of the projection, and everything below works in place on it.
        channels = channels.float()
        dt = self._time_steps(dt, batch)
        states = memory.recurrent[self.layer]
        if batch.num_decodes:
            self._decode(channels, dt, batch, states)
            for row, keep in batch.decode_marks:
                slot = batch.decode_slots[row]
                memory.keep(keep, self.layer, states.conv[slot], states.state[slot])
        for span in batch.spans:
            kept_conv, kept_state = self._prefill(channels, dt, span, states)
            for index, mark in enumerate(span.marks):
                memory.keep(mark.keep, self.layer, kept_conv[index], kept_state[index])
        return self.out_proj(self.norm(channels[:, : shape.inner], gate), batch.tiles)

    def _time_steps(self, dt: Tensor, batch: Batch) -> Tensor:
        """softplus(dt + dt_bias), float32 [rows, heads]; 0 at padding, which leaves the state as it is."""
        steps = self.kernels.softplus(dt.float() + self.weights.dt_bias)
        low, high = self.shape.dt_limit
        if low > 0 or high != float("inf"):
            steps.clamp_(low, high)
        if self.shape.prefill_dt_min > 0 and batch.spans:
            steps[batch.spans[0].first_row :].clamp_(min=self.shape.prefill_dt_min)
        return steps.masked_fill_(batch.padding, 0.0)

    def _parts(self, channels: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """channels [rows, x | B | C] -> x [rows, H, P] and (B, C) [rows, G, N], all of them views."""
        shape = self.shape
        rows = channels.shape[0]
        x, b, c = torch.split(channels, [shape.inner, shape.bc, shape.bc], dim=-1)
        by_group = (rows, shape.num_groups, shape.state_size)
        return x.view(rows, shape.num_heads, shape.head_dim), (b.view(by_group), c.view(by_group))

    def _decode(self, channels: Tensor, dt: Tensor, batch: Batch, states: RecurrentLayer) -> None:
        weights, count = self.weights, batch.num_decodes
        mine = channels[:count]
        slots = torch.tensor(batch.decode_slots, device=channels.device)
        self.kernels.conv_update(mine, weights.conv, weights.conv_bias, states.conv, slots)
        x, bc = self._parts(mine)
        self.kernels.ssd_update(x, dt[:count], bc, (weights.a, weights.d), states.state, batch.decode_slots)

    def _prefill(
        self, channels: Tensor, dt: Tensor, span: Span, states: RecurrentLayer
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the convolution's states at the span's marks and, last, at its end, and the scan's at its marks."""
        weights = self.weights
        conv, state = states.conv[span.slot], states.state[span.slot]
        offsets = [mark.offset for mark in span.marks]
        tokens = channels[span.first_row + span.front : span.rows.stop]
        kept_conv = self.kernels.conv_prefill(
            tokens, weights.conv, weights.conv_bias, conv, span.front, [*offsets, span.length]
        )
        conv.copy_(kept_conv[-1])
        x, bc = self._parts(channels[span.rows])
        marks = [span.front + offset for offset in offsets]
        kept_state = self.kernels.ssd_prefill(x, dt[span.rows], bc, (weights.a, weights.d), state, marks)
        return kept_conv, kept_state
