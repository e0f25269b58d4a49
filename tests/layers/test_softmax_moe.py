"""The softmax mixture, written out token by token."""

import pytest
import torch
from torch import Tensor

from cairn.layers.backend import kernels_of
from cairn.layers.batch import Batch
from cairn.layers.linear import Linear
from cairn.layers.softmax_moe import GatedSharedExpert, SoftmaxMixture, SoftmaxRouter
from cairn.layers.swiglu import SwiGLU

ROWS, WIDTH, EXPERTS, INNER = 20, 16, 6, 8
KERNELS = kernels_of("cpu")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.manual_seed(sum(shape)))


def batch(tiles: list[slice] | None) -> Batch:
    padding = torch.zeros(ROWS, 1, dtype=torch.bool)
    padding[3] = True
    return Batch(
        tokens=torch.zeros(ROWS, dtype=torch.int64),
        padding=padding,
        token_rows=torch.tensor([row for row in range(ROWS) if row != 3]),
        positions=torch.zeros(3, ROWS, dtype=torch.int64),
        decode_slots=[],
        decode_lengths=[],
        decode_marks=[],
        spans=[],
        groups=[],
        tiles=tiles,
    )


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("tiles", [None, [slice(0, 10), slice(10, 20)]])
def test_a_token_gets_its_experts_by_their_rates(normalize: bool, tiles: list[slice] | None) -> None:
    router, gate_up, down = drawn(EXPERTS, WIDTH), drawn(EXPERTS, 2 * INNER, WIDTH), drawn(EXPERTS, WIDTH, INNER)
    shared = (drawn(5, WIDTH), drawn(5, WIDTH) * 2, drawn(WIDTH, 5))
    rate = drawn(1, WIDTH)
    mixture = SoftmaxMixture(
        KERNELS,
        SoftmaxRouter(Linear(KERNELS, router), 2, normalize),
        tuple(gate_up),
        tuple(down),
        GatedSharedExpert(
            KERNELS,
            SwiGLU(KERNELS, *(Linear(KERNELS, weight) for weight in shared)),
            Linear(KERNELS, rate),
        ),
    )
    hidden = drawn(ROWS, WIDTH)
    found = mixture(hidden, batch(tiles), None)
    for row, x in enumerate(hidden):
        wanted = torch.sigmoid(rate @ x) * swiglu(x, *shared)
        rates = torch.softmax(router @ x, 0)
        best = rates.argsort(descending=True)[:2]
        for expert in best if row != 3 else []:
            share = rates[expert] / rates[best].sum() if normalize else rates[expert]
            wanted = wanted + share * swiglu(x, gate_up[expert, :INNER], gate_up[expert, INNER:], down[expert])
        torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-3)
