"""Products by dot instructions: every size of group, panel and chunk, and rows that do not see each other."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cairn.kernels import cpu
from cairn.kernels.cpu import panels, products
from cairn.kernels.cpu.amx import HAS_AMX, ROWS, RUN
from cairn.kernels.cpu.panels import (
    SEGMENT,
    multiply_panels,
    pack_panels,
    partition_expert_rows,
    partition_rows,
)
from cairn.kernels.cpu.tiles import GROUP, PANEL
from kernels.comparison import same_bits
from kernels.int8_products import NEEDS_INT8
from tiers import more

pytestmark = pytest.mark.skipif(not (panels.has_panels(torch.bfloat16)), reason="done by oneDNN, or by nothing")

CHUNK = 2 * panels._CHUNK
"""Inputs that a panel is read of at once."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((x.shape[0] + 1, weight.shape[0]), torch.nan, dtype=dtype)
    multiply_panels(x, pack_panels([[weight]])[0], bias, out[:-1], partition_rows(x.shape[0], -(-x.shape[1] // 2)))
    assert out[-1].isnan().all()
    return out[:-1]


def check(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within what sums in float32 may be off, and the last rounding to bfloat16, if that is what was asked for."""
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    last = torch.finfo(found.dtype).eps / 2 * wanted.abs()
    assert ((found.double() - wanted).abs() <= 1e-5 * sizes + 1.02 * last).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [*range(1, GROUP + 2), 2 * GROUP, 2 * GROUP + 1, SEGMENT, SEGMENT + 1, 400])
def test_any_number_of_rows(rows: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight = drawn(rows, 70), drawn(2 * PANEL + 5, 70, seed=1)
    bias = drawn(2 * PANEL + 5, seed=2) if biased else None
    check(product(x, weight, bias, dtype), x, weight, bias)


@pytest.mark.parametrize("inputs", [1, 2, 3, CHUNK - 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 2])
@pytest.mark.parametrize("outputs", [1, PANEL - 1, PANEL, PANEL + 1])
@pytest.mark.parametrize("rows", [1, 7, 30])
def test_any_number_of_inputs_and_outputs(rows: int, outputs: int, inputs: int) -> None:
    x, weight = drawn(rows, inputs), drawn(outputs, inputs, seed=1)
    check(product(x, weight), x, weight)


def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    weight = drawn(100, CHUNK + 36, seed=1)
    x = drawn(300, CHUNK + 36)
    alone = torch.cat([product(row[None], weight) for row in x])
    for rows in (*range(2, 30), 191, 192, 193, 300):
        assert same_bits(product(x[:rows], weight), alone[:rows])
    beside = x.clone()
    beside[::2] = torch.tensor([3e38, torch.inf, torch.nan]).repeat(50)[:, None].bfloat16()
    assert same_bits(product(beside, weight)[1::2], alone[1::2])


def test_rows_that_are_parts_of_longer_ones() -> None:
    wide, weight = drawn(9, 151), drawn(40, 50, seed=1)
    for first in (0, 1, 100):
        part = wide[:, first : first + 50]
        assert same_bits(product(part, weight), product(part.contiguous(), weight))


def test_not_a_number_stays_one() -> None:
    x, weight = drawn(5, 64), drawn(70, 64, seed=1)
    x[1, 3], x[2, 7], weight[33, 5] = torch.nan, torch.inf, torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        found = product(x, weight, dtype=dtype)
        assert found[1].isnan().all() and found[:, 33].isnan().all() and not found[2].isfinite().any()
        assert found[[0, 3, 4]][:, :33].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_panel_has_its_outputs_side_by_side(dtype: torch.dtype) -> None:
    weight = torch.arange(40 * 10).remainder(119).view(40, 10).to(dtype)
    found, per_word = pack_panels([[weight]])[0], 4 // dtype.itemsize
    words = -(-10 // (per_word * RUN)) * RUN
    assert found.shape == (2, words, PANEL, per_word) and found.is_contiguous()
    for output in range(2 * PANEL):
        row = found[output // PANEL, :, output % PANEL].flatten()
        assert torch.equal(row[:10], weight[output] if output < 40 else torch.zeros(10, dtype=dtype))
        assert not row[10:].any()


@pytest.mark.parametrize("counts", [[n] for n in (1, 12, 13, 192, 193, 385, 4_000)] + [[0, 5, 0, 200, 13], [3] * 40])
def test_rows_are_cut_into_few_parts_of_like_size(counts: list[int]) -> None:
    parts = partition_expert_rows(torch.tensor(counts).cumsum(0), sum(counts))
    assert parts.num_rows == sum(counts)
    segments, groups = parts.segments.tolist(), parts.groups.tolist()
    first = 0
    for matrix, count in enumerate(counts):
        mine = [segment for segment in segments if segment[0] == matrix]
        assert len(mine) == -(-count // SEGMENT)
        for _, begin, rows, group in mine:
            like = -(-rows // -(-rows // GROUP))
            wanted = -(-like // ROWS) * ROWS if HAS_AMX else like
            assert begin == first and 0 < rows <= SEGMENT and group == wanted <= GROUP
            for row in range(0, rows, group):
                assert groups.pop(0) == [begin + row, min(group, rows - row)]
            first += rows
        assert not mine or max(each[2] for each in mine) - min(each[2] for each in mine) <= 1
    assert first == sum(counts) and not groups


@pytest.mark.parametrize("quantized", [False, pytest.param(True, marks=NEEDS_INT8)])
def test_rows_of_experts_are_what_each_experts_product_gives(quantized: bool) -> None:
    """Experts without rows, with one and with more than a segment; rows gathered, and in order."""
    counts = [0, 1, SEGMENT + 9, 0, 14]
    weight, x = drawn(len(counts), PANEL + 7, 70, seed=1), drawn(60, 70)
    packed = (cpu.pack_int8 if quantized else cpu.pack)(weight)
    assert packed.layout == "panels"
    ends, total = torch.tensor(counts).cumsum(0), sum(counts)
    order = torch.randint(60, (total,), generator=torch.Generator().manual_seed(2))
    rows = products.ExpertRows(order, ends, total)
    begins = [end - count for end, count in zip(ends.tolist(), counts, strict=True)]
    wanted = torch.cat(
        [
            products.multiply(x[order[begin : begin + count]], packed, None, expert)
            for expert, (begin, count) in enumerate(zip(begins, counts, strict=True))
        ]
    )
    assert same_bits(products.multiply_experts(x, packed, rows), wanted)
    in_order = replace(rows, order=None)
    assert same_bits(products.multiply_experts(x[order], packed, in_order), wanted)


@pytest.mark.parametrize(
    ("found", "dtypes"),
    [
        ({"avx512bf16"}, {torch.bfloat16}),
        (set(), set()),
        ({"avx512vnni"}, {torch.int8}),
        ({"avxvnni"}, {torch.int8}),
        ({"avx512bf16", "avx512vnni", "amx-bf16", "amx-int8", "amx-tile"}, {torch.bfloat16, torch.int8}),
    ],
)
def test_the_processors_that_have_them(
    found: set[str], dtypes: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "cpu_features", lambda: dict.fromkeys({"avx2", "fma", *found}, True))
    kinds = torch.bfloat16, torch.int8, torch.float32
    assert {kind for kind in kinds if panels.has_instructions.__wrapped__(kind)} == dtypes
    assert {kind for kind in kinds if panels.widens.__wrapped__(kind)} == set(kinds[:2]) - dtypes


ASKED = """
import llvmlite.binding, torch
found = llvmlite.binding.get_host_cpu_features()
found.update({changes})
llvmlite.binding.get_host_cpu_features = lambda: found
from cairn.errors import ConfigError
from cairn.kernels import cpu
from cairn.kernels.cpu import int8, panels
try:
    layout = cpu.pack_int8(torch.zeros(4, 4)).layout
except ConfigError:
    layout = "refused"
kernels = panels._multiply, panels._group_rows, panels._widen_rows, int8._multiply_int8
print(*(len(each.argument_types) for each in kernels), cpu.pack(torch.zeros(4, 4).bfloat16()).layout, layout)
"""
AVX512 = ("avx512bf16", "avx512vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl")
ALL_OFF = dict.fromkeys((*AVX512, "avxvnni", "amx-int8", "amx-bf16", "amx-tile"), False)
OTHERS_INT8 = ("onednn", "refused")


@pytest.mark.parametrize(
    ("changes", "counts", "layout", "of_int8"),
    [
        (ALL_OFF, [2, 1, 1, 3], "panels", ["panels"]),
        more(ALL_OFF | {"avxvnni": True}, [2, 1, 1, 3], "panels", ["panels"]),
        more(ALL_OFF | {"fma": False}, [0, 1, 0, 0], "float32", OTHERS_INT8),
    ],
)
def test_a_processor_without_them_is_not_asked_to_compile_them(
    changes: dict[str, bool], counts: list[int], layout: str, of_int8: list[str]
) -> None:
    """LLVM would end the process."""
    asked = ASKED.replace("{changes}", repr(changes))
    # a limit that this processor does not reach then is refused
    limits = {"CAIRN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"}
    environ = {name: value for name, value in os.environ.items() if name not in limits}
    command = [sys.executable, "-c", asked]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    *found, bfloat16, int8 = done.stdout.split()
    assert [int(each) for each in found] == counts and bfloat16 == layout and int8 in of_int8


def test_what_a_model_in_bfloat16_needs_is_compiled_at_the_start() -> None:
    """The output, in float32, too."""
    assert len(panels._multiply.keys_for(torch.bfloat16)) == 2
    assert not panels._multiply.keys_for(torch.float32)
