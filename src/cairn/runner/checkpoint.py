"""A checkpoint's bytes, and the way between them and the tensors of running sequences.

    file    [header | unit 0 | unit 1 | ...], cut into pages anywhere
    header  [hidden | shared convolution channels [layer][column][channel]]
    unit    [layer][conv [column][own channels] | state [own heads][...]]

A running state of all layers is moved by one call, and so are one layer's snapshots of a pass.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.kernels.checkpoint_files import FileSpan
from cairn.kernels.contract import FileSpans, Kernels
from cairn.layers.memory import MemorySpec, RecurrentSpec
from cairn.runner.memory import LiveStates


class CheckpointFiles:
    """Reads and writes checkpoint files in a pool of pages, uint8 [num_pages, page_bytes]. `files` are the page lists
    of n files, int64 [n, pages_per_checkpoint]; n may be 0. `slots`: int64 [n].

    Raises ValueError when the layout's sizes are not those of the model.
    """

    def __init__(self, pool: Tensor, spec: MemorySpec, layout: CacheLayout, live: LiveStates, kernels: Kernels) -> None:
        self._pool, self._kernels = pool, kernels
        self._live = live.tensors
        hidden = spec.hidden_size * spec.dtype.itemsize
        sizes = None if spec.recurrent is None else LayerBytes(spec.recurrent, spec.dtype)
        header, state = hidden, 0
        if sizes is not None:
            header += sizes.spec.num_layers * sizes.shared
            state = sizes.spec.num_layers * sizes.unit * sizes.spec.units
        if (header, state) != (layout.header_bytes, layout.state_bytes):
            raise ValueError(
                f"layout has header_bytes {layout.header_bytes} and state_bytes {layout.state_bytes}, "
                f"the model's checkpoints take {header} and {state}"
            )
        self._hidden = kernels.pack_file_spans([FileSpan(0, 0, 0, hidden)], [hidden], pool)
        self._layers = list[FileSpans]()
        if sizes is not None:
            for layer in range(sizes.spec.num_layers):
                spans = list(sizes.spans(layer, hidden))
                self._layers.append(kernels.pack_file_spans(spans, sizes.entry_bytes, pool))
        entry_bytes = [part.stride(0) * part.itemsize for part in self._live]
        self._whole = kernels.pack_file_spans(live_spans(spec, live), entry_bytes, pool)

    def restore(self, files: Tensor, slots: Tensor) -> None:
        """From files to slots, which are all different."""
        self._kernels.load_states(self._pool, files, self._live, slots, self._whole)

    def save(self, files: Tensor, slots: Tensor) -> None:
        """From slots to files."""
        self._kernels.store_states(self._pool, files, self._live, slots, self._whole)

    def write_hidden(self, files: Tensor, hidden: Tensor, rows: Tensor) -> None:
        """Rows int64 [n] of hidden [tokens, hidden]."""
        self._kernels.store_states(self._pool, files, (hidden,), rows, self._hidden)

    def write_layer(self, files: Tensor, layer: int, conv: Tensor, state: Tensor) -> None:
        """conv [n, columns, channels], state [n, heads, ...] of recurrent layer `layer`."""
        states = [part for part in (conv, state) if part.shape[1:].numel()]
        self._kernels.store_states(self._pool, files, states, None, self._layers[layer])


def live_spans(spec: MemorySpec, live: LiveStates) -> list[FileSpan]:
    """Where a slot's `LiveStates.tensors` lie in a file."""
    hidden = spec.hidden_size * spec.dtype.itemsize
    spans = [FileSpan(0, 0, 0, hidden)]
    if spec.recurrent is not None:
        sizes = LayerBytes(spec.recurrent, spec.dtype)
        layer_bytes = [part.stride(1) * part.itemsize for part in live.tensors[1:]]
        for layer in range(spec.recurrent.num_layers):
            for span in sizes.spans(layer, hidden):
                offset = span.offset + layer * layer_bytes[span.tensor]
                spans.append(replace(span, tensor=span.tensor + 1, offset=offset))
    return spans


class LayerBytes:
    """Sizes of one layer's state in a file. `shared`: the channels that all units have together; `unit`: a unit's
    convolution channels (`conv`) and state. `entry_bytes`: of a layer's convolution inputs and state, contiguous, less
    what has no bytes.

    Raises ValueError where channels or heads do not divide among the units.
    """

    def __init__(self, spec: RecurrentSpec, dtype: torch.dtype) -> None:
        for part in spec.parts:
            if not part.shared and part.channels % spec.units:
                raise ValueError(f"{part.channels} convolution channels do not divide among {spec.units} units")
        if spec.state[0] % spec.units:
            raise ValueError(f"{spec.state[0]} heads do not divide among {spec.units} units")
        self.spec, self._number = spec, dtype.itemsize
        column = dtype.itemsize * spec.columns
        self.shared = column * sum(part.channels for part in spec.parts if part.shared)
        self.conv = column * sum(part.channels for part in spec.parts if not part.shared) // spec.units
        self._state = torch.Size(spec.state).numel() // spec.units * torch.float32.itemsize
        self.unit = self.conv + self._state
        self.entry_bytes = [size for size in (column * spec.channels, self._state * spec.units) if size]

    def spans(self, layer: int, header: int) -> Iterator[FileSpan]:
        """Of recurrent layer `layer`: convolution inputs [columns, channels] and state, which are tensors 0 and 1, or 0
        alone where there is one of them. `header`: bytes of a file before the first layer's shared channels."""
        spec = self.spec
        if self.shared:
            yield from self._channels(header + layer * self.shared, None)
        units = header + spec.num_layers * self.shared
        for unit in range(spec.units):
            at = units + (unit * spec.num_layers + layer) * self.unit
            if self.conv:
                yield from self._channels(at, unit)
            if self._state:
                yield FileSpan(len(self.entry_bytes) - 1, unit * self._state, at + self.conv, self._state)

    def _channels(self, file_offset: int, unit: int | None) -> Iterator[FileSpan]:
        """A unit's own channels, or those that are shared, column by column."""
        first = 0
        ranges = list[tuple[int, int]]()
        for part in self.spec.parts:
            if part.shared == (unit is None):
                own = part.channels if unit is None else part.channels // self.spec.units
                ranges.append((first + own * (unit or 0), own))
            first += part.channels
        for column in range(self.spec.columns):
            for channel, count in ranges:
                num_bytes = count * self._number
                yield FileSpan(0, (column * first + channel) * self._number, file_offset, num_bytes)
                file_offset += num_bytes
