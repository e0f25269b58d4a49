"""The gated delta rule and gated experts against the slow truth, and their bits against themselves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels import cpu, reference
from cairn.kernels.contract import TILE
from kernels.comparison import (
    DTYPES,
    SEEDS,
    SHORT,
    chunks_up_to,
    close,
    marks_of,
    normal,
    padding_of,
    routed,
    same_prefill,
    same_update,
)


def inputs(seed: int, rows: int, heads: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """heads: q/k heads, and value heads to each. Decays from almost none to almost all, everything a view."""
    key_heads, per_key = heads
    value_heads = key_heads * per_key
    widths = [key_heads * 6, key_heads * 6, value_heads * 5, 3]
    wide, gates, state = normal(seed, (rows, sum(widths)), (rows, 2 * value_heads), (value_heads, 6, 5), dtype=dtype)
    q, k, v, _ = torch.split(wide, widths, dim=-1)
    g, beta = gates.chunk(2, dim=-1)
    return {
        "q": q.view(rows, key_heads, 6),
        "k": k.view(rows, key_heads, 6),
        "v": v.view(rows, value_heads, 5),
        "g": -(3 * g - 2).exp(),
        "beta": beta.sigmoid(),
        "state": state,
    }


def gates_of(i: dict[str, Tensor], end: int | None = None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (i["q"][:end], i["k"][:end]), (i["g"][:end], i["beta"][:end])


HEADS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@SHORT
@given(
    seed=SEEDS,
    chunks=st.integers(1, 3),
    heads=HEADS,
    front=st.integers(0, TILE - 1),
    behind=st.integers(0, TILE - 1),
    data=st.data(),
    dtype=DTYPES,
)
def test_gdn_prefill(
    seed: int, chunks: int, heads: tuple[int, int], front: int, behind: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    rows = chunks * TILE
    i = inputs(seed, rows, heads, dtype)
    padding, marks = padding_of(rows, front, behind), marks_of(data, rows)
    i["g"][padding], i["beta"][padding] = 0, 0
    same_prefill(
        lambda v, state: reference.gdn_prefill(v, *gates_of(i), state, marks),
        lambda v, state: cpu.gdn_prefill(v, *gates_of(i), state, marks),
        (i["v"], i["state"]),
        padding,
        len(marks),
    )


@pytest.mark.parametrize("heads", [(1, 2), (2, 1), (2, 3)])
def test_gdn_state_at_every_position_is_bitwise_that_of_a_run_which_ends_there(heads: tuple[int, int]) -> None:
    rows, marks = 3 * TILE, list(range(1, 3 * TILE + 1))
    i = inputs(4, rows, heads, torch.float32)
    whole, state = i["v"].clone(), i["state"].clone()
    kept = cpu.gdn_prefill(whole, *gates_of(i), state, marks)
    for mark, wanted in zip(marks, kept, strict=True):
        end = chunks_up_to(mark)
        short = {name: part.clone() for name, part in i.items()}
        for name, other in (("v", 3.0), ("q", -1.0), ("k", 2.0), ("g", 0.0), ("beta", 0.0)):
            short[name][mark:] = other  # what stands behind the end is padding of another kind
        v = short["v"][:end]
        cpu.gdn_prefill(v, *gates_of(short, end), short["state"], [])
        assert torch.equal(short["state"], wanted), mark
        assert torch.equal(v[:mark], whole[:mark]), mark


def test_gdn_prefill_goes_on_bitwise_from_a_chunks_end() -> None:
    i = inputs(5, 3 * TILE, (2, 2), torch.float32)
    whole = i["v"].clone()
    (middle,) = cpu.gdn_prefill(whole, *gates_of(i), i["state"].clone(), [TILE])
    (q, k), (g, beta) = ((a[TILE:], b[TILE:]) for a, b in gates_of(i))
    rest = i["v"][TILE:].clone()
    cpu.gdn_prefill(rest, (q, k), (g, beta), middle, [])
    assert torch.equal(rest, whole[TILE:])


@SHORT
@given(seed=SEEDS, heads=HEADS, slots=st.permutations(range(6)), rows=st.integers(1, 6), dtype=DTYPES)
def test_gdn_update(seed: int, heads: tuple[int, int], slots: list[int], rows: int, dtype: torch.dtype) -> None:
    i = inputs(seed, rows, heads, dtype)
    (states,) = normal(seed + 2, (6, 2, heads[0] * heads[1], 6, 5), dtype=dtype)
    same_update(
        lambda v, states: reference.gdn_update(v, *gates_of(i), states[:, 1], slots[:rows]),
        lambda v, states: cpu.gdn_update(v, *gates_of(i), states[:, 1], slots[:rows]),
        (i["v"], states),
        untouched=slots[rows:],
    )


def test_gdn_update_gives_a_row_the_same_bits_in_any_batch_and_slot() -> None:
    i = inputs(6, 7, (2, 2), torch.float32)
    states = i["state"].expand(9, 4, 6, 5).clone()
    together = i["v"].clone()
    cpu.gdn_update(together, *gates_of(i), states, [8, 2, 3, 0, 5, 6, 7])
    for row, slot in enumerate([8, 2, 3, 0, 5, 6, 7]):
        alone, state = i["v"][row : row + 1].clone(), i["state"][None].clone()
        (q, k), (g, beta) = ((a[row : row + 1], b[row : row + 1]) for a, b in gates_of(i))
        cpu.gdn_update(alone, (q, k), (g, beta), state, [0])
        assert torch.equal(alone[0], together[row])
        assert torch.equal(state[0], states[slot])


@SHORT
@given(
    seed=SEEDS,
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    chosen=st.integers(1, 4),
    tile=st.sampled_from([None, 4, 16]),
    dtype=DTYPES,
)
def test_gated_experts(seed: int, tokens: int, experts: int, chosen: int, tile: int | None, dtype: torch.dtype) -> None:
    chosen = min(chosen, experts)
    gate_up = normal(seed + 1, *[(14, 10)] * experts, dtype=dtype)
    down = normal(seed + 2, *[(10, 7)] * experts, dtype=dtype)
    arguments = (*routed(seed, tokens, (experts, chosen), dtype), (gate_up, down), tile)
    close(cpu.gated_experts(*arguments), reference.gated_experts(*arguments))


def test_a_tokens_experts_give_the_same_bits_in_any_batch() -> None:
    x, choice, share = routed(1, 50, (6, 3), torch.float32)
    weights = normal(2, *[(16, 10)] * 6, dtype=torch.float32), normal(3, *[(10, 8)] * 6, dtype=torch.float32)
    together = cpu.gated_experts(x, choice, share, weights, 16)
    for row in range(50):
        one = slice(row, row + 1)
        assert torch.equal(cpu.gated_experts(x[one], choice[one], share[one], weights, 16)[0], together[row])
