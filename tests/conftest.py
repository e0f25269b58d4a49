"""What several rooms' tests need: one thread of torch, doubles, and tiny checkpoints, each made once."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from cairn.models.random_weights.make_model import make_model

# `make test-clients` runs these, in environments of their own
collect_ignore = ["clients"]

torch.set_num_threads(1)

# Child processes, such as an engine core's, find `doubles`, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's name -> the folder of its tiny checkpoint."""

    @cache
    def made(family: str) -> Path:
        folder = tmp_path_factory.mktemp("models") / family
        make_model(family, folder)
        return folder

    return made


@pytest.fixture(scope="session")
def tiny_model(made_model: Callable[[str], Path]) -> Path:
    """A tiny Nemotron-H checkpoint folder with Mamba2, attention, MLP and MoE layers."""
    return made_model("nemotron_h")


@pytest.fixture(scope="session")
def tiny_vl_model(made_model: Callable[[str], Path]) -> Path:
    """A tiny Qwen3.5 checkpoint folder with a vision tower."""
    return made_model("qwen3_5_vl")
