"""The gated delta net (arXiv 2412.06464): projection, short convolution, delta rule, gated norm, projection."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.layers.batch import Batch, Span
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory, RecurrentLayer
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
        shape = self.shape
        widths = [2 * shape.keys + shape.values, shape.values, shape.value_heads, shape.value_heads]
        channels, gate, beta, steps = torch.split(self.in_proj(hidden, batch.tiles), widths, dim=-1)
        # In float32 this is a view of the projection, and everything below works in place on it.
        channels = channels.float()
        gates = self._gates(beta, steps, batch)
        states = memory.recurrent[self.layer]
        if batch.num_decodes:
            self._decode(channels, gates, batch, states)
            for row, keep in batch.decode_marks:
                slot = batch.decode_slots[row]
                memory.keep(keep, self.layer, states.conv[slot], states.state[slot])
        for span in batch.spans:
            kept_conv, kept_state = self._prefill(channels, gates, span, states)
            for index, mark in enumerate(span.marks):
                memory.keep(mark.keep, self.layer, kept_conv[index], kept_state[index])
        return self.out_proj(self._gated_norm(channels[:, 2 * shape.keys :], gate), batch.tiles)

    def _gates(self, beta: Tensor, steps: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The log of the decay and beta, float32 [rows, value heads]; 0 at padding, which leaves the state as it is."""
        log_decay = self.kernels.softplus(steps.float() + self.weights.dt_bias).mul_(self.weights.a)
        written = self.kernels.sigmoid(beta.float())
        return log_decay.masked_fill_(batch.padding, 0.0), written.masked_fill_(batch.padding, 0.0)

    def _parts(self, channels: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """channels [rows, q | k | v] -> v [rows, Hv, V] and (q, k) [rows, Hk, K], all of them views."""
        shape = self.shape
        rows = channels.shape[0]
        q, k, v = torch.split(channels, [shape.keys, shape.keys, shape.values], dim=-1)
        by_head = (rows, shape.key_heads, shape.key_dim)
        return v.view(rows, shape.value_heads, shape.value_dim), (q.view(by_head), k.view(by_head))

    def _gated_norm(self, values: Tensor, gate: Tensor) -> Tensor:
        """Each value head's norm times silu(gate), [rows, values] or the rank's own channels of them."""
        rows, width = gate.shape
        normed = self.norm(values.reshape(-1, self.shape.value_dim)).view(rows, width)
        wide = gate.float()
        gated = self.kernels.sigmoid(wide).mul_(wide).mul_(normed).to(gate.dtype)
        return gated if self.own is None else gated[:, self.own].contiguous()

    def _decode(self, channels: Tensor, gates: tuple[Tensor, Tensor], batch: Batch, states: RecurrentLayer) -> None:
        count = batch.num_decodes
        mine = channels[:count]
        slots = torch.tensor(batch.decode_slots, device=channels.device)
        self.kernels.conv_update(mine, self.weights.conv, None, states.conv, slots)
        v, qk = self._parts(mine)
        self.kernels.gdn_update(v, qk, (gates[0][:count], gates[1][:count]), states.state, batch.decode_slots)

    def _prefill(
        self, channels: Tensor, gates: tuple[Tensor, Tensor], span: Span, states: RecurrentLayer
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the convolution's states at the span's marks and, last, at its end, and the rule's at its marks."""
        conv, state = states.conv[span.slot], states.state[span.slot]
        offsets = [mark.offset for mark in span.marks]
        tokens = channels[span.first_row + span.front : span.rows.stop]
        kept_conv = self.kernels.conv_prefill(
            tokens, self.weights.conv, None, conv, span.front, [*offsets, span.length]
        )
        conv.copy_(kept_conv[-1])
        v, qk = self._parts(channels[span.rows])
        marks = [span.front + offset for offset in offsets]
        kept_state = self.kernels.gdn_prefill(v, qk, (gates[0][span.rows], gates[1][span.rows]), state, marks)
        return kept_conv, kept_state
