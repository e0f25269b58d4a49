"""What several rooms' tests need: one thread of torch, and a tiny checkpoint made once."""

from pathlib import Path

import pytest
import torch

from cairn.models.make_model import make_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Nemotron-H checkpoint folder with Mamba2, attention, MLP and MoE layers."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model("nemotron_h", folder)
    return folder
