"""Recurrent states in float16 and bfloat16, in every backend: computed in float32, rounded where the contract says."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cairn.kernels.batch import CHUNK
from cairn.kernels.contract import Kernels
from kernels.backends import BACKENDS, INTERPRETED, ON_GPU, VERIFIES_DRAFTS, every_backend, name_of
from kernels.comparison import close, same_bits
from kernels.drafts import call_of, check_folds, check_verifies, every_acceptance
from kernels.fixed_calls import MIXED, fresh_sequence, small_call
from kernels.kernel_calls import Call
from kernels.random_batches import RandomBatch, SequenceRows
from tiers import more

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

every_name = pytest.mark.parametrize("name", ["ssd", "gdn"])
every_state_dtype = pytest.mark.parametrize("state_dtype", [F16, BF16], ids=str)
first_state_dtype = pytest.mark.parametrize(
    "state_dtype", [F16, BF16 if INTERPRETED or ON_GPU else more(BF16)], ids=str
)
"""Where one says as much of a rule; the GPU's lanes have no second half."""

VERIFIES = (SequenceRows(0, 0, 5), SequenceRows(5, 63, 3), SequenceRows(4, 1, 1))
DRAFTED = RandomBatch((SequenceRows(3, 77, 1),), (SequenceRows(1, 0, 70), SequenceRows(6, 61, 3)), 4, verifies=VERIFIES)


def with_states(call: Call, dtype: torch.dtype) -> Call:
    """The same numbers for states of whatever dtype: those of the one with the fewest bits."""
    states = call.operands["states"].to(BF16).to(F16).float()
    return replace(call, operands={**call.operands, "states": states.to(dtype)})


def rounds_once(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """`found`: numbers of a dtype that the float32 numbers `wanted` were rounded to; the last bits of these may be
    others."""
    assert found.dtype == dtype
    unit = torch.finfo(dtype).eps * wanted.abs().clamp(min=torch.finfo(dtype).tiny)
    assert ((found.float() - wanted).abs() <= 0.5 * unit + 3e-6 * wanted.abs().max()).all()
    # Nobody has cut bits off, or rounded twice: nearly all are the nearest numbers, bit for bit.
    assert (found == wanted.to(dtype)).float().mean() > 0.99


@every_backend
@every_name
@every_state_dtype
def test_a_pass_within_a_chunk_rounds_what_it_leaves_and_nothing_else(
    kernels: Kernels, name: str, state_dtype: torch.dtype
) -> None:
    decodes = (SequenceRows(3, 77, 1, snapshots=(1,)), SequenceRows(7, 0, 1))
    prefills = (SequenceRows(0, 64, 64, snapshots=(7, 64)), SequenceRows(5, 61, 3, snapshots=(2,)))
    call = small_call(name, RandomBatch(decodes, prefills, seed=4))
    wide, narrow = with_states(call, F32), with_states(call, state_dtype)
    (wanted, wanted_kept), (found, kept) = wide.run(kernels), narrow.run(kernels)
    close(found, wanted)
    rounds_once(kept, wanted_kept, state_dtype)
    slots = [sequence.slot for sequence in call.batch.sequences]
    rounds_once(narrow.operands["states"][slots], wide.operands["states"][slots], state_dtype)


@every_backend
@every_name
@first_state_dtype
def test_a_pass_that_is_cut_where_chunks_end_has_the_bits_of_one_that_is_not(
    kernels: Kernels, name: str, state_dtype: torch.dtype
) -> None:
    """So a prompt that goes on from a checkpoint there has the answer of one that is computed whole."""
    tokens = 2 * CHUNK + 20 if INTERPRETED else 5 * CHUNK + 20
    call = with_states(small_call(name, fresh_sequence(tokens, (CHUNK, tokens))), state_dtype)
    whole, parts = call.copied(), call.copied()
    wanted, kept = whole.run(kernels)
    cuts = [0, CHUNK, 2 * CHUNK, tokens]
    found = []
    for start, end in pairwise(cuts):
        rows = SequenceRows(2, start, end - start)
        found.append(parts.of_rows(slice(start, end), RandomBatch((), (rows,))).run(kernels)[0])
        if end == CHUNK:
            assert same_bits(parts.operands["states"][2], kept[0])
    assert same_bits(torch.cat(found), wanted)
    assert same_bits(parts.operands["states"][2], whole.operands["states"][2])
    assert same_bits(kept[1], whole.operands["states"][2])
    # And it is not the state that float32 ends with, rounded.
    wide = with_states(call, F32)
    wide.run(kernels)
    assert not torch.equal(wide.operands["states"][2].to(state_dtype), whole.operands["states"][2])


@every_backend
@every_name
@first_state_dtype
def test_answers_stay_near_those_of_float32_states(kernels: Kernels, name: str, state_dtype: torch.dtype) -> None:
    """And differ from them."""
    call = small_call(name, MIXED)
    wanted, found = with_states(call, F32).run(kernels)[0], with_states(call, state_dtype).run(kernels)[0]
    distance = ((found - wanted).norm() / wanted.norm()).item()
    assert torch.finfo(state_dtype).eps / 1000 < distance < 2 * torch.finfo(state_dtype).eps


@pytest.mark.parametrize("kernels", [each for each in VERIFIES_DRAFTS if each in BACKENDS], ids=name_of)
@every_name
@first_state_dtype
@pytest.mark.parametrize("dtype", [BF16, more(F32)], ids=str)
def test_verifies_and_folds_have_the_bits_of_decodes(
    kernels: Kernels, name: str, state_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    call = with_states(call_of(name, DRAFTED, dtype), state_dtype)
    check_verifies(kernels, call)
    for drafts in every_acceptance(call):
        check_folds(kernels, drafts, [tuple({1, (count + 1) // 2, count}) for count in drafts.accepted])


@pytest.mark.skipif(INTERPRETED, reason="numpy, which Triton's interpreter rounds with, warns of it")
@every_backend
@every_name
def test_what_is_beyond_float16_is_infinite(kernels: Kernels, name: str) -> None:
    """As torch rounds it: nothing hides that the dtype is too small for a model."""
    call = small_call(name, RandomBatch((SequenceRows(3, 77, 1),), (SequenceRows(5, 61, 3),), seed=4))
    key = "x" if name == "ssd" else "v"
    operands = {**call.operands, key: torch.full_like(call.operands[key], 3e6)}
    narrow = with_states(replace(call, operands=operands), F16)
    narrow.run(kernels)
    states = narrow.operands["states"][[3, 5]]
    assert states.isinf().any()
