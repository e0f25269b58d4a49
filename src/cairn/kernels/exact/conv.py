"""Causal depthwise convolution with a time-major state.

Prefill and decode add the taps in the same order with the same operations, so both give the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch
from cairn.kernels.exact.elementwise import silu_, widen
from cairn.kernels.exact.metadata import Decode, Prefill, decodes_by_state, metadata_of


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: Batch, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """See `Kernels.conv`."""
    metadata = metadata_of(batch)
    taps = _Taps(weight, bias, silu)
    out = torch.empty(x.shape, dtype=weight.dtype)
    snapshots = states.new_empty(metadata.num_snapshots, *states.shape[1:])
    if decodes := decodes_by_state(batch):
        _decode(x, taps, states, decodes, out, snapshots)
    for prefill in metadata.prefills:
        _prefill(x, taps, states, prefill, out, snapshots)
    return out, snapshots


class _Taps:
    """The convolution of windows that are shifted against each other by one token."""

    def __init__(self, weight: Tensor, bias: Tensor | None, silu: bool) -> None:
        self.width = weight.shape[0]
        self._weight = weight
        self._bias = bias
        self._silu = silu

    def write(self, windows: Sequence[Tensor], out: Tensor) -> None:
        """out = bias + sum over taps of windows[tap] * weight[tap], or silu of it."""
        torch.mul(windows[0], self._weight[0], out=out)
        for window, tap in zip(windows[1:], self._weight[1:], strict=True):
            out.addcmul_(window, tap)
        if self._bias is not None:
            out.add_(self._bias)
        if self._silu:
            silu_(out)


def _decode(x: Tensor, taps: _Taps, states: Tensor, decodes: Sequence[Decode], out: Tensor, snapshots: Tensor) -> None:
    """All rows at once: what a row of a verify or a fold is convolved with does not follow from what comes out of the
    row before it."""
    count = decodes[-1].rows.stop
    raw = x[:count]
    slots = torch.tensor([decode.slot for decode in decodes for _ in decode.rows])
    fresh = torch.tensor([decode.is_fresh for decode in decodes for _ in decode.rows])
    before = states.index_select(0, slots).masked_fill_(fresh[:, None, None], 0)
    for decode in decodes:
        if decode.length > 1:
            rows = slice(decode.rows.start, decode.rows.stop)
            inputs = torch.cat([before[decode.first_row], raw[rows]])
            for tap in range(before.shape[1]):
                before[rows, tap] = inputs[tap : tap + decode.length]
    after = torch.cat([before[:, 1:], raw[:, None]], dim=1)
    last = torch.tensor([decode.rows[-1] for decode in decodes if decode.in_place], dtype=torch.int64)
    states[slots[last]] = after[last]
    taps.write([widen(window) for window in (*before.unbind(1), raw)], out[:count])
    for decode in decodes:
        for number, row in decode.numbered_snapshots:
            snapshots[number] = after[row]


def _prefill(x: Tensor, taps: _Taps, states: Tensor, prefill: Prefill, out: Tensor, snapshots: Tensor) -> None:
    """One chunk at a time, so that the temporaries stay in the cache."""
    columns = taps.width - 1
    inputs = torch.cat([prefill.state_before(states), x[prefill.rows]])
    begin, end = 0, min(CHUNK - prefill.front, prefill.length)
    while begin < prefill.length:
        wide = widen(inputs[begin : end + columns])
        windows = [wide[tap : tap + end - begin] for tap in range(taps.width)]
        taps.write(windows, out[prefill.first_row + begin : prefill.first_row + end])
        begin, end = end, min(end + CHUNK, prefill.length)
    for number, offset in enumerate(prefill.offsets, start=prefill.first_snapshot):
        snapshots[number] = inputs[offset : offset + columns]
    states[prefill.slot] = inputs[prefill.length :]
