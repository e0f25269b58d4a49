"""Whether the tests would find what goes wrong in such kernels: each mutant has one place of the source changed, and a
few fixed calls have to find it, which the source as it is passes."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cairn.kernels.attention_rule import AttentionRule
from cairn.kernels.contract import Kernels
from cairn.kernels.operations import OPERATIONS
from kernels.backends import BACKENDS, DEVICES, name_of
from kernels.comparison import check_against_reference
from kernels.file_copies import CASES, ENCODED, LONG, SMALL, FileCopy, check_page_copies
from kernels.fixed_calls import (
    MIXED,
    code_experts_call,
    code_linear_call,
    fp8_experts_call,
    fp8_linear_call,
    paged_call,
    small_call,
)
from kernels.kernel_calls import Call
from kernels.random_batches import RandomBatch, SequenceRows

CUDA = next((backend for backend in BACKENDS if name_of(backend) == "cuda"), ModuleType("none"))

pytestmark = [
    pytest.mark.skipif(CUDA not in BACKENDS, reason="there is nothing that runs Triton's kernels"),
    # numpy computes for Triton's interpreter, and warns of infinity and NaN.
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]

F32 = torch.float32

SEVERAL_SPLITS = RandomBatch((SequenceRows(2, 299, 1), SequenceRows(5, 40, 1), SequenceRows(1, 128, 1)), (), seed=3)
PAGES = RandomBatch(
    (SequenceRows(3, 70, 1),),
    (SequenceRows(6, 0, 70, kv_write_from=9), SequenceRows(2, 61, 40, kv_write_from=64)),
    seed=5,
)

CALLS: Mapping[str, Callable[[], tuple[Call, ...]]] = {
    "ssd": lambda: (small_call("ssd", MIXED),),
    "gdn": lambda: (small_call("gdn", MIXED),),
    "conv": lambda: (small_call("conv", MIXED),),
    "attention": lambda: (
        paged_call("attention", SEVERAL_SPLITS, (4, 2, 16), 16, F32),
        paged_call("attention", PAGES, (4, 2, 16), 64, F32),
    ),
    "attention in a window": lambda: (
        paged_call("attention", SEVERAL_SPLITS, (4, 2, 16), 16, F32, rule=AttentionRule(window=200), sinks=True),
        paged_call("attention", PAGES, (4, 2, 16), 7, F32, rule=AttentionRule(window=20), sinks=True),
    ),
    "attention in chunks": lambda: (
        paged_call("attention", SEVERAL_SPLITS, (4, 2, 16), 16, F32, rule=AttentionRule(chunk=50, softcap=2.0)),
        paged_call("attention", PAGES, (4, 2, 16), 16, F32, rule=AttentionRule(chunk=10, softcap=2.0)),
    ),
    "fp8 of few rows": lambda: (fp8_linear_call(1, (9, 1300), F32, blocked=True, bias=True),),
    "fp8 of a scale a row": lambda: (fp8_linear_call(1, (9, 72), F32, blocked=False, bias=False),),
    "fp8 of many rows": lambda: (fp8_linear_call(5, (40, 200), F32, blocked=True, bias=True),),
    "fp8 experts": lambda: (fp8_experts_call(6, (40, 136), F32, blocked=True, gated=True),),
    "fp8 experts of few tokens": lambda: (fp8_experts_call(1, (40, 136), F32, blocked=True, gated=True),),
    "codes of few rows": lambda: (code_linear_call("zeros", 1, (9, 2112), F32, bias=False),),
    "codes of many rows": lambda: (code_linear_call("activation order", 5, (40, 192), F32, bias=False),),
    "codes of five bits": lambda: (code_linear_call("K-quant, five bits", 5, (40, 256), F32, bias=True),),
    "codes, divided": lambda: (code_linear_call("NVFP4, divided", 5, (40, 128), F32, bias=True),),
    "codes of experts": lambda: (code_experts_call("zeros", 6, (64, 96), F32, gated=True),),
    "codes of experts, few tokens": lambda: (code_experts_call("zeros", 1, (64, 96), F32, gated=True),),
    "write_kv": lambda: (paged_call("write_kv", PAGES, (4, 2, 16), 16, F32),),
}
"""What a function is held to."""

ZEROS = ("codes of few rows", "codes of many rows", "codes of experts", "codes of experts, few tokens")
OF_CODES = (*ZEROS, "codes of five bits")
FIVE_BITS = ("codes of five bits",)


def check_encoded(case: str, name: str, kernels: Kernels) -> None:
    FileCopy(*ENCODED[case], (3, 0, 2)).check(kernels, name)


COPIES: Mapping[str, Callable[[Kernels], object]] = {
    "store_states": lambda kernels: FileCopy(SMALL, 256, (3, 0, 2)).check(kernels, "store_states"),
    "load_states": lambda kernels: FileCopy(SMALL, 256, (3, 0, 2)).check(kernels, "load_states"),
    "states longer than a tile's row": lambda kernels: FileCopy(*CASES[LONG], (3, 0, 2)).check(kernels, "load_states"),
    **{
        f"{name} in {encoding}": partial(check_encoded, f"two heads a unit, {encoding}", name)
        for encoding in ("float16", "int8")
        for name in ("store_states", "load_states")
    },
    "copy_pages": lambda kernels: [check_page_copies(kernels, size, ((0, 4), (6, 4), (2, 5))) for size in (256, 8448)],
}
"""The same of those that move bytes."""


@dataclass(frozen=True)
class Mutant:
    """A module of the backend with `text` replaced wherever it stands. `found_by`: functions whose calls must fail."""

    name: str
    module: str
    text: str
    replacement: str
    found_by: tuple[str, ...]


FILES, MOVES = "checkpoint_files", ("store_states", "load_states")
ENCODED_STORES = ("store_states in float16", "store_states in int8")

MUTANTS = (
    *(
        Mutant(
            "a snapshot is of the token before",
            scan,
            "position = start % 64 + tl.load(snapshot_offsets + snapshot)",
            "position = start % 64 + tl.load(snapshot_offsets + snapshot) - 1",
            (scan,),
        )
        for scan in ("ssd", "gdn")
    ),
    *(
        Mutant(
            "a snapshot at a chunk's end is of the chunk before",
            "scalars",
            "(start % 64 + here) // 64, num_chunks",
            "(start % 64 + here - 1) // 64, num_chunks",
            (scan,),
        )
        for scan in ("ssd", "gdn")
    ),
    *(
        Mutant(
            "every snapshot's loop begins at chunk 0",
            "scalars",
            "return (start % 64 + before) // 64, stop",
            "return 0, stop",
            (scan,),
        )
        for scan in ("ssd", "gdn")
    ),
    *(
        Mutant(
            "the state of the neighbour's slot",
            scan,
            "tl.load(slots + sequence)",
            "(tl.load(slots + sequence) + 1)",
            (scan,),
        )
        for scan in ("ssd", "gdn")
    ),
    Mutant("a fresh sequence begins with its slot's old state", "gdn", "mask & (start > 0)", "mask", ("gdn",)),
    Mutant(
        "a fresh sequence begins with its slot's old state",
        "ssd",
        "tl.trans(mask) & (start > 0)",
        "tl.trans(mask)",
        ("ssd",),
    ),
    *(
        Mutant(
            "a chunk's decay counts twice", scan, "tl.exp(final), PRECISION)", "tl.exp(2 * final), PRECISION)", (scan,)
        )
        for scan in ("ssd", "gdn")
    ),
    Mutant(
        "a decode's decay counts twice",
        "gdn_decode",
        "state = state * decay",
        "state = state * decay * decay",
        ("gdn",),
    ),
    Mutant(
        "a decode's decay counts twice",
        "ssd_decode",
        "state * tl.exp(step * tl.load(a + head))",
        "state * tl.exp(2 * step * tl.load(a + head))",
        ("ssd",),
    ),
    Mutant(
        "rows of the sequence before are in the first chunk",
        "ssd",
        "valid = (rows >= first) & (rows < end)",
        "valid = rows < end",
        ("ssd",),
    ),
    Mutant(
        "rows of the sequence before are in the first chunk",
        "gdn",
        "valid = (rows >= first) & (rows < end)",
        "valid = rows < end",
        ("gdn",),
    ),
    Mutant(
        "later tokens of the chunk are seen",
        "ssd",
        "tl.where(token[:, None] >= token[None, :], scores, 0.0)",
        "scores",
        ("ssd",),
    ),
    Mutant(
        "the token itself is not seen",
        "gdn",
        "sees = (token[:, None] >= token[None, :])",
        "sees = (token[:, None] > token[None, :])",
        ("gdn",),
    ),
    Mutant(
        "chunks lie on the batch's grid, not on their sequence's",
        "metadata",
        "host.cu_seqlens[chunk_seqs] - host.seq_starts[chunk_seqs] % CHUNK + within * CHUNK",
        "host.cu_seqlens[chunk_seqs] // CHUNK * CHUNK + within * CHUNK",
        ("ssd", "gdn"),
    ),
    Mutant(
        "snapshots are the next sequence's",
        "metadata",
        "np.searchsorted(host.snapshot_seqs, np.arange(host.num_seqs + 1))",
        'np.searchsorted(host.snapshot_seqs, np.arange(host.num_seqs + 1), side="right")',
        ("ssd", "gdn", "conv"),
    ),
    Mutant("a later key is seen", "attention", "positions[None, :] < seen[:, None]", "positions[None, :] < end", ()),
    Mutant(
        "keys behind the sequence's end are read", "attention", "there = positions < end", "there = positions >= 0", ()
    ),
    Mutant(
        "the last part of a decode is dropped",
        "attention",
        "count = tl.cdiv(length, _part_length(length, split_length, num_splits, LEAST))",
        "count = tl.maximum(1, length // _part_length(length, split_length, num_splits, LEAST))",
        (),
    ),
    Mutant(
        "parts of a decode weigh the same",
        "attention",
        "tl.store(part_weights + rows, largest + tl.log2(weight), mask=members < GROUP)",
        "tl.store(part_weights + rows, largest * 0, mask=members < GROUP)",
        (),
    ),
    Mutant(
        "a window sees a token more",
        "attention",
        "tl.maximum(position - (WINDOW - 1), 0)",
        "tl.maximum(position - WINDOW, 0)",
        ("attention in a window",),
    ),
    Mutant(
        "a chunk begins at the next one",
        "attention",
        "tl.maximum(position, 0) // CHUNK * CHUNK",
        "tl.maximum(position + 1, 0) // CHUNK * CHUNK",
        ("attention in chunks",),
    ),
    Mutant(
        "what a row no longer sees counts",
        "attention",
        "positions[None, :] >= unseen[:, None]",
        "positions[None, :] >= lowest",
        ("attention in a window", "attention in chunks"),
    ),
    Mutant(
        "tokens of pages before the reach are read",
        "attention",
        "there = there & (positions >= lowest)\n    k =",
        "there = there & (positions >= lowest - BLOCK)\n    k =",
        ("attention in a window",),
    ),
    Mutant(
        "a sink is in every part",
        "attention",
        "(members < GROUP) & (split == 0)",
        "(members < GROUP)",
        ("attention in a window",),
    ),
    Mutant(
        "a sink of the neighbour",
        "attention",
        "tl.load(sinks + heads,",
        "tl.load(sinks + (heads ^ 1),",
        ("attention in a window",),
    ),
    Mutant(
        "the softcap is put on what is masked",
        "attention",
        "scores = SOFTCAP * tanh(scores * SCALE)\n",
        "scores = tl.where(positions[None, :] < seen[:, None], scores, float('-inf'))\n"
        "        scores = SOFTCAP * tanh(scores * SCALE)\n        seen = seen + 1000\n",
        ("attention in chunks",),
    ),
    Mutant(
        "a window reaches into the sequence before",
        "conv",
        "old = (started & (before + tap < W - 1))[:, None] & inside[None, :]",
        "old = (started & (before + tap < W))[:, None] & inside[None, :]",
        ("conv",),
    ),
    Mutant(
        "the window ends a token early",
        "conv",
        "token = seen - (W - 1) + tap",
        "token = seen - W + tap",
        ("conv",),
    ),
    Mutant(
        "the first block's scale is every block's",
        "fp8",
        "scales + k // _BLOCK, mask",
        "scales, mask",
        ("fp8 of many rows", "fp8 experts"),
    ),
    Mutant(
        "the first block's scale is every block's",
        "fp8",
        "+ tl.arange(0, BLOCKS)",
        "+ 0 * tl.arange(0, BLOCKS)",
        ("fp8 of few rows", "fp8 experts of few tokens"),
    ),
    Mutant(
        "blocks begin anew in each tile",
        "fp8",
        "block = k // _BLOCK + tl",
        "block = tl",
        ("fp8 of few rows",),
    ),
    Mutant(
        "a row's scale is left out",
        "fp8",
        "return sums * tl.load(scales, mask=mask, other=0)",
        "return sums",
        ("fp8 of a scale a row",),
    ),
    Mutant(
        "the bias is left out",
        "fp8",
        "mask=column < num_biases",
        "mask=column < 0",
        ("fp8 of few rows", "fp8 of many rows"),
    ),
    Mutant(
        "an expert's scales are the first one's",
        "experts",
        "weight_row = expert.to(tl.int64) * width + column",
        "weight_row = column.to(tl.int64)",
        ("fp8 experts", "codes of experts"),
    ),
    Mutant(
        "an expert's scales are the first one's",
        "expert_gemv",
        "weight_rows = (experts * width)[None, :] + column",
        "weight_rows = (experts * 0)[None, :] + column",
        ("fp8 experts of few tokens", "codes of experts, few tokens"),
    ),
    Mutant(
        "up has gate's scales",
        "expert_form",
        "return first, first + inner_width",
        "return first, first",
        ("fp8 experts", "fp8 experts of few tokens", "codes of experts", "codes of experts, few tokens"),
    ),
    Mutant("a group has its neighbour's scale", "codes", "scales + places", "scales + (places ^ 1)", OF_CODES),
    Mutant(
        "two codes of a byte change places", "codes", "(pairs & 15, pairs >> 4)", "(pairs >> 4, pairs & 15)", OF_CODES
    ),
    Mutant("a group has its neighbour's zero point", "codes", "zeros + places", "zeros + (places ^ 1)", ZEROS),
    Mutant("there are no zero points", "codes", "+ 8388608.0\n", "* 0 + 8388608.0\n", ZEROS),
    Mutant("groups begin anew in each tile", "codes", "(k // GROUP if GROUP > 0 else 0) +", "", OF_CODES[:2]),
    Mutant("codes begin anew in each tile", "codes", "byte = k // 2 +", "byte =", OF_CODES[:2]),
    Mutant("fifth bits begin anew in each tile", "codes", "byte = k // 8 +", "byte =", FIVE_BITS),
    Mutant(
        "fifth bits are those of the next code", "codes", ">> tl.arange(0, 8)", ">> (tl.arange(0, 8) ^ 1)", FIVE_BITS
    ),
    Mutant("all groups have the first one's factor", "codes", "(group // SHARED if", "(group * 0 if", FIVE_BITS),
    Mutant(
        "minimums have no factors",
        "codes",
        "least * tl.load(minimum_factors",
        "least * 1 + 0 * tl.load(factors",
        FIVE_BITS,
    ),
    Mutant("minimums have scales' factors", "codes", "tl.load(minimum_factors", "tl.load(factors", FIVE_BITS),
    Mutant(
        "a factor multiplies that divides",
        "codes",
        "tl.div_rn(sizes, tl.load(factors + factor_places, mask=known, other=1.0))",
        "sizes * tl.load(factors + factor_places, mask=known, other=1.0)",
        ("codes, divided",),
    ),
    Mutant("FP4 has no sign", "codes", "(codes & 8) << 28 |", "0 * codes |", ("codes, divided",)),
    Mutant(
        "FP4's exponent is one too high",
        "codes",
        "tl.constexpr(2.0**126)",
        "tl.constexpr(2.0**127)",
        ("codes, divided",),
    ),
    Mutant(
        "inputs are not put in order", "fp8", "x = x.index_select(1, weight.order)", "pass", ("codes of many rows",)
    ),
    Mutant("the state of the neighbour's slot", FILES, "tl.load(entries + file)", "tl.load(entries + file) + 1", MOVES),
    Mutant("all files are the first one", FILES, "file.to(tl.int64) * file_pages + ", "", MOVES),
    Mutant("all of a file is in its first page", FILES, "yield page, in_page", "yield 0, in_page", MOVES),
    Mutant("spans begin where their page does", FILES, "yield page, in_page + done", "yield page, done", MOVES),
    Mutant("a word behind a span goes with it", FILES, "[None, :] < length[", "[None, :] <= length[", MOVES),
    Mutant("a span's last word stays behind", FILES, "[None, :] < length[", "[None, :] + 1 < length[", MOVES),
    Mutant("a tensor's last tile is dropped", FILES, "[tensor] * num_tiles", "[tensor] * (num_tiles - 1)", MOVES),
    Mutant(
        "each row of a tile has a span's first bytes",
        FILES,
        "in_entry + done, min",
        "in_entry, min",
        ("states longer than a tile's row",),
    ),
    Mutant(
        "all of a file's states are in its first page",
        FILES,
        "tl.load(file_pages + offset // page_bytes",
        "tl.load(file_pages + 0 * offset",
        (*ENCODED_STORES, "load_states in float16", "load_states in int8"),
    ),
    Mutant("a scale is twice as large", FILES, "254) - _HALF_TOP", "254) - _HALF_TOP + 1", ENCODED_STORES[:1]),
    Mutant("what would be infinity is", FILES, "tl.maximum(scaled, -_MOST_HALF)", "2 * scaled", ENCODED_STORES[:1]),
    Mutant("numbers of fewer bits are scaled", FILES, "(most < _LEAST_BITS) | broken", "broken", ENCODED_STORES),
    Mutant("a tie goes up", FILES, "(scaled + _INT8_ROUNDING)", "(scaled + 0.25 + _INT8_ROUNDING)", ENCODED_STORES[1:]),
    Mutant("a scale has all its bits", FILES, "scale & -(2 * _ROW_ROUNDING)", "scale", ENCODED_STORES[1:]),
    Mutant("a scale's second half is its first", FILES, "<< (16 * half[None, :])", "<< 0", ("load_states in int8",)),
    Mutant(
        "the last pages are not copied",
        FILES,
        'triton.cdiv(len(targets), tile["ROWS"])',
        'len(targets) // tile["ROWS"]',
        ("copy_pages",),
    ),
    Mutant(
        "the end of a page comes from its beginning",
        FILES,
        "column = tl.program_id(1) * COLUMNS",
        "column = 0",
        ("copy_pages",),
    ),
    Mutant(
        "pages come from the first one",
        FILES,
        "origin = tl.load(sources + copy, mask=there, other=0) * page_words",
        "origin = copy * 0",
        ("copy_pages",),
    ),
    Mutant(
        "keys before kv_write_from are written",
        "write_kv",
        "is_written = there & (positions >= tl.load(kv_write_from + seqs))",
        "is_written = there",
        ("write_kv",),
    ),
)


SHARED = {
    "scalars": ("ssd", "gdn"),
    "codes": ("fp8", "products", "expert_gemv", "experts"),
    "fp8": ("products", "expert_gemv", "experts"),
    "expert_form": ("expert_gemv", "experts"),
    "expert_gemv": ("experts",),
    "ssd_decode": ("ssd",),
    "gdn_decode": ("gdn",),
}
"""Modules that others take parts of kernels from, in an order in which they can be loaded."""


def source_of(name: str) -> str:
    return Path(str(sys.modules[f"cairn.kernels.cuda.{name}"].__file__)).read_text()


def load(folder: Path, name: str, source: str) -> ModuleType:
    """Triton reads kernels' sources from files."""
    path = folder / f"changed_{name}.py"
    path.write_text(source)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def backend_with(folder: Path, name: str, change: Callable[[str], str]) -> ModuleType:
    """The CUDA backend with one module's source changed."""
    changed = [load(folder, name, change(source_of(name)))]
    if name == "metadata":
        # The other modules ask for theirs.
        changed[0].__dict__["CudaMetadata"] = sys.modules["cairn.kernels.cuda.metadata"].__dict__["CudaMetadata"]
    if name in SHARED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, f"cairn.kernels.cuda.{name}", changed[0])
            changed = []
            for user in SHARED[name]:
                changed.append(load(folder, user, source_of(user)))
                patch.setitem(sys.modules, f"cairn.kernels.cuda.{user}", changed[-1])
    backend = ModuleType("changed")
    backend.__dict__.update({each: getattr(CUDA, each) for each in OPERATIONS})
    for module in changed:
        backend.__dict__.update({each: value for each, value in vars(module).items() if each in OPERATIONS})
    return backend


@pytest.fixture
def build_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[str], str]], ModuleType]:
    def build(name: str, change: Callable[[str], str]) -> ModuleType:
        backend = backend_with(tmp_path, name, change)
        monkeypatch.setitem(DEVICES, backend, DEVICES[CUDA])
        return backend

    return build


def check_function(backend: ModuleType, function: str) -> None:
    if function in COPIES:
        COPIES[function](backend)
        return
    for call in CALLS[function]():
        check_against_reference(backend, call, F32)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.module}: {mutant.name}, {mutant.found_by}")
def test_a_mutant_is_found(mutant: Mutant, build_backend: Callable[[str, Callable[[str], str]], ModuleType]) -> None:
    def changed(source: str) -> str:
        assert mutant.text in source, f"{mutant.module} no longer has {mutant.text!r}"
        return source.replace(mutant.text, mutant.replacement)

    backend = build_backend(mutant.module, changed)
    for function in mutant.found_by or (mutant.module,):
        with pytest.raises(AssertionError, match="Tensor-likes are not"):
            check_function(backend, function)


OWN_CALLS = {
    FILES: tuple(COPIES),
    "metadata": ("ssd", "gdn", "conv", "attention", "write_kv"),
    "attention": tuple(call for call in CALLS if call.startswith("attention")),
    **{name: tuple(call for call in CALLS if call.startswith("fp8")) for name in ("fp8", "experts", "expert_gemv")},
    "codes": tuple(call for call in CALLS if call.startswith("codes")),
}
"""Of modules that are not held to the call of their name."""

MODULES = ("ssd", "gdn", "conv", "write_kv")
"""Those that are."""


@pytest.mark.parametrize("name", [*MODULES, *OWN_CALLS])
def test_the_source_as_it_is_passes(
    name: str, build_backend: Callable[[str, Callable[[str], str]], ModuleType]
) -> None:
    backend = build_backend(name, lambda source: source)
    for function in OWN_CALLS.get(name, (name,)):
        check_function(backend, function)
