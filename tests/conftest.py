"""What several rooms' tests need: one thread of torch, doubles, and tiny checkpoints, each made once."""

import fcntl
import gc
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from cairn.models.random_weights.make_model import make_model
from cairn.models.random_weights.make_tokenizer import make_tokenizer
from models.covered import IMAGES

# `make test-clients` and `make test-ray` run these, in environments of their own
collect_ignore = ["clients", "ray_serve"]

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Tests of properties draw the same examples in each run, and `make test-long` looks for others. None is in a
    hurry, whatever else the machine does."""
    is_long = config.option.markexpr == "long"
    hypothesis.settings.register_profile("cairn", derandomize=not is_long, deadline=None)
    hypothesis.settings.load_profile("cairn")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is rare twice, by its model and by its sizes for one, is the long run's: `make test-more` has each of the
    two beside what `make test` has of the other."""
    for item in items:
        marks = item.callspec.marks if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        if sum(mark.name == "more" for mark in marks) > 1:
            item.add_marker("long")


def pytest_collectstart() -> None:
    """Until all is collected hardly anything goes that was made: looking for it took a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Thousands of tests and modules, which stay to the end: the garbage collector need not look at them each time. Nor
    has each model that is built to count them: loading one asks whether there are any."""
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What has been skipped, a line for each reason."""
    counts = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"{count:5} skipped: {reason}")


# Child processes, such as an engine core's, find `doubles`, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU keeps weights in bfloat16, as those do that have products for it: sizes are the same on all machines."""
    monkeypatch.setattr("cairn.kernels.cpu.packed_dtype", lambda dtype: dtype)


MakeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> MakeOnce:
    """A name and what fills a folder -> that folder, filled by whichever of the run's processes asks first."""
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        shared = shared.parent

    @cache
    def made(name: str, fill: Callable[[Path], object]) -> Path:
        folder, done = shared / "made" / name, shared / f"made-{name}"
        with done.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not done.stat().st_size:
                folder.mkdir(parents=True, exist_ok=True)
                fill(folder)
                file.write("done")
        return folder

    return made


@pytest.fixture(scope="session")
def made_model(make_once: MakeOnce) -> Callable[[str], Path]:
    """A family's name -> the folder of its tiny checkpoint, which nobody changes; `+mtp` behind it for one with a head
    of multi-token prediction."""

    @cache
    def made(name: str) -> Path:
        family, _, head = name.partition("+")
        return make_once(name, lambda folder: make_model(family, folder, mtp=bool(head)))

    return made


@pytest.fixture(scope="session")
def plain_tokenizer(make_once: MakeOnce) -> Path:
    """The folder of a tokenizer with 4,096 tokens, which nobody changes."""
    return make_once("tokenizer", lambda folder: make_tokenizer(folder, vocab_size=4096, max_length=1 << 20))


@pytest.fixture(scope="session")
def tiny_model(made_model: Callable[[str], Path]) -> Path:
    """A tiny Nemotron-H checkpoint folder with Mamba2, attention, MLP and MoE layers."""
    return made_model("nemotron_h")


@pytest.fixture(scope="session")
def tiny_vl_model(made_model: Callable[[str], Path]) -> Path:
    """A tiny Qwen3.5 checkpoint folder with a vision tower."""
    return made_model(IMAGES.families[0])
