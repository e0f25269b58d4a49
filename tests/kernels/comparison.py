"""How a backend's results are held against the truth."""

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import Phase, settings
from torch import Tensor

from cairn.kernels import reference
from cairn.kernels.contract import Kernels
from kernels.backends import BF16_PRODUCTS, INTERPRETED, ON_GPU
from kernels.kernel_calls import Call, Kind, whole_memory
from tiers import more

FEW = settings(max_examples=16, deadline=None)
if ON_GPU:
    # Nearly each has kernels of its own to compile.
    FEW = settings(FEW, max_examples=12)
if INTERPRETED:
    # A failure is told as it was found: to make it smaller would take minutes.
    FEW = settings(FEW, max_examples=5, phases=[Phase.explicit, Phase.generate])

NUM_EXAMPLES: tuple[Any, ...] = (5, more(FEW.max_examples))
"""What `make test` draws of a matrix of functions, and what `make test-more` does."""
if INTERPRETED or ON_GPU:
    # The lanes of the GPU have no second half.
    NUM_EXAMPLES = (FEW.max_examples,)

TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 1.5e-2}
"""Of the largest number: only a wrong formula differs in float64."""


def bits(x: Tensor) -> Tensor:
    """What lies in memory, NaN included."""
    return x.contiguous().flatten().view(torch.uint8)


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(bits(found), bits(wanted))


def close(
    found: Tensor, wanted: Tensor, computed_in: torch.dtype | None = None, tolerance: float | None = None
) -> None:
    """Within the tolerance of the dtype that was computed in, which is the result's own unless it was rounded to that
    at last, or within another one; NaN is equal to NaN."""
    finite = wanted[wanted.isfinite()].abs()
    largest = max(1.0, finite.max().item() if finite.numel() else 0.0)
    # Rounding to nearest is off by half of a unit in the last place at most.
    last = 0.0 if computed_in is None else torch.finfo(found.dtype).eps / 2
    allowed = largest * (tolerance or TOLERANCES[computed_in or found.dtype])
    torch.testing.assert_close(found.to(wanted.dtype), wanted, rtol=1.01 * last, atol=allowed, equal_nan=True)


def tolerance_of(kernels: Kernels, name: str, dtype: torch.dtype) -> float | None:
    """A function's own, if it has one."""
    return BF16_PRODUCTS.get(kernels, {}).get(name) if dtype == torch.bfloat16 else None


def check_against_reference(kernels: Kernels, call: Call, dtype: torch.dtype) -> None:
    """What the backend returns and what it writes in place is what the reference has in float64; it leaves alone what
    it is not to write, and returns memory of its own."""
    truth, given = call.in_float64(), call.copied()
    before = {name: whole_memory(value).clone() for name, value in given.operands.items() if isinstance(value, Tensor)}
    wanted, found = truth.run(reference), given.run(kernels)
    tolerance = tolerance_of(kernels, call.name, dtype)
    _same_results(call, wanted, found, dtype, tolerance)
    for name, value in given.operands.items():
        if not isinstance(value, Tensor):
            continue
        if name in call.operation.changed:
            # The last slot and the last page are for padding rows: nobody reads them.
            kept = slice(None) if name in call.operation.rows else slice(-1)
            _same(value[kept], truth.operands[name][kept], call.operation.changed[name], dtype, tolerance)
        else:
            assert same_bits(whole_memory(value), before[name]), f"{call.name} has written its operand {name}"
        for result in found:
            assert result.numel() == 0 or result.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def _same_results(
    call: Call, wanted: tuple[Tensor, ...], found: tuple[Tensor, ...], dtype: torch.dtype, tolerance: float | None
) -> None:
    assert len(found) == len(wanted) == len(call.operation.results)
    assert all(result.is_contiguous() for result in found)
    if call.operation.results[:1] == ("chosen",):
        experts = call.operands["logits"].shape[-1]
        assert found[0].dtype == torch.int64
        _same(_by_expert(*found, experts), _by_expert(*wanted, experts), "wide", dtype)
        return
    for one, other, kind in zip(found, wanted, call.operation.results, strict=True):
        _same(one, other, kind, dtype, tolerance)


def _by_expert(topk_ids: Tensor, topk_weights: Tensor, experts: int) -> Tensor:
    """Every expert's topk_weights, -1 where it was not chosen: in which order the chosen ones come is left open."""
    return torch.full((topk_ids.shape[0], experts), -1, dtype=topk_weights.dtype).scatter_(1, topk_ids, topk_weights)


def _same(found: Tensor, wanted: Tensor, kind: Kind, dtype: torch.dtype, tolerance: float | None = None) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    assert found.dtype in ((dtype,) if kind in ("model", "once", "copied") else (wide, *[dtype] * bool(tolerance)))
    if kind == "copied":
        torch.testing.assert_close(found.to(wanted.dtype), wanted, rtol=0, atol=0, equal_nan=True)
    else:
        computed_in = {"product": dtype, "once": torch.promote_types(dtype, torch.float32)}.get(kind)
        close(found, wanted, computed_in, tolerance)
