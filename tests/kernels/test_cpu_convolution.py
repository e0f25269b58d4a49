"""On the CPU a row of a convolution has the same bits whether its taps come from the rows of the pass, from the state,
or from both, in a prefill or a decode."""

import pytest
import torch

from cairn.kernels import cpu
from kernels.comparison import same_bits
from kernels.kernel_calls import Call, part_of_sequence
from kernels.random_batches import RandomBatch, SequenceRows

END = 41
"""Rows: more than a thread takes at once."""

CHANNELS = 1100
"""A whole block of them, and some that no vector takes."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("decode", [True, False])
def test_rows_have_the_same_bits_in_any_pass(
    dtype: torch.dtype, silu: bool, has_bias: bool, width: int, decode: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    operands = {
        "x": torch.randn(END, CHANNELS, generator=generator).to(dtype),
        "weight": torch.randn(width, CHANNELS, generator=generator),
        "bias": torch.randn(CHANNELS, generator=generator) if has_bias else None,
        "states": torch.zeros(6, width - 1, CHANNELS, dtype=dtype),
        "silu": silu,
    }
    whole = Call("conv", RandomBatch((), (SequenceRows(2, 0, END),), 0), operands)
    wanted = whole.run(cpu)[0]
    first = part_of_sequence(whole, 5, 0, 2).run(cpu)[0]
    ends = range(3, END + 1) if decode else (7, 39, END)
    begins = (2, *ends[:-1])
    rest = [
        part_of_sequence(whole, 5, begin, end, decode=decode).run(cpu)[0]
        for begin, end in zip(begins, ends, strict=True)
    ]
    assert same_bits(torch.cat([first, *rest]), wanted)
