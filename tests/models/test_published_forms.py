"""Checkpoints that say or name one thing in several ways: each is read as transformers reads it."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers import logging as transformers_logging

from cairn.check.reference import TransformersReference
from cairn.check.report import check
from cairn.errors import ModelError
from cairn.models.families import FAMILIES
from cairn.models.qwen3_5_vision import parse as parse_vision
from cairn.models.registry import open_model
from models import tiny_configs
from models.decoder_families import tiny
from models.qwen3_5_truth import qwen_weights, raw_qwen
from models.tiny_configs import olmo_hybrid, qwen3
from runner.harness import Driver, parse, prompt, random_weights, raw_config

Raw = Mapping[str, Any]

QWENS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    **tiny_configs.MAKERS,
    "nemotron_h": lambda **changes: raw_config("M*-E", **changes),
    **{name: partial(raw_qwen, name) for name in QWENS},
}
SCALINGS = (
    "'default' or 'linear' or 'llama3' or 'yarn' is implemented; without it the model is served at the length that it "
    "was trained for"
)
WITH_ROPE = [name for name in MAKERS if name not in ("nemotron_h", "gemma3_text", "gemma4_text", "lfm3", "llama4_text")]
"""With one kind of rotary positions."""


def with_positions(name: str) -> dict[str, Any]:
    """config.json of a family in which not every model has rotary ones."""
    changes: dict[str, dict[str, Any]] = {
        "granitemoehybrid": {"position_embedding_type": "rope"},
        "olmo_hybrid": {"rope_parameters": {"rope_theta": 1e6}},
    }
    return MAKERS[name](**changes.get(name, {}))


def random_tensors(raw: Raw) -> dict[str, Tensor]:
    if raw["model_type"] == "nemotron_h":
        return random_weights(parse(raw), 0)
    return qwen_weights(parse(raw), 0) if raw["model_type"] in QWENS else dict(tiny(raw).weights)


def write(folder: Path, raw: Raw, weights: Mapping[str, Tensor]) -> Path:
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(raw)))
    return folder


def served(folder: Path) -> Tensor:
    """The log-probabilities of what follows a prompt, [vocab]."""
    opened = open_model(folder)
    driver = Driver(opened.config, opened.build(exact=False), exact=False)
    (logits,) = driver.run(driver.row(driver.sequence(0, 70), prompt(70, 0)))
    return logits.log_softmax(dim=-1)


def truth(folder: Path) -> Tensor:
    """The same by transformers, as log-probabilities."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return TransformersReference(folder, "float32").generate(prompt(70, 0), 1).logprobs[0]


# -- the output --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_a_tied_output_that_is_stored_all_the_same_is_served(name: str, tmp_path: Path, caplog: Any) -> None:
    raw = MAKERS[name](**{"tie_embedding" if name == "lfm2" else "tie_word_embeddings": True})
    weights = random_tensors(raw)
    weights["lm_head.weight"] = torch.randn(97, 32, generator=torch.Generator().manual_seed(5)) * 0.2
    write(tmp_path, raw, weights)
    report = check(tmp_path)
    assert report.ok, report.accounting.problems[:3]
    assert report.weight_bytes == open_model(tmp_path).weight_bytes(open_model(tmp_path).stored_tensors())
    found, wanted = served(tmp_path), truth(tmp_path)
    assert caplog.text.count("lm_head.weight is stored as well: what is stored is served") == (name != "nemotron_h")
    assert wanted.std() > 0.05
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


def test_a_copy_of_the_embedding_changes_nothing(tmp_path: Path) -> None:
    raw = raw_qwen("qwen3_5_text", tie_word_embeddings=True)
    weights, found = random_tensors(raw), []
    for copy in ({}, {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}):
        write(tmp_path, raw, weights | copy)
        found.append((served(tmp_path), check(tmp_path).weight_bytes))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_model_that_also_sees_may_have_the_output_too(kind: str, tmp_path: Path) -> None:
    raw = raw_qwen(kind, tie_word_embeddings=True)
    weights = qwen_weights(parse(raw), 0)
    weights["lm_head.weight"] = torch.randn(97, 32, generator=torch.Generator().manual_seed(5)) * 0.2
    found = served(write(tmp_path, raw, weights))
    assert torch.equal(found, served(write(tmp_path, raw_qwen(kind, tie_word_embeddings=False), weights)))


def test_a_stored_output_of_another_shape_is_found_by_both(tmp_path: Path) -> None:
    raw = qwen3(tie_word_embeddings=True)
    write(tmp_path, raw, random_tensors(raw) | {"lm_head.weight": torch.zeros(98, 32)})
    message = "lm_head.weight has shape [98, 32], config.json makes it [97, 32]"
    assert message in check(tmp_path).accounting.problems[0]
    with pytest.raises(ModelError) as refused:
        open_model(tmp_path).build(exact=False)
    assert message in str(refused.value)


# -- names of tensors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_text_model_under_the_names_of_one_that_sees(name: str, tied: bool, tmp_path: Path) -> None:
    raw = raw_qwen(name, tie_word_embeddings=tied)
    renamed = {key.replace("model.", "model.language_model.", 1): value for key, value in random_tensors(raw).items()}
    renamed |= {each: torch.zeros(3) for each in ("mtp.norm.weight", "model.visual.patch_embed.proj.bias")}
    write(tmp_path, raw, renamed)
    report = check(tmp_path)
    assert report.ok and report.accounting.num_ignored == 2
    found, wanted = served(tmp_path), truth(tmp_path)
    assert wanted.std() > 0.05
    # a tied output's logits are large, and so are their roundings
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)
    assert len(open_model(tmp_path).transfer_facts()["weights"]) == 64


def test_what_is_missing_is_shown_beside_what_is_foreign(tmp_path: Path) -> None:
    raw = qwen3(tie_word_embeddings=True)
    write(tmp_path, raw, {f"transformer.{key}": value for key, value in random_tensors(raw).items()})
    with pytest.raises(ModelError) as refused:
        open_model(tmp_path).build(exact=False)
    for problem in (
        "model.embed_tokens.weight [97, 32] (safetensors) is missing",
        "transformer.model.embed_tokens.weight is not part of this architecture",
        "model.layers.0.input_layernorm.weight [32] (safetensors) is missing",
        "transformer.model.layers.0.input_layernorm.weight is not part of this architecture",
    ):
        assert problem in str(refused.value) and problem in " ".join(check(tmp_path).accounting.problems[:5])


# -- rotary positions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_ROPE)
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"type": "default"},
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "default", "type": "mrope", "rope_theta": 5e5},
        {},
        None,
    ],
)
def test_no_scaling_may_be_said(name: str, scaling: object, tmp_path: Path) -> None:
    raw = with_positions(name)
    raw |= {"rope_scaling": scaling, "rope_theta": 1e6, "rope_parameters": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    config: Any = FAMILIES[raw["model_type"]].parse(raw)
    assert config.rope_theta == theirs["rope_theta"]
    if name in QWENS:
        assert config.rotary_dim == int(theirs["partial_rotary_factor"] * config.head_dim)


@pytest.mark.parametrize("kind", [*QWENS, "qwen3_5", "qwen3_5_moe"])
def test_no_scaling_may_be_said_beside_the_newer_field(kind: str) -> None:
    """transformers would drop the newer one then, and with it the base that the model was trained with."""
    given = raw_qwen(kind)
    rope = (given.get("text_config") or given)["rope_parameters"] | {"rope_theta": 5e5}
    for scaling in ({"rope_type": "default"}, {"type": "default"}, dict(rope)):
        config: Any = FAMILIES[kind].parse(raw_qwen(kind, rope_parameters=rope, rope_scaling=scaling))
        assert (config.rope_theta, config.rotary_dim) == (5e5, 8)


@pytest.mark.parametrize("name", WITH_ROPE)
@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, f"rope_scaling.rope_type is 'dynamic', but only {SCALINGS}"),
        ({"type": "longrope", "factor": 4.0}, f"rope_scaling.type is 'longrope', but only {SCALINGS}"),
        ({"full_attention": {"rope_theta": 1e4}}, "rope_scaling has settings for full_attention alone"),
        ({"rope_theta": 1e5}, "rope_parameters.rope_theta and rope_scaling.rope_theta differ; keep one of them"),
        ({"rope_theta": "high"}, "rope_scaling.rope_theta must be a number in 1"),
        ("default", "rope_scaling must be an object, not 'default'"),
    ],
)
def test_a_scaling_is_refused_by_its_name(name: str, scaling: object, message: str) -> None:
    raw = with_positions(name)
    rope = {"rope_theta": 1e6} if "differ" in message else None
    with pytest.raises(ModelError) as refused:
        FAMILIES[raw["model_type"]].parse(raw | {"rope_scaling": scaling, "rope_parameters": rope})
    assert str(refused.value).startswith(f"config.json: {message}")


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": None},
        {"rope_parameters": None, "rope_theta": None},
        {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": None},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None},
        {"rope_theta": 5e5},
    ],
)
def test_a_base_that_is_null_is_no_positions(rope: Raw, tmp_path: Path) -> None:
    raw = {name: value for name, value in olmo_hybrid().items() if name != "rope_parameters"} | rope
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    config: Any = FAMILIES["olmo_hybrid"].parse(raw)
    assert (config.rope_theta or None) == theirs.rope_parameters["rope_theta"]
    assert (config.decoder().rotary is None) == (config.rope_theta == 0)


def test_norms_under_the_names_that_transformers_writes(tmp_path: Path) -> None:
    raw = olmo_hybrid()
    weights = random_tensors(raw)
    found = []
    for index, kind in enumerate(raw["layer_types"]):
        names = {"post_attention_layernorm": "feedforward_layer_norm"}
        names |= {"input_layernorm": "attention_layer_norm"} if kind == "linear_attention" else {}
        for ours, theirs in names.items():
            weights[f"model.layers.{index}.{theirs}.weight"] = weights.pop(f"model.layers.{index}.{ours}.weight")
    for each in (weights, random_tensors(raw)):
        found.append(served(write(tmp_path, raw, each)))
        assert check(tmp_path).ok
    assert torch.equal(*found)


# -- errors name the field, where it is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "inner", "path"),
    [
        ({}, {"hidden_size": 0}, "text_config.hidden_size"),
        ({"hidden_size": 0}, {"hidden_size": None}, "text_config.hidden_size"),
        ({}, {"rope_parameters": {"rope_theta": 0}}, "text_config.rope_parameters.rope_theta"),
        ({}, {"rope_scaling": {"rope_theta": 0}, "rope_parameters": {}}, "text_config.rope_scaling.rope_theta"),
        ({"eos_token_id": 2}, {"eos_token_id": 97}, "text_config.eos_token_id"),
        ({"eos_token_id": 97}, {"eos_token_id": 2}, "eos_token_id"),
        ({"tie_word_embeddings": 0}, {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": 0}, "text_config.tie_word_embeddings"),
    ],
)
def test_a_field_of_the_text_model_is_named_with_its_place(outer: Raw, inner: Raw, path: str) -> None:
    raw = raw_qwen("qwen3_5", **inner) | dict(outer)
    with pytest.raises(ModelError) as refused:
        parse(raw)
    assert str(refused.value).startswith(f"config.json: {path} ")


def test_ends_of_answers_are_named_in_both_places() -> None:
    assert parse(raw_qwen("qwen3_5", eos_token_id=[2, 3]) | {"eos_token_id": [5, 2]}).eos_token_ids == (5, 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "vision_config.depth must be an integer in 1..1024, not 0"),
        ({"hidden_size": None}, "vision_config.hidden_size is missing"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "vision_config.rope_parameters.rope_type is 'yarn', but only"),
        ({"rope_scaling": {"type": "yarn"}}, "vision_config.rope_scaling.type is 'yarn', but only"),
        ({"rope_parameters": [1]}, "vision_config.rope_parameters must be an object"),
    ],
)
def test_a_field_of_the_tower_is_named_with_its_place(made_model: Any, change: Raw, message: str) -> None:
    raw = json.loads((made_model("qwen3_5_vl") / "config.json").read_text())["vision_config"]
    assert parse_vision(raw | {"rope_scaling": {"rope_type": "default"}}) == parse_vision(raw)
    with pytest.raises(ModelError) as refused:
        parse_vision(raw | dict(change))
    assert str(refused.value).startswith(f"config.json: {message}")


@pytest.mark.parametrize("path", ["dtype", "torch_dtype", "text_config.dtype", "text_config.torch_dtype"])
def test_a_dtype_is_named_as_it_is_there(path: str, tmp_path: Path) -> None:
    raw = raw_qwen("qwen3_5")
    place = raw["text_config"] if path.startswith("text_config.") else raw
    place[path.rpartition(".")[2]] = "int3"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=rf"^config.json: {path} 'int3' is none of float32"):
        open_model(tmp_path)
