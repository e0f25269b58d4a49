"""A checkpoint's bytes, and the way between them and the tensors of a running sequence.

    file    [header | unit 0 | unit 1 | ...], cut into pages anywhere
    header  [hidden | shared convolution channels [layer][column][channel]]
    unit    [layer][conv [column][own channels] | state [own heads][...]]

One layer is moved at a time, so that nothing of a checkpoint's full size is ever held beside the pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.layers.memory import MemorySpec, RecurrentSpec
from cairn.types import Pages


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes [begin, end) of a buffer lie in the file's page number `page`, from byte `offset` on."""

    page: int
    offset: int
    begin: int
    end: int


class CheckpointFiles:
    """Reads and writes checkpoint files in a pool of pages, uint8 [num_pages, page_bytes].

    Raises ValueError when the layout's sizes are not those of the model.
    """

    def __init__(self, pool: Tensor, spec: MemorySpec, layout: CacheLayout) -> None:
        self._pool = pool
        self._spec = spec
        self._page_bytes = layout.page_bytes
        item = spec.dtype.itemsize
        self._hidden = self._pieces([(0, spec.hidden_size * item)])
        self._layers: list[_LayerBytes] = []
        header, state = spec.hidden_size * item, 0
        if spec.recurrent is not None:
            codec = _LayerCodec(spec.recurrent, spec.dtype)
            header += spec.recurrent.num_layers * codec.shared_bytes
            state = spec.recurrent.num_layers * codec.unit_bytes * spec.recurrent.units
            self._layers = [self._layer(codec, layer, header) for layer in range(spec.recurrent.num_layers)]
        if (header, state) != (layout.header_bytes, layout.state_bytes):
            raise ValueError(
                f"layout has header_bytes {layout.header_bytes} and state_bytes {layout.state_bytes}, "
                f"the model's checkpoints take {header} and {state}"
            )

    def write_hidden(self, pages: Pages, hidden: Tensor) -> None:
        """hidden [hidden]."""
        self._put(pages, self._hidden, hidden.contiguous().view(torch.uint8))

    def read_hidden(self, pages: Pages, hidden: Tensor) -> None:
        buffer = torch.empty(hidden.nbytes, dtype=torch.uint8)
        self._get(pages, self._hidden, buffer)
        hidden.copy_(buffer.view(hidden.dtype))

    def write_layer(self, pages: Pages, layer: int, conv: Tensor, state: Tensor) -> None:
        """conv [columns, channels], state [heads, ...] of recurrent layer `layer`."""
        own = self._layers[layer]
        shared, units = own.codec.buffers()
        own.codec.pack(conv, state, shared, units)
        self._put(pages, own.shared, shared)
        self._put(pages, own.units, units.view(-1))

    def read_layer(self, pages: Pages, layer: int, conv: Tensor, state: Tensor) -> None:
        """The reverse of `write_layer`, into conv and state."""
        own = self._layers[layer]
        shared, units = own.codec.buffers()
        self._get(pages, own.shared, shared)
        self._get(pages, own.units, units.view(-1))
        own.codec.unpack(shared, units, conv, state)

    def _layer(self, codec: "_LayerCodec", layer: int, header: int) -> "_LayerBytes":
        spec = codec.spec
        shared = self._spec.hidden_size * self._spec.dtype.itemsize + layer * codec.shared_bytes
        units = [
            (header + (unit * spec.num_layers + layer) * codec.unit_bytes, codec.unit_bytes)
            for unit in range(spec.units)
        ]
        return _LayerBytes(codec, self._pieces([(shared, codec.shared_bytes)]), self._pieces(units))

    def _pieces(self, ranges: Sequence[tuple[int, int]]) -> tuple[_Piece, ...]:
        """(file offset, length) ranges, which follow each other in a buffer, cut at page borders."""
        pieces, begin = [], 0
        for start, length in ranges:
            position, stop = start, start + length
            while position < stop:
                page, offset = divmod(position, self._page_bytes)
                size = min(stop - position, self._page_bytes - offset)
                pieces.append(_Piece(page, offset, begin, begin + size))
                position += size
                begin += size
        return tuple(pieces)

    def _put(self, pages: Pages, pieces: Sequence[_Piece], buffer: Tensor) -> None:
        for piece in pieces:
            page = self._pool[int(pages[piece.page])]
            page[piece.offset : piece.offset + piece.end - piece.begin] = buffer[piece.begin : piece.end]

    def _get(self, pages: Pages, pieces: Sequence[_Piece], buffer: Tensor) -> None:
        for piece in pieces:
            page = self._pool[int(pages[piece.page])]
            buffer[piece.begin : piece.end] = page[piece.offset : piece.offset + piece.end - piece.begin]


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """Where one layer's shared channels and units lie."""

    codec: "_LayerCodec"
    shared: tuple[_Piece, ...]
    units: tuple[_Piece, ...]


class _LayerCodec:
    """One layer's state as bytes: shared channels uint8 [shared_bytes], units uint8 [units, unit_bytes]."""

    def __init__(self, spec: RecurrentSpec, dtype: torch.dtype) -> None:
        for part in spec.parts:
            if not part.shared and part.channels % spec.units:
                raise ValueError(f"{part.channels} convolution channels do not divide among {spec.units} units")
        if spec.state[0] % spec.units:
            raise ValueError(f"{spec.state[0]} heads do not divide among {spec.units} units")
        self.spec = spec
        self._dtype = dtype
        column = dtype.itemsize * spec.columns
        self.shared_bytes = column * sum(part.channels for part in spec.parts if part.shared)
        self._conv_bytes = column * sum(part.channels for part in spec.parts if not part.shared) // spec.units
        self._state_numbers = torch.Size(spec.state).numel() // spec.units
        self.unit_bytes = self._conv_bytes + self._state_numbers * torch.float32.itemsize

    def buffers(self) -> tuple[Tensor, Tensor]:
        shared = torch.empty(self.shared_bytes, dtype=torch.uint8)
        return shared, torch.empty(self.spec.units, self.unit_bytes, dtype=torch.uint8)

    def pack(self, conv: Tensor, state: Tensor, shared: Tensor, units: Tensor) -> None:
        for mine, bytes_of in self._conv_views(conv, shared, units):
            bytes_of.copy_(mine)
        units[:, self._conv_bytes :] = self._state_view(state)

    def unpack(self, shared: Tensor, units: Tensor, conv: Tensor, state: Tensor) -> None:
        for mine, bytes_of in self._conv_views(conv, shared, units):
            mine.copy_(bytes_of)
        self._state_view(state).copy_(units[:, self._conv_bytes :])

    def _state_view(self, state: Tensor) -> Tensor:
        return state.view(self.spec.units, self._state_numbers).view(torch.uint8)

    def _conv_views(self, conv: Tensor, shared: Tensor, units: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each part of the convolution its bytes in `conv` and in the file, as views of the same shape."""
        columns, item = self.spec.columns, self._dtype.itemsize
        raw = conv.view(torch.uint8)
        together = shared.view(columns, self.shared_bytes // columns)
        apart = units[:, : self._conv_bytes].view(self.spec.units, columns, self._conv_bytes // columns)
        views, begin, at_shared, at_unit = [], 0, 0, 0
        for part in self.spec.parts:
            size = part.channels * item
            mine = raw[:, begin : begin + size]
            begin += size
            if part.shared:
                views.append((mine, together[:, at_shared : at_shared + size]))
                at_shared += size
            else:
                own = size // self.spec.units
                by_unit = mine.view(columns, self.spec.units, own).transpose(0, 1)
                views.append((by_unit, apart[:, :, at_unit : at_unit + own]))
                at_unit += own
        return views
