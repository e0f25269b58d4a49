"""The softmax mixture, written out token by token."""

import pytest
import torch
from torch import Tensor

from cairn.kernels import exact, reference
from cairn.kernels.contract import Kernels
from cairn.kernels.operations import KernelFunction
from cairn.layers.feed_forward import GatedMLP, MixtureOfExperts, SharedExpert, SoftmaxRouter
from cairn.layers.linear import Linear
from kernels.random_batches import RandomBatch, SequenceRows

ROWS, WIDTH, EXPERTS, INNER = 20, 16, 6, 8


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.manual_seed(sum(shape)))


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kernels", [reference, exact])
def test_a_token_gets_its_experts_by_their_rates(normalize: bool, kernels: Kernels) -> None:
    def linear(weight: Tensor) -> Linear:
        return Linear(kernels, kernels.pack(weight), None, tuple(weight.shape))

    router, gate_up, down = drawn(EXPERTS, WIDTH), drawn(EXPERTS, 2 * INNER, WIDTH), drawn(EXPERTS, WIDTH, INNER)
    shared = (drawn(5, WIDTH), drawn(5, WIDTH) * 2, drawn(WIDTH, 5))
    rate = drawn(1, WIDTH)
    mixture = MixtureOfExperts(
        KernelFunction(kernels, "gated_experts"),
        SoftmaxRouter(kernels, linear(router), 2, normalize),
        kernels.pack(gate_up),
        kernels.pack(down),
        SharedExpert(
            kernels,
            GatedMLP(KernelFunction(kernels, "silu_mul"), linear(torch.cat(shared[:2])), linear(shared[2])),
            linear(rate),
        ),
    )
    hidden = drawn(ROWS, WIDTH)
    found = mixture(hidden, RandomBatch((), (SequenceRows(0, 0, ROWS),)).batch(kernels), None)
    for row, x in enumerate(hidden):
        wanted = torch.sigmoid(rate @ x) * swiglu(x, *shared)
        rates = torch.softmax(router @ x, 0)
        best = rates.argsort(descending=True)[:2]
        for expert in best:
            share = rates[expert] / rates[best].sum() if normalize else rates[expert]
            wanted = wanted + share * swiglu(x, gate_up[expert, :INNER], gate_up[expert, INNER:], down[expert])
        torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-3)
