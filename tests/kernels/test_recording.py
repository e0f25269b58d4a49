"""A pass that is recorded: what its record repeats, what memory it has, and what it refuses."""

import subprocess
import sys
import threading

import msgspec
import pytest
import torch

from cairn.kernels import cpu
from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import HostBatch
from cairn.kernels.cpu.compiled import F32, INT, kernel
from cairn.kernels.cpu.graphs import CpuGraphs, LoopSequence
from cairn.kernels.cpu.recording import PassMemory, Recording, call_again, kept, recording
from cairn.kernels.staging import Staging
from kernels.fixed_calls import paged_call
from kernels.random_batches import RandomBatch, SequenceRows


@kernel({torch.float32: (F32, F32, INT)})
def _add_one(begin, end, x, out, width):
    for i in range(begin * width, end * width):
        out[i] = x[i] + 1


def add_one(x):
    out = torch.empty_like(x)
    _add_one[x.dtype](len(x), 0, x.data_ptr(), out.data_ptr(), x.shape[1])
    return out


@kernel({torch.float32: (F32, INT)})
def _fail_at(begin, end, x, wanted):
    for i in range(begin, end):
        if x[i] == wanted:
            raise ValueError("the wanted number")


def add_sum(x, numbers):
    """What a record cannot know: how many numbers there are."""
    out = torch.empty_like(x)
    call_again(lambda: out.copy_(x + sum(numbers)))
    return out


def test_a_record_repeats_loops_operations_and_what_is_call_again():
    x, out, numbers = torch.zeros(3, 4), torch.empty(3, 4), [1.0]

    def run():
        y = add_sum(add_one(add_one(x)), numbers).mul_(2)
        out.copy_(add_one(y.view(4, 3)).view(3, 4) + x)

    repeat = CpuGraphs().capture(run)
    assert out.unique().tolist() == [7]
    x.fill_(10)
    numbers += [2.0, 3.0]
    out.zero_()
    repeat()
    assert out.unique().tolist() == [(12 + 6) * 2 + 1 + 10]
    assert sum(isinstance(step, LoopSequence) for step in repeat._operations) == 2


def test_the_first_pass_is_computed_while_it_is_recorded():
    x = torch.zeros(1, 1)
    CpuGraphs().capture(lambda: x.add_(1))
    assert x.item() == 1


def test_views_are_not_repeated():
    x = torch.arange(12.0).view(3, 4)
    with Recording(PassMemory()) as record:
        x.view(4, 3).t()[1:].contiguous().chunk(2)
        x.contiguous().float().reshape(12).to(torch.float32)
    assert len(record.steps) == 1  # the copy


def test_memory_is_used_again_when_nobody_has_a_tensor_there():
    memory = PassMemory()
    first = memory.empty((5, 7), torch.bfloat16)
    view, address = first[1:].view(-1), first.data_ptr()
    assert first.is_contiguous() and first.dtype == torch.bfloat16 and not address % 64
    del first
    second = memory.empty((5, 7), torch.bfloat16)
    assert second.data_ptr() != address
    del view
    third = memory.empty((70,), torch.uint8)
    assert third.data_ptr() == address and memory.num_bytes == 256
    assert memory.empty((0, 3), torch.float32).shape == (0, 3) and memory.num_bytes == 256


def test_a_second_pass_has_the_memory_of_the_first():
    x, graphs = torch.zeros(3, 400), CpuGraphs()
    repeats = [graphs.capture(lambda: x.copy_(add_one(add_one(x)))) for _ in range(3)]
    assert x.unique().tolist() == [6] and graphs._memory.num_bytes == 2 * 8192
    for repeat in repeats:
        repeat()
    assert x.unique().tolist() == [12]


def test_what_is_kept_is_not_repeated_and_stays():
    made = []

    def make():
        made.append(1)
        return add_one(torch.zeros(1, 1))

    with Recording(PassMemory()) as record:
        assert kept(make) in record._kept and not record.steps
    assert kept(make).item() == 1 and len(made) == 2


def test_a_value_that_is_read_is_refused():
    x = torch.zeros(2)
    with pytest.raises(RuntimeError, match="what follows from a value"), Recording(PassMemory()):
        x[1].item()
    assert recording() is None


def test_another_threads_loops_are_its_own():
    x = torch.zeros(1, 1)
    with Recording(PassMemory()) as record:
        thread = threading.Thread(target=add_one, args=(x,))
        thread.start()
        thread.join()
        assert not record.steps
        add_one(x)
    assert len(record.steps) == 1


def test_a_loop_that_fails_is_named():
    x = torch.zeros(8)
    repeat = CpuGraphs().capture(lambda: [_fail_at[x.dtype](8, 0, x.data_ptr(), wanted) for wanted in (5, 1, 2)])
    repeat()
    x[3] = 1
    with pytest.raises(RuntimeError, match="_fail_at failed"):
        repeat()
    x[3] = 0
    repeat()


def test_only_this_backend_records():
    from cairn.kernels import exact, reference

    assert isinstance(cpu.step_graphs(), CpuGraphs) and exact.step_graphs() is None is reference.step_graphs()


def test_attention_that_is_recorded_follows_the_lengths_whatever_its_reach():
    """Lengths at which tables have other rows, and more of them, than those that were there first."""
    rules = FULL, AttentionRule(window=40), AttentionRule(chunk=64, softcap=5.0), AttentionRule(window=600)
    longest = RandomBatch((SequenceRows(0, 1100, 1), SequenceRows(1, 700, 1)), ())
    call = paged_call("attention", longest, (4, 2, 16), 16, torch.float32)
    operands = [call.operands[name] for name in ("q", "keys", "values", "group")]
    sinks = longest.numbers(4, salt=5).float()
    metadata = cpu.build_metadata(HostBatch.captured(2, 2048), Staging())
    recorded = msgspec.structs.replace(longest.batch(cpu, call.block_tables), metadata=metadata)
    results, graphs, repeat = [], CpuGraphs(), None

    def run():
        results[:] = [cpu.attention(*operands, recorded, rule, sinks) for rule in rules]

    for starts in ((5, 39), (511, 512), (1100, 64), (40, 700)):
        batch = RandomBatch(tuple(SequenceRows(slot, start, 1) for slot, start in enumerate(starts)), ())
        graphs.set_lengths(metadata, batch.host())
        repeat() if repeat else (repeat := graphs.capture(run))
        now = batch.batch(cpu, call.block_tables)
        for rule, found in zip(rules, results, strict=True):
            assert torch.equal(found, cpu.attention(*operands, now, rule, sinks)), (starts, rule)


def test_recording_loads_no_compiler_of_torch():
    """Loading it takes a second and a half, in the midst of the first answer."""
    code = """
import sys, torch
from cairn.kernels.cpu.recording import PassMemory, Recording
x = torch.ones(2, 3)
with Recording(PassMemory()) as recording:
    y = x + 1
recording.steps[0]()
assert y.sum() == 12, y
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
