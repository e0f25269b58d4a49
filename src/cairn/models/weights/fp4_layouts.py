"""FP4 (e2m1) in codes: NVFP4 and MXFP4 as they are published."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cairn.kernels.quantized import QuantizedWeight
from cairn.models.weights.packed_layouts import Coding, PackedLayout, Read, Wanted, divided


@dataclass(frozen=True, slots=True)
class Fp4Bytes(PackedLayout):
    """`codes`: the role of the tensor that has them. `scale_dtype`: of a group's scale. `factor`: the role of the
    factor of all scales, by which they are to be divided where `divides`; None: there is none."""

    codes: str = "weight_packed"
    scale_dtype: Literal["F8_E4M3", "U8"] = "F8_E4M3"
    factor: str | None = "weight_global_scale"
    divides: bool = True

    key_dtypes = ("U8",)
    unused = ("input_global_scale", "input_scale", "weight_shape")

    @property
    def key(self) -> str:  # type: ignore[override]
        """See `PackedLayout`."""
        return self.codes

    def wanted(self, coding: Coding) -> Mapping[str, Wanted]:
        """See `PackedLayout`."""
        tensors = {
            self.codes: Wanted(((coding.outputs, coding.inputs // 2),), ("U8",)),
            "weight_scale": Wanted(((coding.outputs, coding.groups),), (self.scale_dtype,)),
        }
        return tensors | ({} if self.factor is None else {self.factor: Wanted(((), (1,), (1, 1)), ("F32",))})

    def units(self, coding: Coding, roles: Sequence[str]) -> tuple[int, int]:
        """See `PackedLayout`."""
        return 1, coding.group

    def read(
        self, read: Read, coding: Coding, place: tuple[slice, ...], roles: Sequence[str], dtype: torch.dtype
    ) -> QuantizedWeight:
        """See `PackedLayout`."""
        rows, columns = place
        codes = read(self.codes, (rows, divided(columns, 2))).contiguous()
        scales = read("weight_scale", (rows, divided(columns, coding.group))).contiguous()
        factors = None
        if self.factor is not None:
            factors = read(self.factor, ()).reshape(1, 1).expand(codes.shape[0], 1).contiguous()
        scales = scales.view(torch.float8_e8m0fnu) if self.scale_dtype == "U8" else scales
        return QuantizedWeight(codes, scales, dtype, numbers="e2m1", factors=factors, divides=self.divides)


class Mxfp4Blocks(PackedLayout):
    """[E, out, groups, 16 bytes]."""

    __slots__ = ()
    key = "blocks"
    key_dtypes = ("U8",)
    num_dims = 3

    def stored_name(self, name: str, role: str) -> str | None:
        """See `PackedLayout`."""
        return f"{name}_{role}"

    def matrix_name(self, stored: str) -> str | None:
        """See `PackedLayout`."""
        return stored.removesuffix("_blocks") if stored.endswith("_blocks") else None

    def wanted(self, coding: Coding) -> Mapping[str, Wanted]:
        """See `PackedLayout`."""
        groups = (*coding.shape[:-1], coding.groups)
        return {"blocks": Wanted(((*groups, coding.group // 2),), ("U8",)), "scales": Wanted((groups,), ("U8",))}

    def units(self, coding: Coding, roles: Sequence[str]) -> tuple[int, int]:
        """See `PackedLayout`."""
        return 1, coding.group

    def read(
        self, read: Read, coding: Coding, place: tuple[slice, ...], roles: Sequence[str], dtype: torch.dtype
    ) -> QuantizedWeight:
        """See `PackedLayout`."""
        groups = (*place[:-1], divided(place[-1], coding.group))
        blocks = read("blocks", (*groups, slice(0, coding.group // 2))).flatten(-2).contiguous()
        scales = read("scales", groups).contiguous().view(torch.float8_e8m0fnu)
        return QuantizedWeight(blocks, scales, dtype, numbers="e2m1")
