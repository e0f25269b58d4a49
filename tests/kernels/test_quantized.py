"""Weights in codes with scales: what they stand for, number by number, and how they are cut, joined and reordered."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.kernels.fp8 import Fp8Weight
from cairn.kernels.quantized import E2M1, QuantizedWeight
from cairn.kernels.weight_rows import dequantize_rows, join_rows, stack_experts

BF16, F32 = torch.bfloat16, torch.float32


def drawn_weight(
    outputs: int = 6,
    inputs: int = 64,
    group: int = 16,
    seed: int = 0,
    dtype: torch.dtype = BF16,
    bits: Any = 4,
    scales: torch.dtype = torch.float16,
    **fields: Any,
) -> QuantizedWeight:
    """With random codes and scales. Of the other fields: True for a random tensor."""
    generator = torch.manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs if bits == 8 else inputs // 2), generator=generator).to(torch.uint8)
    if fields.get("numbers") == "e4m3":
        codes &= 0xF7  # none of the two that are NaN
    shape = outputs, inputs // group
    sizes = torch.rand(shape, generator=generator) + 0.1
    if scales == torch.float8_e8m0fnu:
        drawn = torch.randint(117, 128, shape, generator=generator).to(torch.uint8).view(scales)
    else:
        drawn = torch.randint(1, 64, shape, generator=generator).to(scales) if not scales.is_floating_point else sizes
    made = {name: value for name, value in fields.items() if value is not True or name == "divides"}
    for name in (name for name, value in fields.items() if value is True and name != "divides"):
        if name == "order":
            made[name] = torch.randperm(inputs, generator=generator)
        elif name == "zeros":
            made[name] = torch.randint(0, 2**bits, shape, generator=generator).to(torch.uint8)
        elif name == "minimums":
            made[name] = torch.randint(0, 64, shape, generator=generator).to(torch.uint8)
        elif name == "fifths":
            made[name] = torch.randint(0, 256, (outputs, inputs // 8), generator=generator).to(torch.uint8)
        else:
            width = 1 if shape[1] % 4 else shape[1] // 4
            made[name] = torch.rand((outputs, width), generator=generator) + 0.01
    return QuantizedWeight(codes, drawn.to(scales), dtype, bits=bits, **made)


def across(weight: QuantizedWeight) -> QuantizedWeight:
    """With codes in words, and rows side by side."""
    words = replace(weight, codes=weight.codes.view(torch.int32))
    return words.changed(lambda part: part.mT.contiguous().mT)


def below_zero(weight: QuantizedWeight) -> QuantizedWeight:
    """With codes of eight bits in int8."""
    zeros = None if weight.zeros is None else (weight.zeros ^ 128).view(torch.int8)
    return replace(weight, codes=(weight.codes ^ 128).view(torch.int8), zeros=zeros, zero=weight.zero - 128)


FORMS: dict[str, dict[str, Any]] = {
    "symmetric": {"zero": 8, "scales": BF16},
    "zeros": {"zeros": True},
    "activation order": {"zeros": True, "order": True, "group": 32},
    "eight bits": {"bits": 8, "zero": 128, "group": 64, "scales": F32},
    "eight bits, groups": {"bits": 8, "zeros": True, "group": 32},
    "K-quant": {"scales": torch.uint8, "minimums": True, "factors": True, "minimum_factors": True},
    "five bits": {"bits": 5, "fifths": True, "zero": 16, "group": 32},
    "K-quant, five bits": {
        "bits": 5,
        "fifths": True,
        "group": 32,
        "scales": torch.uint8,
        "minimums": True,
        "factors": True,
        "minimum_factors": True,
    },
    "NVFP4": {"numbers": "e2m1", "scales": torch.float8_e4m3fn, "factors": True},
    "NVFP4, divided": {"numbers": "e2m1", "scales": torch.float8_e4m3fn, "factors": True, "divides": True},
    "FP8": {"numbers": "e4m3", "bits": 8, "group": 64, "scales": F32},
    "MXFP4": {"numbers": "e2m1", "scales": torch.float8_e8m0fnu, "group": 32},
}
"""As `drawn_weight` takes them."""


def wanted_of(weight: QuantizedWeight) -> Tensor:
    """Number by number, in Python's own floats rounded to float32 after each operation."""

    def rounded(number: float) -> float:
        return float(torch.tensor(number, dtype=F32))

    def scale_at(scales: Tensor, factors: Tensor | None, row: int, group: int) -> float:
        scale = float(scales[row, group].float())
        if factors is None:
            return scale
        factor = float(factors[row, group * factors.shape[1] // scales.shape[1]])
        return rounded(scale / factor) if weight.divides and scales is weight.scales else rounded(scale * factor)

    rows, inputs = weight.shape
    out = torch.empty(rows, inputs)
    for row in range(rows):
        for column in range(inputs):
            code = int(weight.codes[row, column if weight.bits == 8 else column // 2])
            code = code if weight.bits == 8 else code >> 4 * (column % 2) & 15
            if weight.fifths is not None:
                code += 16 * (int(weight.fifths[row, column // 8]) >> column % 8 & 1)
            group = column // weight.group
            zero = weight.zero if weight.zeros is None else int(weight.zeros[row, group])
            number = E2M1[code] if weight.numbers == "e2m1" else code - zero
            if weight.numbers == "e4m3":
                number = float(torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float())
            number = rounded(number * scale_at(weight.scales, weight.factors, row, group))
            if weight.minimums is not None:
                number = rounded(number + scale_at(weight.minimums, weight.minimum_factors, row, group))
            out[row, column if weight.order is None else int(weight.order[column])] = number
    return out


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_its_codes_times_its_scales(form: str) -> None:
    weight = drawn_weight(**FORMS[form])
    wanted = wanted_of(weight)
    assert wanted.unique().numel() > 30
    assert torch.equal(weight.dequantize(F32), wanted)
    assert weight.dequantize().dtype == BF16 and torch.equal(weight.dequantize(), wanted.to(BF16))
    described = weight.to(torch.device("meta"))
    assert described.dequantize().shape == weight.shape and described.nbytes == weight.nbytes


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_joined_stacked_and_reordered(form: str) -> None:
    first, other = (drawn_weight(**FORMS[form], seed=seed) for seed in range(2))
    wide = [each.dequantize() for each in (first, other)]
    joined = join_rows([first, other])
    assert torch.equal(dequantize_rows(joined), torch.cat(wide))
    # Columns of an order of their own are not those of another weight.
    assert len(joined) == (2 if first.order is not None else 1)
    stacked = stack_experts([first, other])
    assert (stacked is None) is (first.order is not None)
    if isinstance(stacked, QuantizedWeight):
        assert torch.equal(stacked.dequantize(), torch.stack(wide)) and torch.equal(stacked[1].dequantize(), wide[1])
    order = torch.tensor([3, 0, 5])
    assert torch.equal(first.changed(lambda part: part[order]).dequantize(), wide[0][order])


@pytest.mark.parametrize("form", FORMS)
def test_what_is_as_files_have_it_has_the_same_numbers(form: str) -> None:
    first, other = (drawn_weight(**FORMS[form], seed=seed) for seed in range(2))
    assert first.settled() is first
    for change in (across, below_zero) if first.bits == 8 and first.numbers == "integer" else (across,):
        stored, wide = [change(each) for each in (first, other)], [each.dequantize() for each in (first, other)]
        assert stored[0].shape == first.shape and stored[0].nbytes == first.nbytes
        assert torch.equal(stored[0].dequantize(), wide[0]) and torch.equal(stored[0].settled().codes, first.codes)
        assert torch.equal(dequantize_rows(join_rows(stored)), torch.cat(wide))
        stacked = stack_experts(stored)
        if isinstance(stacked, QuantizedWeight):
            assert torch.equal(stacked.dequantize(), torch.stack(wide))
            assert change is below_zero or stacked.codes.stride(1) == 1, "rows lie across still"


def test_what_is_of_another_kind_is_a_part_of_its_own() -> None:
    first = drawn_weight(zero=8)
    others: list[Any] = [replace(first, zero=7), drawn_weight(zero=8, group=32), drawn_weight(zero=8, scales=BF16)]
    others += [replace(first, dtype=F32), drawn_weight(zeros=True), drawn_weight(bits=8, zero=8), torch.ones(2, 64)]
    others += [Fp8Weight(first.codes, torch.ones(6, 1), BF16), drawn_weight(zero=8, factors=True)]
    for other in others:
        assert join_rows([first, other]) == (first, other)
        assert stack_experts([first, other]) is None


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("form", ["symmetric", "zeros", "K-quant"])
def test_codes_of_four_bits_are_a_weight_in_four_bits(form: str, group: int) -> None:
    weight = drawn_weight(inputs=256, **FORMS[form] | {"group": group})
    assert weight.becomes_int4
    made, wanted = weight.as_int4().dequantize(F32), weight.dequantize(F32)
    assert weight.as_int4().group == group
    assert (made - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("form", ["activation order", "eight bits, groups", "five bits", "NVFP4"])
def test_other_codes_are_none(form: str) -> None:
    assert not drawn_weight(**FORMS[form]).becomes_int4


def test_nor_are_codes_in_small_groups() -> None:
    assert not drawn_weight(**FORMS["zeros"]).becomes_int4
