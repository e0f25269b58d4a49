"""A sequence that is computed in several passes gives what it gives in one: through the live states, through a
snapshot that is put into another slot, through the pages; prefill or decode."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels.contract import Kernels
from kernels.backends import every_backend_and_dtype
from kernels.comparison import FEW, NUM_EXAMPLES, TOLERANCES, close, tolerance_of
from kernels.kernel_calls import Call, calls, part_of_sequence
from kernels.random_batches import RandomBatch, SequenceRows

RECURRENT = st.sampled_from(["conv", "ssd", "gdn"])


@st.composite
def cut_sequences(draw: st.DrawFn) -> tuple[int, int]:
    """Where a fresh sequence is cut, and where it ends."""
    cut = draw(st.one_of(st.sampled_from([1, 2, 63, 64, 65, 128]), st.integers(1, 150)))
    return cut, cut + draw(st.one_of(st.just(1), st.integers(1, 100)))


def rest_of(kernels: Kernels, whole: Call, slot: int, cut: int, end: int, decode: bool) -> Tensor:
    """What comes out for positions [cut, end), one token a pass or all in one."""
    if not decode:
        return part_of_sequence(whole, slot, cut, end).run(kernels)[0]
    steps = [part_of_sequence(whole, slot, position, position + 1, decode=True) for position in range(cut, end)]
    return torch.cat([step.run(kernels)[0] for step in steps])


@every_backend_and_dtype
@FEW
@given(data=st.data(), name=RECURRENT, places=cut_sequences(), decode=st.booleans())
def test_states(
    kernels: Kernels, dtype: torch.dtype, name: str, data: st.DataObject, places: tuple[int, int], decode: bool
) -> None:
    cut, end = places
    snapshots = tuple(sorted({cut, end}))
    batch = RandomBatch((), (SequenceRows(2, 0, end, snapshots=snapshots),), data.draw(st.integers(0, 2**31)))
    whole = data.draw(calls(name, dtype, batch))
    wanted, (at_cut, at_end) = whole.run(kernels)
    states = whole.operands["states"]
    near = partial(close, tolerance=tolerance_of(kernels, name, dtype))
    near(states[2], at_end)

    states[5] = torch.nan
    near(part_of_sequence(whole, 5, 0, cut).run(kernels)[0], wanted[:cut])
    near(states[5], at_cut)
    near(rest_of(kernels, whole, 5, cut, end, decode), wanted[cut:])
    near(states[5], at_end)

    states[0] = at_cut
    near(rest_of(kernels, whole, 0, cut, end, decode), wanted[cut:])
    near(states[0], at_end)


@every_backend_and_dtype
@pytest.mark.parametrize("max_examples", NUM_EXAMPLES)
def test_pages(kernels: Kernels, dtype: torch.dtype, max_examples: int) -> None:
    @settings(FEW, max_examples=max_examples)
    @given(data=st.data(), places=cut_sequences(), decode=st.booleans())
    def check(data: st.DataObject, places: tuple[int, int], decode: bool) -> None:
        check_pages(kernels, dtype, data, places, decode)

    check()


def check_pages(
    kernels: Kernels, dtype: torch.dtype, data: st.DataObject, places: tuple[int, int], decode: bool
) -> None:
    cut, end = places
    seed = data.draw(st.integers(0, 2**31))
    whole = data.draw(calls("attention", dtype, RandomBatch((), (SequenceRows(2, 0, end),), seed)))
    (wanted,) = whole.run(kernels)
    keys, values = whole.operands["keys"], whole.operands["values"]
    table, page_size = whole.block_tables[1], keys.shape[2]
    places_of = [(int(table[2, position // page_size]), position % page_size) for position in range(end)]
    k, v = (torch.stack([cache[page, :, offset] for page, offset in places_of]) for cache in (keys, values))
    writing = Call("write_kv", whole.batch, {"k": k, "v": v, "keys": keys, "values": values, "group": 1})
    for cache in (keys, values):
        cache.fill_(torch.nan)

    def run(start: int, stop: int, decode: bool = False) -> Tensor:
        """Keys and values first, as in a layer."""
        queries = part_of_sequence(whole, 2, start, stop, decode)
        part_of_sequence(
            Call(writing.name, writing.batch, writing.operands, whole.block_tables), 2, start, stop, decode
        ).run(kernels)
        return queries.run(kernels)[0]

    close(run(0, cut), wanted[:cut])
    if decode:
        close(torch.cat([run(position, position + 1, decode=True) for position in range(cut, end)]), wanted[cut:])
    else:
        close(run(cut, end), wanted[cut:])
    assert TOLERANCES[dtype] < wanted.abs().max()
