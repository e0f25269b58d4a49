"""A checkpoint's bytes, and the way between them and the tensors of running sequences.

    file    [header | unit 0 | unit 1 | ...], cut into pages anywhere
    header  [hidden | shared convolution channels [layer][column][channel]]
    unit    [layer][conv [column][own channels] | state [own heads][...]]

One layer of all files that a step names is moved at a time, by one gather or scatter for each kind of bytes.
"""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.layers.memory import MemorySpec, RecurrentSpec

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class _FileRanges:
    """Some byte ranges of every file, as rows of equal length in the pool."""

    def __init__(self, pool: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """`ranges`: (file offset, length), which follow each other in a buffer."""
        page_bytes = pool.shape[1]
        row_bytes = gcd(page_bytes, *(number for each in ranges for number in each))
        self._word = next(dtype for size, dtype in _WORDS if row_bytes % size == 0)
        self._rows = pool.view(self._word).view(-1, row_bytes // self._word.itemsize)
        # on the device from the start: steps only gather and scatter
        starts = [torch.arange(at, at + length, row_bytes, device=pool.device) for at, length in ranges]
        numbers = torch.cat(starts) // row_bytes
        self._rows_per_page = page_bytes // row_bytes
        self._page, self._offset = numbers // self._rows_per_page, numbers % self._rows_per_page

    def write(self, files: Tensor, values: Tensor) -> None:
        """files int64 [n, pages], values [n, ...] of any dtype, contiguous, with as many bytes each as the ranges."""
        rows = values.view(len(files), -1).view(self._word).view(-1, self._rows.shape[1])
        self._rows.index_copy_(0, self._index(files), rows)

    def read(self, files: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The reverse: [n, *shape] of `dtype`."""
        rows = self._rows.index_select(0, self._index(files))
        return rows.view(len(files), -1).view(dtype).view(len(files), *shape)

    def _index(self, files: Tensor) -> Tensor:
        return (files[:, self._page] * self._rows_per_page + self._offset).flatten()


class CheckpointFiles:
    """Reads and writes checkpoint files in a pool of pages, uint8 [num_pages, page_bytes]. `files` are the page lists
    of n files, int64 [n, pages_per_checkpoint]; n may be 0.

    Raises ValueError when the layout's sizes are not those of the model.
    """

    def __init__(self, pool: Tensor, spec: MemorySpec, layout: CacheLayout) -> None:
        self._spec = spec
        header, state = spec.hidden_size * spec.dtype.itemsize, 0
        self._hidden = _FileRanges(pool, [(0, header)])
        self._layers: list[_Layer] = []
        if spec.recurrent is not None:
            sizes = _LayerBytes(spec.recurrent, spec.dtype)
            shared = header
            header += spec.recurrent.num_layers * sizes.shared
            state = spec.recurrent.num_layers * sizes.unit * spec.recurrent.units
            for layer in range(spec.recurrent.num_layers):
                self._layers.append(_Layer(pool, sizes, layer, shared + layer * sizes.shared, header))
        if (header, state) != (layout.header_bytes, layout.state_bytes):
            raise ValueError(
                f"layout has header_bytes {layout.header_bytes} and state_bytes {layout.state_bytes}, "
                f"the model's checkpoints take {header} and {state}"
            )

    def write_hidden(self, files: Tensor, hidden: Tensor) -> None:
        """hidden [n, hidden]."""
        if len(files):
            self._hidden.write(files, hidden.contiguous())

    def read_hidden(self, files: Tensor) -> Tensor:
        """[n, hidden]."""
        return self._hidden.read(files, [self._spec.hidden_size], self._spec.dtype)

    def write_layer(self, files: Tensor, layer: int, conv: Tensor, state: Tensor) -> None:
        """conv [n, columns, channels], state [n, heads, ...] of recurrent layer `layer`."""
        if len(files):
            self._layers[layer].write(files, conv, state)

    def read_layer(self, files: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The reverse of `write_layer`."""
        return self._layers[layer].read(files)


class _LayerBytes:
    """Sizes of one layer's state in a file. `shared`: the channels that all units have together; `unit`: a unit's
    convolution channels (`conv`) and state.

    Raises ValueError where channels or heads do not divide among the units.
    """

    def __init__(self, spec: RecurrentSpec, dtype: torch.dtype) -> None:
        for part in spec.parts:
            if not part.shared and part.channels % spec.units:
                raise ValueError(f"{part.channels} convolution channels do not divide among {spec.units} units")
        if spec.state[0] % spec.units:
            raise ValueError(f"{spec.state[0]} heads do not divide among {spec.units} units")
        self.spec, self.dtype = spec, dtype
        self.own_channels = sum(part.channels for part in spec.parts if not part.shared) // spec.units
        self.shared_channels = sum(part.channels for part in spec.parts if part.shared)
        column = dtype.itemsize * spec.columns
        self.shared, self.conv = column * self.shared_channels, column * self.own_channels
        self.unit = self.conv + torch.Size(spec.state).numel() // spec.units * torch.float32.itemsize


class _Layer:
    """One recurrent layer's places in every file: shared channels from `shared` on, units from `units` on."""

    def __init__(self, pool: Tensor, sizes: _LayerBytes, layer: int, shared: int, units: int) -> None:
        self._sizes, spec = sizes, sizes.spec
        starts = [units + (unit * spec.num_layers + layer) * sizes.unit for unit in range(spec.units)]
        self._shared = _FileRanges(pool, [(shared, sizes.shared)]) if sizes.shared else None
        self._conv = _FileRanges(pool, [(start, sizes.conv) for start in starts]) if sizes.conv else None
        length = sizes.unit - sizes.conv
        self._state = _FileRanges(pool, [(start + sizes.conv, length) for start in starts]) if length else None

    def write(self, files: Tensor, conv: Tensor, state: Tensor) -> None:
        shared, own = self._split(conv)
        if self._shared is not None:
            self._shared.write(files, torch.cat(shared, dim=-1))
        if self._conv is not None:
            self._conv.write(files, torch.cat(own, dim=-1))
        if self._state is not None:
            self._state.write(files, state.contiguous())

    def read(self, files: Tensor) -> tuple[Tensor, Tensor]:
        sizes, spec = self._sizes, self._sizes.spec
        conv = torch.empty(len(files), spec.columns, spec.channels, dtype=sizes.dtype, device=files.device)
        shared, own = self._split(conv)
        if self._shared is not None:
            _copy_to(shared, self._shared.read(files, [spec.columns, sizes.shared_channels], sizes.dtype))
        if self._conv is not None:
            _copy_to(own, self._conv.read(files, [spec.units, spec.columns, sizes.own_channels], sizes.dtype))
        if self._state is None:
            return conv, torch.empty(len(files), *spec.state, dtype=torch.float32, device=files.device)
        return conv, self._state.read(files, spec.state, torch.float32)

    def _split(self, conv: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of conv [n, columns, channels]: its shared parts, and its other parts by unit."""
        parts = self._sizes.spec.parts
        views = list(zip(torch.split(conv, [part.channels for part in parts], dim=-1), parts, strict=True))
        shared = [view for view, part in views if part.shared]
        return shared, [self._by_unit(view) for view, part in views if not part.shared]

    def _by_unit(self, part: Tensor) -> Tensor:
        """A view: [n, columns, channels] -> [n, units, columns, channels of one]."""
        units = self._sizes.spec.units
        return part.view(*part.shape[:2], units, part.shape[2] // units).transpose(1, 2)


def _copy_to(parts: list[Tensor], values: Tensor) -> None:
    """Copy the channels of `values` to `parts`, one after the other."""
    for part, own in zip(parts, torch.split(values, [part.shape[-1] for part in parts], dim=-1), strict=True):
        part.copy_(own)
