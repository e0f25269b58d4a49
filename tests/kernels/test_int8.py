"""Products in int8: how far off they may be, that rows do not see each other, and what they take."""

import math
import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels import cpu, exact, reference
from cairn.kernels.contract import Kernels
from cairn.kernels.cpu import int8, onednn, panels
from cairn.kernels.cpu.products import multiply
from kernels.backends import BF16, F32
from kernels.comparison import close, same_bits
from kernels.int8_products import NEEDS_INT8, onednn_is_right
from kernels.random_batches import RandomBatch, SequenceRows

DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
NEEDS_ONEDNN = pytest.mark.skipif(not onednn_is_right(), reason="needs VNNI or AMX: oneDNN's are wrong elsewhere")
OUT, IN = 160, 96


@pytest.fixture(params=["panels", "onednn"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How weights lie that are packed in a test: as on this processor, or on others."""
    if request.param == "panels" and not panels.has_panels(torch.int8):
        pytest.skip("needs VNNI or AVX2, or is done by AMX")
    if request.param == "onednn" and not onednn_is_right():
        pytest.skip("oneDNN's products in int8 are wrong here")
    monkeypatch.setattr(int8, "has_panels", lambda _: request.param == "panels")
    return str(request.param)


def drawn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch_of(rows: int) -> RandomBatch:
    return RandomBatch((), (SequenceRows(0, 0, rows),))


def most_error(x: Tensor, weight: Tensor) -> Tensor:
    """Of x weight^T [n, out] in exact arithmetic: either factor of each product is off by half a step at most, which is
    the largest number of its row or channel over 127."""
    x, weight = x.double().abs(), weight.double().abs()
    step, channel_step = x.amax(1, keepdim=True) / 127, weight.amax(1) / 127
    of_weights = x.sum(1, keepdim=True) * channel_step / 2
    of_rows = weight.sum(1) * step / 2
    return of_weights + of_rows + x.shape[1] * step * channel_step / 4


@NEEDS_INT8
@pytest.mark.usefixtures("layout")
@DTYPES
@pytest.mark.parametrize("rows", [1, 5, 17, 64, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_within_the_steps_of_both_factors(dtype: torch.dtype, rows: int, biased: bool) -> None:
    # Channels and rows of all sizes: a scale that they had in common would leave nothing of the small ones.
    sizes, channel_sizes = torch.logspace(-8, 8, rows)[:, None], torch.logspace(-4, 3, OUT)[:, None]
    x, weight = (drawn(rows, IN) * sizes).to(dtype), (drawn(OUT, IN, seed=1) * channel_sizes).to(dtype)
    bias = drawn(OUT, seed=2).to(dtype) if biased else None
    found = cpu.linear(x, cpu.pack_int8(weight), bias, batch_of(rows).batch(cpu))
    assert found.dtype == dtype and found.shape == (rows, OUT)
    added = torch.zeros(OUT, dtype=torch.float64) if bias is None else bias.double()
    wanted = x.double() @ weight.double().t() + added
    # float32 arithmetic on the way: scale by scale, the bias, and what multiplying by a reciprocal moves.
    rounding = 4e-6 * (x.double().abs() @ weight.double().abs().t() + added.abs())
    last = torch.finfo(dtype).eps / 2 * wanted.abs()
    assert ((found.double() - wanted).abs() <= most_error(x, weight) + rounding + 1.02 * last).all()
    # and the bound says something: bias aside, no error is more than a few percent of what the sums could be
    assert (most_error(x, weight) <= 0.05 * x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)).all()


@NEEDS_INT8
@DTYPES
def test_logits_are_not_rounded_to_the_models_dtype(dtype: torch.dtype) -> None:
    hidden, weight = drawn(7, IN, dtype=dtype), drawn(OUT, IN, dtype=dtype, seed=1)
    found = cpu.lm_head(hidden, cpu.pack_int8(weight))
    assert found.dtype == F32
    close(found, reference.lm_head(hidden.double(), reference.pack_int8(weight)), tolerance=1e-5)


@NEEDS_INT8
@DTYPES
@pytest.mark.parametrize("gated", [False, True])
def test_experts_are_the_references(dtype: torch.dtype, gated: bool) -> None:
    num_experts, inner, rows = 5, 24, 40
    x = drawn(rows, IN, dtype=dtype)
    choice = torch.stack([torch.randperm(num_experts, generator=torch.manual_seed(row))[:2] for row in range(rows)])
    share = drawn(rows, 2, seed=3).softmax(1)
    up = (drawn(num_experts, (2 if gated else 1) * inner, IN, seed=1) * 0.1).to(dtype)
    down = (drawn(num_experts, IN, inner, seed=2) * 0.2).to(dtype)

    def run(kernels: Kernels, x: Tensor) -> Tensor:
        call = kernels.gated_experts if gated else kernels.experts
        weights = kernels.pack_int8(up), kernels.pack_int8(down)
        return call(x, choice, share, *weights, batch_of(rows).batch(kernels))

    wanted = run(reference, x.double())
    # What `down` is given is rounded to the model's dtype first, and may then be nearest to another whole number.
    close(run(cpu, x), wanted, tolerance=0.02 if dtype == BF16 else 2e-3)


@NEEDS_INT8
@pytest.mark.usefixtures("layout")
@DTYPES
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype) -> None:
    weight = cpu.pack_int8(drawn(OUT, IN, dtype=dtype, seed=1))
    x = (drawn(300, IN) * torch.logspace(-3, 3, 300)[:, None]).to(dtype)
    alone = torch.cat([multiply(row[None], weight) for row in x])
    for rows in (*range(1, 18), 63, 64, 65, 200, 300):
        assert same_bits(multiply(x[:rows], weight), alone[:rows])
    beside = x.clone()
    beside[::2] = torch.tensor([1e30, torch.inf, torch.nan]).repeat(50)[:, None].to(dtype)
    assert same_bits(multiply(beside, weight)[1::2], alone[1::2])
    assert same_bits(multiply(x[100:164].flip(0), weight), alone[100:164].flip(0))


@NEEDS_INT8
@pytest.mark.usefixtures("layout")
def test_sums_of_the_largest_numbers_are_exact() -> None:
    """Of two such products, or of those of neighbours, no 16 bits would have room; each place of a word has its own."""
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [-1, 1, 1, 1], [-1, -1, -1, -1]]).repeat(
        1, IN // 4
    )
    weight, x = 127.0 * signs, 127.0 * signs.flip(0)
    x[:, -5:] = torch.tensor([1.0, -2, 3, -4, 5])
    assert torch.equal(multiply(x, cpu.pack_int8(weight)).double(), x.double() @ weight.double().t())


@NEEDS_INT8
@pytest.mark.usefixtures("layout")
@DTYPES
def test_rows_that_are_not_contiguous_among_themselves(dtype: torch.dtype) -> None:
    weight, wide = cpu.pack_int8(drawn(OUT, IN, dtype=dtype, seed=1)), drawn(9, 2 * IN, dtype=dtype)
    assert same_bits(multiply(wide[:, IN:], weight), multiply(wide[:, IN:].contiguous(), weight))


@NEEDS_INT8
@pytest.mark.usefixtures("layout")
@DTYPES
def test_the_rows_at_the_ends_of_the_numbers(dtype: torch.dtype) -> None:
    weight = drawn(OUT, IN, dtype=dtype, seed=1)
    weight[3] = 0
    x = drawn(6, IN, dtype=dtype)
    x[0], x[1], x[2, 5], x[3, 5], x[4] = 0, 1e-40, torch.nan, torch.inf, -x[5]
    found = multiply(x, cpu.pack_int8(weight))
    assert found[0].eq(0).all() and found[:2].isfinite().all() and found[5, 3] == 0
    assert found[2].isnan().all() and not found[3].isfinite().any()
    assert torch.equal(found[4], -found[5])


@NEEDS_INT8
@DTYPES
def test_the_tensor_that_was_given_stays_as_it_is(dtype: torch.dtype) -> None:
    """It may be the embedding, too."""
    weight = drawn(OUT, IN, dtype=dtype)
    before = weight.clone()
    cpu.pack_int8(weight)
    assert same_bits(weight, before)


@NEEDS_INT8
def test_no_rows_are_no_rows() -> None:
    assert multiply(drawn(0, IN), cpu.pack_int8(drawn(OUT, IN))).shape == (0, OUT)


@NEEDS_ONEDNN
def test_products_have_few_heights(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps code for every height that it meets."""
    heights, original = [], onednn.scaled_int8_sums

    def counted(numbers: Tensor, *rest: Tensor) -> Tensor:
        heights.append(numbers.shape[0])
        return original(numbers, *rest)

    monkeypatch.setattr(int8, "has_panels", lambda _: False)
    monkeypatch.setattr(int8, "scaled_int8_sums", counted)
    weight, x = cpu.pack_int8(drawn(16, 32)), drawn(700, 32)
    for rows in range(1, 701):
        assert multiply(x[:rows], weight).shape == (rows, 16)
    assert set(heights) == {onednn.height_of(rows) for rows in range(1, 701)}
    assert len(set(heights)) <= 80


def bytes_of(*tensors: Tensor) -> int:
    return sum(torch.ops.mkldnn._nbytes(each) if each.is_mkldnn else each.nbytes for each in tensors)


@NEEDS_INT8
@pytest.mark.usefixtures("layout")
def test_weights_take_little_more_than_half() -> None:
    weight = drawn(512, 1024, dtype=BF16)
    packed, quantized = cpu.pack(weight), cpu.pack_int8(weight)
    found = bytes_of(*quantized.matrices, *quantized.scales, *quantized.zeros)
    assert found <= 0.52 * bytes_of(*packed.matrices)
    experts = cpu.pack_int8(drawn(3, 64, 32))
    assert experts.shape == (3, 64, 32) and len(experts.matrices) == len(experts.scales) == 3


def test_whole_numbers_and_scales_of_a_weight() -> None:
    weight = torch.tensor([[0.0, 1.0, -2.0], [0.0, 0.0, 0.0], [1.27, -1.27, 0.01]])
    made = reference.pack_int8(weight)
    assert made.numbers.tolist() == [[0, 64, -127], [0, 0, 0], [127, -127, 1]]
    assert made.scales[[0, 2], 0].tolist() == pytest.approx([2 / 127, 0.01])


# -- machines and weights without such products ----------------------------------------------------------------------


def test_a_torch_without_the_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Tensor:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(onednn, "reorder_int8", fails)
    with pytest.raises(ConfigError, match=r"--quantization int8: .*no such operation.*leave it out"):
        onednn.check_int8.__wrapped__()


def test_sums_that_saturate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = onednn.scaled_int8_sums
    monkeypatch.setattr(onednn, "scaled_int8_sums", lambda *given: original(*given).clamp(-(2**15), 2**15 - 1))
    with pytest.raises(ConfigError, match=r"--quantization int8: .*wrong sums.*leave it out"):
        onednn.check_int8.__wrapped__()


@pytest.mark.more
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of these processors")
def test_onednns_products_without_vnni_are_refused() -> None:
    """oneDNN takes another path there, which adds pairs of products up in 16 bits."""
    asked = (
        "from cairn.kernels.cpu import int8; import torch; int8.has_panels = lambda _: False; "
        "int8.pack_int8(torch.zeros(4, 4))"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "ConfigError: --quantization int8" in done.stderr.splitlines()[-1]


@NEEDS_ONEDNN
@pytest.mark.parametrize(("found", "warned"), [({"avx512_vnni": False}, True), ({"avx_vnni": True}, False)])
def test_a_processor_without_the_instructions_is_logged(
    found: dict[str, bool], warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    onednn.check_int8.__wrapped__()
    assert ("VNNI" in caplog.text) is warned


@NEEDS_INT8
def test_more_inputs_than_the_sums_have_room_for_are_refused() -> None:
    assert math.isclose(int8.MAX_INPUTS, 2**31 / 255 / 127, rel_tol=1e-4)
    with pytest.raises(ConfigError, match=f"{int8.MAX_INPUTS + 1} inputs.*leave --quantization out"):
        cpu.pack_int8(torch.zeros(1, int8.MAX_INPUTS + 1))
    x = torch.ones(2, int8.MAX_INPUTS)
    assert multiply(x, cpu.pack_int8(x[:1])).tolist() == [[pytest.approx(int8.MAX_INPUTS)]] * 2


def test_exact_kernels_have_none() -> None:
    with pytest.raises(ConfigError, match=r"--quantization int8 .*--exact"):
        exact.pack_int8(drawn(4, 4))
