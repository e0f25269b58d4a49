"""Every kernel of the CPU backend against the slow truth, on random shapes, in float64 so that only a wrong formula
can differ, and in float32 for the rounding."""

import inspect
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels import cpu, reference
from cairn.kernels.contract import TILE, Kernels
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


@pytest.mark.parametrize("backend", [cpu, reference])
def test_a_backend_has_the_contracts_functions_with_their_parameters(backend: ModuleType) -> None:
    wanted = {name: value for name, value in vars(Kernels).items() if inspect.isfunction(value) and name[0] != "_"}
    assert set(backend.__all__) == set(wanted)
    for name, function in wanted.items():
        parameters = list(inspect.signature(function).parameters)[1:]
        assert list(inspect.signature(getattr(backend, name)).parameters) == parameters


@SHORT
@given(seed=SEEDS, rows=st.integers(0, 40), width=st.integers(1, 70), dtype=DTYPES)
def test_elementwise(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    (x,) = normal(seed, (rows, width), dtype=dtype)
    for name in ("softplus", "sigmoid"):
        close(getattr(cpu, name)(8 * x), getattr(reference, name)(8 * x))


@SHORT
@given(seed=SEEDS, rows=st.integers(1, 40), width=st.integers(1, 40))
def test_an_elements_bits_do_not_depend_on_how_many_there_are(seed: int, rows: int, width: int) -> None:
    (x,) = normal(seed, (rows, width), dtype=torch.float32)
    for function in (cpu.softplus, cpu.sigmoid):
        whole = function(x)
        for row in range(rows):
            assert torch.equal(function(x[row : row + 1])[0], whole[row])


@SHORT
@given(seed=SEEDS, rows=st.integers(0, 20), groups=st.integers(1, 4), part=st.integers(1, 33), dtype=DTYPES)
def test_norms(seed: int, rows: int, groups: int, part: int, dtype: torch.dtype) -> None:
    width = groups * part
    x, gate, weight = normal(seed, (rows, width), (rows, 2 * width), (width,), dtype=dtype)
    gate = gate[:, :width]  # a view, as in the layer
    close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    before = gate.clone()
    close(cpu.gated_rms_norm(x, gate, weight, groups, 1e-5), reference.gated_rms_norm(x, gate, weight, groups, 1e-5))
    assert torch.equal(gate, before)


@SHORT
@given(seed=SEEDS, tiles=st.lists(st.integers(1, 20), max_size=4), bias=st.booleans(), cut=st.booleans(), dtype=DTYPES)
def test_linear(seed: int, tiles: list[int], bias: bool, cut: bool, dtype: torch.dtype) -> None:
    x, weight, offset = normal(seed, (sum(tiles), 13), (21, 13), (21,), dtype=dtype)
    edges = [sum(tiles[:i]) for i in range(len(tiles) + 1)]
    slices = [slice(a, b) for a, b in pairwise(edges)] if cut else None
    arguments = (x, weight, offset if bias else None, slices)
    close(cpu.linear(*arguments), reference.linear(*arguments))


@SHORT
@given(
    seed=SEEDS,
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    chosen=st.integers(1, 4),
    tile=st.sampled_from([None, 4, 16]),
    dtype=DTYPES,
)
def test_experts(seed: int, tokens: int, experts: int, chosen: int, tile: int | None, dtype: torch.dtype) -> None:
    chosen = min(chosen, experts)
    up = normal(seed + 1, *[(14, 10)] * experts, dtype=dtype)
    down = normal(seed + 2, *[(10, 14)] * experts, dtype=dtype)
    arguments = (*routed(seed, tokens, (experts, chosen), dtype), (up, down), tile)
    close(cpu.experts(*arguments), reference.experts(*arguments))


@SHORT
@given(
    seed=SEEDS,
    tokens=st.integers(1, 200),
    front=st.integers(0, TILE - 1),
    width=st.integers(2, 5),
    bias=st.booleans(),
    data=st.data(),
    dtype=DTYPES,
)
def test_conv_prefill(
    seed: int, tokens: int, front: int, width: int, bias: bool, data: st.DataObject, dtype: torch.dtype
) -> None:
    marks = marks_of(data, tokens)
    wide, weight, offset, state = normal(seed, (tokens, 19), (width, 11), (11,), (width - 1, 11), dtype=dtype)
    x, before = wide[:, 4:15], state.clone()  # a view, as in the layer
    wanted = x.clone()
    kept_wanted = reference.conv_prefill(wanted, weight, offset if bias else None, state, front, marks)
    kept = cpu.conv_prefill(x, weight, offset if bias else None, state, front, marks)
    close(x, wanted)
    assert torch.equal(state, before)
    assert len(kept) == len(marks)
    for one, other in zip(kept, kept_wanted, strict=True):
        assert torch.equal(one, other)


@SHORT
@given(seed=SEEDS, width=st.integers(2, 5), dtype=DTYPES, slots=st.permutations(range(6)), rows=st.integers(1, 6))
def test_conv_update(seed: int, width: int, dtype: torch.dtype, slots: list[int], rows: int) -> None:
    x, weight, bias, states = normal(seed, (rows, 11), (width, 11), (11,), (6, 2, width - 1, 11), dtype=dtype)
    wanted, wanted_states = x.clone(), states.clone()
    chosen = torch.tensor(slots[:rows])
    reference.conv_update(wanted, weight, bias, wanted_states[:, 1], chosen)
    cpu.conv_update(x, weight, bias, states[:, 1], chosen)
    close(x, wanted)
    assert torch.equal(states, wanted_states)


@SHORT
@given(seed=SEEDS, tokens=st.integers(1, 150), width=st.integers(2, 5))
def test_conv_gives_the_same_bits_in_one_go_and_token_by_token(seed: int, tokens: int, width: int) -> None:
    x, weight, bias, states = normal(seed, (tokens, 16), (width, 16), (16,), (1, width - 1, 16), dtype=torch.float32)
    whole = x.clone()
    (end,) = cpu.conv_prefill(whole, weight, bias, states[0], 0, [tokens])
    for token in range(tokens):
        cpu.conv_update(x[token : token + 1], weight, bias, states, torch.tensor([0]))
    assert torch.equal(x, whole)
    assert torch.equal(states[0], end)


def scan_inputs(seed: int, rows: int, groups: int, per_group: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of a scan: time steps and decays from almost none to almost all, everything a view of a wider row."""
    heads = groups * per_group
    wide, b, c, d = normal(seed, (rows, heads * 5 + 3), (rows, groups, 6), (rows, groups, 6), (heads,), dtype=dtype)
    dt, a, state = normal(seed + 1, (rows, heads), (heads,), (heads, 5, 6), dtype=dtype)
    return {
        "x": wide[:, : heads * 5].view(rows, heads, 5),
        "dt": (3 * dt - 2).exp(),
        "b": b,
        "c": c,
        "a": -(2 * a).exp(),
        "d": d,
        "state": state,
    }


@SHORT
@given(
    seed=SEEDS,
    chunks=st.integers(1, 3),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    front=st.integers(0, TILE - 1),
    behind=st.integers(0, TILE - 1),
    data=st.data(),
    dtype=DTYPES,
)
def test_ssd_prefill(
    seed: int,
    chunks: int,
    groups: int,
    per_group: int,
    front: int,
    behind: int,
    data: st.DataObject,
    dtype: torch.dtype,
) -> None:
    rows = chunks * TILE
    i = scan_inputs(seed, rows, groups, per_group, dtype)
    padding, marks = padding_of(rows, front, behind), marks_of(data, rows)
    i["dt"][padding] = 0
    rest = (i["dt"], (i["b"], i["c"]), (i["a"], i["d"]))
    same_prefill(
        lambda x, state: reference.ssd_prefill(x, *rest, state, marks),
        lambda x, state: cpu.ssd_prefill(x, *rest, state, marks),
        (i["x"], i["state"]),
        padding,
        len(marks),
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_ssd_state_at_every_position_is_bitwise_that_of_a_run_which_ends_there(groups: int) -> None:
    rows, marks = 3 * TILE, list(range(1, 3 * TILE + 1))
    i = scan_inputs(4, rows, groups, 2, torch.float32)
    rest = ((i["b"], i["c"]), (i["a"], i["d"]))
    whole, start = i["x"].clone(), i["state"].clone()
    kept = cpu.ssd_prefill(whole, i["dt"], *rest, i["state"], marks)
    for mark, wanted in zip(marks, kept, strict=True):
        end = chunks_up_to(mark)
        x, dt, state = i["x"][:end].clone(), i["dt"][:end].clone(), start.clone()
        x[mark:] = 3.0  # what stands behind the end is padding of another kind
        dt[mark:] = 0
        bc = (i["b"][:end], i["c"][:end])
        cpu.ssd_prefill(x, dt, bc, (i["a"], i["d"]), state, [])
        assert torch.equal(state, wanted), mark
        assert torch.equal(x[:mark], whole[:mark]), mark


@SHORT
@given(
    seed=SEEDS,
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    slots=st.permutations(range(6)),
    rows=st.integers(1, 6),
    dtype=DTYPES,
)
def test_ssd_update(seed: int, groups: int, per_group: int, slots: list[int], rows: int, dtype: torch.dtype) -> None:
    i = scan_inputs(seed, rows, groups, per_group, dtype)
    (states,) = normal(seed + 2, (6, 2, groups * per_group, 5, 6), dtype=dtype)
    rest = (i["dt"], (i["b"], i["c"]), (i["a"], i["d"]))
    same_update(
        lambda x, states: reference.ssd_update(x, *rest, states[:, 1], slots[:rows]),
        lambda x, states: cpu.ssd_update(x, *rest, states[:, 1], slots[:rows]),
        (i["x"], states),
        untouched=slots[rows:],
    )


def cache(seed: int, tokens: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of 40 pages as views of one array, as in a pool of pages of several layers."""
    (pool,) = normal(seed, (40, kv_heads, 2, 2, tokens, 8), dtype=dtype)
    return pool[:, :, 1, 0], pool[:, :, 1, 1]


def poisoned(keys: Tensor, values: Tensor, pages: Tensor, end: int) -> None:
    """Whatever is not one of the first `end` tokens of `pages` reads as NaN."""
    tokens = keys.shape[2]
    for part in (keys, values):
        good = part[pages].clone()
        part.fill_(torch.nan)
        part[pages] = good
        position = torch.arange(len(pages) * tokens).view(len(pages), tokens)
        part[pages] = part[pages].masked_fill((position >= end)[:, None, :, None], torch.nan)


@SHORT
@given(
    seed=SEEDS,
    tokens=st.sampled_from([1, 7, 16, 100]),
    kv_heads=st.integers(1, 3),
    per_kv=st.integers(1, 3),
    first=st.sampled_from([0, 64, 128]),
    more=st.integers(1, 130),
    dtype=DTYPES,
)
def test_attend_prefill(
    seed: int, tokens: int, kv_heads: int, per_kv: int, first: int, more: int, dtype: torch.dtype
) -> None:
    end = min(first + more, 40 * tokens)
    if end <= first:
        return
    keys, values = cache(seed, tokens, kv_heads, dtype)
    rows = -(-(end - first) // TILE) * TILE
    (q,) = normal(seed + 1, (rows, kv_heads * per_kv, 8), dtype=dtype)
    pages = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[: -(-end // tokens)]
    poisoned(keys, values, pages, end)
    found = cpu.attend_prefill(q, keys, values, pages, first, end)
    wanted = reference.attend_prefill(q, keys, values, pages, first, end)
    close(found[: end - first], wanted[: end - first])
    assert found.isfinite().all()


@SHORT
@given(
    seed=SEEDS,
    tokens=st.sampled_from([1, 7, 16, 100]),
    kv_heads=st.integers(1, 3),
    per_kv=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    dtype=DTYPES,
)
def test_attend_decode(
    seed: int, tokens: int, kv_heads: int, per_kv: int, lengths: list[int], dtype: torch.dtype
) -> None:
    lengths = [min(length, 40 * tokens) for length in lengths]
    keys, values = cache(seed, tokens, kv_heads, dtype)
    (q,) = normal(seed + 1, (len(lengths), kv_heads * per_kv, 8), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    # More pages than the length needs: a row's list may reach further.
    pages = [torch.randperm(40, generator=generator)[: -(-length // tokens) + 1] for length in lengths]
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    if len(lengths) == 1:
        poisoned(keys, values, pages[longest], lengths[longest])
    found = cpu.attend_decode(q, keys, values, pages, lengths)
    close(found, reference.attend_decode(q, keys, values, pages, lengths))


@SHORT
@given(seed=SEEDS, tokens=st.sampled_from([1, 7, 16]), count=st.integers(0, 30), dtype=DTYPES)
def test_write_kv(seed: int, tokens: int, count: int, dtype: torch.dtype) -> None:
    keys, values = cache(seed, tokens, 2, dtype)
    other_keys, other_values = keys.clone(), values.clone()
    k, v = normal(seed + 1, (count, 2, 8), (count, 2, 8), dtype=dtype)
    places = torch.randperm(40 * tokens, generator=torch.Generator().manual_seed(seed))[:count]
    pages, offsets = places // tokens, places % tokens
    cpu.write_kv(keys, values, (k, v), pages, offsets)
    reference.write_kv(other_keys, other_values, (k, v), pages, offsets)
    assert torch.equal(keys, other_keys)
    assert torch.equal(values, other_values)
