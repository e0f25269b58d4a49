"""How a fast kernel is held to the slow truth: random inputs, and what has to be equal afterwards."""

from collections.abc import Callable, Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels.contract import TILE

SHORT = settings(max_examples=25, deadline=None, derandomize=True)
DTYPES = st.sampled_from([torch.float64, torch.float32])
SEEDS = st.integers(0, 2**31)

Prefill = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""Works on rows and a state in place; the states at the marks."""

Update = Callable[[Tensor, Tensor], None]
"""Works on rows and all slots' states in place."""


def close(found: Tensor, wanted: Tensor) -> None:
    """Within a tolerance of the largest number."""
    tolerance = 1e-10 if wanted.dtype == torch.float64 else 3e-5
    largest = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * max(1.0, largest))


def normal(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def marks_of(data: st.DataObject, rows: int) -> list[int]:
    """Places at which states are to be handed out, the same ones more than once, too."""
    return sorted(data.draw(st.lists(st.integers(1, rows), max_size=6)))


def padding_of(rows: int, front: int, behind: int) -> Tensor:
    """Which rows of whole chunks are nobody's."""
    padding = torch.zeros(rows, dtype=torch.bool)
    padding[:front] = True
    padding[rows - behind :] = behind > 0
    return padding


def same_prefill(slow: Prefill, fast: Prefill, given: tuple[Tensor, Tensor], padding: Tensor, count: int) -> None:
    """Of `given` rows and state. `count`: states that are handed out."""
    x, state = given
    wanted, wanted_state = x.clone(), state.clone()
    kept_wanted, kept = slow(wanted, wanted_state), fast(x, state)
    close(x[~padding], wanted[~padding])
    close(state, wanted_state)
    assert len(kept) == count
    for one, other in zip(kept, kept_wanted, strict=True):
        close(one, other)


def same_update(slow: Update, fast: Update, given: tuple[Tensor, Tensor], untouched: Sequence[int]) -> None:
    """Of `given` rows and states. `untouched`: slots that no row is for."""
    x, states = given
    wanted, wanted_states = x.clone(), states.clone()
    slow(wanted, wanted_states)
    fast(x, states)
    close(x, wanted)
    close(states, wanted_states)
    assert torch.equal(states[untouched], wanted_states[untouched])


def chunks_up_to(mark: int) -> int:
    """Rows of the whole chunks that end at `mark` or behind it."""
    return -(-mark // TILE) * TILE


def routed(seed: int, tokens: int, counts: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of 10 numbers, which experts they go to, and each one's share. `counts`: experts, and how many a row has."""
    experts, chosen = counts
    x, scores, share = normal(seed, (tokens, 10), (tokens, experts), (tokens, chosen), dtype=dtype)
    return x, scores.topk(chosen, dim=-1).indices, share
