"""Matrices in codes, found among a checkpoint's tensors by the layouts that its config names, and read."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from cairn.kernels.quantized import QuantizedWeight
from cairn.models.sharding import Slice, TensorShard
from cairn.models.weights.compiled_loops import read_codes
from cairn.models.weights.packed_layouts import Coding, PackedLayout, Wanted, codings
from cairn.models.weights.tensor_headers import TensorHeader

logger = logging.getLogger(__name__)

Layouts = tuple[PackedLayout, ...]

ReadPart = Callable[[str, tuple[slice, ...]], Tensor]
"""A part of the tensor of this name, with one slice a dimension, as it is stored."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [out, in], or a stack of experts', in codes. `tensors`: the names of its tensors by role."""

    name: str
    layout: PackedLayout
    coding: Coding
    tensors: Mapping[str, str]
    headers: Mapping[str, TensorHeader]

    @property
    def form(self) -> str:
        """In words."""
        coding = self.coding
        scales = "a scale a row" if coding.groups == 1 else f"groups of {coding.group}"
        return f"{self.layout.format}, {coding.bits} bits, {scales}"

    @property
    def units(self) -> tuple[int, int]:
        """Outputs and inputs at multiples of which it can be cut."""
        return self.layout.units(self.coding, tuple(self.tensors))

    def read(self, read_part: ReadPart, place: tuple[slice, ...], dtype: torch.dtype) -> QuantizedWeight:
        """The part at a place that is cut at multiples of `units`."""

        def read(role: str, part: tuple[slice, ...]) -> Tensor:
            name = self.tensors[role]
            return read_part(name, part or tuple(slice(0, length) for length in self.headers[name].shape))

        return self.layout.read(read, self.coding, place, tuple(self.tensors), dtype)

    def read_part(self, read_part: ReadPart, place: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """The numbers of any part, rounded to a dtype once."""
        *outer, rows, columns = place
        whole = [
            _widened(part, unit, length)
            for part, unit, length in zip((rows, columns), self.units, self.coding.shape[-2:], strict=True)
        ]
        numbers = self.read(read_part, (*outer, *whole), dtype).dequantize()
        return numbers[..., _inside(rows, whole[0]), _inside(columns, whole[1])]

    def read_shard(self, read_part: ReadPart, shard: TensorShard | None, dtype: torch.dtype) -> QuantizedWeight | None:
        """As it is stored, or a shard of it; None for a cut inside groups of inputs, which is logged."""
        shape = self.coding.shape
        place = [slice(0, length) for length in shape]
        if shard is None:
            return read_codes(lambda: self.read(read_part, tuple(place), dtype))
        if shard.dim == len(shape) - 1:
            if not self._cuts_between_groups(shard.slices):
                logger.warning("%s is cut inside groups of inputs with one scale: it is dequantized", self.name)
                return None
            parts = []
            for begin, end in shard.slices:
                place[-1] = slice(begin, end)
                parts.append(self.read(read_part, tuple(place), dtype))
            return _join_columns(parts, has_groups=self.coding.groups > 1)
        row_parts = []
        for begin, end in shard.slices:
            rows = slice(begin, end)
            place[-2] = _widened(rows, self.units[0], shape[-2])
            part = self.read(read_part, tuple(place), dtype)
            inside = _inside(rows, place[-2])
            row_parts.append(part.changed(lambda each, inside=inside: each[..., inside, :]))  # type: ignore[misc]
        return _join_rows(row_parts)

    def _cuts_between_groups(self, slices: tuple[Slice, ...]) -> bool:
        unit = self.units[1]
        return all(begin % unit == 0 and end % unit == 0 for begin, end in slices)


def find_layout(headers: Mapping[str, TensorHeader], name: str, layouts: Layouts) -> PackedLayout | None:
    """How a matrix is stored in codes; None where it is not."""
    return next((layout for layout in layouts if layout.is_used_by(headers, name)), None)


def resolve_matrix(
    headers: Mapping[str, TensorHeader], name: str, shape: tuple[int, ...], layout: PackedLayout
) -> PackedMatrix | str:
    """A matrix of this shape, or what is wrong with its tensors, in a sentence that begins with the file."""
    file = headers[layout.stored_name(name, layout.key) or name].file
    if len(shape) != layout.num_dims:
        return f"{file}: {name} {list(shape)} is stored as {layout.format}, which is for matrices alone"
    problems = []
    for coding, wanted in _choices(layout, shape):
        matrix = _match(headers, name, layout, coding, wanted)
        if not isinstance(matrix, str):
            return matrix
        problems.append(matrix)
    if problems:
        return problems[0]
    sizes = " or ".join(map(str, layout.sizes))
    return f"{file}: {name} ({layout.format}): groups of {sizes} do not divide its {shape[-1]} inputs into whole words"


@lru_cache(maxsize=1024)
def _choices(layout: PackedLayout, shape: tuple[int, ...]) -> tuple[tuple[Coding, Mapping[str, Wanted]], ...]:
    """The codings that a matrix of this shape may have, and what each wants: many matrices are of one shape."""
    return tuple((coding, layout.wanted(coding)) for coding in codings(layout, shape))


def packed_tensors(headers: Mapping[str, TensorHeader], name: str, layout: PackedLayout) -> Iterator[str]:
    """The stored tensors of a matrix, also those that are not needed."""
    for role in _roles_of(layout):
        stored = layout.stored_name(name, role)
        if stored is not None and stored in headers:
            yield stored


@cache
def _roles_of(layout: PackedLayout) -> tuple[str, ...]:
    coding = Coding((1,) * layout.num_dims, 4, 1)
    return *layout.wanted(coding), *layout.unused


def layouts_by_name(headers: Mapping[str, TensorHeader], layouts: Layouts) -> dict[str, PackedLayout]:
    """What `find_layout` finds of all matrices in codes."""
    return {
        name: layout
        # Of several the first one is it.
        for layout in reversed(layouts)
        for stored, header in headers.items()
        if header.dtype in layout.key_dtypes and (name := layout.matrix_name(stored)) is not None
    }


def _match(
    headers: Mapping[str, TensorHeader], name: str, layout: PackedLayout, coding: Coding, roles: Mapping[str, Wanted]
) -> PackedMatrix | str:
    tensors = {}
    for role, wanted in roles.items():
        stored = layout.stored_name(name, role)
        header = None if stored is None else headers.get(stored)
        if stored is None or header is None:
            if wanted.optional:
                continue
            return f"{stored} {list(wanted.shapes[0])} ({layout.format}) is missing"
        if header.shape not in wanted.shapes or header.dtype not in wanted.dtypes:
            dtype = header.dtype if header.dtype in wanted.dtypes else wanted.dtypes[0]
            return (
                f"{header.file}: {stored} is {header.dtype} {list(header.shape)}, {layout.format} of "
                f"{list(coding.shape)} in groups of {coding.group} makes it {dtype} {list(wanted.shapes[0])}"
            )
        tensors[role] = stored
    return PackedMatrix(name, layout, coding, tensors, headers)


def _widened(part: slice, unit: int, length: int) -> slice:
    """To multiples of a unit, but not beyond the end."""
    return slice(part.start // unit * unit, min(length, -(-part.stop // unit) * unit))


def _inside(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _join_rows(parts: list[QuantizedWeight]) -> QuantizedWeight:
    if len(parts) == 1:
        return parts[0]
    rows = [part.row_tensors() for part in parts]
    return parts[0].with_rows({name: torch.cat([each[name] for each in rows], dim=-2) for name in rows[0]})


def _join_columns(parts: list[QuantizedWeight], has_groups: bool) -> QuantizedWeight:
    """Factors are of whole rows, and so is the only scale of a row."""
    if len(parts) == 1:
        return parts[0]
    rows = [part.row_tensors() for part in parts]
    wide = {"codes", "scales", "zeros"} & rows[0].keys() if has_groups else {"codes"}
    return parts[0].with_rows({name: torch.cat([each[name] for each in rows], dim=-1) for name in wide})
