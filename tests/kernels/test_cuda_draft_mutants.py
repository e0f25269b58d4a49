"""Whether the tests of verifies and folds would find what goes wrong in the CUDA kernels: each mutant has one place of
the source changed, and a fixed batch has to find it, which the source as it is passes."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest

from kernels.backends import BACKENDS
from kernels.test_cuda_mutants import CUDA, build_backend
from kernels.test_draft_mutants import CHECKS, FOLD, VERIFY

__all__ = ["build_backend"]

pytestmark = [
    pytest.mark.skipif(CUDA not in BACKENDS, reason="there is nothing that runs Triton's kernels"),
    # numpy computes for Triton's interpreter, and warns of infinity and NaN.
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]

Build = Callable[[str, Callable[[str], str]], ModuleType]

FUNCTIONS = {
    "conv": "conv",
    "ssd_decode": "ssd",
    "gdn_decode": "gdn",
    "ssd": "ssd",
    "gdn": "gdn",
    "metadata": "attention",
}
"""By module, what is held to decodes."""

SCANS = ("ssd_decode", "gdn_decode")


@dataclass(frozen=True)
class Mutant:
    """A module of the backend with `text` replaced wherever it stands. `found_by`: the checks that must fail."""

    name: str
    module: str
    text: str
    replacement: str
    found_by: tuple[str, ...]


LAST = "other=last - first)"
BEFORE = "(tl.load(cu_seqlens + tl.maximum(sequence, 1)) - tl.load(cu_seqlens + tl.maximum(sequence, 1) - 1))"
FEWER = f"other=tl.minimum({BEFORE}, last - first))"

MUTANTS = (
    *(
        mutant
        for scan in SCANS
        for mutant in (
            Mutant("a verify writes its live state", scan, "sequence < num_in_place", "sequence >= 0", (VERIFY,)),
            Mutant("a fold writes no live state", scan, "host.num_in_place", "host.num_decodes", (FOLD,)),
            Mutant("a fold takes a token of the next sequence", scan, LAST, f"{LAST} + (sequence == 0)", (FOLD,)),
            Mutant("no more tokens than the one before", scan, LAST, FEWER, (VERIFY,)),
            Mutant("a snapshot before its token", scan, LAST, f"{LAST} - (index < end_of_snapshots)", (FOLD,)),
            Mutant("tokens before a snapshot count twice", scan, "begin = end", "begin = 0", (FOLD,)),
            Mutant("all snapshots go to one place", scan, "target += H", "target += 0 * H", (FOLD,)),
            Mutant(
                "the rows of the sequence before",
                scan,
                "first.to(tl.int64) + offset",
                "tl.load(cu_seqlens + tl.maximum(sequence - 1, 0)).to(tl.int64) + offset",
                (VERIFY, FOLD),
            ),
        )
    ),
    *(
        Mutant("a verify is a prefill without chunks", scan, "host.first_prefill", "host.num_decodes", (VERIFY,))
        for scan in ("ssd", "gdn")
    ),
    Mutant("a verify writes its live window", "conv", "started, seq < num_in_place,", "started, seq >= 0,", (VERIFY,)),
    Mutant("a fold writes no live window", "conv", "host.num_in_place", "host.num_decodes", (FOLD,)),
    Mutant(
        "a fold takes a token of the next sequence",
        "conv",
        "seen = tl.load(cu_seqlens + seq + 1) - first_row",
        "seen = tl.load(cu_seqlens + seq + 1) - first_row + (seq == 0)",
        (FOLD,),
    ),
    Mutant(
        "a snapshot before its token",
        "conv",
        "seen = tl.load(snapshot_offsets + snapshot)",
        "seen = tl.load(snapshot_offsets + snapshot) - 1",
        (FOLD,),
    ),
    Mutant("a window that stays behind", "conv", "place = before + tap", "place = tap", (VERIFY, FOLD)),
    Mutant(
        "the rows of the sequence before",
        "conv",
        "row = first_row.to(tl.int64) + before",
        "row = tl.load(cu_seqlens + tl.maximum(seq - 1, 0)).to(tl.int64) + before",
        (VERIFY, FOLD),
    ),
    Mutant("verifies are computed nowhere", "conv", "host.first_prefill", "host.num_decodes", (VERIFY,)),
    Mutant(
        "each token sees the drafts behind it",
        "metadata",
        "host.seq_starts[seqs] + offsets + 1",
        "host.seq_lens[seqs] + 0 * offsets",
        (VERIFY,),
    ),
    Mutant(
        "a token does not see itself",
        "metadata",
        "host.seq_starts[seqs] + offsets + 1",
        "host.seq_starts[seqs] + offsets",
        (VERIFY,),
    ),
    Mutant("pages of the row before", "metadata", "host.slots[seqs],", "np.roll(host.slots[seqs], 1),", (VERIFY,)),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.module}: {mutant.name}")
def test_a_mutant_is_found(mutant: Mutant, build_backend: Build) -> None:
    def changed(source: str) -> str:
        assert mutant.text in source, f"{mutant.module} no longer has {mutant.text!r}"
        return source.replace(mutant.text, mutant.replacement)

    backend = build_backend(mutant.module, changed)
    for check in mutant.found_by:
        with pytest.raises(AssertionError):
            CHECKS[check](backend, FUNCTIONS[mutant.module])


@pytest.mark.parametrize("module", ["conv", *SCANS, "metadata"])
def test_the_source_as_it_is_passes(module: str, build_backend: Build) -> None:
    backend = build_backend(module, lambda source: source)
    CHECKS[VERIFY](backend, FUNCTIONS[module])
    if module != "metadata":
        CHECKS[FOLD](backend, FUNCTIONS[module])
