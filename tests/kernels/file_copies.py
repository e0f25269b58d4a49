"""Copies between states and checkpoint files: what is in both, in several layouts, and how a backend is held to the
reference, byte by byte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cairn.kernels import reference
from cairn.kernels.checkpoint_files import StateSpan
from cairn.kernels.contract import Kernels
from cairn.kernels.state_encoding import ENCODINGS, EncodedStates, HeadSpan
from kernels.backends import DEVICES
from kernels.kernel_calls import CPU, moved_to, whole_memory

BF16, F32 = torch.bfloat16, torch.float32
F32_MAX = float(torch.finfo(F32).max)


def any_bytes(seed: int, *shape: int) -> Tensor:
    """NaN and infinity among the numbers that they make, in every dtype."""
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@dataclass(frozen=True)
class States:
    """Hidden states, convolution windows and states of some heads, in slots: sizes of an entry, in numbers of `dtype`
    but for `state`, which are float32. `padding`: bytes from an entry's end to the next one. `encoding`: how files have
    a state, of heads with `head` rows and columns."""

    dtype: torch.dtype
    hidden: int
    columns: int
    channels: tuple[int, ...]
    state: int
    units: int
    layers: int
    padding: int = 0
    encoding: str = "float32"
    head: tuple[int, int] = (0, 0)

    def tensors(self, num_entries: int, seed: int = 0) -> list[Tensor]:
        sizes = [self.hidden * self.dtype.itemsize]
        if self.layers:
            sizes += [self.layers * self._conv_bytes, self.layers * self.state * 4]
        kept = [size for size in sizes if size]
        tensors = [
            any_bytes(seed + number, num_entries + 1, size + self.padding)[:-1, :size].view(
                F32 if number == 2 else self.dtype
            )
            for number, size in enumerate(kept)
        ]
        if self.encoding != "float32":
            tensors[2].copy_(any_states(seed, num_entries, self.layers * self.state, self.head))
        return tensors

    @property
    def entry_bytes(self) -> list[int]:
        return [each.stride(0) * each.itemsize for each in self.tensors(1)]

    @property
    def _conv_bytes(self) -> int:
        return self.columns * sum(self.channels) * self.dtype.itemsize

    def spans(self) -> tuple[list[StateSpan], EncodedStates | None]:
        """Hidden states first, then by unit and layer its share of each part of the channels, and its heads. Behind a
        unit's layers the scales of its heads, if it has any."""
        spans = [StateSpan(0, 0, 0, self.hidden * self.dtype.itemsize)]
        at = spans[0].num_bytes

        def add(tensor: int, offset: int, num_bytes: int) -> None:
            nonlocal at
            if num_bytes:
                spans.append(StateSpan(tensor, offset, at, num_bytes))
                at += num_bytes

        size, row = self.dtype.itemsize, sum(self.channels) * self.dtype.itemsize
        encoding, rows, columns = ENCODINGS[self.encoding], *self.head
        heads = list[HeadSpan]()
        for unit in range(self.units):
            for layer in range(self.layers):
                for column in range(self.columns):
                    first = layer * self._conv_bytes + column * row
                    for channels in self.channels:
                        own = channels // self.units * size
                        add(1, first + unit * own, own)
                        first += channels * size
                share = self.state // self.units * 4
                if self.encoding == "float32":
                    add(2, layer * self.state * 4 + unit * share, share)
                else:
                    num_heads = share // 4 // (rows * columns)
                    heads.append(HeadSpan(layer * self.state * 4 + unit * share, num_heads, at, 0))
                    at += share // 4 * encoding.value_bytes
                    at += at % 2
            for index in range(max(0, len(heads) - self.layers), len(heads)):
                heads[index] = replace(heads[index], scales_offset=at)
                at += heads[index].num_heads * encoding.num_scales(self.head) * 4
        return spans, EncodedStates(2, encoding, rows, columns, tuple(heads)) if heads else None

    @property
    def file_bytes(self) -> int:
        spans, states = self.spans()
        ends = [span.state_offset + span.num_bytes for span in spans]
        if states is not None:
            ends += [head.scales_offset + head.num_heads * states.scale_bytes for head in states.spans]
        return max(ends)


def any_states(seed: int, num_entries: int, numbers: int, head: tuple[int, int]) -> Tensor:
    """Float32 numbers, but in some heads all 0, and in others as large or as small as there are: whatever a number is,
    its neighbour is of another size."""
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(num_entries, numbers // math.prod(head), *head, generator=generator)
    sizes = torch.tensor([0.0, 2.0**-149, 2.0**-126, 2.0**-112, 2.0**-3, 1.0, 1000.0, 2.0**100, F32_MAX])
    wanted = sizes[torch.randint(len(sizes), heads.shape[:2], generator=generator)][..., None, None]
    spread = torch.exp2(torch.randint(-9, 1, heads.shape, generator=generator).float())
    largest = heads.abs().amax((-2, -1), keepdim=True)
    return ((heads / largest * spread).double() * wanted).float().view(num_entries, -1)


SMALL = States(BF16, hidden=40, columns=3, channels=(16, 8, 8), state=64, units=2, layers=2)
LONG = "a span over three pages, rows longer than a tile's"
CASES = {
    "bfloat16": (SMALL, 256),
    "float32": (States(F32, 24, 3, (12, 8), 40, 4, 1), 128),
    LONG: (States(F32, 16, 2, (8,), 600, 1, 2), 1024),
    "one tensor": (States(BF16, 200, 0, (), 0, 1, 0), 176),
    "windows alone": (States(BF16, 8, 2, (24,), 0, 1, 2), 64),
    "words of 8 bytes": (States(BF16, 12, 3, (8, 8), 6, 2, 1), 72),
    "words of 4 bytes": (States(BF16, 10, 3, (6, 4), 3, 1, 2), 52),
    "words of 2 bytes": (States(BF16, 7, 3, (3, 5), 3, 1, 1), 26),
    "bytes": (States(torch.uint8, 5, 1, (3,), 2, 1, 1), 9),
    "entries apart": (States(BF16, 40, 3, (16, 8, 8), 64, 2, 2, padding=48), 256),
}

ENCODED = {
    f"{case}, {encoding}": (replace(states, encoding=encoding), page_bytes)
    for encoding in ("float16", "int8")
    for case, (states, page_bytes) in {
        "two heads a unit": (replace(SMALL, head=(4, 4)), 256),
        "one row a head": (States(F32, 24, 3, (12, 8), 40, 4, 1, head=(1, 10)), 128),
        "a head over pages": (States(F32, 16, 2, (8,), 600, 1, 2, head=(20, 30)), 256),
        "longer than a tile's row": (States(BF16, 16, 2, (8,), 2 * 2500, 2, 1, head=(1, 2500)), 4096),
        "odd sizes": (States(BF16, 7, 3, (3, 5), 105, 1, 2, head=(7, 5)), 26),
        "pages of two bytes": (States(BF16, 3, 1, (2,), 6, 1, 1, head=(2, 3)), 2),
        "entries apart": (States(BF16, 40, 3, (16, 8, 8), 64, 2, 2, padding=48, head=(2, 16)), 66),
    }.items()
}
"""Of states that files have in another form."""


@dataclass(frozen=True)
class FileCopy:
    """`entries`: of each file, None for all in their order. `files`: which of six, None for the first ones."""

    states: States
    page_bytes: int
    entries: tuple[int, ...] | None
    num_entries: int = 5
    files: tuple[int, ...] | None = None

    def run(self, kernels: Kernels, name: str) -> list[Tensor]:
        """The pool and the tensors with all that they are parts of, after the copy: there is memory behind each."""
        device, (spans, states) = DEVICES.get(kernels, CPU), self.states.spans()
        file_pages = -(-self.states.file_bytes // self.page_bytes)
        count = self.num_entries if self.entries is None else len(self.entries)
        pages = torch.randperm(6 * file_pages + 3, generator=torch.Generator().manual_seed(count))
        lists = pages[: 6 * file_pages].view(6, file_pages)[list(self.files or range(count))]
        pool = any_bytes(9, len(pages) + 1, self.page_bytes).to(device)[:-1]
        tensors = [moved_to(device, each) for each in self.states.tensors(self.num_entries)]
        entries = None if self.entries is None else torch.tensor(self.entries, dtype=torch.int64, device=device)
        if states is not None and name == "load_states":
            # Files have no other numbers than those that were stored there.
            stored = [moved_to(CPU, each) for each in self.states.tensors(6, seed=50)]
            on_host, every_file = pool.to(CPU), pages[: 6 * file_pages].view(6, file_pages)
            truth = reference.pack_state_spans(spans, self.states.entry_bytes, on_host, states)
            reference.store_states(on_host, every_file, stored, None, truth)
            pool.copy_(on_host)
        packed = kernels.pack_state_spans(spans, self.states.entry_bytes, pool, states)
        getattr(kernels, name)(pool, lists.to(device).contiguous(), tensors, entries, packed)
        return [whole_memory(each).view(torch.uint8).to(CPU) for each in (pool, *tensors)]

    def check(self, kernels: Kernels, name: str) -> None:
        """`store_states` or `load_states`."""
        wanted = self.run(reference, name)
        for found, truth in zip(self.run(kernels, name), wanted, strict=True):
            torch.testing.assert_close(found, truth, rtol=0, atol=0)
        before = replace(self, entries=(), files=None).run(reference, name)
        moved = any(not torch.equal(one, other) for one, other in zip(wanted, before, strict=True))
        assert moved == (self.entries != ())


def check_page_copies(kernels: Kernels, page_bytes: int, pairs: Sequence[tuple[int, int]]) -> None:
    """`pairs`: of seven pages, to which one and from which."""
    targets, sources = (torch.tensor(each, device=DEVICES.get(kernels, CPU)) for each in zip(*pairs, strict=True))
    before = any_bytes(3, 7, page_bytes)
    pool = before.clone().to(targets.device)
    kernels.copy_pages(pool, targets, sources)
    wanted = before.clone()
    reference.copy_pages(wanted, targets, sources)
    torch.testing.assert_close(pool.to(CPU), wanted, rtol=0, atol=0)
    assert not torch.equal(wanted, before)
