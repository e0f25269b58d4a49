"""Where the states of running sequences lie in checkpoint files, and copies between the two by torch's index
operations, which are those of the backends that compute on the host."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import gcd

import torch
from torch import Tensor

from cairn.kernels.state_codec import CODECS
from cairn.kernels.state_encoding import SCALE_BYTES, EncodedStates, HeadSpan

_GROUP_BYTES = 4 << 20
"""Of a file that are copied at once: so much memory for each file is taken on the way."""


@dataclass(frozen=True, slots=True)
class StateSpan:
    """`num_bytes` bytes that follow one another in a checkpoint file, from `state_offset` on, and in an entry of tensor
    number `tensor` of those that are copied, from `offset` on."""

    tensor: int
    offset: int
    state_offset: int
    num_bytes: int

    def pieces(self, page_bytes: int) -> "Iterator[tuple[int, int, StateSpan]]":
        """The same, cut where a page ends: a file's page, the offset in it, and what lies there."""
        done = 0
        while done < self.num_bytes:
            page, begin = divmod(self.state_offset + done, page_bytes)
            length = min(page_bytes - begin, self.num_bytes - done)
            yield page, begin, StateSpan(self.tensor, self.offset + done, self.state_offset + done, length)
            done += length


def common_alignment(spans: Sequence[StateSpan], entry_bytes: Sequence[int], page_bytes: int) -> int:
    """The largest number of bytes that divides whatever the spans begin at or consist of, pages and entries."""
    places = (number for span in spans for number in (span.offset, span.state_offset, span.num_bytes))
    return gcd(page_bytes, *(entry_bytes[span.tensor] for span in spans), *places)


def word_of(alignment: int) -> torch.dtype:
    """Whole numbers of at most so many bytes, and as many as can be."""
    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(word for word in words if alignment % word.itemsize == 0)


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Some spans of one tensor as rows of equal length. `pages`, `rows_in_page`, `rows_in_entry`: int64, of each row.
    `rows_per_entry`: from an entry to the next. `end`: of the last row in an entry. `is_whole`: whether entries are
    nothing but the rows in their order."""

    tensor: int
    row_bytes: int
    pages: Tensor
    rows_in_page: Tensor
    rows_in_entry: Tensor
    rows_per_entry: int
    end: int
    is_whole: bool

    @staticmethod
    def of(spans: Sequence[StateSpan], entry_bytes: Sequence[int], pool: Tensor) -> "RowGroup":
        row_bytes = common_alignment(spans, entry_bytes, pool.shape[1])
        rows_per_page, rows_per_entry = pool.shape[1] // row_bytes, entry_bytes[spans[0].tensor] // row_bytes

        def rows_from(offset: int, span: StateSpan) -> Tensor:
            first = offset // row_bytes
            return torch.arange(first, first + span.num_bytes // row_bytes, device=pool.device)

        in_file = torch.cat([rows_from(span.state_offset, span) for span in spans])
        in_entry = torch.cat([rows_from(span.offset, span) for span in spans])
        end = max(span.offset + span.num_bytes for span in spans) // row_bytes
        follow = all(before.offset + before.num_bytes == after.offset for before, after in pairwise(spans))
        is_whole = follow and spans[0].offset == 0 and end == rows_per_entry
        pages, rows_in_page = in_file // rows_per_page, in_file % rows_per_page
        return RowGroup(
            spans[0].tensor, row_bytes, pages, rows_in_page, in_entry, rows_per_entry, end, is_whole=is_whole
        )

    def in_pool(self, pool: Tensor, files: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the pool, and which of them are the files'."""
        rows = pool.view(word_of(self.row_bytes)).view(-1, self._row_words)
        index = files.index_select(1, self.pages) * (pool.shape[1] // self.row_bytes) + self.rows_in_page
        return rows, index.flatten()

    def in_tensor(self, tensor: Tensor, entries: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
        """Rows of the tensor, and which of them are the entries': None for all of them, in their order."""
        stride = tensor.stride(0) * tensor.itemsize
        # Of one entry torch has no stride to hold to.
        assert len(tensor) == 1 or stride == self.rows_per_entry * self.row_bytes, "entries lie as they were said to"
        num_rows = (len(tensor) - 1) * self.rows_per_entry + self.end
        # Whatever lies between entries is a part of the rows' memory.
        flat = tensor.as_strided((num_rows * self.row_bytes // tensor.itemsize,), (1,))
        rows = flat.view(word_of(self.row_bytes)).view(num_rows, self._row_words)
        if entries is None:
            if self.is_whole and len(tensor) == count:
                return rows, None
            entries = torch.arange(count, device=tensor.device)
        return rows, (entries[:, None] * self.rows_per_entry + self.rows_in_entry).flatten()

    @property
    def _row_words(self) -> int:
        return self.row_bytes // word_of(self.row_bytes).itemsize


@dataclass(frozen=True, slots=True, eq=False)
class HeadGroup:
    """Heads that follow one another in an entry, from byte `offset` on, as `parts` parts of `numbers` numbers with a
    scale each. `values`, `scales`: of tensors that have nothing else."""

    offset: int
    parts: int
    numbers: int
    values: RowGroup
    scales: RowGroup

    @staticmethod
    def of(spans: Sequence[HeadSpan], states: EncodedStates, pool: Tensor) -> "HeadGroup":
        num_scales = states.scale_bytes // SCALE_BYTES
        return HeadGroup(
            spans[0].offset,
            sum(span.num_heads for span in spans) * num_scales,
            states.rows * states.columns // num_scales,
            _places(spans, [span.values_offset for span in spans], states.value_bytes, pool),
            _places(spans, [span.scales_offset for span in spans], states.scale_bytes, pool),
        )

    def in_tensor(self, tensor: Tensor) -> Tensor:
        """A view, [entry, parts, numbers]."""
        shape, strides = (len(tensor), self.parts, self.numbers), (tensor.stride(0), self.numbers, 1)
        return tensor.as_strided(shape, strides, tensor.storage_offset() + self.offset // tensor.itemsize)


def _head_groups(states: EncodedStates, pool: Tensor) -> Iterator[HeadGroup]:
    """Spans that follow one another in an entry are one group, up to a size."""
    run = list[HeadSpan]()
    for span in sorted(states.spans, key=lambda span: span.offset):
        length = sum(each.num_heads for each in run) * states.head_bytes
        if run and not (run[0].offset + length == span.offset and length < _GROUP_BYTES):
            yield HeadGroup.of(run, states, pool)
            run = []
        run.append(span)
    yield HeadGroup.of(run, states, pool)


def _places(spans: Sequence[HeadSpan], file_offsets: Sequence[int], bytes_per_head: int, pool: Tensor) -> RowGroup:
    """Where what becomes of the spans' heads lies in files, out of a tensor that has nothing else."""
    pieces, offset = list[StateSpan](), 0
    for span, state_offset in zip(spans, file_offsets, strict=True):
        pieces.append(StateSpan(0, offset, state_offset, span.num_heads * bytes_per_head))
        offset += pieces[-1].num_bytes
    return RowGroup.of(pieces, [offset], pool)


def _write(pool: Tensor, files: Tensor, group: RowGroup, values: Tensor) -> None:
    rows, index = group.in_pool(pool, files)
    rows.index_copy_(0, index, values.view(len(files), -1).view(rows.dtype).view(-1, rows.shape[1]))


def _read(pool: Tensor, files: Tensor, group: RowGroup, dtype: torch.dtype) -> Tensor:
    """[files, numbers]."""
    rows, index = group.in_pool(pool, files)
    return rows.index_select(0, index).view(len(files), -1).view(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class IndexedCopies:
    """What `pack_state_spans` makes here: what is copied as it is, and heads that are encoded."""

    rows: tuple[RowGroup, ...]
    heads: tuple[HeadGroup, ...]
    states: EncodedStates | None


def pack_state_spans(
    spans: Sequence[StateSpan], entry_bytes: Sequence[int], pool: Tensor, states: EncodedStates | None = None
) -> IndexedCopies:
    """See `Kernels.pack_state_spans`."""
    groups: list[list[StateSpan]] = []
    for _, tensor_spans in groupby(
        sorted(spans, key=lambda span: (span.tensor, span.state_offset)), lambda span: span.tensor
    ):
        size = _GROUP_BYTES
        for span in tensor_spans:
            if size + span.num_bytes > _GROUP_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(span)
            size += span.num_bytes
    rows = tuple(RowGroup.of(group, entry_bytes, pool) for group in groups)
    return IndexedCopies(rows, () if states is None else tuple(_head_groups(states, pool)), states)


def store_states(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: IndexedCopies
) -> None:
    """See `Kernels.store_states`."""
    if not len(files):
        return
    for group in spans.rows:
        values, chosen = group.in_tensor(tensors[group.tensor], entries, len(files))
        rows, index = group.in_pool(pool, files)
        rows.index_copy_(0, index, values if chosen is None else values.index_select(0, chosen))
    if spans.states is None:
        return
    codec, tensor = CODECS[spans.states.encoding.name], tensors[spans.states.tensor]
    for heads in spans.heads:
        numbers = heads.in_tensor(tensor)
        stored, scales = codec.encode(numbers if entries is None else numbers.index_select(0, entries))
        _write(pool, files, heads.values, stored)
        _write(pool, files, heads.scales, scales)


def load_states(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: IndexedCopies
) -> None:
    """See `Kernels.load_states`."""
    if not len(files):
        return
    for group in spans.rows:
        rows, index = group.in_pool(pool, files)
        target, chosen = group.in_tensor(tensors[group.tensor], entries, len(files))
        if chosen is None:
            torch.index_select(rows, 0, index, out=target)
        else:
            target.index_copy_(0, chosen, rows.index_select(0, index))
    if spans.states is None:
        return
    codec, tensor = CODECS[spans.states.encoding.name], tensors[spans.states.tensor]
    for heads in spans.heads:
        target = heads.in_tensor(tensor)
        stored = _read(pool, files, heads.values, codec.dtype).view(len(files), heads.parts, heads.numbers)
        scales = _read(pool, files, heads.scales, torch.float32).view(len(files), heads.parts, 1)
        target[slice(None) if entries is None else entries] = codec.decode(stored, scales)


def copy_pages(pool: Tensor, targets: Tensor, sources: Tensor) -> None:
    """See `Kernels.copy_pages`."""
    pool[targets] = pool[sources]
