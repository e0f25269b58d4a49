"""flashinfer's attention and fla's delta rule behind the contract's functions, held to the reference.

Without a GPU doubles stand in for both, which ask what the libraries ask and compute the truth: proven are the plans,
index tables, views, states and snapshots, not what the libraries compute. On a GPU the libraries themselves are held to
the same, where they are installed.
"""

import importlib
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from cairn.errors import ConfigError
from cairn.kernels.attention_rule import FULL, AttentionRule
from doubles.gpu_libraries import FLASHINFER, Fla
from kernels.backends import BACKENDS, BF16_PRODUCTS, DEVICES, ON_GPU, name_of
from kernels.comparison import check_against_reference, same_bits
from kernels.fixed_calls import MIXED, gdn_call, paged_call
from kernels.random_batches import RandomBatch, SequenceRows

CUDA = next((backend for backend in BACKENDS if name_of(backend) == "cuda"), ModuleType("none"))
if CUDA not in BACKENDS:
    pytest.skip("there is nothing that runs Triton's kernels", allow_module_level=True)

from cairn.kernels.cuda import flashinfer_attention, libraries  # noqa: E402
from cairn.kernels.cuda.fla_gdn import DeltaRuleShape, FlaDeltaRule  # noqa: E402
from cairn.kernels.cuda.flashinfer_attention import AttentionShape, FlashInferAttention  # noqa: E402
from cairn.kernels.cuda.libraries import load_fla, load_flashinfer, with_libraries  # noqa: E402
from kernels.test_cuda_mutants import load, source_of  # noqa: E402

# numpy computes for Triton's interpreter, and warns of infinity and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

BF16, F32 = torch.bfloat16, torch.float32
DEVICE = DEVICES[CUDA]
HEADS = (4, 2, 64)

DECODES = RandomBatch(
    (SequenceRows(2, 299, 1), SequenceRows(5, 15, 1), SequenceRows(1, 16, 1), SequenceRows(7, 0, 1)), (), seed=3
)
PREFILLS = RandomBatch((), (SequenceRows(6, 0, 70, kv_write_from=9), SequenceRows(2, 61, 40), SequenceRows(0, 3, 1)))
FITTING = RandomBatch(
    (SequenceRows(3, 77, 1, snapshots=(1,)), SequenceRows(7, 0, 1)),
    (
        SequenceRows(0, 0, 130, snapshots=(64, 130)),  # a snapshot inside
        SequenceRows(5, 64, 70, snapshots=(70,)),
        SequenceRows(4, 100, 30),  # begins inside a chunk
        SequenceRows(6, 128, 1),
        SequenceRows(1, 0, 3, snapshots=(3,)),
    ),
    seed=4,
)
WITH_VERIFIES = replace(FITTING, verifies=(SequenceRows(2, 70, 3), SequenceRows(8, 0, 2)))


def attention_call(batch):
    return paged_call("attention", batch, HEADS, 16, BF16)


def delta_rule_call(batch):
    return gdn_call(batch, (2, 2, 24, 16), BF16)


def installed(module):
    if not ON_GPU:
        pytest.skip("the library runs on a GPU only")
    return pytest.importorskip(module, reason=f"{module} is not installed")


@pytest.fixture
def build(monkeypatch):
    def build(attention=None, delta_rule=None):
        kernels = with_libraries(attention, delta_rule)
        monkeypatch.setitem(DEVICES, kernels, DEVICE)
        monkeypatch.setitem(BF16_PRODUCTS, kernels, BF16_PRODUCTS[CUDA])
        return kernels

    return build


def attention_by(library, page_size=16, steps=2):
    return FlashInferAttention(library, AttentionShape(*HEADS, page_size, BF16), DEVICE, steps)


@pytest.mark.parametrize("library", ["double", "installed"])
@pytest.mark.parametrize("page_size", [7, 16, 64])
@pytest.mark.parametrize("batch", [MIXED, DECODES, PREFILLS], ids=["mixed", "decodes", "prefills"])
def test_flashinfer_on_cuda(build, batch, page_size, library):
    module = FLASHINFER if library == "double" else installed("flashinfer")
    kernels = build(attention_by(module, page_size))
    check_against_reference(kernels, paged_call("attention", batch, HEADS, page_size, BF16, 2**30), BF16)


def test_plans_of_two_steps_on_cuda_are_apart(build):
    """The second step is planned before the first one's layers run, whose second layer has another attention group."""
    kernels = build(attention_by(FLASHINFER))
    calls = [paged_call("attention", batch, HEADS, 16, BF16) for batch in (MIXED, PREFILLS)]
    planned = []
    for call in calls:
        other = torch.randperm(call.operands["keys"].shape[0], dtype=torch.int32)
        tables = [call.block_tables[0], other[call.block_tables[0].long()]]
        planned.append((call.batch.batch(kernels, [table.to(DEVICE) for table in tables], DEVICE), other))
    for call, (batch, other) in zip(calls, planned, strict=True):
        q, keys, values = (call.operands[name].to(DEVICE) for name in ("q", "keys", "values"))
        first = kernels.attention(q, keys, values, 0, batch)
        moved_keys, moved_values = (torch.empty_like(part) for part in (keys, values))
        moved_keys[other.long()], moved_values[other.long()] = keys, values
        assert torch.equal(kernels.attention(q, moved_keys, moved_values, 1, batch), first)
        assert torch.equal(kernels.attention(q, keys, values, 0, batch), first)
        own = CUDA.attention(q, keys, values, 0, batch)
        torch.testing.assert_close(first, own, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("rule", "sinks"), [(AttentionRule(window=20), False), (AttentionRule(scale=0.2), False), (FULL, True)], ids=str
)
def test_layers_on_cuda_that_are_not_plain_are_not_given_to_flashinfer(build, rule, sinks):
    attention = attention_by(FLASHINFER)
    call = paged_call("attention", MIXED, HEADS, 16, BF16, rule=rule, sinks=sinks)
    check_against_reference(build(attention), call, BF16)
    assert not any(wrapper.num_runs for pair in attention._wrappers for wrapper in pair)


def test_layers_on_cuda_share_a_plan_and_its_page_numbers(build, monkeypatch):
    attention, fills = attention_by(FLASHINFER), []
    fill = flashinfer_attention._page_indices_kernel
    counted = type("Counted", (), {"__getitem__": lambda _, grid: fills.append(grid) or fill[grid]})
    monkeypatch.setattr(flashinfer_attention, "_page_indices_kernel", counted())
    kernels = build(attention)
    call = paged_call("attention", MIXED, HEADS, 16, BF16)
    batch = call.batch.batch(kernels, [table.to(DEVICE) for table in call.block_tables], DEVICE)
    q, keys, values = (call.operands[name].to(DEVICE) for name in ("q", "keys", "values"))
    for _ in range(3):
        kernels.attention(q, keys, values, 0, batch)
    assert len(fills) == 1
    assert [wrapper.num_runs for wrapper in attention._wrappers[0]] == [3, 3]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_fla_on_cuda(build, dtype):
    fla = Fla()
    check_against_reference(build(None, FlaDeltaRule(fla)), gdn_call(FITTING, (2, 2, 24, 16), dtype), dtype)
    assert fla.calls == [[70, 1, 3]]


def test_a_batch_without_a_sequence_for_fla_on_cuda_is_all_for_the_own_kernel(build, monkeypatch):
    kernels = build(None, FlaDeltaRule(Fla()))
    called = []
    monkeypatch.setattr(CUDA, "gdn", lambda *operands: called.append(operands))
    gdn_call(MIXED, (2, 2, 24, 16)).run(kernels)
    assert len(called) == 1


def test_batches_with_verifies_on_cuda_are_all_for_the_own_kernels(build):
    kernels = build(attention_by(FLASHINFER), FlaDeltaRule(Fla()))
    calls = [make(WITH_VERIFIES) for make in (attention_call, delta_rule_call)]
    wanted = [call.copied().run(CUDA) for call in calls]
    for call, results in zip(calls, wanted, strict=True):
        assert all(map(same_bits, call.copied().run(kernels), results))
    check_against_reference(kernels, attention_call(MIXED), BF16)


def test_fla_on_cuda_with_every_sequence(build):
    batch = RandomBatch((), (SequenceRows(2, 64, 65, snapshots=(65,)), SequenceRows(0, 0, 64)), seed=1)
    check_against_reference(build(None, FlaDeltaRule(Fla())), gdn_call(batch, (1, 2, 24, 16)), F32)


def test_installed_fla_on_cuda(build):
    kernels = build(None, FlaDeltaRule(installed("fla.ops.gated_delta_rule")))
    check_against_reference(kernels, gdn_call(FITTING, (2, 2, 64, 64), BF16), BF16)


MUTANTS = (
    ("flashinfer_attention", "tl.load(slots + sequence)", "(tl.load(slots + sequence) + 1)"),
    ("flashinfer_attention", "begin.to(tl.int64) + entries, pages", "entries, pages"),
    ("flashinfer_attention", "(host.seq_lens - 1) % shape.page_size + 1", "host.seq_lens % shape.page_size"),
    ("flashinfer_attention", "indices[first:], arrays[2]", "indices[: len(indices) - first], arrays[2]"),
    ("flashinfer_attention", "self._num_steps += 1", "pass"),
    ("flashinfer_attention", "plan.filled_group != group", "plan.filled_group is None"),
    ("fla_gdn", "(host.seq_starts % CHUNK == 0)", "(host.seq_starts >= 0)"),
    ("fla_gdn", "is_fit[snapshot_seqs[is_inside]] = False", "pass"),
    ("fla_gdn", "torch.where(begun, states[slots], 0.0)", "states[slots]"),
    ("fla_gdn", "states.index_copy_(0, slots, final)", "states.index_copy_(0, slots, final * 2)"),
    ("fla_gdn", "final[plan.snapshot_seqs.tensor]", "final[: len(plan.snapshot_seqs.tensor)]"),
    ("fla_gdn", "state_slots=batch.state_slots[seqs]", "state_slots=batch.state_slots"),
)


@pytest.mark.skipif(ON_GPU, reason="an index of a mutant's that is out of bounds ends CUDA for the whole process")
@pytest.mark.parametrize(("module", "text", "replacement"), MUTANTS)
def test_a_changed_adapter_is_found_on_cuda(build, tmp_path, monkeypatch, module, text, replacement):
    source = source_of(module)
    assert text in source
    changed = load(tmp_path, module, source.replace(text, replacement))
    fla = Fla()
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        if module == "fla_gdn":
            monkeypatch.setattr(libraries, "FlaDeltaRule", changed.FlaDeltaRule)
            check_against_reference(build(None, changed.FlaDeltaRule(fla)), gdn_call(FITTING, (2, 2, 24, 16), F32), F32)
            assert fla.calls == [[70, 1, 3]]
        else:
            monkeypatch.setattr(sys.modules[__name__], "FlashInferAttention", changed.FlashInferAttention)
            check_against_reference(
                build(attention_by(FLASHINFER)), paged_call("attention", MIXED, HEADS, 16, BF16), BF16
            )
            test_plans_of_two_steps_on_cuda_are_apart(build)


# -- at the start -----------------------------------------------------------------------------------------------------

SHAPE = AttentionShape(4, 2, 64, 16, BF16)
RULE = DeltaRuleShape(2, 4, 16, 24, BF16)


def test_libraries_on_cuda_are_tried_out():
    fla = Fla()
    attention = load_flashinfer(SHAPE, DEVICE, 2, lambda name: FLASHINFER)
    assert [wrapper.num_runs for pair in attention._wrappers for wrapper in pair] == [1] * 4
    load_fla(RULE, DEVICE, lambda name: fla)
    assert fla.calls == [[64]]


def absent(name):
    return importlib.import_module(f"no_such_package.{name}")


class Broken(Fla):
    def chunk_gated_delta_rule(self, *operands, **more):
        raise RuntimeError("Could not find\n nvcc")


class Wrong(Fla):
    def chunk_gated_delta_rule(self, *operands, **more):
        y, final = super().chunk_gated_delta_rule(*operands, **more)
        return y + torch.nan, final


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (
            lambda: load_flashinfer(AttentionShape(4, 2, 96, 16, BF16), DEVICE, 2, absent),
            r"^--attention-backend flashinfer: takes attention heads of 64, 128 or 256 numbers.* have 96 \(head_dim",
        ),
        (
            lambda: load_flashinfer(AttentionShape(4, 2, 64, 16, F32), DEVICE, 2, absent),
            r"^--attention-backend flashinfer: computes in bfloat16, not in float32: ask for --dtype bfloat16",
        ),
        (
            lambda: load_flashinfer(SHAPE, DEVICE, 2, absent),
            r"^--attention-backend flashinfer: flashinfer cannot be imported .*: pip install flashinfer-python",
        ),
        (
            lambda: load_flashinfer(SHAPE, DEVICE, 2, lambda name: ModuleType("older")),
            r"^--attention-backend flashinfer: does not work on this machine .*BatchDecodeWith.*: install nvcc",
        ),
        (
            lambda: load_fla(DeltaRuleShape(2, 4, 512, 24, BF16), DEVICE, absent),
            r"^--gdn-prefill-backend fla: takes keys of at most 256 .* have 512 \(linear_key_head_dim",
        ),
        (
            lambda: load_fla(DeltaRuleShape(2, 4, 16, 24, F32), DEVICE, absent),
            r"^--gdn-prefill-backend fla: computes in bfloat16, not in float32",
        ),
        (lambda: load_fla(RULE, DEVICE, absent), r"^--gdn-prefill-backend fla: .* pip install fla-core"),
        (
            lambda: load_fla(RULE, DEVICE, lambda name: Broken()),
            r"^--gdn-prefill-backend fla: does not work on this machine \(Could not find nvcc\): install fla-core",
        ),
        (lambda: load_fla(RULE, DEVICE, lambda name: Wrong()), "no finite numbers for zeros"),
    ],
)
def test_what_a_library_on_cuda_does_not_take_is_said(start, said):
    with pytest.raises(ConfigError, match=said):
        start()
