"""Every function of every backend against the slow truth, on random batches: in float64, where only a wrong formula
can differ, and in the models' dtypes for the rounding."""

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings

from cairn.kernels.contract import Kernels
from kernels.backends import every_backend, every_backend_and_dtype
from kernels.comparison import FEW, NUM_EXAMPLES, check_against_reference
from kernels.kernel_calls import OPERATIONS, Call, calls
from kernels.random_batches import RandomBatch, SequenceRows
from tiers import more


def functions_of_the_contract() -> dict[str, Callable[..., object]]:
    return {name: value for name, value in vars(Kernels).items() if inspect.isfunction(value) and name[0] != "_"}


@every_backend
def test_a_backend_has_the_contracts_functions_with_their_parameters(kernels: ModuleType) -> None:
    for name, function in functions_of_the_contract().items():
        parameters = list(inspect.signature(function).parameters.values())[1:]
        found = inspect.signature(getattr(kernels, name)).parameters.values()
        assert [(each.name, each.default) for each in found] == [(each.name, each.default) for each in parameters]


def test_every_function_has_a_random_call() -> None:
    others = {
        "pack",
        "lays_out",
        "pack_stored",
        "pack_int4",
        "pack_int8",
        "packed_dtype",
        "begin_step",
        "build_metadata",
        "step_graphs",
        "warm_up",
    }
    others |= {"token_counts", "sampler", "sampling_bytes", "logprobs"}
    others |= {"pack_state_spans", "store_states", "load_states", "copy_pages"}
    assert set(OPERATIONS) | others == set(functions_of_the_contract())
    for name, operation in OPERATIONS.items():
        parameters = inspect.signature(getattr(Kernels, name)).parameters
        assert {*operation.rows, *operation.packed, *operation.changed} <= set(parameters)
        assert operation.takes_batch == ("batch" in parameters)


@pytest.mark.parametrize("max_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("name", OPERATIONS)
@every_backend_and_dtype
def test_against_the_reference(kernels: Kernels, dtype: torch.dtype, name: str, max_examples: int) -> None:
    @settings(FEW, max_examples=max_examples)
    @given(call=calls(name, dtype))
    def check(call: Call) -> None:
        check_against_reference(kernels, call, dtype)

    check()


@pytest.mark.parametrize("name", OPERATIONS)
@every_backend_and_dtype
@pytest.mark.parametrize("batch", [RandomBatch((), ()), RandomBatch((SequenceRows(3, 70, 1),), ())], ids=["empty", "1"])
@pytest.mark.parametrize("max_examples", [8] if len(NUM_EXAMPLES) == 1 else [3, more(8)])
def test_the_smallest_batches(
    kernels: Kernels, dtype: torch.dtype, name: str, batch: RandomBatch, max_examples: int
) -> None:
    @settings(FEW, max_examples=max_examples)
    @given(call=calls(name, dtype, batch))
    def check(call: Call) -> None:
        check_against_reference(kernels, call, dtype)

    check()
