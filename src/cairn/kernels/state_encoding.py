"""How a recurrent state is stored in a checkpoint file. Without torch.

One that is float32 while it runs, in any of these forms:

float32   the state's own bytes
float16   one scale a head, a power of two: the head's largest number becomes one of 2^14 to 2^15, so that numbers down
          to 2^-29 of it keep 11 bits; powers of two are exact, so nothing but the rounding changes a number
int8      one scale a row, which is the last dimension of a head's state: the row's largest number becomes 127. A scale
          has 17 bits, so that 127 times it is a float32 number

Scales are float32. Numbers are rounded to the nearest, ties to even. What has been read back is stored again as the
same bytes: a chain of copies does not drift. A head or row without a number of at least 2^-126 is stored as zeros with
scale 1; one with NaN or infinity reads back as NaN. `kernels.state_codec` has the arithmetic.

One that is float16 or bfloat16 while it runs is stored as its own bytes, without scales.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SCALE_BYTES = 4

_VALUES_ALIGNMENT = 4
_SCALES_ALIGNMENT = 64
"""Units stay as aligned as they are without scales, whatever follows them in a file."""


@dataclass(frozen=True, slots=True)
class StateEncoding:
    """`value_bytes`: of one number. `scale`: what has a scale, a head or each of its rows; None where nothing has."""

    name: str
    value_bytes: int
    scale: Literal["head", "row"] | None = None

    def num_scales(self, head: Sequence[int]) -> int:
        """Scales of one head whose state has this shape, [..., row]."""
        if self.scale is None:
            return 0
        return 1 if self.scale == "head" else math.prod(head[:-1])

    def unit_bytes(self, num_layers: int, conv: int, num_heads: int, head: Sequence[int]) -> "UnitBytes":
        """Of a unit with `conv` bytes of convolution inputs and `num_heads` heads of shape `head` in each layer."""
        values = num_heads * math.prod(head) * self.value_bytes
        scales = num_heads * self.num_scales(head) * SCALE_BYTES if values else 0
        layer = conv + _round_up(values, _VALUES_ALIGNMENT if scales else 1)
        if not scales:
            return UnitBytes(conv, values, 0, layer, num_layers * layer, num_layers * layer)
        first = _round_up(num_layers * layer, SCALE_BYTES)
        total = _round_up(first + num_layers * scales, _SCALES_ALIGNMENT)
        return UnitBytes(conv, values, scales, layer, first, total)


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """A unit in a file: of each layer convolution inputs and numbers of the state, and after those of all layers the
    scales of each.

        [layer][conv | values] [layer][scales]

    `conv`, `values`, `scales`: bytes of one layer; `layer`: from one layer's to the next one's; `first_scales`: where
    scales begin; `total`: all of it.
    """

    conv: int
    values: int
    scales: int
    layer: int
    first_scales: int
    total: int


@dataclass(frozen=True, slots=True)
class HeadSpan:
    """`num_heads` heads that follow one another in an entry of a tensor, from byte `offset` on, and in a checkpoint
    file, their numbers from `values_offset` and their scales from `scales_offset` on."""

    offset: int
    num_heads: int
    values_offset: int
    scales_offset: int


@dataclass(frozen=True, slots=True)
class EncodedStates:
    """Heads of tensor number `tensor` of those that are copied, float32, which checkpoint files have as `encoding`
    says, one that has scales. A head has `rows` rows of `columns` numbers."""

    tensor: int
    encoding: StateEncoding
    rows: int
    columns: int
    spans: tuple[HeadSpan, ...]

    @property
    def head_bytes(self) -> int:
        """Of a head in an entry."""
        return self.rows * self.columns * 4

    @property
    def value_bytes(self) -> int:
        """Of a head's numbers in a file."""
        return self.rows * self.columns * self.encoding.value_bytes

    @property
    def scale_bytes(self) -> int:
        """Of a head's scales in a file."""
        return self.encoding.num_scales((self.rows, self.columns)) * SCALE_BYTES


def head_table(states: EncodedStates, page_bytes: int) -> NDArray[np.int64]:
    """Of each head its place in an entry, in numbers, and in a file, in bytes, that of its numbers and that of its
    scales: int64 [heads, 3]. Pages, scales and numbers of two bytes begin at even places: a number lies in one page,
    and so does a half of a scale."""
    table = np.array(
        [
            (
                (span.offset + head * states.head_bytes) // 4,
                span.values_offset + head * states.value_bytes,
                span.scales_offset + head * states.scale_bytes,
            )
            for span in states.spans
            for head in range(span.num_heads)
        ],
        np.int64,
    )
    even = table[:, 1:] if states.encoding.value_bytes == 2 else table[:, 2]
    assert page_bytes % 2 == 0 and not (even % 2).any(), f"pages of {page_bytes} bytes, and places of heads"
    return table


FLOAT32 = StateEncoding("float32", 4)
FLOAT16 = StateEncoding("float16", 2, "head")
INT8 = StateEncoding("int8", 1, "row")

ENCODINGS: Mapping[str, StateEncoding] = MappingProxyType({each.name: each for each in (FLOAT32, FLOAT16, INT8)})
"""Of states that are float32 while they run."""

STATE_DTYPES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""What a state may be in while it runs, and the bytes of a number."""


def plain_encoding(state_dtype: str) -> StateEncoding:
    """A state's own bytes, of one in this dtype."""
    return StateEncoding(state_dtype, STATE_DTYPES[state_dtype])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
