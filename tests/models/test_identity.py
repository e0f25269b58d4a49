"""What two servers compare before page bytes may go from one to the other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn.errors import ModelError
from cairn.models.random_weights.make_model import make_model
from cairn.models.registry import open_model
from cairn.models.weights.identity import weights_identity


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def write_as_one_file(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    for old in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        old.unlink()
    save_file(weights, folder / "model.safetensors", metadata={"who": "somebody else"})


def test_facts_are_those_of_the_model_and_say_nothing_of_the_server(tiny_model: Path) -> None:
    facts = open_model(tiny_model).transfer_facts()
    assert facts["model_type"] == "nemotron_h"
    assert facts["dtype"] == "float32"
    assert facts["pattern"] == "MEM*M-MEM*"
    assert (facts["num_key_value_heads"], facts["n_groups"], facts["ssm_state_size"]) == (2, 2, 32)
    assert facts["layer_norm_epsilon"] == "1e-05"
    assert len(str(facts["weights"])) == 64
    assert not [name for name in facts if "block" in name or "parallel" in name or "token" in name]
    assert all(type(value) in (int, str) for value in facts.values())
    assert facts == open_model(tiny_model).transfer_facts()


def test_how_the_weights_lie_in_files_makes_no_difference(tiny_model: Path, copied: Path) -> None:
    write_as_one_file(copied, tensors_of(tiny_model))
    assert open_model(copied).transfer_facts() == open_model(tiny_model).transfer_facts()


def test_the_length_limit_and_the_end_tokens_make_no_difference(tiny_model: Path, copied: Path) -> None:
    raw = json.loads((copied / "config.json").read_text()) | {"max_position_embeddings": 99, "eos_token_id": 5}
    (copied / "config.json").write_text(json.dumps(raw))
    assert open_model(copied).transfer_facts() == open_model(tiny_model).transfer_facts()


@pytest.mark.parametrize(
    "change", [{"routed_scaling_factor": 2.0}, {"layer_norm_epsilon": 1e-6}, {"num_experts_per_tok": 3}]
)
def test_every_field_that_changes_the_states_does(tiny_model: Path, copied: Path, change: dict[str, float]) -> None:
    (copied / "config.json").write_text(json.dumps(json.loads((copied / "config.json").read_text()) | change))
    found, wanted = open_model(copied).transfer_facts(), open_model(tiny_model).transfer_facts()
    assert {name for name in found if found[name] != wanted[name]} == set(change)


def test_the_serving_dtype_does(tiny_model: Path) -> None:
    assert open_model(tiny_model, "bfloat16").transfer_facts()["dtype"] == "bfloat16"


def test_other_weights_do(tiny_model: Path, tmp_path: Path) -> None:
    make_model("nemotron_h", tmp_path / "other", seed=1)
    assert (
        open_model(tmp_path / "other").transfer_facts()["weights"] != open_model(tiny_model).transfer_facts()["weights"]
    )


def test_one_tensor_trained_further_does(tiny_model: Path, copied: Path) -> None:
    weights = tensors_of(tiny_model)
    wanted = open_model(tiny_model).transfer_facts()["weights"]
    for name in ("backbone.layers.0.mixer.in_proj.weight", "backbone.layers.2.mixer.A_log", "lm_head.weight"):
        changed = dict(weights)
        changed[name] = weights[name] * 1.0001
        if name == "lm_head.weight":
            changed[name] = weights[name].clone()
            changed[name][-1, -1] += 1  # the last number of a tensor is in its last sample
        write_as_one_file(copied, changed)
        assert open_model(copied).transfer_facts()["weights"] != wanted, name
        (copied / "model.safetensors.index.json").touch()


def test_a_tensor_that_is_not_there_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"surely\.not is missing"):
        weights_identity(tiny_model, ["surely.not", "lm_head.weight"])
    with pytest.raises(ModelError, match="neither"):
        weights_identity(tmp_path, ["lm_head.weight"])
