"""Integers in codes: layouts of compressed-tensors, AutoAWQ, GPTQ and AutoRound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from cairn.errors import ModelError
from cairn.kernels.quantized import QuantizedWeight
from cairn.models.weights.packed_layouts import FLOATS, Coding, PackedLayout, Read, Wanted, divided
from cairn.models.weights.transposes import join_codes, order_codes, sort_by_group, transpose_words, unpack_codes

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs of a word, from its lowest bits on."""

_IN_ORDER = tuple(range(8))


class _Words(PackedLayout):
    """Of a whole matrix by words along its outputs or inputs."""

    __slots__ = ()

    def units(self, coding: Coding, roles: Sequence[str]) -> tuple[int, int]:
        """See `PackedLayout`."""
        # Inputs in an order of their own have their groups anywhere.
        ordered = "g_idx" in roles or "weight_g_idx" in roles
        group = coding.group if coding.groups > 1 else 1
        return coding.in_word, coding.inputs if ordered else lcm(group, coding.in_word)


class CompressedIntegers(_Words):
    """Zero points lie in words of neighbouring outputs; without any, half of the codes are below zero."""

    __slots__ = ()
    key = "weight_packed"
    key_dtypes = ("I32",)
    unused = ("weight_shape",)

    def wanted(self, coding: Coding) -> Mapping[str, Wanted]:
        """See `PackedLayout`."""
        outputs, groups = coding.outputs, coding.groups
        return {
            "weight_packed": Wanted(((outputs, coding.inputs // coding.in_word),), ("I32",)),
            "weight_scale": _scales(coding),
            "weight_zero_point": Wanted(((-(-outputs // coding.in_word), groups),), ("I32",), optional=True),
            "weight_g_idx": Wanted(((coding.inputs,),), ("I32", "I64"), optional=True),
        }

    def read(
        self, read: Read, coding: Coding, place: tuple[slice, ...], roles: Sequence[str], dtype: torch.dtype
    ) -> QuantizedWeight:
        """See `PackedLayout`."""
        rows, columns = place
        words = read("weight_packed", (rows, divided(columns, coding.in_word)))
        zeros = order = None
        if "weight_zero_point" in roles:
            packed = read("weight_zero_point", (divided(rows, coding.in_word), divided(columns, coding.group)))
            zeros = _unpack(packed.t(), coding.bits).t()[: words.shape[0]]
        if "weight_g_idx" in roles:
            order = _order(read("weight_g_idx", (columns,)), coding, f"{self.format}: weight_g_idx")
        if order is not None:
            words = order_codes(transpose_words(words), order, coding.bits).t()
        return QuantizedWeight(
            words,
            _read_scales(read, "weight_scale", coding, place),
            dtype,
            coding.bits,
            zero=1 << (coding.bits - 1),
            zeros=zeros,
            order=order,
        )


class CompressedBytes(PackedLayout):
    """One number a byte."""

    __slots__ = ()
    key = "weight"
    key_dtypes = ("I8",)
    unused = ("input_scale", "input_zero_point")

    def wanted(self, coding: Coding) -> Mapping[str, Wanted]:
        """See `PackedLayout`."""
        shapes = (coding.outputs, coding.groups), *(((1,), ()) if coding.groups == 1 else ())
        return {
            "weight": Wanted((coding.shape,), ("I8",)),
            "weight_scale": _scales(coding),
            "weight_zero_point": Wanted(shapes, ("I8",), optional=True),
        }

    def units(self, coding: Coding, roles: Sequence[str]) -> tuple[int, int]:
        """See `PackedLayout`."""
        return 1, coding.group if coding.groups > 1 else 1

    def read(
        self, read: Read, coding: Coding, place: tuple[slice, ...], roles: Sequence[str], dtype: torch.dtype
    ) -> QuantizedWeight:
        """See `PackedLayout`."""
        zeros = _read_scales(read, "weight_zero_point", coding, place) if "weight_zero_point" in roles else None
        scales = _read_scales(read, "weight_scale", coding, place)
        return QuantizedWeight(read("weight", place), scales, dtype, bits=8, zeros=zeros)


class AwqWords(_Words):
    """A word has eight outputs in an order of their own."""

    __slots__ = ()
    key = "qweight"
    key_dtypes = ("I32",)

    def wanted(self, coding: Coding) -> Mapping[str, Wanted]:
        """See `PackedLayout`."""
        words = coding.outputs // coding.in_word
        return {
            "qweight": Wanted(((coding.inputs, words),), ("I32",)),
            "qzeros": Wanted(((coding.groups, words),), ("I32",)),
            "scales": Wanted(((coding.groups, coding.outputs),), FLOATS),
        }

    def read(
        self, read: Read, coding: Coding, place: tuple[slice, ...], roles: Sequence[str], dtype: torch.dtype
    ) -> QuantizedWeight:
        """See `PackedLayout`."""
        (rows, columns), groups = place, divided(place[1], coding.group)
        words = divided(rows, coding.in_word)
        codes = join_codes(read("qweight", (columns, words)), _AWQ_ORDER)
        zeros = unpack_codes(read("qzeros", (groups, words)), _AWQ_ORDER)
        return QuantizedWeight(codes.t(), read("scales", (groups, rows)).t(), dtype, zeros=zeros.t())


@dataclass(frozen=True, slots=True)
class GptqWords(_Words):
    """`zeros_less_one`: zero points are stored less 1, as in all but version 2."""

    zeros_less_one: bool = True

    key = "qweight"
    key_dtypes = ("I32",)

    def wanted(self, coding: Coding) -> Mapping[str, Wanted]:
        """See `PackedLayout`."""
        return {
            "qweight": Wanted(((coding.inputs // coding.in_word, coding.outputs),), ("I32",)),
            "qzeros": Wanted(((coding.groups, coding.outputs // coding.in_word),), ("I32",)),
            "scales": Wanted(((coding.groups, coding.outputs),), FLOATS),
            "g_idx": Wanted(((coding.inputs,),), ("I32",), optional=True),
        }

    def read(
        self, read: Read, coding: Coding, place: tuple[slice, ...], roles: Sequence[str], dtype: torch.dtype
    ) -> QuantizedWeight:
        """See `PackedLayout`."""
        (rows, columns), groups = place, divided(place[1], coding.group)
        words = read("qweight", (divided(columns, coding.in_word), rows))
        order = _order(read("g_idx", (columns,)), coding, f"{self.format}: g_idx") if "g_idx" in roles else None
        codes = words if order is None else order_codes(words, order, coding.bits)
        packed = read("qzeros", (groups, divided(rows, coding.in_word)))
        if coding.bits == 4:
            zeros = unpack_codes(packed, _IN_ORDER, int(self.zeros_less_one))
        else:
            zeros = _bytes_of(packed) + int(self.zeros_less_one)
        return QuantizedWeight(
            codes.t(), read("scales", (groups, rows)).t(), dtype, coding.bits, zeros=zeros.t(), order=order
        )


def _scales(coding: Coding) -> Wanted:
    shapes = (coding.outputs, coding.groups), *(((1,), (), (coding.outputs,)) if coding.groups == 1 else ())
    return Wanted(shapes, FLOATS)


def _read_scales(read: Read, role: str, coding: Coding, place: tuple[slice, ...]) -> Tensor:
    """[rows, groups], whichever of the shapes of `_scales` they have."""
    rows, columns = place
    if coding.groups > 1:
        return read(role, (rows, divided(columns, coding.group)))
    scales = read(role, ()).reshape(-1, 1)
    whole = scales.expand(coding.outputs, 1) if scales.shape[0] == 1 else scales
    return whole[rows]


def _bytes_of(words: Tensor) -> Tensor:
    """int32 [n, m] -> uint8 [n, 4 m]."""
    # What has one column is contiguous whatever its stride.
    is_plain = words.is_contiguous() and words.stride(-1) == 1
    rows = words if is_plain else words.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.uint8)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits], from the lowest bits on."""
    codes = _bytes_of(words)
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1) if bits == 4 else codes


def _order(groups: Tensor, coding: Coding, label: str) -> Tensor | None:
    """The order of inputs in which each group's lie together, given the group of each input; None for the stored order.
    Raises ModelError where groups are not all of one size."""
    if groups.is_meta or groups.numel() == 0:
        return None
    try:
        return sort_by_group(groups, coding.groups, coding.group)
    except ValueError:
        raise ModelError(f"{label} does not have {coding.group} inputs in each of {coding.groups} groups") from None
