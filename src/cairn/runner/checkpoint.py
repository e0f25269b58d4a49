"""A checkpoint's bytes, and the way between them and the tensors of running sequences.

    state   [header | unit 0 | unit 1 | ...], cut into pages anywhere
    header  [hidden | shared convolution channels [layer][column][channel]]
    unit    [layer][conv [column][own channels] | state [own heads][...]] [layer][scales [own heads][...]]

Scales, and so a state that is smaller than the running one, are there as the layout's `checkpoint_dtype` says.

A running state of all layers is moved by one call, and so are one layer's snapshots of a pass.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.kernels.checkpoint_files import StateSpan
from cairn.kernels.contract import Kernels, StateSpans
from cairn.kernels.state_encoding import (
    ENCODINGS,
    FLOAT32,
    STATE_DTYPES,
    EncodedStates,
    HeadSpan,
    StateEncoding,
    plain_encoding,
)
from cairn.layers.memory import MemorySpec, RecurrentSpec
from cairn.runner.memory import LiveStates


class CheckpointPages:
    """Reads and writes states in a pool of pages, uint8 [num_pages, page_bytes]. `state_pages`: the page lists of n
    states, int64 [n, pages_per_checkpoint]; n may be 0. `slots`: int64 [n].

    Raises ValueError when the layout's sizes are not those of the model.
    """

    def __init__(self, pool: Tensor, spec: MemorySpec, layout: CacheLayout, live: LiveStates, kernels: Kernels) -> None:
        self._pool, self._kernels = pool, kernels
        self._live = live.tensors
        hidden, encoding = spec.hidden_size * spec.dtype.itemsize, encoding_of(layout)
        sizes = None if spec.recurrent is None else LayerBytes(spec.recurrent, spec.dtype, encoding)
        header, state = hidden, 0
        if sizes is not None:
            header += sizes.spec.num_layers * sizes.shared
            state = sizes.unit.total * sizes.spec.units
        if (header, state) != (layout.header_bytes, layout.state_bytes):
            raise ValueError(
                f"layout has header_bytes {layout.header_bytes} and state_bytes {layout.state_bytes}, "
                f"the model's checkpoints take {header} and {state}"
            )
        if sizes is not None and layout.state_dtype != sizes.spec.state_dtype:
            raise ValueError(f"layout has states in {layout.state_dtype}, the model in {sizes.spec.state_dtype}")
        self._hidden = kernels.pack_state_spans([StateSpan(0, 0, 0, hidden)], [hidden], pool)
        self._layers = list[StateSpans]()
        if sizes is not None:
            for layer in range(sizes.spec.num_layers):
                spans, states = list(sizes.spans(layer, hidden)), sizes.states(layer, hidden)
                self._layers.append(kernels.pack_state_spans(spans, sizes.entry_bytes, pool, states))
        entry_bytes = [part.stride(0) * part.itemsize for part in self._live]
        whole, states = live_spans(spec, live, encoding)
        self._whole = kernels.pack_state_spans(whole, entry_bytes, pool, states)
        self.has_hidden_apart = hidden <= pool.shape[1]
        """Whether all of a hidden state lies in a checkpoint's first page."""
        self._first_pages = pool[:, :hidden].view(spec.dtype) if self.has_hidden_apart else None

    def restore(self, state_pages: Tensor, slots: Tensor) -> None:
        """From state pages to slots, which are all different."""
        self._kernels.load_states(self._pool, state_pages, self._live, slots, self._whole)

    def restore_hidden(self, state_pages: Tensor, slots: Tensor) -> None:
        """As `restore`, of the hidden states alone, where they `has_hidden_apart`."""
        assert self._first_pages is not None
        self._live[0].index_copy_(0, slots, self._first_pages.index_select(0, state_pages[:, 0]))

    def save(self, state_pages: Tensor, slots: Tensor) -> None:
        """From slots to state pages."""
        self._kernels.store_states(self._pool, state_pages, self._live, slots, self._whole)

    def write_hidden(self, state_pages: Tensor, hidden: Tensor, rows: Tensor) -> None:
        """Rows int64 [n] of hidden [tokens, hidden]."""
        self._kernels.store_states(self._pool, state_pages, (hidden,), rows, self._hidden)

    def write_layer(self, state_pages: Tensor, layer: int, conv: Tensor, state: Tensor) -> None:
        """conv [n, columns, channels], state [n, heads, ...] of recurrent layer `layer`."""
        states = [part for part in (conv, state) if part.shape[1:].numel()]
        self._kernels.store_states(self._pool, state_pages, states, None, self._layers[layer])


def encoding_of(layout: CacheLayout) -> StateEncoding:
    """How checkpoints have the recurrent state."""
    if layout.state_dtype == layout.checkpoint_dtype:
        return plain_encoding(layout.state_dtype)
    return ENCODINGS[layout.checkpoint_dtype]


def live_spans(
    spec: MemorySpec, live: LiveStates, encoding: StateEncoding = FLOAT32
) -> tuple[list[StateSpan], EncodedStates | None]:
    """Where a slot's `LiveStates.tensors` lie in state pages: what is there as it is, and what is encoded."""
    hidden = spec.hidden_size * spec.dtype.itemsize
    spans = [StateSpan(0, 0, 0, hidden)]
    states = None
    if spec.recurrent is not None:
        sizes = LayerBytes(spec.recurrent, spec.dtype, encoding)
        layer_bytes = [part.stride(1) * part.itemsize for part in live.tensors[1:]]
        heads = list[HeadSpan]()
        for layer in range(spec.recurrent.num_layers):
            for span in sizes.spans(layer, hidden):
                offset = span.offset + layer * layer_bytes[span.tensor]
                spans.append(replace(span, tensor=span.tensor + 1, offset=offset))
            states = sizes.states(layer, hidden)
            if states is not None:
                offset = layer * layer_bytes[states.tensor]
                heads += [replace(span, offset=span.offset + offset) for span in states.spans]
        if states is not None:
            states = replace(states, tensor=states.tensor + 1, spans=tuple(heads))
    return spans, states


class LayerBytes:
    """Sizes of one layer's state in its pages. `shared`: the channels that all units have together. `entry_bytes`: of a
    layer's convolution inputs and state, contiguous, less what has no bytes.

    Raises ValueError where channels or heads do not divide among the units.
    """

    def __init__(self, spec: RecurrentSpec, dtype: torch.dtype, encoding: StateEncoding = FLOAT32) -> None:
        self.spec, self.encoding, self._number = spec, encoding, dtype.itemsize
        self.unit = spec.unit_bytes(dtype.itemsize, encoding)
        column = dtype.itemsize * spec.columns
        self.shared = column * spec.shared_channels
        self._unit_heads = spec.state[0] // spec.units
        self._unit_state_bytes = STATE_DTYPES[spec.state_dtype] * math.prod(spec.state) // spec.units
        self.entry_bytes = [size for size in (column * spec.channels, self._unit_state_bytes * spec.units) if size]

    def spans(self, layer: int, header: int) -> Iterator[StateSpan]:
        """Of recurrent layer `layer`: convolution inputs [columns, channels] and state, which are tensors 0 and 1, or 0
        alone where there is one of them; the state only if it is not encoded. `header`: bytes before the
        first layer's shared channels."""
        if self.shared:
            yield from self._channels(header + layer * self.shared, None)
        for unit in range(self.spec.units):
            at = self._unit_at(unit, header) + layer * self.unit.layer
            if self.unit.conv:
                yield from self._channels(at, unit)
            if self.unit.values and not self.unit.scales:
                yield StateSpan(self._state, unit * self._unit_state_bytes, at + self.unit.conv, self.unit.values)

    def states(self, layer: int, header: int) -> EncodedStates | None:
        """The state of recurrent layer `layer`, if it is encoded; tensors and `header` as for `spans`."""
        if not self.unit.scales:
            return None
        spans = list[HeadSpan]()
        for unit in range(self.spec.units):
            at = self._unit_at(unit, header)
            values = at + layer * self.unit.layer + self.unit.conv
            scales = at + self.unit.first_scales + layer * self.unit.scales
            spans.append(HeadSpan(unit * self._unit_state_bytes, self._unit_heads, values, scales))
        *rows, columns = self.spec.state[1:]
        return EncodedStates(self._state, self.encoding, math.prod(rows), columns, tuple(spans))

    @property
    def _state(self) -> int:
        """The number of the tensor with states."""
        return len(self.entry_bytes) - 1

    def _unit_at(self, unit: int, header: int) -> int:
        return header + self.spec.num_layers * self.shared + unit * self.unit.total

    def _channels(self, state_offset: int, unit: int | None) -> Iterator[StateSpan]:
        """A unit's own channels, or those that are shared, column by column."""
        first = 0
        ranges = list[tuple[int, int]]()
        for part in self.spec.parts:
            if part.shared == (unit is None):
                num_channels = part.channels if unit is None else part.channels // self.spec.units
                ranges.append((first + num_channels * (unit or 0), num_channels))
            first += part.channels
        for column in range(self.spec.columns):
            for channel, count in ranges:
                num_bytes = count * self._number
                yield StateSpan(0, (column * first + channel) * self._number, state_offset, num_bytes)
                state_offset += num_bytes
