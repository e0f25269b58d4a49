"""The CUDA backend's attention at its edges: groups that fill no tile, models' heads, positions around the ends of
tiles and of blocks of keys, decodes of very different lengths in parts. Pages hold NaN behind a sequence's end."""

from importlib import import_module

import pytest
import torch

from cairn.errors import ConfigError
from cairn.kernels.attention_rule import FULL, AttentionRule
from kernels.backends import BACKENDS, name_of
from kernels.comparison import check_against_reference, same_bits
from kernels.fixed_calls import Heads, paged_call
from kernels.random_batches import OUT_OF_RANGE, RandomBatch, SequenceRows

pytest.importorskip("triton")

CUDA = next((kernels for kernels in BACKENDS if name_of(kernels) == "cuda"), None)
if CUDA is None:
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)

from cairn.kernels import cuda_exact  # noqa: E402
from kernels.cuda_configurations import configurations  # noqa: E402

# The package has the function under the module's name.
module = import_module("cairn.kernels.cuda.attention")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
GARBAGE = pytest.mark.parametrize("garbage", [None, -OUT_OF_RANGE, OUT_OF_RANGE], ids=str)

WINDOWS = (
    AttentionRule(window=1),
    AttentionRule(window=33, softcap=5.0),
    AttentionRule(window=200),
    AttentionRule(chunk=10),
    AttentionRule(chunk=128, scale=0.2),
)


def check(batch: RandomBatch, heads: Heads, page_size: int, dtype: torch.dtype, garbage: int | None = None) -> None:
    check_against_reference(CUDA, paged_call("attention", batch, heads, page_size, dtype, garbage), dtype)


def decodes(*lengths: int) -> RandomBatch:
    return RandomBatch(tuple(SequenceRows(slot, length - 1, 1) for slot, length in enumerate(lengths)), ())


def prefills(*rows: tuple[int, int]) -> RandomBatch:
    """Starts and numbers of tokens."""
    return RandomBatch((), tuple(SequenceRows(slot, *each) for slot, each in enumerate(rows)))


@DTYPES
@pytest.mark.parametrize("per_key", range(1, 9))
def test_groups_of_any_size(per_key: int, dtype: torch.dtype) -> None:
    batch = RandomBatch((SequenceRows(0, 20, 1), SequenceRows(1, 0, 1)), (SequenceRows(2, 60, 9),))
    check(batch, (2 * per_key, 2, 16), 16, dtype)


@DTYPES
@pytest.mark.parametrize(
    "heads", [(4, 1, 64), (32, 2, 128), (16, 2, 256), (8, 1, 512), (3, 3, 80), (5, 1, 24), (40, 1, 8)], ids=str
)
def test_models_heads_and_odd_ones(heads: Heads, dtype: torch.dtype) -> None:
    batch = RandomBatch(
        (SequenceRows(0, 40, 1), SequenceRows(1, 0, 1)), (SequenceRows(2, 0, 1), SequenceRows(3, 30, 5))
    )
    check(batch, heads, 16, dtype)


@DTYPES
@pytest.mark.parametrize("page_size", [1, 7, 16, 32, 64, 100, 128])
def test_pages_of_any_size_with_garbage_behind_the_end(page_size: int, dtype: torch.dtype) -> None:
    batch = RandomBatch((SequenceRows(0, 127, 1), SequenceRows(5, 64, 1)), (SequenceRows(2, 126, 3),))
    for garbage in (None, -OUT_OF_RANGE, OUT_OF_RANGE):
        check(batch, (4, 2, 32), page_size, dtype, garbage)


@pytest.mark.parametrize("start", [0, 31, 32, 63, 64, 65])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65])
def test_prompts_around_the_ends_of_tiles_and_chunks(start: int, num_tokens: int) -> None:
    check(prefills((start, num_tokens)), (2, 1, 16), 16, torch.bfloat16)


@DTYPES
@pytest.mark.parametrize("per_key", [4, 16])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_prompts_around_a_tile(over: int, per_key: int, dtype: torch.dtype) -> None:
    constants, _ = module.prefill_tile(dtype, per_key, 1, 16, 16)
    tokens = constants["TOKENS"]
    assert tokens < 64
    check(prefills((0, tokens + over), (tokens + over, tokens)), (per_key, 1, 16), 16, dtype)


def test_several_prompts_share_neither_tiles_nor_chunks() -> None:
    check(prefills((0, 3), (63, 2), (130, 70), (1, 1), (64, 64)), (3, 1, 8), 7, torch.float32)


@DTYPES
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_decodes_around_the_end_of_a_part(over: int, dtype: torch.dtype) -> None:
    part = module.MIN_SPLIT
    assert module.split_length(2, 1, 2 * part + 1) == part
    check(decodes(part + over, 2 * part + over), (3, 1, 16), 16, dtype)


@DTYPES
def test_decodes_of_very_different_lengths(dtype: torch.dtype) -> None:
    """Most programs lie behind their sequence's end; what they do not write may be anything."""
    assert module.split_length(5, 2, 650) == module.MIN_SPLIT
    check(decodes(1, 650, 64, 2, 129), (4, 2, 32), 16, dtype)


@pytest.mark.parametrize("parts", [part + more for part in module._COMBINED for more in (-1, 0, 1)])
def test_more_parts_than_are_combined_at_a_time(parts: int) -> None:
    batch, part = decodes(parts * module.MIN_SPLIT - 5, 3), module.MIN_SPLIT
    assert module.split_length(2, 1, parts * part) == part
    check(batch, (2, 1, 16), 100, torch.float32)


def test_a_fixed_split_gives_the_same_bits_whatever_else_is_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIXED_SPLIT", 128)
    call = paged_call("attention", decodes(100, 300, 129), (4, 2, 32), 16, torch.bfloat16)
    (together,) = call.copied().run(cuda_exact)
    for index in range(3):
        (alone,) = call.of_sequence(index).copied().run(cuda_exact)
        assert same_bits(alone[0], together[index])


@pytest.mark.parametrize("rule", [FULL, *WINDOWS], ids=str)
def test_a_prompts_rows_do_not_depend_on_how_it_was_cut(rule: AttentionRule) -> None:
    whole = paged_call("attention", prefills((0, 150)), (4, 2, 32), 16, torch.bfloat16, rule=rule, sinks=True)
    (wanted,) = whole.copied().run(CUDA)
    for cut in (1, 63, 64, 100):
        part = whole.of_rows(slice(cut, 150), prefills((cut, 150 - cut)))
        (found,) = part.copied().without_reach().run(CUDA)
        assert same_bits(found, wanted[cut:])


@DTYPES
@pytest.mark.parametrize("rule", [*WINDOWS, AttentionRule(softcap=2.0), FULL], ids=str)
@pytest.mark.parametrize("page_size", [7, 64])
def test_rules_with_sinks_at_the_edges_of_tiles_blocks_and_parts(
    rule: AttentionRule, page_size: int, dtype: torch.dtype
) -> None:
    """Pages before the reach are no pages any more, and those that were are full of NaN."""
    batch = RandomBatch(
        (SequenceRows(0, 0, 1), SequenceRows(1, 299, 1), SequenceRows(7, 32, 1)),
        (SequenceRows(2, 75, 40), SequenceRows(3, 0, 35), SequenceRows(4, 200, 1)),
        verifies=(SequenceRows(5, 127, 3), SequenceRows(6, 199, 2)),
    )
    call = paged_call("attention", batch, (6, 2, 16), page_size, dtype, rule=rule, sinks=True)
    check_against_reference(CUDA, call, dtype)


def test_decodes_are_cut_by_their_reach_and_not_by_their_context() -> None:
    short, long = (module._most_keys(length, AttentionRule(window=128)) for length in (1024, 32_768))
    assert short == long == 192
    assert module._most_keys(100, AttentionRule(chunk=128)) == 100 and module._most_keys(32_768, FULL) == 32_768


@pytest.mark.parametrize("rule", [FULL, AttentionRule(window=200)], ids=str)
def test_a_sink_counts_once_in_a_decode_of_several_parts(rule: AttentionRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIXED_SPLIT", 64)
    call = paged_call("attention", decodes(300, 63, 129), (4, 2, 16), 16, torch.float32, rule=rule, sinks=True)
    check_against_reference(cuda_exact, call, torch.float32)


@DTYPES
def test_scores_that_grow_from_block_to_block(dtype: torch.dtype) -> None:
    """What was summed up before is brought down to nearly nothing, in parts of a decode, too."""
    batch = RandomBatch((SequenceRows(0, 299, 1),), (SequenceRows(1, 0, 150),))
    call = paged_call("attention", batch, (2, 1, 16), 16, dtype)
    (table,), keys = call.block_tables, call.operands["keys"]
    for slot, length in ((0, 300), (1, 150)):
        for page in range(-(-length // 16)):
            keys[table[slot, page]] *= 1 + page / 4
    check_against_reference(CUDA, call, dtype)


@DTYPES
@GARBAGE
@pytest.mark.parametrize("heads", [(1, 1, 128), (1, 2, 80), (1, 3, 256)], ids=str)
def test_keys_and_values_are_written_where_they_are_wanted(
    heads: Heads, garbage: int | None, dtype: torch.dtype
) -> None:
    batch = RandomBatch(
        (SequenceRows(0, 20, 1, 21), SequenceRows(1, 0, 1), SequenceRows(5, 63, 1, 63)),
        (SequenceRows(2, 0, 70, 30), SequenceRows(3, 64, 1), SequenceRows(4, 100, 9, 109), SequenceRows(7, 5, 9)),
    )
    for page_size in (1, 7, 16, 64):
        check_against_reference(CUDA, paged_call("write_kv", batch, heads, page_size, dtype, garbage), dtype)


def test_what_attention_does_not_take_is_named() -> None:
    batch = decodes(3)
    call = paged_call("attention", batch, (2, 1, 513), 16, torch.float32)
    with pytest.raises(ConfigError, match="at most 512 numbers, and the model's have 513"):
        call.run(CUDA)
    call = paged_call("attention", batch, (2, 1, 16), 16, torch.float64)
    with pytest.raises(ConfigError, match="in bfloat16 and float32, not in float64"):
        call.run(CUDA)


def test_parts_are_long_where_there_are_many_sequences_and_no_shorter_than_is_worth_a_program() -> None:
    for sequences in (1, 3, 32, 128, 1000):
        for longest in (1, 127, 2000, 32768, 10**6):
            length = module.split_length(sequences, 2, longest)
            assert length % 64 == 0 and length >= module.MIN_SPLIT
            assert length <= module.MAX_SPLIT or -(-longest // length) <= module.MAX_SPLITS
    assert module.split_length(1, 2, 32768) < module.split_length(32, 2, 32768) <= module.MAX_SPLIT
    assert module.split_length(1, 2, 4096, fixed=True) == module.split_length(64, 8, 10**5, fixed=True)


def test_every_compiled_variant_has_all_its_arguments() -> None:
    found = [*configurations("attention"), *configurations("write_kv")]
    assert found
    for kernel, signature, constants, _ in found:
        assert {*signature, *constants} == set(kernel.arg_names)
        assert not set(signature) & set(constants)
