"""The doubly gated short convolution of LFM2: projection to B | C | x, C * conv(B * x), projection.

Its state is the convolution's last inputs and nothing else: see `RecurrentSpec`.
"""

from dataclasses import dataclass

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels
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
        b, c, x = self.in_proj(hidden, batch).chunk(3, dim=-1)
        inputs = b * x
        if batch.host.num_verifies:
            memory.keep_inputs(inputs, self._convolve)
        return self.out_proj(self._convolve(inputs, batch, memory).to(hidden.dtype).mul_(c), batch)

    def _convolve(self, inputs: Tensor, batch: Batch, memory: Memory) -> Tensor:
        states = memory.recurrent[self.layer]
        mixed, snapshots = self.kernels.conv(inputs, self.conv, self.conv_bias, states.conv, batch, silu=False)
        # There is no state beside the convolution's inputs.
        memory.write_snapshots(self.layer, snapshots, states.state.new_empty(len(snapshots), *states.state.shape[1:]))
        return mixed
