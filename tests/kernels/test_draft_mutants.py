"""Whether the tests of verifies and folds, and of attention's rules, would find what goes wrong there: each mutant has
one place of the source changed, and the checks that the source as it is passes have to find it."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest
import torch

from cairn.kernels import cpu, exact, reference
from cairn.kernels.attention_rule import AttentionRule
from cairn.kernels.contract import Kernels
from cairn.kernels.cpu import compiled
from cairn.kernels.operations import OPERATIONS
from kernels.backends import BACKENDS, name_of
from kernels.comparison import check_against_reference
from kernels.drafts import call_of, check_folds, check_verifies, check_wrong_numbers, every_acceptance
from kernels.fixed_calls import paged_call
from kernels.test_verify_and_fold import LONG, MIXED
from tiers import more

pytestmark = pytest.mark.skipif(cpu not in BACKENDS, reason="is about the CPU's kernels")

F32 = torch.float32


def check_verify(kernels: Kernels, name: str) -> None:
    check_verifies(kernels, call_of(name, LONG if name == "attention" else MIXED, F32))


def check_fold(kernels: Kernels, name: str) -> None:
    for drafts in every_acceptance(call_of(name, MIXED, F32)):
        check_folds(kernels, drafts, [tuple({1, (count + 1) // 2, count}) for count in drafts.accepted])


def check_wrong(kernels: Kernels, name: str) -> None:
    check_wrong_numbers(kernels, call_of(name, LONG, F32))


RULES = (AttentionRule(window=40), AttentionRule(chunk=50, softcap=2.0), AttentionRule(window=512, scale=0.2))


def check_rules(kernels: Kernels, name: str) -> None:
    """Of attention with sinks, whose pages before the reach are no pages any more."""
    for rule in RULES:
        check_against_reference(kernels, paged_call(name, LONG, (4, 2, 16), 7, F32, rule=rule, sinks=True), F32)


VERIFY, FOLD, WRONG, RULE = "verify", "fold", "wrong numbers", "rules"
CHECKS: Mapping[str, Callable[[Kernels, str], None]] = MappingProxyType(
    {VERIFY: check_verify, FOLD: check_fold, WRONG: check_wrong, RULE: check_rules}
)


@dataclass(frozen=True)
class Mutant:
    """A module of a backend with `text` replaced wherever it stands. `found_by`: the checks that must fail, of each of
    the functions."""

    name: str
    backend: ModuleType
    module: str
    text: str
    replacement: str
    found_by: tuple[str, ...]
    functions: tuple[str, ...]


SCANS = ("ssd", "gdn")
ALL = ("conv", *SCANS)

QUICK = (
    Mutant(
        "a verify writes the live state",
        reference, "recurrences", "if self.in_place:", "if True:", (VERIFY,), ALL,
    ),
    Mutant(
        "a fold writes no state",
        reference, "recurrences", "in_place=i < host.num_in_place", "in_place=i < host.num_decodes", (FOLD,), ALL,
    ),
    Mutant(
        "a verify writes the live state",
        exact, "metadata", "if decode.in_place and state is not live", "if state is not live", (VERIFY,), SCANS,
    ),
    Mutant(
        "a verify is computed in the live state",
        exact, "metadata", "= decode.in_place and live.data_ptr()", "= live.data_ptr()", (VERIFY,), SCANS,
    ),
    Mutant(
        "a verify writes the live window",
        exact, "conv", "for decode in decodes if decode.in_place]", "for decode in decodes]", (VERIFY,), ("conv",),
    ),
    Mutant(
        "a fold of the first sequence takes a token of the second one",
        exact, "metadata",
        "return range(self.first_row, self.first_row + self.length)",
        "return range(self.first_row, self.first_row + self.length + (self.first_row == 0 < self.length - 1))",
        (FOLD,), SCANS,
    ),
    Mutant(
        "how many tokens the sequence before has",
        exact, "metadata",
        "            ends[i] - starts[i],",
        "            min(ends[i - 1] - starts[i - 1], host.num_tokens - edges[i]),",
        (FOLD,), ALL,
    ),
    Mutant(
        "a snapshot before its token",
        exact, "metadata",
        "yield number, self.first_row + offset - 1",
        "yield number, self.first_row + max(offset - 2, 0)",
        (FOLD,), ALL,
    ),
    Mutant(
        "a window one token late",
        exact, "conv",
        "inputs[tap : tap + decode.length]",
        "inputs[max(tap - 1, 0) : max(tap - 1, 0) + decode.length]",
        (VERIFY, FOLD), ("conv",),
    ),
    Mutant(
        "each token sees the drafts behind it",
        exact, "attention",
        "enumerate(decode.rows, start=decode.start + 1)",
        "enumerate(decode.rows, start=decode.start + decode.length)",
        (VERIFY,), ("attention",),
    ),
    Mutant(
        "a decode's window one token too long",
        exact, "attention", "mask[:, : first - begin] =", "mask[:, : max(first - begin - 1, 0)] =",
        (RULE,), ("attention",),
    ),
    Mutant(
        "a prefill's window one token too long",
        exact, "attention", "(positions < first_keys)", "(positions < first_keys - 1)", (RULE,), ("attention",),
    ),
    Mutant(
        "a sink of the neighbour",
        exact, "attention", "logits = sinks.to", "logits = sinks.roll(1).to", (RULE,), ("attention",),
    ),
    Mutant(
        "the softcap is put on masked scores",
        exact, "attention", "torch.tanh(scores / rule.softcap)", "torch.tanh((scores + mask) / rule.softcap); mask = 0",
        (RULE,), ("attention",),
    ),
)  # fmt: skip

ROWS = "first_row, end_row = int(s.cu_seqlens[sequence]), int(s.cu_seqlens[sequence + 1])\n        state = begin"
OF_THE_SEQUENCE_BEFORE = """first_row, before = int(s.cu_seqlens[sequence]), max(sequence, 1)
        end_row = min(first_row + s.cu_seqlens[before] - s.cu_seqlens[before - 1], int(s.cu_seqlens[s.first_prefill]))
        state = begin"""

COMPILED = (
    Mutant(
        "a verify is computed in the live state",
        cpu, "recurrence", "if sequence < s.num_in_place:", "if sequence < s.first_prefill:", (VERIFY,), ALL,
    ),
    Mutant(
        "a fold is computed beside the live state",
        cpu, "recurrence", "*(host.num_in_place, host.first_prefill)", "*(host.num_decodes, host.first_prefill)",
        (FOLD,), ALL,
    ),
    Mutant(
        "a part of the state is not copied",
        cpu, "recurrence", "copy(state, scratch, count)", "copy(state, scratch, count - 1)", (VERIFY,), ALL,
    ),
    *(
        Mutant(
            "a fold takes a token of the next sequence",
            cpu, module,
            "for row in range(first_row, end_row):",
            "for row in range(first_row, end_row + (sequence + 1 < s.first_prefill)):",
            (FOLD,), (module,),
        )
        for module in ALL
    ),
    *(
        Mutant(
            "as many tokens as the sequence before has",
            cpu, module, ROWS, OF_THE_SEQUENCE_BEFORE, (FOLD,), (module,),
        )
        for module in ALL
    ),
    *(
        Mutant(
            "a snapshot before its token",
            cpu, module, "row + 1 - first_row", "row + 2 - first_row", (FOLD,), (module,),
        )
        for module in ALL
    ),
    Mutant(
        "a window that stays behind",
        cpu, "conv", "                    if tap:", "                    if tap and row == first_row:", (VERIFY, FOLD),
        ("conv",),
    ),
    *(
        Mutant(
            "each token of a fresh sequence is its first",
            cpu, module, "fresh = False", "fresh = fresh", (VERIFY, FOLD), (module,),
        )
        for module in ("conv", "gdn")
    ),
    Mutant(
        "a verify's keys are not cut",
        cpu, "metadata", "num_rows == 1 or num_decodes <= i < first_prefill", "num_rows == 1", (VERIFY,),
        ("attention",),
    ),
    Mutant(
        "parts of the token before",
        cpu, "metadata", "num_partials + each * num_parts", "num_partials + max(each - 1, 0) * num_parts",
        (VERIFY,), ("attention",),
    ),
    Mutant(
        "where the first token of a tile has its parts",
        cpu, "attention", "row_partial = partial + i // per_kv * num_parts", "row_partial = partial", (VERIFY,),
        ("attention",),
    ),
    Mutant(
        "each token sees the draft behind it",
        cpu, "attention", "for t in range(position + 1 - key, BLOCK):", "for t in range(position + 2 - key, BLOCK):",
        (VERIFY,), ("attention",),
    ),
    Mutant(
        "weights of nothing times what is no number",
        cpu, "attention", "min(np.int64(BLOCK), position + 1 - key) - begin", "np.int64(BLOCK) - begin",
        (WRONG,), ("attention",),
    ),
    Mutant(
        "a token too many sees a block as a whole",
        cpu, "attention", "key + BLOCK - 1 - position", "key + BLOCK - 2 - position",
        (VERIFY,), ("attention",),
    ),
    Mutant(
        "a window one token too long",
        cpu, "attention", "range(first_key(position, rule.window, rule.chunk) - key)",
        "range(first_key(position, rule.window, rule.chunk) - key - 1)", (RULE,), ("attention",),
    ),
    Mutant(
        "a row sees one block too few",
        cpu, "attention", "_end_of_sight(key + BLOCK - 1, rule)", "_end_of_sight(key, rule)", (RULE,), ("attention",),
    ),
    Mutant(
        "all of a block counts that a row begins to leave",
        cpu, "attention", "_end_of_sight(key, rule) - position", "_end_of_sight(key + BLOCK - 1, rule) - position",
        (RULE,), ("attention",),
    ),
    Mutant(
        "a sink of the neighbour, of what is in one part",
        cpu, "attention", "rule.sinks[kv_head * per_kv + i % per_kv]", "rule.sinks[kv_head * per_kv]", (RULE,),
        ("attention",),
    ),
    Mutant(
        "a sink of the neighbour, of several parts",
        cpu, "attention", "exp(sinks[head] - largest)", "exp(sinks[head ^ 1] - largest)", (RULE,), ("attention",),
    ),
    Mutant(
        "a sink in each part",
        cpu, "attention", "if rule.has_sinks and partial < 0:", "if rule.has_sinks:", (RULE,), ("attention",),
    ),
    Mutant(
        "a chunk begins at the next one",
        cpu, "attention", "(key // rule.chunk + 1) * rule.chunk", "(key // rule.chunk + 2) * rule.chunk", (RULE,),
        ("attention",),
    ),
    Mutant(
        "rows share a tile whose first parts are others",
        cpu, "metadata", "while first_key(start + row, window, chunk) // SPLIT_TOKENS < first_part:",
        "while first_key(start + row, window, chunk) < 0:", (RULE,), ("attention",),
    ),
)  # fmt: skip

USERS: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {("exact", "metadata"): ("attention", *ALL), ("cpu", "recurrence"): ALL}
)
"""Modules that others take parts of."""


def load(folder: Path, path: Path, change: Callable[[str], str]) -> ModuleType:
    """numba wants a source's file."""
    copy = folder / f"changed_{path.name}"
    copy.write_text(change(path.read_text()))
    spec = spec_from_file_location(copy.stem, copy)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def backend_with(folder: Path, backend: ModuleType, name: str, change: Callable[[str], str]) -> ModuleType:
    """A backend with one module's source changed, and `linear`, `conv` and so on of all that use it."""
    package = f"{backend.__name__}."
    source = Path(str(backend.__file__)).parent
    changed = [load(folder, source / f"{name}.py", change)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, package + name, changed[0])
        users = USERS.get((name_of(backend), name), ())
        changed += [load(folder, source / f"{user}.py", lambda text: text) for user in users]
    whole = ModuleType("changed")
    whole.__dict__.update({each: getattr(backend, each) for each in OPERATIONS})
    for module in changed:
        whole.__dict__.update({each: value for each, value in vars(module).items() if each in OPERATIONS})
    return whole


@pytest.fixture(autouse=True)
def without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wants compiled mutants again."""
    monkeypatch.setattr(compiled, "cache_folder", lambda: None)


@pytest.mark.parametrize(
    "mutant",
    [*QUICK, *map(more, COMPILED)],
    ids=lambda mutant: f"{name_of(mutant.backend)}.{mutant.module}: {mutant.name}",
)
def test_a_mutant_is_found(mutant: Mutant, tmp_path: Path) -> None:
    def changed(source: str) -> str:
        assert mutant.text in source, f"{mutant.module} no longer has {mutant.text!r}"
        return source.replace(mutant.text, mutant.replacement)

    backend = backend_with(tmp_path, mutant.backend, mutant.module, changed)
    for check in mutant.found_by:
        for function in mutant.functions:
            with pytest.raises(AssertionError):
                CHECKS[check](backend, function)


@pytest.mark.parametrize(
    ("backend", "module", "functions"),
    [
        (reference, "recurrences", ALL),
        (exact, "metadata", ("attention", *ALL)),
        (exact, "conv", ("conv",)),
        (exact, "attention", ("attention",)),
        more(cpu, "recurrence", ALL),
        more(cpu, "metadata", ("attention",)),
        more(cpu, "attention", ("attention",)),
        *(more(cpu, name, (name,)) for name in ALL),
    ],
    ids=name_of,
)
def test_the_source_as_it_is_passes(
    backend: ModuleType, module: str, functions: tuple[str, ...], tmp_path: Path
) -> None:
    unchanged = backend_with(tmp_path, backend, module, lambda source: source)
    for function in functions:
        check_verify(unchanged, function)
        if function == "attention":
            check_rules(unchanged, function)
        if function in ALL:
            check_fold(unchanged, function)
        elif backend is cpu:
            check_wrong(unchanged, function)
