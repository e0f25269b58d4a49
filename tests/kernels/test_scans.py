"""The convolution and the scans where random batches are thin: models' shapes, a thousand tokens, a state after every
token, decays that differ by orders of magnitude."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cairn.kernels import cpu, reference
from cairn.kernels.batch import CHUNK
from cairn.kernels.contract import Kernels
from cairn.kernels.cpu.compiled import StateKey
from kernels.backends import INTERPRETED, ON_GPU, every_backend, name_of
from kernels.comparison import check_against_reference, close, same_bits
from kernels.fixed_calls import MIXED, conv_call, fresh_sequence, gdn_call, small_call, ssd_call
from kernels.kernel_calls import Call
from kernels.random_batches import NUM_SLOTS, RandomBatch, SequenceRows
from tiers import more

RECURRENT = ("conv", "ssd", "gdn")
F32, BF16 = torch.float32, torch.bfloat16


def of_one(call: Call, start: int, end: int, snapshots: tuple[int, ...] = ()) -> Call:
    """Tokens [start, end) of a sequence that is all of a call's batch and begins with it."""
    rows = SequenceRows(call.batch.sequences[0].slot, start, end - start, snapshots=snapshots)
    return call.of_rows(slice(start, end), RandomBatch((), (rows,)))


@every_backend
@pytest.mark.parametrize("model", [F32, BF16])
def test_models_shapes(kernels: Kernels, model: torch.dtype) -> None:
    calls = [
        conv_call(MIXED, (4, 1300), model),
        conv_call(MIXED, (8, 257), model),
        ssd_call(MIXED, (2, 3, 64, 128), model),
        ssd_call(MIXED, (1, 10, 80, 16), model),
        ssd_call(MIXED, (1, 2, 16, 200), model),
        gdn_call(MIXED, (2, 1, 128, 128), model),
        gdn_call(MIXED, (1, 3, 80, 64), model),
    ]
    for call in calls:
        check_against_reference(kernels, call, model)


@every_backend
@pytest.mark.parametrize("name", RECURRENT)
def test_a_sequence_that_has_ended_leaves_its_slot_and_the_others_alone(kernels: Kernels, name: str) -> None:
    rows = (SequenceRows(1, 70, 1, snapshots=(1,)), SequenceRows(4, 9, 1), SequenceRows(2, 64, 1))
    batch = RandomBatch(rows, (SequenceRows(0, 60, 10, snapshots=(4,)),), seed=3)
    plain, before = small_call(name, batch), small_call(name, batch).operands["states"]
    ended = small_call(name, replace(batch, ended=(1,)))
    wanted, found = plain.run(kernels), ended.run(kernels)
    others = [0, *range(2, len(wanted[0]))]
    same_bits(found[0][others], wanted[0][others])
    same_bits(found[1], wanted[1])
    states = ended.operands["states"]
    same_bits(states[4], before[4])
    same_bits(states[[0, 1, 2]], plain.operands["states"][[0, 1, 2]])
    assert not torch.equal(states[1], before[1])


@every_backend
@pytest.mark.parametrize("name", RECURRENT)
def test_a_thousand_tokens_cut_at_odd_places(kernels: Kernels, name: str) -> None:
    whole = small_call(name, fresh_sequence(1000))
    wanted, _ = whole.in_float64().run(reference)
    parts = replace(whole, operands={**whole.operands, "states": whole.operands["states"].clone()})
    cuts = [0, 1, 64, 127, 129, 190, 191, 448, 700, 999, 1000]
    found = torch.cat([of_one(parts, start, end).run(kernels)[0] for start, end in pairwise(cuts)])
    close(found, wanted.float())
    close(whole.run(kernels)[0], wanted.float())
    close(parts.operands["states"][2], whole.operands["states"][2])


@every_backend
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("every_token", [False] if INTERPRETED else [True] if ON_GPU else [False, more(True)])
def test_a_state_after_every_token_is_that_of_a_run_which_ends_there(
    kernels: Kernels, name: str, every_token: bool
) -> None:
    """Or after every 15th and around the ends of chunks."""
    tokens = 2 * CHUNK + 20
    everywhere = tuple(range(1, tokens + 1))
    if not every_token:
        edges = (
            1,
            CHUNK - 1,
            CHUNK,
            CHUNK + 1,
            2 * CHUNK - 1,
            2 * CHUNK,
            2 * CHUNK + 1,
            tokens,
        )
        everywhere = tuple(sorted({*edges, *everywhere[::15]}))
    whole = small_call(name, fresh_sequence(tokens, everywhere))
    y, kept = whole.copied().run(kernels)
    for end, snapshot in zip(everywhere, kept, strict=True):
        short = of_one(whole.copied(), 0, end)
        short_y, _ = short.run(kernels)
        close(snapshot, short.operands["states"][2])
        close(short_y, y[:end])
        if kernels is cpu:
            # Nothing that stands behind a token is in what is computed of it, not even as a zero.
            assert same_bits(snapshot, short.operands["states"][2])
            assert same_bits(short_y, y[:end])
    with_none, _ = of_one(whole.copied(), 0, tokens).run(kernels)
    assert same_bits(with_none, y)


def decays(call: Call, dt: Tensor) -> Call:
    """With these time steps, the same for all heads, and a decay of e^(-20 dt)."""
    a, bias = call.operands["a"], call.operands["dt_bias"]
    steps = dt.float()[:, None].expand(-1, a.shape[0]).contiguous()
    changed = {"dt": steps, "a": torch.full_like(a, -20), "dt_bias": torch.zeros_like(bias)}
    return replace(call, operands={**call.operands, **changed})


@every_backend
@pytest.mark.parametrize("name", ["ssd", "gdn"])
def test_what_comes_behind_strong_decays_is_exact(kernels: Kernels, name: str, request: pytest.FixtureRequest) -> None:
    """The log of the decay is some -16,000 before tokens that forget next to nothing: float32 knows it to a
    thousandth."""
    if name_of(kernels) == "cuda":
        reason = "its sums of logarithms within a chunk are one float32 number each"
        request.applymarker(pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason))
    dt = torch.full((120,), 20.0)
    dt[40:64], dt[104:] = -11, -9
    call = decays(small_call(name, fresh_sequence(120, (41, 63, 64, 120))), dt)
    check_against_reference(kernels, call, F32)


@every_backend
@pytest.mark.parametrize("name", ["ssd", "gdn"])
def test_strong_decays(kernels: Kernels, name: str) -> None:
    """About e^-20 a token, and all of it now and then."""
    dt = torch.full((150,), 0.55)
    dt[::7] = 60
    check_against_reference(kernels, decays(small_call(name, fresh_sequence(150, (30, 128, 150))), dt), F32)


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


LARGE: Mapping[str, Call] = {
    "conv": conv_call(MIXED, (4, 1300), BF16),
    "ssd": ssd_call(MIXED, (2, 8, 64, 64), BF16),
    "gdn": gdn_call(MIXED, (4, 2, 64, 64), BF16),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_sequences_bits_are_its_own(num_threads: None, name: str) -> None:
    """Whatever else is in the batch, and however many threads there are."""
    together, call = LARGE[name].copied(), LARGE[name]
    y, kept = together.run(cpu)
    for index, sequence in enumerate(MIXED.sequences):
        alone = call.copied().of_sequence(index)
        alone_y, alone_kept = alone.run(cpu)
        assert same_bits(alone_y, y[MIXED.rows_of(index)])
        assert same_bits(alone_kept, kept[MIXED.snapshots_of(index)])
        assert same_bits(alone.operands["states"][sequence.slot], together.operands["states"][sequence.slot])


@pytest.mark.parametrize("name", ["ssd", "gdn"])
def test_a_mixed_batch_asks_for_no_other_variant_of_decode(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A start compiles what its model's dtype wants: another variant would be compiled while requests wait."""
    module = sys.modules[f"cairn.kernels.cpu.{name}"]
    variants = getattr(module, f"_{name}_decode")
    key = StateKey(BF16, F32)
    monkeypatch.setattr(module, f"_{name}_decode", {key: variants[key]})
    LARGE[name].copied().run(cpu)


@pytest.mark.parametrize("name", RECURRENT)
def test_other_slots_and_other_layers_states_are_left_alone(name: str) -> None:
    call = LARGE[name]
    states = call.operands["states"]
    live = torch.full((NUM_SLOTS + 1, 3, *states.shape[1:]), 7.0, dtype=states.dtype)
    live[:, 1] = states
    before = live.clone()
    replace(call, operands={**call.operands, "states": live[:, 1]}).run(cpu)
    used = [sequence.slot for sequence in MIXED.sequences]
    assert same_bits(live[:, ::2], before[:, ::2])
    others = [slot for slot in range(NUM_SLOTS + 1) if slot not in used]
    assert same_bits(live[others], before[others])
    assert not live[used].isnan().any()


@pytest.mark.parametrize("name", RECURRENT)
def test_states_of_another_layout_are_refused(name: str) -> None:
    call = LARGE[name]
    states = call.operands["states"]
    scattered = states.transpose(-1, -2).contiguous().transpose(-1, -2)
    for wrong in (scattered, states[:, :-1], states.double()):
        with pytest.raises(ValueError, match=r"states are .* wanted are"):
            replace(call, operands={**call.operands, "states": wrong}).run(cpu)
