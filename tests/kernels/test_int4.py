"""Products in four bits: the reference's, rows that do not see each other, what they take, and what is refused."""

import pytest
import torch
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels import cpu, exact, reference
from cairn.kernels.contract import Kernels
from cairn.kernels.cpu import int4
from cairn.kernels.cpu.products import multiply
from cairn.kernels.cpu.tiles import GROUP, HAS_INT4
from cairn.kernels.int4 import Int4Weight, int4_bytes, quantize_int4
from kernels.backends import BF16, F32
from kernels.comparison import close, same_bits
from kernels.test_int8 import DTYPES, batch_of, drawn

NEEDS_INT4 = pytest.mark.skipif(not HAS_INT4, reason="needs AVX2 and FMA, or VNNI")
INPUTS = pytest.mark.parametrize("inputs", [32, 96, 128, 320, 7 * 128, 9 * 128, 33 * 128])
"""Groups of all three sizes; one group, and more than are multiplied with at once."""


def drawn_weight(outputs: int, inputs: int) -> Int4Weight:
    """Of which groups and channels have sizes of their own."""
    sizes = torch.logspace(-3, 2, outputs)[:, None]
    return quantize_int4(drawn(outputs, inputs, seed=1) * sizes + sizes * torch.linspace(-1, 1, inputs))


def wanted_of(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    return reference.linear(x.double(), reference.pack_int4(weight), bias, batch_of(x.shape[0]).batch(reference))


@NEEDS_INT4
@DTYPES
@INPUTS
@pytest.mark.parametrize("rows", [1, 2, 3, GROUP - 1, GROUP, GROUP + 1, 40])
def test_products_are_the_references(dtype: torch.dtype, inputs: int, rows: int) -> None:
    # Whole numbers times a power of two have no ties that a reciprocal could move.
    x = torch.randint(-127, 128, (rows, inputs), generator=torch.manual_seed(0)).float()
    x[:, ::32] = 127
    x = (x * 2.0 ** torch.arange(-6, -6 + rows)[:, None]).to(dtype)
    weight, bias = drawn_weight(70, inputs), drawn(70, seed=2).to(dtype)
    found = cpu.linear(x, cpu.pack_int4(weight), bias, batch_of(rows).batch(cpu))
    assert found.dtype == dtype
    sizes = x.double().abs() @ weight.dequantize(torch.float64).abs().t() + bias.double().abs()
    wanted = wanted_of(x, weight, bias.double())
    last = torch.finfo(dtype).eps / 2 * wanted.abs()
    assert ((found.double() - wanted).abs() <= 3e-6 * sizes + 1.02 * last).all()


@NEEDS_INT4
def test_sums_of_the_largest_numbers_are_exact() -> None:
    """15 * 127 of all places of a group, with either sign: no sum in 16 bits is cut off. Each place has its own."""
    numbers = torch.full((64, 128), 15, dtype=torch.uint8)
    numbers[1:] = torch.randint(0, 16, (63, 128), generator=torch.manual_seed(0)).to(torch.uint8)
    weight = Int4Weight(numbers, torch.ones(64, 1), torch.zeros(64, 1), F32)
    x = torch.tensor([[127.0], [-127.0]]).repeat(1, 128)
    x = torch.cat([x, 127 * torch.eye(128) - 3 * torch.eye(128).roll(1, 0)])
    assert torch.equal(multiply(x, cpu.pack_int4(weight)).double(), x.double() @ numbers.double().t())


@NEEDS_INT4
def test_without_minimums_a_group_reaches_equally_far_on_both_sides() -> None:
    numbers = torch.arange(16, dtype=torch.uint8).repeat(8, 8)
    weight = Int4Weight(numbers, torch.full((8, 1), 0.5), None, F32)
    x = 127 * torch.eye(128)
    assert torch.equal(multiply(x, cpu.pack_int4(weight)) / 127, (numbers.float().t() - 8) / 2)


@NEEDS_INT4
@DTYPES
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype) -> None:
    weight = cpu.pack_int4(drawn_weight(100, 1152))
    x = (drawn(60, 1152) * torch.logspace(-3, 3, 60)[:, None]).to(dtype)
    alone = torch.cat([multiply(row[None], weight) for row in x])
    for rows in (*range(2, 30), 60):
        assert same_bits(multiply(x[:rows], weight), alone[:rows])
    beside = x.clone()
    beside[::2] = torch.tensor([1e30, torch.inf, torch.nan]).repeat(10)[:, None].to(dtype)
    found = multiply(beside, weight)
    assert same_bits(found[1::2], alone[1::2])
    assert found[4::6].isnan().all() and not found[2::6].isfinite().any()


@NEEDS_INT4
@DTYPES
@pytest.mark.parametrize("gated", [False, True])
def test_experts_are_the_references(dtype: torch.dtype, gated: bool) -> None:
    x, count = drawn(40, 96, dtype=dtype), 5
    choice = torch.stack([torch.randperm(count, generator=torch.manual_seed(row))[:2] for row in range(40)])
    share = drawn(40, 2, seed=3).softmax(1)
    up = quantize_int4((drawn(count, (2 if gated else 1) * 32, 96, seed=1) * 0.1).to(dtype))
    down = quantize_int4((drawn(count, 96, 32, seed=2) * 0.2).to(dtype))

    def run(kernels: Kernels, x: Tensor) -> Tensor:
        call = kernels.gated_experts if gated else kernels.experts
        weights = kernels.pack_int4(up), kernels.pack_int4(down)
        return call(x, choice, share, *weights, batch_of(40).batch(kernels))

    close(run(cpu, x), run(reference, x.double()), tolerance=0.02 if dtype == BF16 else 2e-3)


@pytest.mark.parametrize(("inputs", "group"), [(128, 128), (192, 64), (96, 32)])
def test_a_weight_is_within_half_a_step_of_its_groups_but_for_their_ends(inputs: int, group: int) -> None:
    weight = drawn(9, inputs) * torch.logspace(-3, 3, 9)[:, None]
    weight[3] = 0
    weight[4] = torch.arange(inputs) % 16 * 0.5 - 3
    made = quantize_int4(weight)
    assert made.group == group and made.numbers.max() == 15 and made.numbers.min() == 0
    steps, least = (each.double().repeat_interleave(group, 1) for each in (made.scales, made.least()))
    inside = weight.clamp(least, least + 15 * steps)
    assert ((made.dequantize(torch.float64) - inside).abs() <= 0.501 * steps).all()
    # no more than a twentieth of a group's range is cut off at an end
    assert ((weight - inside).abs() <= 15 / 0.9 * 0.051 * steps).all()
    assert made.dequantize(F32)[3].abs().max() < 1e-36
    assert torch.equal(made.dequantize(F32)[4], weight[4])


def test_ends_are_cut_off_where_that_leaves_fewer_errors() -> None:
    weight = drawn(64, 1024)
    groups = weight.view(64, 8, 128)
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    whole = ((groups - groups.amin(-1, keepdim=True)) / step).round() * step + groups.amin(-1, keepdim=True)
    plain = (whole - groups).square().sum(-1)
    found = (quantize_int4(weight).dequantize(F32).view_as(groups) - groups).square().sum(-1)
    assert (found <= 1.001 * plain).all() and found.sum() < 0.93 * plain.sum()


@NEEDS_INT4
def test_weights_take_what_is_counted() -> None:
    packed = cpu.pack_int4(quantize_int4(drawn(3, 64, 256)))
    assert sum(each.nbytes for each in packed.matrices) == int4_bytes((3, 64, 256)) == 3 * 64 * 256 * 9 // 16


def test_inputs_that_no_group_divides_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--quantization int4: .*48 inputs.*take --quantization int8"):
        quantize_int4(drawn(4, 48))
    with pytest.raises(ConfigError, match="48 inputs"):
        int4_bytes((4, 48))


def test_backends_without_such_products_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantize_int4(drawn(4, 32))
    with pytest.raises(ConfigError, match=r"--quantization int4 .*--exact"):
        exact.pack_int4(weight)
    monkeypatch.setattr(int4, "HAS_INT4", False)
    with pytest.raises(ConfigError, match=r"--quantization int4: .*AVX2.*leave it out"):
        cpu.pack_int4(weight)
