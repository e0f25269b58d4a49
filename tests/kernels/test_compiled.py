"""Compiled loops of the CPU backend: rounding, the hand-over to a team of threads, where what was compiled is kept."""

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels import cpu
from cairn.kernels.cpu import compile_cache, compiled, threads
from cairn.kernels.cpu.compiled import BF16, F16, F32, FLOAT, I64, INT, Kernel, Variant, kernel, record
from cairn.kernels.cpu.scalars import exp, load, narrow, rounded, sigmoid, silu, store, widen
from cairn.kernels.cpu.warm_up import MODULES, warm_up
from cairn.machine import Machine
from kernels.comparison import FEW, NUM_EXAMPLES, same_bits
from kernels.kernel_calls import OPERATIONS, calls

LITTLE, MUCH = 0, 10**9
"""Nanoseconds of work."""


@kernel({torch.bfloat16: (F32, BF16)})
def _round(begin: int, end: int, x: Any, out: Any) -> None:
    for i in range(begin, end):
        if i % 2:
            out[i] = narrow(x[i])
        else:
            store(out, i, x[i])


@kernel({torch.bfloat16: (BF16, F32)})
def _widen(begin: int, end: int, x: Any, out: Any) -> None:
    for i in range(begin, end):
        out[i] = widen(x[i]) if i % 2 else load(x, i)


@kernel({torch.float16: (F32, F16, F32)})
def _round_halves(begin: int, end: int, x: Any, halves: Any, wide: Any) -> None:
    """`wide` is x rounded, by way of memory or not."""
    for i in range(begin, end):
        store(halves, i, x[i])
        wide[i] = load(halves, i) if i % 2 else rounded(halves, x[i])


@kernel({torch.float32: (F32, F32)})
def _exp(begin: int, end: int, x: Any, out: Any) -> None:
    for i in range(begin, end):
        out[i] = exp(x[i])


@kernel({torch.float32: (F32, F32, F32)})
def _gate(begin: int, end: int, x: Any, shares: Any, gated: Any) -> None:
    for i in range(begin, end):
        shares[i], gated[i] = sigmoid(x[i]), silu(x[i])


@kernel({torch.int64: (I64,)})
def _mark(begin: int, end: int, ranges: Any) -> None:
    """A range is written down where it begins, by its end."""
    ranges[begin] = end if ranges[begin] == 0 else -1


@kernel({torch.int64: (I64, INT)})
def _count(begin: int, end: int, counts: Any, step: int) -> None:
    for i in range(begin, end):
        counts[i] += step


@kernel({torch.int64: (I64, INT)})
def _fail(begin: int, end: int, x: Any, size: int) -> None:
    x[0] = len(np.empty(size))


class Scaling(NamedTuple):
    x: Any
    factor: float


@kernel({torch.float32: (record(Scaling, F32, FLOAT), F32)})
def _scale(begin: int, end: int, scaling: Any, out: Any) -> None:
    for i in range(begin, end):
        out[i] = scaling.factor * scaling.x[i]


class Team:
    """Instead of OpenMP's: as many threads as are asked for, all of them new ones."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(
            self._run
        )

    @property
    def address(self) -> int:
        return ctypes.cast(self._parallel, ctypes.c_void_p).value or 0

    def _run(self, body: int, data: int, count: int, flags: int) -> None:
        self.asked.append(count)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body)
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: function(data), range(count)))


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    """Three threads, for any work."""
    own = Team()
    variants = [
        variant
        for module in (*MODULES, sys.modules[__name__])
        for each in vars(module).values()
        if isinstance(each, Kernel)
        for variant in map(each.__getitem__, each.keys_for())
    ]
    for variant in variants:
        monkeypatch.setattr(variant, "_team", own.address)
    torch.set_num_threads(3)
    yield own
    torch.set_num_threads(1)


def to_bfloat16(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    _round[torch.bfloat16](x.numel(), LITTLE, x.data_ptr(), out.data_ptr())
    return out


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_rounding_is_to_the_nearest_and_of_two_to_the_even() -> None:
    # Every bfloat16, and for each what lies just below, at and just above the half between it and its neighbour.
    high = torch.arange(2**16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (high[:, None] + low).flatten().to(torch.uint32).view(torch.float32)
    found, wanted = to_bfloat16(x), x.to(torch.bfloat16)
    assert torch.equal(found.isnan(), x.isnan())
    assert same_bits(found[~x.isnan()], wanted[~x.isnan()])


def test_a_bfloat16_is_widened_to_the_same_number() -> None:
    x = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    out = torch.empty(x.shape)
    _widen[torch.bfloat16](x.numel(), LITTLE, x.data_ptr(), out.data_ptr())
    assert same_bits(out, x.float())


def test_float16_is_rounded_to_the_nearest_and_widened_to_the_same_number() -> None:
    # Every float16, and for each what lies just below, at and just above the half between it and its neighbour; what is
    # too small for one, and what is too large.
    halves = torch.arange(2**16).to(torch.uint16).view(torch.float16)
    steps = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF])
    near = (halves.float().view(torch.int32).long()[:, None] + steps).to(torch.uint32).view(torch.float32)
    few = 2.0 ** torch.arange(-60, 128) * torch.tensor([1.0, 1.5, -1.25])[:, None]
    x = torch.cat([halves.float(), near.flatten(), few.flatten(), torch.tensor([65519.99, 65520.0, -65520.0])])
    found, wide = torch.empty(x.shape, dtype=torch.float16), torch.empty(x.shape)
    _round_halves[torch.float16](x.numel(), LITTLE, x.data_ptr(), found.data_ptr(), wide.data_ptr())
    wanted = x.half()
    assert torch.equal(found.isnan(), x.isnan())
    numbers = ~x.isnan()
    assert same_bits(found[numbers], wanted[numbers])
    assert same_bits(wide[numbers], wanted.float()[numbers])
    assert wide[~numbers].isnan().all()


def test_the_exponential_is_right_to_two_units_in_the_last_place() -> None:
    x = torch.cat([torch.linspace(-86.98, 88.7, 200_001), torch.linspace(-1, 1, 10_001)])
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -200.0, 200.0])
    for given_, wanted in ((x, x.double().exp()), (edges, edges.double().exp())):
        out = torch.empty(given_.shape)
        _exp[torch.float32](given_.numel(), LITTLE, given_.data_ptr(), out.data_ptr())
        torch.testing.assert_close(out, wanted.float(), rtol=2 * torch.finfo(torch.float32).eps, atol=0, equal_nan=True)


def test_the_exponential_of_what_is_left_of_its_range_is_zero() -> None:
    x = torch.tensor([-86.99, -87.4, -88.0, -103.0, -104.5, -1e4, -3e38, -torch.inf])
    out = torch.full_like(x, torch.nan)
    _exp[torch.float32](x.numel(), LITTLE, x.data_ptr(), out.data_ptr())
    assert out.tolist() == [0.0] * x.numel()


def gate(x: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid and silu of x."""
    shares, gated = torch.empty_like(x), torch.empty_like(x)
    _gate[torch.float32](x.numel(), LITTLE, x.data_ptr(), shares.data_ptr(), gated.data_ptr())
    return shares, gated


def test_gates_are_right_to_three_units_in_the_last_place_and_to_what_rounding_x_does() -> None:
    # To raise e to a rounded number is off by its rounding: |x| times half a unit, and here no more than that.
    x = torch.cat([torch.linspace(-87, 100, 200_001), torch.linspace(-1, 1, 10_001)])
    wide = x.double()
    allowed = torch.finfo(torch.float32).eps * (2 + wide.clamp(max=0).abs() / 4)
    for found, wanted in zip(gate(x), (wide.sigmoid(), wide * wide.sigmoid()), strict=True):
        assert ((found - wanted).abs() <= allowed * wanted.abs()).all()


def test_gates_saturate_and_keep_nan() -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 90.0, 3e38, -88.6, -90.0, -3e38])
    shares, gated = gate(x)
    assert shares.nan_to_num(-1).tolist() == [0.5, 0.5, 1, 0, -1, 1, 1, 0, 0, 0]
    assert gated.nan_to_num(-1, posinf=torch.inf).tolist() == [0, 0, torch.inf, -1, -1, 90, x[6].item(), 0, 0, 0]
    # With any bits set below those of a bfloat16.
    payloads = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF]).to(torch.int32).view(torch.float32)
    assert all(found.isnan().all() for found in gate(payloads.repeat(7)))


def test_a_record_is_called_with_its_fields_one_after_the_other() -> None:
    x, out = torch.arange(3.0), torch.empty(3)
    _scale[torch.float32](3, LITTLE, *Scaling(x.data_ptr(), 2.5), out.data_ptr())
    assert out.tolist() == [0.0, 2.5, 5.0]


def test_a_kernel_has_no_variants_where_its_instructions_are_missing() -> None:
    missing = kernel({torch.float32: (F32,)}, needs=False)(lambda begin, end, x: None)
    assert list(missing.keys_for()) == []
    with pytest.raises(TypeError, match="takes"):
        missing[torch.float32]


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 95, 96, 97, 10_007])
def test_every_item_is_done_once_by_however_many_threads(team: Team, count: int) -> None:
    counts = torch.zeros(count + 1, dtype=torch.int64)
    for cost in (LITTLE, MUCH):
        _count[torch.int64](count, cost, counts.data_ptr(), 1)
    assert counts.tolist() == [2] * count + [0]
    assert team.asked == ([3] if count > 1 else [])


def test_ranges_are_large_at_first_and_end_with_single_items(team: Team) -> None:
    ranges = torch.zeros(240, dtype=torch.int64)
    _mark[torch.int64](240, MUCH, ranges.data_ptr())
    begins = ranges.nonzero().flatten().tolist()
    ends = [ranges[begin].item() for begin in begins]
    assert [0, *ends] == [*begins, 240]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    # Of three threads each takes half of its share of what is left.
    assert sizes[0] == 40 and sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)


def test_torchs_own_team_is_found_and_does_the_work() -> None:
    assert threads.team()
    torch.set_num_threads(2)
    counts = torch.zeros(10_007, dtype=torch.int64)
    _count[torch.int64](10_007, MUCH, counts.data_ptr(), 1)
    torch.set_num_threads(1)
    assert counts.eq(1).all()


def test_without_a_team_the_calling_thread_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = _count[torch.int64]
    monkeypatch.setattr(variant, "_team", 0)
    torch.set_num_threads(2)
    counts = torch.zeros(100, dtype=torch.int64)
    variant(100, MUCH, counts.data_ptr(), 1)
    torch.set_num_threads(1)
    assert counts.eq(1).all()


@pytest.mark.parametrize("policy", [{"OMP_WAIT_POLICY": "PASSIVE"}, {"GOMP_SPINCOUNT": "0"}])
def test_more_work_stays_on_one_thread_where_the_others_sleep(
    monkeypatch: pytest.MonkeyPatch, policy: dict[str, str]
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    spinning = threads.inline_limit.__wrapped__()
    for name, value in policy.items():
        monkeypatch.setenv(name, value)
    assert threads.inline_limit.__wrapped__() > spinning
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert threads.inline_limit.__wrapped__() == spinning


def test_little_work_is_not_handed_over(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, counts = _count[torch.int64], torch.zeros(100, dtype=torch.int64)
    monkeypatch.setattr(variant, "_inline_limit", 1000)
    variant(100, 999, counts.data_ptr(), 1)
    assert team.asked == []
    variant(100, 1000, counts.data_ptr(), 1)
    assert team.asked == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("max_examples", NUM_EXAMPLES)
def test_results_do_not_depend_on_the_number_of_threads(
    team: Team, name: str, dtype: torch.dtype, max_examples: int
) -> None:
    @settings(FEW, max_examples=max_examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        call = data.draw(calls(name, dtype))
        many, one = call.copied(), call.copied()
        found = run_with(many, limit=0)
        wanted = run_with(one, limit=2**62)
        for mine, other in zip(found, wanted, strict=True):
            assert same_bits(mine, other)
        for operand in call.operation.changed:
            assert same_bits(many.operands[operand], one.operands[operand])

    check()
    assert team.asked or name in ("embed", "linear", "lm_head")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["rms_norm", "add_rms_norm", "gated_rms_norm", "rms_norm_then_gate"])
def test_results_do_not_depend_on_where_they_lie(
    norm: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM has another loop for memory that might overlap, which a result close behind the weights might."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.zeros(80_000, dtype=torch.uint8)
    weight_dtype = torch.float32 if norm == "rms_norm_then_gate" else dtype

    def found(x: Tensor, gate: Tensor, weight: Tensor, gap: int) -> Tensor:
        """With the result `gap` bytes behind the weights."""
        memory.zero_()
        placed = memory[: weight.nbytes].view(weight.dtype).copy_(weight)
        out = memory[weight.nbytes + gap :][: gate.nbytes].view(gate.dtype).view(gate.shape)
        call: Mapping[str, Callable[[], Tensor]] = {
            "rms_norm": lambda: cpu.rms_norm(gate, placed, 1e-5),
            "add_rms_norm": lambda: cpu.add_rms_norm(x.to(dtype, copy=True), gate, placed, 1e-5),
            "gated_rms_norm": lambda: cpu.gated_rms_norm(x, gate, placed, 1, 1e-5),
            "rms_norm_then_gate": lambda: cpu.rms_norm_then_gate(x[:, None], gate, placed, 1e-5),
        }
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", lambda _, **options: out)
            return call[norm]().clone()

    for width in (*range(1, 41), 64, 100):
        x, gate = torch.randn((2, 2, width), generator=generator)
        operands = (x, gate.to(dtype), torch.randn(width, generator=generator).to(weight_dtype))
        far = found(*operands, gap=40_000)
        for gap in (0, 4, 64, 160):
            assert same_bits(found(*operands, gap=gap), far)


def run_with(call: Any, limit: int) -> tuple[Tensor, ...]:
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            for each in vars(module).values():
                if isinstance(each, Kernel):
                    for variant in each.values():
                        patch.setattr(variant, "_inline_limit", limit)
        return call.run(cpu)


def test_a_kernel_that_fails_says_so(team: Team) -> None:
    x = torch.zeros(1, dtype=torch.int64)
    for cost in (LITTLE, MUCH):
        with pytest.raises(RuntimeError, match="_fail failed on 5 items"):
            _fail[torch.int64](5, cost, x.data_ptr(), -1)


def test_a_dtype_that_no_variant_is_for_is_named() -> None:
    with pytest.raises(TypeError, match=r"_silu_mul takes .*float64"):
        cpu.silu_mul(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def found_folder() -> Path | None:
    return compile_cache.cache_folder.__wrapped__()


def test_the_cache_folder_is_its_owners_alone(cache_home: Path) -> None:
    before = os.umask(0)
    try:
        folder = found_folder()
    finally:
        os.umask(before)
    assert folder is not None and folder.is_relative_to(cache_home)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert found_folder() == folder


def test_a_cache_folder_that_others_could_write_is_not_used(cache_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = found_folder()
    assert folder is not None
    folder.chmod(0o770)
    assert found_folder() is None
    assert str(folder) in caplog.text and "770" in caplog.text
    folder.rename(cache_home / "elsewhere")
    (cache_home / "elsewhere").chmod(0o700)
    folder.symlink_to(cache_home / "elsewhere")
    assert found_folder() is None


def test_where_no_folder_can_be_made_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert found_folder() is None


def test_what_is_compiled_once_is_loaded_afterwards(monkeypatch: pytest.MonkeyPatch, cache_home: Path) -> None:
    folder = found_folder()
    monkeypatch.setattr(compiled, "cache_folder", lambda: folder)
    for from_cache in (False, True):
        variant = Variant(_count._function, (I64, INT))
        assert variant.from_cache is from_cache
        counts = torch.zeros(3, dtype=torch.int64)
        variant(3, LITTLE, counts.data_ptr(), 4)
        assert counts.tolist() == [4, 4, 4]


def test_without_a_folder_it_is_compiled_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiled, "cache_folder", lambda: None)
    variant = Variant(_count._function, (I64, INT))
    counts = torch.zeros(3, dtype=torch.int64)
    variant(3, LITTLE, counts.data_ptr(), 4)
    assert not variant.from_cache and counts.tolist() == [4, 4, 4]
    assert list(tmp_path.iterdir()) == []


def test_warming_up_compiles_what_a_dtype_wants_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    both = warm_up()
    for dtype in (torch.float32, torch.bfloat16):
        assert 0 < warm_up(dtype) < both
    assert f"{both} ready" in caplog.text


def test_the_other_backends_do_without_numba() -> None:
    """A process of its own: here numba is imported already."""
    code = "import sys; sys.modules['numba'] = None; import cairn.kernels.exact, cairn.kernels.reference"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[threads.StepWork]:
    """What a process of its own would know of its steps, on three threads."""
    monkeypatch.setattr(threads, "BYTES_PER_NS", 35)
    monkeypatch.setattr(threads, "PRODUCTS_PER_NS", 350)
    torch.set_num_threads(3)
    yield threads.StepWork(packed_bytes=16_000_000)
    torch.set_num_threads(1)


def cores(number: int) -> Machine:
    return Machine(Path("/nowhere"), lambda: range(number))


def test_a_small_step_has_one_thread_and_a_large_one_all(work: threads.StepWork) -> None:
    work.begin_step(10)
    assert torch.get_num_threads() == 3, "nothing is served yet"
    work.begin_serving(cores(3))
    seen = []
    for rows in (1, 16, 200, 1):
        work.begin_step(rows)
        seen.append(torch.get_num_threads())
    assert seen == [1, 1, 3, 1]
    torch.set_num_threads(3)
    work.begin_serving(cores(4))
    work.begin_step(16)
    assert torch.get_num_threads() == 3, "a core is left for others"
    work.packed_bytes = 600_000_000
    work.begin_step(1)
    assert torch.get_num_threads() == 3


def test_a_step_is_as_long_as_its_products_take(work: threads.StepWork) -> None:
    """60 MB are read in less than 2 ms, half of what a step has to take."""
    work.packed_bytes = 60_000_000
    work.begin_serving(cores(3))
    work.begin_step(1)
    assert torch.get_num_threads() == 1
    work.begin_step(32)
    assert torch.get_num_threads() == 3


def test_a_step_without_rows_has_one_thread_unless_its_head_is_no_loop(work: threads.StepWork) -> None:
    work.packed_bytes = 600_000_000
    work.begin_serving(cores(3))
    for layouts, expected in (({"panels"}, 1), ({"panels", "onednn"}, 3)):
        work.packed_layouts = layouts
        work.begin_step(1)
        work.begin_step(0)
        assert torch.get_num_threads() == expected


def test_a_large_loop_of_a_small_step_has_all_threads(work: threads.StepWork) -> None:
    work.begin_serving(cores(3))
    work.begin_step(1)
    assert work.threads_for(threads.LARGE_LOOP - 1) == 1 and work.threads_for(threads.LARGE_LOOP) == 3


def test_packed_weights_are_counted() -> None:
    before = threads.step_work().packed_bytes
    cpu.pack(torch.zeros(48, 32, dtype=torch.bfloat16))
    cpu.pack(torch.zeros(2, 8, 4))
    itemsize = cpu.packed_dtype(torch.bfloat16).itemsize
    assert threads.step_work().packed_bytes == before + 48 * 32 * itemsize + 2 * 8 * 4 * 4
    assert {cpu.pack(torch.zeros(2, 8, 4)).layout} <= threads.step_work().packed_layouts
