"""Verifies and folds of drafts, in every backend that has them: bit for bit what decodes one after the other give and
leave."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels import cpu, exact
from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.contract import Kernels
from cairn.kernels.exact import products
from cairn.kernels.exact.metadata import ROW_TILE, TILE
from cairn.kernels.exact.products import multiply_tiles
from kernels.backends import BACKENDS, EXACT, FIRST, INTERPRETED, VERIFIES_DRAFTS, name_of
from kernels.comparison import NUM_EXAMPLES, same_bits
from kernels.drafts import (
    RECURRENT,
    Drafts,
    call_of,
    check_folds,
    check_verifies,
    check_written_pages,
    check_wrong_numbers,
    decode_one_by_one,
    every_acceptance,
)
from kernels.fixed_calls import paged_call
from kernels.kernel_calls import attention_rules
from kernels.random_batches import RandomBatch, SequenceRows
from tiers import more

F32, BF16 = torch.float32, torch.bfloat16

DTYPES = {EXACT: (F32,), **BACKENDS}
if INTERPRETED:
    # Seconds each.
    DTYPES = {backend: (F32,) if backend is EXACT else (BF16,) for backend in DTYPES}
VERIFYING = [backend for backend in VERIFIES_DRAFTS if backend in DTYPES]

every_backend_and_dtype = pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        (kernels, dtype) if FIRST.get(kernels, dtype) == dtype else more(kernels, dtype)
        for kernels in VERIFYING
        for dtype in DTYPES[kernels]
    ],
    ids=name_of,
)
every_size = pytest.mark.parametrize(
    "sizes",
    # Those that end within a tile are seconds enough where kernels are interpreted.
    [(5, 7), more((24, 16)) if INTERPRETED else (24, 16), *map(more, [(64, 128), (6, 33), (33, 6)])],
    ids=str,
)

DECODES = (SequenceRows(3, 77, 1), SequenceRows(7, 0, 1))
VERIFIES = (
    SequenceRows(0, 0, 5),
    SequenceRows(5, 63, 3),
    SequenceRows(4, 1, 1),
    SequenceRows(2, 100, 6),
    SequenceRows(8, 0, 1),
)
PREFILLS = (SequenceRows(1, 0, 70), SequenceRows(6, 61, 3))

ALONE = RandomBatch((), (), 3, verifies=VERIFIES)
MIXED = RandomBatch(DECODES, PREFILLS, 4, verifies=VERIFIES)
LONG = RandomBatch(
    DECODES[:1],
    PREFILLS[:1],
    5,
    verifies=(
        SequenceRows(0, 510, 4),
        SequenceRows(4, 1022, 5),
        SequenceRows(2, 64, 3),
        SequenceRows(8, 0, 2),
        SequenceRows(5, 600, 1),
    ),
)
MANY = RandomBatch(
    DECODES[:1], PREFILLS[:1], 7, verifies=(SequenceRows(0, 1000, 33), SequenceRows(4, 20, 20), SequenceRows(5, 511, 2))
)
"""More tokens of a verify than the CPU has in a tile, before and after a place where keys are cut."""


@every_backend_and_dtype
@every_size
@pytest.mark.parametrize("batch", [ALONE, MIXED], ids=["alone", "mixed"])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_verify_gives_the_bits_of_decodes_and_leaves_the_states(
    kernels: Kernels, dtype: torch.dtype, name: str, batch: RandomBatch, sizes: tuple[int, int]
) -> None:
    check_verifies(kernels, call_of(name, batch, dtype, sizes))


@every_backend_and_dtype
@every_size
@pytest.mark.parametrize("name", RECURRENT)
def test_a_fold_leaves_the_bits_of_decodes(
    kernels: Kernels, dtype: torch.dtype, name: str, sizes: tuple[int, int]
) -> None:
    for drafts in every_acceptance(call_of(name, MIXED, dtype, sizes)):
        check_folds(kernels, drafts, [tuple({1, (count + 1) // 2, count}) for count in drafts.accepted])


@every_backend_and_dtype
@pytest.mark.parametrize("sizes", [(24, 16), more((5, 7)), more((64, 16))], ids=str)
@pytest.mark.parametrize("batch", [MIXED, LONG], ids=["short", "long"])
def test_attention_over_a_verifys_tokens_has_the_bits_of_decodes(
    kernels: Kernels, dtype: torch.dtype, batch: RandomBatch, sizes: tuple[int, int]
) -> None:
    check_verifies(kernels, call_of("attention", batch, dtype, sizes))


@pytest.mark.skipif(cpu not in BACKENDS, reason="is about the CPU's tiles")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 24), (3, 1, 80), more((9, 1, 5)), more((2, 2, 128))], ids=str)
def test_rows_of_a_verify_that_share_keys_have_the_bits_of_decodes(
    dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    for batch, rule in product((LONG, MANY), (FULL, AttentionRule(window=500), AttentionRule(chunk=20, softcap=5.0))):
        call = paged_call("attention", batch, heads, 16, dtype, rule=rule, sinks=rule != FULL)
        check_verifies(cpu, call)
        check_wrong_numbers(cpu, call)


@every_backend_and_dtype
def test_keys_and_values_of_all_tokens_are_written(kernels: Kernels, dtype: torch.dtype) -> None:
    read_only = tuple(
        replace(each, kv_write_from=each.start + place % 4 - 1 if each.start else 0)
        for place, each in enumerate(VERIFIES)
    )
    check_written_pages(kernels, call_of("write_kv", replace(MIXED, verifies=read_only), dtype))


@pytest.mark.skipif(exact not in BACKENDS, reason="is about the CPU's products")
@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_products_of_a_verify_are_those_of_decodes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bits, which are the same with some libraries however many rows there are, and in the tiles that they are made
    in. More tokens than a tile of decode rows has, too."""
    heights = list[tuple[int, int]]()

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, height: int) -> Tensor:
        heights.append((len(x), height))
        return multiply_tiles(x, weight, bias, height)

    many = tuple(SequenceRows(slot, 40, 9) for slot in range(4))
    for batch in (MIXED, RandomBatch(DECODES[1:], PREFILLS[1:], 6, verifies=many)):
        call = call_of("linear", batch, dtype)
        check_verifies(exact, call)
        with monkeypatch.context() as patch:
            patch.setattr(products, "multiply_tiles", multiply)
            call.run(exact)
        num_prefill_tokens = sum(sequence.num_tokens for sequence in batch.prefills)
        assert heights[-2:] == [(batch.num_tokens - num_prefill_tokens, ROW_TILE), (num_prefill_tokens, TILE)]


@every_backend_and_dtype
@pytest.mark.parametrize("name", RECURRENT)
def test_a_verify_its_fold_and_the_next_verify(kernels: Kernels, dtype: torch.dtype, name: str) -> None:
    """As an engine calls them: the states that a fold leaves are those that the next verify begins with."""
    whole = call_of(name, RandomBatch((), (), 8, verifies=(SequenceRows(2, 0, 12),)), dtype)
    wanted, states = decode_one_by_one(kernels, whole, 0), whole.copied()
    begin = 0
    for num_tokens, num_accepted in ((4, 2), (1, 1), (5, 5), (4, 1), (3, 3)):
        verify = SequenceRows(2, begin, num_tokens)
        rows = slice(begin, begin + num_tokens)
        call = states.of_rows(rows, RandomBatch((), (), verifies=(verify,)))
        assert same_bits(call.run(kernels)[0], wanted.results[rows])
        Drafts(call, (num_accepted,)).fold([()]).run(kernels)
        begin += num_accepted
        assert same_bits(states.operands["states"][2], wanted.states[begin - 1])
    assert begin == 12


STARTS = st.one_of(st.sampled_from([0, 1, 63, 64, 65]), st.integers(0, 130))
LONG_STARTS = st.one_of(STARTS, st.sampled_from([509, 511, 512, 513, 1023]))


@st.composite
def drafts(draw: st.DrawFn, starts: st.SearchStrategy[int]) -> RandomBatch:
    """Some verifies, with decodes before them and prefills after them or without."""
    slots = iter(draw(st.permutations(range(9))))
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    return RandomBatch(
        tuple(SequenceRows(next(slots), draw(starts), 1) for _ in range(draw(st.integers(0, 2)))),
        tuple(
            SequenceRows(next(slots), draw(STARTS), draw(st.integers(1, 66))) for _ in range(draw(st.integers(0, 2)))
        ),
        draw(st.integers(0, 2**31)),
        verifies=tuple(SequenceRows(next(slots), draw(starts), length) for length in lengths),
    )


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))


@every_backend_and_dtype
@pytest.mark.parametrize("max_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("name", RECURRENT)
def test_random_drafts(kernels: Kernels, dtype: torch.dtype, name: str, max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None)
    @given(data=st.data(), batch=drafts(STARTS), sizes=SIZES)
    def check(data: st.DataObject, batch: RandomBatch, sizes: tuple[int, int]) -> None:
        call = call_of(name, batch, dtype, sizes)
        check_verifies(kernels, call)
        accepted = tuple(data.draw(st.integers(1, each.num_tokens)) for each in batch.verifies)
        offsets = [tuple(sorted(data.draw(st.sets(st.integers(1, count))))) for count in accepted]
        check_folds(kernels, Drafts(call, accepted), offsets)

    check()


@every_backend_and_dtype
@pytest.mark.parametrize("max_examples", NUM_EXAMPLES)
def test_random_drafts_in_attention(kernels: Kernels, dtype: torch.dtype, max_examples: int) -> None:
    """`cuda` cuts long contexts into parts by how many rows there are."""

    @settings(max_examples=max_examples, deadline=None)
    @given(
        batch=drafts(STARTS if name_of(kernels) == "cuda" else LONG_STARTS),
        dim=st.sampled_from([4, 5, 16, 40]),
        rule=attention_rules(),
        sinks=st.booleans(),
    )
    def check(batch: RandomBatch, dim: int, rule: AttentionRule, sinks: bool) -> None:
        call = paged_call("attention", batch, (4, 2, dim), 16, dtype, rule=rule, sinks=sinks)
        check_verifies(kernels, call)

    check()
