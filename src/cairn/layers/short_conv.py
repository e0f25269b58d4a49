"""The doubly gated short convolution of LFM2: projection to B | C | x, C * conv(B * x), projection.

It remembers the convolution's last inputs and nothing else: see `RecurrentSpec`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.layers.batch import Batch
from cairn.layers.linear import Projection
from cairn.layers.memory import Memory


@dataclass(frozen=True, slots=True)
class ShortConv:
    """One rank's channels. conv float32 [W, channels], taps oldest first, conv_bias float32 [channels] or None;
    `layer` counts the model's recurrent layers."""

    kernels: Kernels
    in_proj: Projection
    conv: Tensor
    conv_bias: Tensor | None
    out_proj: Projection
    layer: int

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]. Moves the convolution's last inputs of the
        batch's slots on by its tokens."""
        b, c, x = self.in_proj(hidden, batch.tiles).chunk(3, dim=-1)
        # Rounded to the model's dtype first, because that is what the next step finds in the state.
        gated = (b * x).float()
        states = memory.recurrent[self.layer]
        if batch.num_decodes:
            slots = torch.tensor(batch.decode_slots, device=hidden.device)
            mine = gated[: batch.num_decodes]
            self.kernels.conv_update(mine, self.conv, self.conv_bias, states.conv, slots, silu=False)
            for row, keep in batch.decode_marks:
                slot = batch.decode_slots[row]
                memory.keep(keep, self.layer, states.conv[slot], states.state[slot])
        for span in batch.spans:
            tokens = gated[span.first_row + span.front : span.rows.stop]
            ends = [*(mark.offset for mark in span.marks), span.length]
            live, nothing = states.conv[span.slot], states.state[span.slot]
            *kept, last = self.kernels.conv_prefill(
                tokens, self.conv, self.conv_bias, live, span.front, ends, silu=False
            )
            live.copy_(last)
            for mark, conv in zip(span.marks, kept, strict=True):
                memory.keep(mark.keep, self.layer, conv, nothing)
        return self.out_proj(gated.to(hidden.dtype).mul_(c), batch.tiles)
