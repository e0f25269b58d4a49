"""What a server compiles before it is ready: what its model needs, by several processes, each variant once."""

import fcntl
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.cache.placement import placement_for
from cairn.engine.profile_plans import SLOTS, num_profile_pages, profile_plans, warm_up_plans
from cairn.kernels.cpu import compile_cache, compiled
from cairn.kernels.cpu.compiled import I64, INT, Kernel, kernel
from cairn.kernels.cpu.threads import StepWork
from cairn.kernels.operations import OPERATIONS, operations_of
from cairn.models.registry import open_model
from cairn.runner.runner import EVERY_STEP, Runner
from tiers import first

warm_up = importlib.import_module("cairn.kernels.cpu.warm_up")


@kernel({torch.int64: (I64, INT)})
def _count(begin: int, end: int, counts: Any, step: int) -> None:
    for i in range(begin, end):
        counts[i] += step


class Machine:
    def __init__(self, cores: int) -> None:
        self.cores = cores

    def num_cores(self) -> int:
        return self.cores


@contextmanager
def recorded_uses() -> Iterator[set[tuple[str, object]]]:
    """Kernels, by their names in `KERNELS`, and keys that are asked for inside."""
    names = {id(each): name for name, each in warm_up.KERNELS.items()}
    known = {name: dict(each) for name, each in warm_up.KERNELS.items()}
    used: set[tuple[str, object]] = set()

    def ask(self: Kernel, key: object) -> object:
        name = names[id(self)]
        used.add((name, key))
        if key not in known[name]:
            known[name][key] = compiled.Variant(self._function, self.argument_types[key])
        return known[name][key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "__missing__", ask)
        for each in warm_up.KERNELS.values():
            each.clear()
        try:
            yield used
        finally:
            for name, each in warm_up.KERNELS.items():
                each.update(known[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    first(
        2,
        [
            "qwen3_5",
            "nemotron_h",
            "qwen3_5_moe",
            "granitemoehybrid",
            "falcon_h1",
            "lfm2",
            "qwen3",
            "granite",
            "qwen3_moe",
            "lfm2_moe",
            "olmo_hybrid",
            "gemma3",
            "lfm3",
            "gemma2",
            "llama4",
            "gemma4",
        ],
    ),
)
def test_steps_of_a_model_use_no_kernel_that_was_not_compiled_for_it(
    made_model: Callable[[str], Path], family: str, dtype: str
) -> None:
    opened = open_model(made_model(family), dtype)
    model, layout = opened.build(exact=False), opened.layout(16)
    num_pages = num_profile_pages(layout, 200)
    runner, placement = Runner(model, layout, num_pages, SLOTS, exact=False), placement_for("auto", 16, False)
    operations = operations_of(model) | EVERY_STEP
    with recorded_uses() as used:
        plans = [*profile_plans(layout, 200, placement)]
        plans += [plan for plan, _ in warm_up_plans(layout, 200, placement, model.vocab_size)]
        for plan in plans:
            runner.launch(plan)
            runner.sample(plan.step, {})
            runner.collect(plan.step)
    ready = {(task.name, task.key) for task in warm_up.tasks_for(model.spec.dtype, operations)}
    assert used and used <= ready
    assert operations <= OPERATIONS | EVERY_STEP and "linear" in operations
    assert len(ready) < len(warm_up.tasks_for(model.spec.dtype, None))


def test_those_that_take_long_to_compile_come_first() -> None:
    tasks = warm_up.tasks_for(torch.float32, {"gdn", "silu_mul", "rms_norm"})
    assert [task.name.rpartition(":")[2] for task in tasks] == [
        "_gdn_prefill", "_gdn_decode", "_rms_norm", "_silu_mul",
    ]  # fmt: skip
    assert [warm_up.Task.parse(str(task)) for task in tasks] == list(tasks)


@pytest.mark.parametrize(
    ("layouts", "more"),
    [
        (set(), set()),
        ({"panels"}, {"panels:_group_rows", "panels:_widen_rows", "panels:_multiply"}),
        ({"int4 panels"}, {"int4:_quantize_groups", "int4:_multiply_int4", "int4:_multiply_int4_tiles"}),
        ({"int8 onednn"}, {"int8:_quantize_rows", "int8:_scale_rows", "int8:_multiply_int8"}),
    ],
)
def test_products_are_compiled_for_the_weights_that_there_are(
    monkeypatch: pytest.MonkeyPatch, layouts: set[str], more: set[str]
) -> None:
    names = []
    for found in (set(), layouts):
        monkeypatch.setattr(warm_up, "step_work", lambda found=found: StepWork(packed_layouts=found))
        names.append({task.name for task in warm_up.tasks_for(torch.bfloat16, {"linear"})})
    able = {name.removeprefix("cairn.kernels.cpu.") for name, each in warm_up.KERNELS.items() if each.argument_types}
    added = {name.removeprefix("cairn.kernels.cpu.") for name in names[1] - names[0]}
    assert added == more & able


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = compile_cache.cache_folder.__wrapped__()
    for module in (compiled, warm_up):
        monkeypatch.setattr(module, "cache_folder", lambda: found)
    return found


@contextmanager
def another_process_compiles(path: Path) -> Iterator[None]:
    """A lock belongs to an open file, not to a process."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_what_another_process_is_compiling_is_left_to_it(folder: Path) -> None:
    each = Kernel(_count._function, {torch.int64: (I64, INT)})
    assert not each.was_begun(torch.int64)
    with another_process_compiles(compile_cache.CompileCache(each._function, (I64, INT), folder).lock):
        assert each.was_begun(torch.int64)
        assert not each.compile_if_free(torch.int64) and torch.int64 not in each
    assert each.compile_if_free(torch.int64) and not each[torch.int64].from_cache
    again = Kernel(_count._function, {torch.int64: (I64, INT)})
    assert again.compile_if_free(torch.int64) and again[torch.int64].from_cache


def test_a_process_that_never_ends_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_MOST_SECONDS", 0.0)
    each = Kernel(_count._function, {torch.int64: (I64, INT)})
    with another_process_compiles(compile_cache.CompileCache(each._function, (I64, INT), folder).lock):
        assert not each[torch.int64].from_cache


def test_where_nothing_can_be_locked_it_is_compiled_all_the_same(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    each = Kernel(_count._function, {torch.int64: (I64, INT)})
    compile_cache.CompileCache(each._function, (I64, INT), folder).lock.mkdir(parents=True)
    assert not each.compile_if_free(torch.int64)
    assert not each[torch.int64].from_cache
    assert "several processes may compile" in caplog.text


class Processes:
    """Instead of `subprocess.Popen`."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, ...]] = []
        self.ended: list[str] = []

    def __call__(self, command: tuple[str, ...], **others: Any) -> "Processes":
        assert others["env"]["OMP_NUM_THREADS"] == "1"
        self.commands.append(command)
        return self

    def kill(self) -> None:
        self.ended.append("killed")

    def wait(self) -> None:
        self.ended.append("waited for")


@pytest.mark.parametrize(("cores", "count"), [(1, 0), (2, 1), (3, 2), (64, warm_up.MOST_WORKERS)])
def test_every_core_has_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch, cores: int, count: int) -> None:
    tasks, processes = warm_up.tasks_for(torch.float32, {"gdn", "attention", "conv"}), Processes()
    monkeypatch.setattr(warm_up.subprocess, "Popen", processes)
    with pytest.raises(KeyboardInterrupt), warm_up.compile_workers(tasks, Machine(cores)) as found:
        assert found == count and not processes.ended
        raise KeyboardInterrupt
    assert [command[:4] for command in processes.commands] == count * [
        (sys.executable, "-P", "-m", "cairn.kernels.cpu.compile_worker")
    ]
    assert all(command[4:] == tuple(map(str, tasks)) for command in processes.commands)
    assert processes.ended == count * ["killed", "waited for"]


def test_no_process_is_started_for_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = warm_up.tasks_for(torch.float32, {"silu_mul", "rope"})
    monkeypatch.setattr(warm_up.subprocess, "Popen", Processes())
    for left, task in zip((1, 0), tasks, strict=True):
        assert Kernel(task.kernel._function, task.kernel.argument_types).compile_if_free(task.key)
        with warm_up.compile_workers(tasks, Machine(8)) as found:
            assert found == 0
        assert sum(not each.kernel.was_begun(each.key) for each in tasks) == left


def test_where_nothing_is_kept_no_process_could_help(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compiled, warm_up):
        monkeypatch.setattr(module, "cache_folder", lambda: None)
    with warm_up.compile_workers(warm_up.tasks_for(torch.float32, {"gdn"}), Machine(8)) as found:
        assert found == 0


@pytest.mark.more
def test_two_processes_share_the_work_and_a_third_finds_it_done(tmp_path: Path) -> None:
    code = (
        "import logging, torch; logging.basicConfig(level='INFO', format='%(message)s'); "
        "from cairn.kernels.cpu import warm_up; warm_up(torch.float32, {'gdn', 'conv', 'silu_mul'})"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    run = partial(subprocess.run, env=environment, capture_output=True, text=True, timeout=240, check=True)
    told = [run([sys.executable, "-c", code]).stderr for _ in range(2)]
    assert "6 are compiled for this processor, once, by" in told[0] and "6 ready" in told[0]
    assert "are compiled" not in told[1] and "6 ready" in told[1] and "6 of them from" in told[1]
