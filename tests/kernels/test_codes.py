"""Products with weights in codes on the CPU: bit for bit those with the dequantized weight, rows that do not see each
other, experts, what they take, and what happens where codes cannot be expanded."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.kernels import cpu, reference
from cairn.kernels.contract import Kernels
from cairn.kernels.cpu import codes, packed_codes
from cairn.kernels.cpu.packed_codes import CodedRows, Factors, PackedCodes
from cairn.kernels.cpu.products import PackedParts, PackedWeight, multiply
from cairn.kernels.cpu.tiles import GROUP
from cairn.kernels.fp8 import Fp8Weight
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import stack_experts
from kernels.backends import BF16, F32
from kernels.comparison import close, same_bits
from kernels.test_int8 import DTYPES, batch_of, drawn
from kernels.test_quantized import FORMS, across, below_zero, drawn_weight

NEEDS_CODES = pytest.mark.skipif(not packed_codes.HAS_CODES, reason="needs AVX2 and FMA, or AVX512-BF16")
ROWS = (1, 2, GROUP, GROUP + 1, 40)


def weight_of(form: str, dtype: torch.dtype, outputs: int = 70, inputs: int = 320, seed: int = 0) -> QuantizedWeight:
    """70 outputs fill no panel, and 320 inputs no chunk."""
    return drawn_weight(outputs, inputs, dtype=dtype, seed=seed, **FORMS[form])


def packed_bytes(weight: Any) -> int:
    factors = [each for each in (weight.scales, weight.minimums) if isinstance(each, Factors)]
    tensors = [
        weight.zeros,
        weight.order,
        weight.fifths,
        *(part for each in factors for part in (each.values, each.outer)),
    ]
    return sum(each.nbytes for each in (*weight.matrices, *tensors) if each is not None)


@NEEDS_CODES
@pytest.mark.parametrize("form", FORMS)
def test_what_is_as_files_have_it_is_packed_to_the_same_panels(form: str) -> None:
    """Also of several weights, of which one begins inside a panel, and of a stack."""
    parts = [weight_of(form, BF16, outputs) for outputs in (70, 90)]
    if parts[0].order is not None:
        parts = parts[:1]
    stack = stack_experts([weight_of(form, BF16, seed=seed) for seed in range(2)])
    for change in (across, below_zero) if parts[0].bits == 8 and parts[0].numbers == "integer" else (across,):
        assert_same_panels(packed_codes.pack_codes([change(part) for part in parts]), packed_codes.pack_codes(parts))
        if isinstance(stack, QuantizedWeight):
            stored = stack_experts([change(stack[number]) for number in range(2)])
            assert_same_panels(cpu.pack_stored([stored]), cpu.pack_stored([stack]))


def assert_same_panels(found: Any, wanted: Any) -> None:
    assert isinstance(found, PackedCodes) and isinstance(wanted, PackedCodes)
    assert (found.shape, found.form, found.group, found.zero) == (wanted.shape, wanted.form, wanted.group, wanted.zero)
    assert all(map(torch.equal, found.matrices, wanted.matrices))
    for each, other in ((found, wanted), (found.scales, wanted.scales), (found.minimums, wanted.minimums)):
        for name in ("zeros", "fifths", "values", "outer"):
            mine, theirs = getattr(each, name, None), getattr(other, name, None)
            assert (mine is None) is (theirs is None) and (mine is None or torch.equal(mine, theirs))


@NEEDS_CODES
@DTYPES
@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_with_the_dequantized_weight(form: str, dtype: torch.dtype) -> None:
    weight, bias = weight_of(form, dtype), drawn(70, seed=2).to(dtype)
    packed, plain = cpu.pack_stored([weight]), weight.dequantize()
    assert isinstance(packed, PackedCodes) and packed.shape == (70, 320) and packed.dtype == dtype
    for rows in ROWS:
        x = drawn(rows, 320, seed=rows).to(dtype)
        found = cpu.linear(x, packed, bias, batch_of(rows).batch(cpu))
        if dtype == BF16:
            # The same inputs in the same order, as both are packed.
            ordered = plain if weight.order is None else plain[:, weight.order]
            given = x if weight.order is None else x[:, weight.order]
            assert same_bits(found, cpu.linear(given, cpu.pack(ordered), bias, batch_of(rows).batch(cpu)))
        sizes = x.double().abs() @ plain.double().abs().t() + bias.double().abs()
        wanted = x.double() @ plain.double().t() + bias.double()
        last = torch.finfo(dtype).eps / 2 * wanted.abs()
        assert found.dtype == dtype and ((found.double() - wanted).abs() <= 3e-6 * sizes + 1.02 * last).all()
        logits = cpu.lm_head(x, packed)
        assert logits.dtype == F32
        assert ((logits.double() + bias.double() - wanted).abs() <= 3e-6 * sizes).all()


@NEEDS_CODES
@DTYPES
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype) -> None:
    packed = cpu.pack_stored([weight_of("NVFP4", dtype, 100, 1152)])
    x = (drawn(60, 1152) * torch.logspace(-3, 3, 60)[:, None]).to(dtype)
    alone = torch.cat([multiply(row[None], packed) for row in x])
    for rows in (2, 3, 5, 12, 13, 25, 60):
        assert same_bits(multiply(x[:rows], packed), alone[:rows])
    beside = x.clone()
    beside[::2] = torch.nan
    assert same_bits(multiply(beside, packed)[1::2], alone[1::2])


@NEEDS_CODES
@DTYPES
@pytest.mark.parametrize("form", ["zeros", "NVFP4, divided", "eight bits, groups", "five bits"])
@pytest.mark.parametrize("gated", [False, True])
def test_experts_are_the_references(dtype: torch.dtype, form: str, gated: bool) -> None:
    x, count = drawn(40, 96, dtype=dtype), 5
    choice = torch.stack([torch.randperm(count, generator=torch.manual_seed(row))[:2] for row in range(40)])
    share = drawn(40, 2, seed=3).softmax(1)
    shapes = ((64 if gated else 32), 96), (96, 32)
    up, down = (stack_experts([weight_of(form, dtype, *shape, seed=seed) for seed in range(count)]) for shape in shapes)

    def run(kernels: Kernels, x: Tensor) -> Tensor:
        call = kernels.gated_experts if gated else kernels.experts
        weights = [
            kernels.pack_stored([each]) if kernels is cpu else each.dequantize().double()
            for each in (up, down)
            if isinstance(each, QuantizedWeight)
        ]
        return call(x, choice, share, *weights, batch_of(40).batch(kernels))

    wanted = run(reference, x.double())
    close(run(cpu, x) / wanted.abs().max(), wanted / wanted.abs().max(), tolerance=0.02 if dtype == BF16 else 2e-5)


@NEEDS_CODES
@pytest.mark.parametrize("form", FORMS)
def test_they_take_what_they_are_stored_in(form: str) -> None:
    weight = drawn_weight(96, 1024, **FORMS[form])
    packed = cpu.pack_stored([weight])
    assert packed_bytes(packed) <= 1.01 * weight.nbytes


@NEEDS_CODES
@DTYPES
def test_rows_of_other_kinds_are_parts_of_their_own(dtype: torch.dtype) -> None:
    first, other = weight_of("NVFP4", dtype), weight_of("zeros", dtype)
    plain = drawn(10, 320, dtype=dtype)
    fp8 = Fp8Weight(drawn_weight(5, 320, **FORMS["FP8"]).codes, torch.rand(5, 1), dtype)
    rows = [first, first, plain, fp8, other]
    packed = cpu.pack_stored(rows)
    assert isinstance(packed, PackedParts) and packed.shape == (225, 320)
    assert [type(part) for part in packed.parts] == [PackedCodes, PackedWeight, PackedCodes, PackedCodes]
    x, bias = drawn(7, 320, dtype=dtype), drawn(225, seed=4).to(dtype)
    found = cpu.linear(x, packed, bias, batch_of(7).batch(cpu))
    parts = [cpu.pack_stored([part]) for part in (first, first, other)]
    whole = torch.cat([plain, fp8.dequantize()])
    wanted = [multiply(x, part, bias[at : at + 70]) for part, at in zip(parts, (0, 70, 155), strict=True)]
    wanted.insert(2, multiply(x, cpu.pack(whole), bias[140:155]))
    close(found, torch.cat(wanted, dim=1).double(), tolerance=0.01 if dtype == BF16 else 1e-5)


@DTYPES
def test_where_codes_are_not_expanded_rows_are_dequantized(dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(codes, "_ROWS_AT_A_TIME", 7 * 320)
    monkeypatch.setattr(packed_codes, "HAS_CODES", False)
    weight, x = weight_of("activation order", dtype), drawn(5, 320, dtype=dtype)
    packed = cpu.pack_stored([weight])
    assert isinstance(packed, CodedRows) and packed.weight is weight
    wanted = torch.nn.functional.linear(x.double(), weight.dequantize().double())
    close(multiply(x, packed), wanted, tolerance=0.01 if dtype == BF16 else 1e-5)
    stack = stack_experts([weight_of("MXFP4", dtype, 8, seed=seed) for seed in range(2)])
    assert isinstance(stack, QuantizedWeight)
    found = multiply(x, cpu.pack_stored([stack]), expert=1)
    close(found, x.double() @ stack[1].dequantize().double().t(), tolerance=0.01 if dtype == BF16 else 1e-5)
    # Groups that words of codes do not divide.
    monkeypatch.setattr(packed_codes, "HAS_CODES", True)
    assert isinstance(cpu.pack_stored([drawn_weight(8, 36, 12, zero=8)]), CodedRows)


@NEEDS_CODES
@DTYPES
@pytest.mark.parametrize(("inputs", "blocks"), [(256, 2), (200, 1), (200, 2)])
def test_fp8_is_expanded_where_it_can_be(dtype: torch.dtype, inputs: int, blocks: int) -> None:
    """Not where blocks of scales do not divide inputs, or a number is NaN."""
    weight = Fp8Weight(drawn_weight(40, inputs, inputs, bits=8, numbers="e4m3").codes, torch.rand(40, blocks), dtype)
    packed, x = cpu.pack_stored([weight]), drawn(7, inputs, dtype=dtype)
    assert isinstance(packed, PackedCodes) is (inputs % 128 == 0 or blocks == 1)
    close(multiply(x, packed), x.double() @ weight.dequantize().double().t(), tolerance=0.02 if dtype == BF16 else 1e-4)
    weight.numbers[3, 5] = 255
    packed = cpu.pack_stored([weight])
    assert isinstance(packed, PackedWeight)
    assert multiply(x, packed)[:, 3].isnan().all() and not multiply(x, packed)[:, 4].isnan().any()
