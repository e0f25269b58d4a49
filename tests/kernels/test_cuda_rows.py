"""The CUDA backend's kernels by row, its convolution and its experts where random calls do not get: several blocks,
extents that are no powers of 2, ties, experts of everybody and of nobody, sequences shorter than the window."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.backends import BACKENDS, DEVICES, INTERPRETED
from kernels.comparison import check_against_reference, same_bits
from kernels.kernel_calls import Call
from kernels.random_batches import RandomBatch, SequenceRows

CUDA = next((backend for backend in BACKENDS if backend.__name__ == "cairn.kernels.cuda"), ModuleType("none"))

pytestmark = pytest.mark.skipif(CUDA not in BACKENDS, reason="there is nothing that runs Triton's kernels")

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
OVERFLOWS = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
"""numpy computes for Triton's interpreter, and warns of infinity and NaN."""


def rows_of_one(num_rows: int, seed: int = 0) -> RandomBatch:
    return RandomBatch((), (SequenceRows(2, 0, num_rows),), seed)


def numbers(*shape: int, salt: int = 0) -> Tensor:
    return rows_of_one(shape[0]).numbers(*shape, salt=salt)


def check(name: str, dtype: torch.dtype, batch: RandomBatch | None = None, **operands: Any) -> None:
    check_against_reference(CUDA, Call(name, batch or rows_of_one(0), operands), dtype)


def on_device(x: Tensor) -> Tensor:
    return x.to(DEVICES[CUDA])


# -- norms and elementwise -------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("width", [2048, 5000, 8192])
def test_norms_of_wide_rows(dtype: torch.dtype, width: int) -> None:
    x, weight = numbers(3, width).to(dtype), numbers(width, salt=1).to(dtype)
    check("rms_norm", dtype, x=x, weight=weight, eps=1e-6)
    check("add_rms_norm", dtype, residual=numbers(3, width, salt=2).to(dtype), x=x, weight=weight, eps=1e-6)
    check("gated_rms_norm", dtype, x=numbers(3, width).float(), gate=x, weight=weight, groups=2, eps=1e-6)


@DTYPES
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_norms_of_more_heads_than_a_program_has_rows(dtype: torch.dtype, dim: int) -> None:
    x, weight = numbers(5, 9, dim), numbers(dim, salt=1)
    check("rms_norm", dtype, x=x.to(dtype), weight=weight.to(dtype), eps=1e-6)
    gate = numbers(5, 9 * dim, salt=2).to(dtype)
    check("rms_norm_then_gate", dtype, x=x.float(), gate=gate, weight=weight.float(), eps=1e-6)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(2, 2500), (20, 96), (1, 4096)])
def test_elementwise_on_several_blocks(dtype: torch.dtype, rows: int, width: int) -> None:
    x, y = numbers(rows, width).mul(5).to(dtype), numbers(rows, width, salt=1).mul(5).to(dtype)
    check("silu_mul", dtype, gate=x, x=y)
    check("gelu_mul", dtype, gate=x, x=y)
    check("softcap", dtype, x=x.float(), cap=3.0)
    check("sigmoid_mul", dtype, x=x, gate=y)
    check("sigmoid_mul", dtype, x=x, gate=y[:, :1].contiguous())
    check("squared_relu", dtype, x=x)


@DTYPES
@pytest.mark.parametrize(("pairs", "width"), [(32, 64), (32, 256), (24, 100), (64, 128)])
def test_rope_of_models_heads(dtype: torch.dtype, pairs: int, width: int) -> None:
    angles = numbers(7, pairs, salt=1).mul(9)
    x = numbers(7, 5, width).to(dtype)
    check("rope", dtype, x=x, cos=angles.cos().float(), sin=angles.sin().float())


@DTYPES
@OVERFLOWS
def test_extreme_gates(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-300.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 300.0]]).to(dtype)
    x = torch.full_like(gate, 2)
    check("silu_mul", dtype, gate=gate, x=x)
    check("gelu_mul", dtype, gate=gate, x=x)
    check("softcap", dtype, x=gate.float(), cap=2.0)
    check("sigmoid_mul", dtype, x=x, gate=gate)


# -- routers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1, 5, 130, 512])
@pytest.mark.parametrize("normalize", [True, False])
def test_routers_of_any_number_of_experts(experts: int, normalize: bool) -> None:
    logits, top_k = numbers(3, experts).mul(3).float(), min(10, experts)
    check("softmax_router", F32, logits=logits, top_k=top_k, normalize=normalize)
    correction = numbers(experts, salt=1).float()
    options = {"top_k": top_k, "num_groups": 1, "top_groups": 1, "normalize": normalize, "scale": 2.5}
    check("sigmoid_router", F32, logits=logits, correction=correction, **options)


def test_of_equal_experts_the_first_ones_are_chosen() -> None:
    logits = torch.zeros(3, 12)
    logits[1, [3, 7, 11]] = 2.0
    logits[2] = torch.tensor([0.0, -0.0]).repeat(6)
    check("softmax_router", F32, logits=logits, top_k=5, normalize=True)
    for groups, top_groups in ((1, 1), (3, 2), (4, 3), (6, 5)):
        options = {"num_groups": groups, "top_groups": top_groups, "normalize": True, "scale": 1.0}
        check("sigmoid_router", F32, logits=logits, correction=torch.zeros(12), top_k=5, **options)
    choice, _ = CUDA.softmax_router(on_device(logits), 5, True)
    assert choice.tolist() == [[0, 1, 2, 3, 4], [3, 7, 11, 0, 1], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(("groups", "per_group"), [(8, 32), (3, 5), (5, 1), (4, 2)])
def test_groups_of_experts(groups: int, per_group: int) -> None:
    logits, correction = numbers(4, groups * per_group).mul(2).float(), numbers(groups * per_group, salt=1).float()
    options = {"num_groups": groups, "top_groups": 2, "top_k": min(2 * per_group, 8), "normalize": True, "scale": 2.5}
    check("sigmoid_router", F32, logits=logits, correction=correction, **options)
    check("sigmoid_router", F32, logits=logits, correction=correction, **options, epsilon=0.25)


@OVERFLOWS
def test_experts_of_a_token_are_different_ones_whatever_their_scores() -> None:
    logits = torch.zeros(5, 8)
    logits[1], logits[2], logits[3, ::2], logits[4] = torch.nan, -torch.inf, torch.inf, -torch.nan
    logits = on_device(logits)
    for choice, _ in (
        CUDA.softmax_router(logits, 4, True),
        CUDA.sigmoid_router(logits, torch.zeros_like(logits[0]), 4, 4, 2, True, 1.0),
        CUDA.sigmoid_router(logits, torch.zeros_like(logits[0]), 8, 1, 1, False, 1.0),
    ):
        assert all(len(set(row)) == len(row) and set(row) <= set(range(8)) for row in choice.tolist())


# -- experts ---------------------------------------------------------------------------------------------------------


def experts_call(choice: Tensor, num_experts: int, sizes: tuple[int, int], gated: bool, dtype: torch.dtype) -> Call:
    """`sizes`: width and inner width."""
    (tokens, top_k), (width, inner) = choice.shape, sizes
    batch = rows_of_one(tokens)
    up, down = (
        batch.numbers(num_experts, *shape, salt=salt).mul(shape[-1] ** -0.5).to(dtype)
        for salt, shape in ((3, (inner * (1 + gated), width)), (4, (width, inner)))
    )
    operands = {
        "x": batch.numbers(tokens, width).to(dtype),
        "topk_ids": choice,
        "topk_weights": batch.numbers(tokens, top_k, salt=2).float(),
        "gate_up" if gated else "up": up,
        "down": down,
    }
    return Call("gated_experts" if gated else "experts", batch, operands)


def clamped(call: Call) -> Call:
    """The same experts with biases, of whose inner numbers some are beyond the limit."""
    dtype = call.operands["x"].dtype
    biases = {
        f"{name}_bias": call.batch.numbers(*call.operands[name].shape[:2], salt=salt).to(dtype)
        for name, salt in (("gate_up", 5), ("down", 6))
    }
    return Call("clamped_experts", call.batch, {**call.operands, **biases, "alpha": 1.5, "limit": 0.75})


def random_choice(tokens: int, num_experts: int, top_k: int) -> Tensor:
    return numbers(tokens, num_experts, salt=1).topk(top_k, dim=-1).indices


CHOICES = {
    "few tokens": (random_choice(3, 5, 3), 5),
    "all experts of one token": (random_choice(1, 5, 5), 5),
    "many tokens": (random_choice(70, 5, 2), 5),
    "all to one": (torch.full((40, 1), 2), 7),
    "all to the last": (torch.full((17, 1), 6), 7),
    "one expert": (torch.zeros(33, 1, dtype=torch.int64), 1),
    "most of nobody": (random_choice(9, 3, 2) * 40 + 3, 130),
    "a full block": (torch.arange(64)[:, None] % 4, 4),
}


@DTYPES
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("which", CHOICES)
def test_experts(which: str, gated: bool, dtype: torch.dtype) -> None:
    choice, num_experts = CHOICES[which]
    check_against_reference(CUDA, experts_call(choice, num_experts, (72, 40), gated, dtype), dtype)


@DTYPES
@pytest.mark.parametrize("tokens", [2, 12])
def test_gelu_experts(tokens: int, dtype: torch.dtype) -> None:
    call = experts_call(random_choice(tokens, 3, 2), 3, (72, 40), True, dtype)
    check_against_reference(CUDA, Call("gelu_experts", call.batch, call.operands), dtype)


@DTYPES
@pytest.mark.parametrize("tokens", [2, 12])
def test_clamped_experts(tokens: int, dtype: torch.dtype) -> None:
    call = clamped(experts_call(random_choice(tokens, 3, 2), 3, (333, 150), True, dtype))
    check_against_reference(CUDA, call, dtype)
    without = {name: None if name == "down_bias" else value for name, value in call.operands.items()}
    check_against_reference(CUDA, Call(call.name, call.batch, without), dtype)


@DTYPES
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [2, 12])
def test_products_of_several_tiles(tokens: int, gated: bool, dtype: torch.dtype) -> None:
    choice = random_choice(tokens, 3, 2)
    check_against_reference(CUDA, experts_call(choice, 3, (333, 150), gated, dtype), dtype)


@DTYPES
def test_more_rows_than_a_launch_has_programs_for_are_several_launches(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = experts_call(random_choice(90, 9, 3), 9, (40, 24), True, dtype)
    module = sys.modules["cairn.kernels.cuda.experts"]
    (whole,) = call.run(CUDA)
    launched: list[int] = []
    run = module._run_many_tokens

    def counted(x: Tensor, *others: Any) -> None:
        launched.append(len(x))
        run(x, *others)

    monkeypatch.setattr(module, "_run_many_tokens", counted)
    # Two blocks of 32 pairs beside one of each expert.
    monkeypatch.setattr(module, "_MOST_BLOCKS", 9 + 2)
    (parts,) = call.run(CUDA)
    if INTERPRETED and dtype is torch.float32:
        # numpy's products, which stand for the GPU's, round a row by where it stands on some processors
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    else:
        assert same_bits(parts, whole)
    assert launched == [21, 21, 21, 21, 6]


@DTYPES
def test_pairs_are_sorted_by_counting_as_by_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    call = experts_call(random_choice(90, 9, 3), 9, (40, 24), True, dtype)
    (counted,) = call.run(CUDA)
    monkeypatch.setattr(sys.modules["cairn.kernels.cuda.expert_order"], "_COUNTED_PAIRS", 0)
    check_against_reference(CUDA, call, dtype)
    assert same_bits(call.run(CUDA)[0], counted)


@DTYPES
def test_a_tokens_experts_may_come_in_any_order(dtype: torch.dtype) -> None:
    for tokens in (2, 12):
        call = experts_call(random_choice(tokens, 6, 4), 6, (40, 24), True, dtype)
        turned = {name: call.operands[name].flip(1).contiguous() for name in ("topk_ids", "topk_weights")}
        other = Call(call.name, call.batch, {**call.operands, **turned})
        assert same_bits(call.run(CUDA)[0], other.run(CUDA)[0])


@OVERFLOWS
def test_a_token_with_nan_leaves_the_others_alone() -> None:
    for tokens in (3, 20):
        call = experts_call(random_choice(tokens, 4, 2), 4, (40, 24), True, F32)
        (clean,) = call.copied().run(CUDA)
        call.operands["x"][1] = torch.nan
        (found,) = call.copied().run(CUDA)
        others = [token for token in range(tokens) if token != 1]
        assert same_bits(found[others], clean[others])
        assert found[1].isnan().all()


# -- convolution -----------------------------------------------------------------------------------------------------

SHORT_AND_LONG = RandomBatch(
    (SequenceRows(7, 9, 1, snapshots=(1,)), SequenceRows(3, 0, 1, snapshots=(1,)), SequenceRows(5, 1, 1)),
    (
        SequenceRows(6, 64, 1, snapshots=(1,)),
        SequenceRows(0, 0, 2, snapshots=(1, 2)),
        SequenceRows(4, 130, 3, snapshots=(1, 2, 3)),
        SequenceRows(2, 5, 70, snapshots=(1, 3, 4, 59, 70)),
        SequenceRows(1, 0, 33),
    ),
    seed=3,
)


def conv_call(batch: RandomBatch, width: int, channels: int, dtype: torch.dtype, silu: bool, bias: bool) -> Call:
    operands = {
        "x": batch.numbers(batch.num_tokens, channels).to(dtype),
        "weight": batch.numbers(width, channels, salt=1).float(),
        "bias": batch.numbers(channels, salt=2).float() if bias else None,
        "states": batch.states(width - 1, channels, salt=3).to(dtype),
        "silu": silu,
    }
    return Call("conv", batch, operands)


@DTYPES
@pytest.mark.parametrize("width", [2, 3, 4, 6])
@pytest.mark.parametrize("channels", [1, 40, 300])
def test_conv(width: int, channels: int, dtype: torch.dtype) -> None:
    call = conv_call(SHORT_AND_LONG, width, channels, dtype, silu=width != 3, bias=channels != 40)
    check_against_reference(CUDA, call, dtype)


@DTYPES
def test_decoded_rows_are_those_of_a_prefill(dtype: torch.dtype) -> None:
    whole = conv_call(RandomBatch((), (SequenceRows(2, 0, 21),), 5), 4, 40, dtype, silu=True, bias=True)
    wanted, _ = whole.copied().run(CUDA)
    part = whole.copied()
    for start, end, decode in ((0, 2, False), (2, 3, True), (3, 4, True), (4, 20, False), (20, 21, True)):
        rows = (SequenceRows(2, start, end - start),)
        batch = RandomBatch(rows, ()) if decode else RandomBatch((), rows)
        found, _ = part.of_rows(slice(start, end), batch).run(CUDA)
        torch.testing.assert_close(found, wanted[start:end], rtol=1e-6, atol=1e-6)
