"""The exact backends' promise in float32: a row has the same bits whatever batch it is in and wherever its prompt was
cut on the grid of chunks, and a snapshot has those of the state of a pass that ends there."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels import exact
from cairn.kernels.batch import CHUNK
from cairn.kernels.contract import ExactKernels
from cairn.kernels.exact import products
from kernels.backends import DEVICES, EXACT, INTERPRETED, exact_backend
from kernels.comparison import FEW as SOME
from kernels.comparison import NUM_EXAMPLES, same_bits
from kernels.kernel_calls import OPERATIONS, Call, calls, part_of_sequence
from kernels.random_batches import NUM_SLOTS, RandomBatch, SequenceRows
from tiers import more

F32 = torch.float32
COMPUTED = [name for name, operation in OPERATIONS.items() if operation.results]
SEEDS = st.integers(0, 2**31)
if EXACT is not exact:
    # Other functions work row by row, or number by number.
    COMPUTED = ["linear", "lm_head", "experts", "gated_experts", "gelu_experts", "clamped_experts"]
    COMPUTED += ["conv", "ssd", "gdn", "attention"]

FEW, BATCH = SOME, None
if INTERPRETED:
    # Seconds each; `test_cuda_exactness` has models in many batches.
    FEW = settings(SOME, max_examples=1)
    BATCH = RandomBatch(
        (SequenceRows(3, 70, 1), SequenceRows(1, 0, 1)),
        (SequenceRows(0, 64, 20, snapshots=(20,)), SequenceRows(5, 0, 3)),
    )

pytestmark = pytest.mark.usefixtures("products_as_on_a_gpu")
HOST_ONLY = pytest.mark.skipif(EXACT is not exact, reason="about the CPU's products")


def in_other_slots(call: Call) -> Call:
    """The same sequences in the same pages, but with the slots in reverse order."""

    def moved(rows: tuple[SequenceRows, ...]) -> tuple[SequenceRows, ...]:
        return tuple(replace(each, slot=NUM_SLOTS - 1 - each.slot) for each in rows)

    def turned(x: Tensor) -> Tensor:
        return torch.cat([x[:NUM_SLOTS].flip(0), x[NUM_SLOTS:]])

    kinds = {kind: moved(getattr(call.batch, kind)) for kind in ("decodes", "verifies", "prefills")}
    batch = replace(call.batch, **kinds)
    states = {"states": turned(call.operands["states"])} if "states" in call.operands else {}
    tables = tuple(turned(table) for table in call.block_tables)
    return replace(call, batch=batch, operands={**call.operands, **states}, block_tables=tables)


def results_of(call: Call, index: int, found: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """What a call has given and written for the sequence `index` of its batch."""
    sequence, rows = call.batch.sequences[index], call.batch.rows_of(index)
    if "states" in call.operands:
        by_row, snapshots = found
        yield by_row[rows]
        yield snapshots[call.batch.snapshots_of(index)]
        yield call.operands["states"][sequence.slot]
    else:
        yield from (part[rows] for part in found)
        yield from (call.operands[name][rows] for name in call.operation.changed)


PRODUCTS = ("linear", "lm_head", "experts", "gated_experts", "gelu_experts", "clamped_experts")
WEIGHTS = ("weight", "up", "down", "gate_up")


@exact_backend
@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("max_examples", NUM_EXAMPLES if EXACT is exact else [FEW.max_examples])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(kernels: ExactKernels, name: str, max_examples: int) -> None:
    @settings(FEW, max_examples=max_examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_alone(kernels, name, data)

    check()


def check_alone(kernels: ExactKernels, name: str, data: st.DataObject) -> None:
    call = data.draw(calls(name, F32, BATCH))
    # What this machine's BLAS does not keep apart, as a width of 7, is refused at start.
    generator = torch.Generator().manual_seed(0)
    operands = [call.operands[part] for part in WEIGHTS if part in call.operands and name in PRODUCTS]
    weights = [each for operand in operands for each in (operand.unbind() if operand.dim() == 3 else [operand])]
    place = DEVICES.get(kernels, torch.device("cpu"))
    assume(all(kernels.find_dependent_height(each.to(place), None, generator) is None for each in weights))
    together = call.copied()
    found = together.run(kernels)
    for index in range(len(call.batch.sequences)):
        alone = in_other_slots(call.of_sequence(index)).copied()
        wanted = results_of(alone, 0, alone.run(kernels))
        for one, other in zip(wanted, results_of(together, index, found), strict=True):
            assert same_bits(one, other), call.batch.sequences[index]


def whole_sequence(seed: int, start: int, end: int, snapshots: tuple[int, ...] = ()) -> RandomBatch:
    return RandomBatch((), (SequenceRows(2, start, end - start, snapshots=snapshots),), seed)


@exact_backend
@pytest.mark.parametrize("name", ["conv", "ssd", "gdn", "attention"])
@FEW
@given(
    data=st.data(),
    seed=SEEDS,
    start=st.sampled_from([75] if INTERPRETED else [0, 1, 64, 75, 127]),
    chunks=st.integers(1, 1 if INTERPRETED else 2),
    more=st.integers(1, 20 if INTERPRETED else 130),
)
def test_a_pass_has_the_same_bits_whole_and_cut_on_the_grid(
    kernels: ExactKernels, name: str, data: st.DataObject, seed: int, start: int, chunks: int, more: int
) -> None:
    """Wherever it begins."""
    cut = (start // CHUNK + chunks) * CHUNK
    end = cut + more
    whole = data.draw(calls(name, F32, whole_sequence(seed, start, end)))
    cut_up = whole.copied()
    (wanted, *_), (head, *_) = whole.run(kernels), part_of_sequence(cut_up, 2, start, cut).run(kernels)
    rest = part_of_sequence(cut_up, 2, cut, end)
    tail, *_ = (rest.without_reach() if name == "attention" else rest).run(kernels)
    assert same_bits(torch.cat([head, tail]), wanted)
    if "states" in whole.operands:
        assert same_bits(cut_up.operands["states"][2], whole.operands["states"][2])


@exact_backend
@pytest.mark.parametrize("name", ["conv", "ssd", "gdn"])
@pytest.mark.parametrize("start", [75] if INTERPRETED else [0, 64, 75])
@pytest.mark.parametrize("max_examples", [1] if INTERPRETED else [1, more(3)] if EXACT is exact else [3])
def test_a_snapshot_has_the_bits_of_the_state_of_a_pass_that_ends_there(
    kernels: ExactKernels, name: str, start: int, max_examples: int
) -> None:
    """At every position of up to three chunks, with and without tokens before them."""

    @settings(FEW, max_examples=max_examples)
    @given(data=st.data(), seed=SEEDS)
    def check(data: st.DataObject, seed: int) -> None:
        check_snapshots(kernels, name, start, data, seed)

    check()


def check_snapshots(kernels: ExactKernels, name: str, start: int, data: st.DataObject, seed: int) -> None:
    offsets = (1, 53, 54, 128) if INTERPRETED else tuple(range(1, 2 * CHUNK + 1))
    batch = whole_sequence(seed, start, start + 2 * CHUNK, offsets)
    call = data.draw(calls(name, F32, batch))
    whole = call.copied()
    y, snapshots = whole.run(kernels)
    for offset, snapshot in zip(offsets, snapshots, strict=True):
        ended = replace(batch, prefills=(SequenceRows(5, start, offset, snapshots=(offset,)),))
        part = call.of_rows(slice(0, offset), ended).copied()
        part.operands["states"][5] = call.operands["states"][2]
        found, (last,) = part.run(kernels)
        assert same_bits(part.operands["states"][5], snapshot), offset
        assert same_bits(last, snapshot), offset
        assert same_bits(found, y[:offset]), offset


@HOST_ONLY
@FEW
@given(data=st.data(), seed=SEEDS, length=st.integers(1, 100))
def test_conv_has_the_same_bits_in_one_go_and_token_by_token(data: st.DataObject, seed: int, length: int) -> None:
    whole = data.draw(calls("conv", F32, whole_sequence(seed, 0, length, (length,))))
    stepped = whole.copied()
    wanted, (snapshot,) = whole.run(exact)
    steps = [part_of_sequence(stepped, 2, place, place + 1, decode=True).run(exact)[0] for place in range(length)]
    assert same_bits(torch.cat(steps), wanted)
    assert same_bits(stepped.operands["states"][2], snapshot)


@HOST_ONLY
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_this_machines_products_are_independent(bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for outputs, inputs in ((64, 96), (33, 7), (1, 64), (320, 256)):
        weight = torch.randn(outputs, inputs, generator=generator)
        offset = torch.randn(outputs, generator=generator) if bias else None
        assert products.find_dependent_height(weight, offset, generator) is None


@HOST_ONLY
@pytest.mark.parametrize("height", [products.ROW_TILE, products.TILE])
def test_products_whose_rows_depend_on_their_neighbours_are_found(height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a BLAS that adds up the whole tile before it rounds."""
    real = torch.mm

    def mm(x: Tensor, columns: Tensor, out: Tensor) -> None:
        real(x, columns, out=out)
        if len(x) == height:
            out.add_(x.sum() * 1e-6)

    monkeypatch.setattr(torch, "mm", mm)
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    assert products.find_dependent_height(weight, None, torch.Generator().manual_seed(3)) == height
