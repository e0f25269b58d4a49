"""Scaled rotary positions: what families publish is read as transformers reads it, and refused where it is wrong."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cairn.errors import ModelError
from cairn.layers.rotary import make_rotary
from cairn.models.families import FAMILIES
from models.published_families import QWEN3
from models.test_published_forms import WITH_ROPE, with_positions
from models.tiny_configs import qwen3

LONG_QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
"""As Qwen's model cards have it for prompts of more than 32,768 tokens."""
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": LONG_QWEN,
    "yarn by its older name": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn of a length that is not said": {"rope_type": "yarn", "factor": 2},
    "yarn with everything": {
        **LONG_QWEN,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.6,
        "truncate": False,
    },
    "yarn with a factor of its own": {**LONG_QWEN, "attention_factor": 1.25},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 2048},
    "llama3 with nothing between": {**LLAMA3, "high_freq_factor": 1.0, "original_max_position_embeddings": 64},
}


def raw_of(name: str, scaling: Mapping[str, Any]) -> dict[str, Any]:
    raw = with_positions(name)
    rope = {name: value for name, value in raw.get("rope_parameters", {}).items() if name != "rope_type"}
    return raw | {"rope_parameters": rope | dict(scaling)}


@pytest.mark.parametrize("name", WITH_ROPE)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_family_turns_as_transformers_does(name: str, scaling: str, tmp_path: Path) -> None:
    raw = raw_of(name, SCALINGS[scaling])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    wanted, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, torch.device("cpu"))
    spec = FAMILIES[raw["model_type"]].parse(raw).decoder().rotary
    assert spec is not None and spec.scaling is not None
    found = make_rotary(spec.dim, spec.theta, spec.sections, spec.scaling.parameters)
    assert torch.equal(found.frequencies, wanted)
    assert found.scaling == factor
    plain = make_rotary(spec.dim, spec.theta, spec.sections)
    assert not torch.equal(found.frequencies, plain.frequencies)


@pytest.mark.parametrize("scaled", [{"type": "yarn"}, {"type": "yarn", "rope_type": "yarn"}])
def test_either_object_may_say_it(scaled: dict[str, str]) -> None:
    settings = {"factor": 2.0, "original_max_position_embeddings": 64}
    found: list[Any] = [
        FAMILIES["qwen3"].parse(qwen3(**{field: scaled | settings}, **more))
        for field in ("rope_scaling", "rope_parameters")
        for more in ({}, {"rope_scaling" if field == "rope_parameters" else "rope_parameters": dict(settings)})
    ]
    assert len(set(found)) == 1
    assert found[0].transfer_facts() != FAMILIES["qwen3"].parse(qwen3()).transfer_facts()


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 40960),
        (LONG_QWEN, 131072),
        ({"rope_type": "yarn", "factor": 2.5}, 102400),
        ({"rope_type": "linear", "factor": 1.5}, 61440),
        (LLAMA3, 40960),
    ],
)
def test_the_longest_sequence_is_as_in_vllm(scaling: dict[str, Any] | None, length: int) -> None:
    """yarn: the length it was trained for times the factor, whatever `max_position_embeddings` says."""
    assert FAMILIES["qwen3"].parse(QWEN3 | {"rope_scaling": scaling}).max_model_len == length


def test_a_length_beside_the_other_fields_counts() -> None:
    raw = QWEN3 | {"rope_scaling": LONG_QWEN, "original_max_position_embeddings": 16384}
    assert FAMILIES["qwen3"].parse(raw).max_model_len == 65536


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn"}, "rope_scaling.factor is missing; it must be a number in 1..10000"),
        ({"rope_type": "linear", "factor": None}, "rope_scaling.factor is missing"),
        ({"type": "linear", "factor": "4"}, "rope_scaling.factor must be a number in 1..10000, not '4'"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor must be a number in 1..10000, not 0.5"),
        (LONG_QWEN | {"original_max_position_embeddings": 0}, "rope_scaling.original_max_position_embeddings must be"),
        (LONG_QWEN | {"original_max_position_embeddings": 32768.5}, "rope_scaling.original_max_position_embeddings mu"),
        (LONG_QWEN | {"beta_fast": 1, "beta_slow": 2}, "rope_scaling.beta_fast 1 must be at least beta_slow 2"),
        (LONG_QWEN | {"beta_fast": 0.5}, "rope_scaling.beta_fast 0.5 must be at least beta_slow 1"),
        (LONG_QWEN | {"attention_factor": 0}, "rope_scaling.attention_factor must be a number"),
        (LONG_QWEN | {"truncate": "no"}, "rope_scaling.truncate must be true or false"),
        (LONG_QWEN | {"rope_theta": 1.0}, "rope_scaling.rope_theta must be more than 1"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor is missing"),
        (LLAMA3 | {"high_freq_factor": 0.5}, "rope_scaling.high_freq_factor 0.5 must be at least low_freq_factor 1"),
        ({"rope_type": "su", "factor": 4.0}, "rope_scaling.rope_type is 'su', but only 'default' or 'linear'"),
    ],
)
def test_what_is_wrong_is_named(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        FAMILIES["qwen3"].parse(qwen3(rope_scaling=scaling))
    assert str(refused.value).startswith(f"config.json: {message}")


def test_two_types_that_differ_are_refused() -> None:
    rope = {"rope_type": "default"}
    with pytest.raises(ModelError, match=r"rope_parameters.rope_type and rope_scaling.type differ; keep one"):
        FAMILIES["qwen3"].parse(qwen3(rope_parameters=rope, rope_scaling={"type": "yarn", "factor": 4.0}))
    with pytest.raises(ModelError, match=r"rope_parameters.rope_type and rope_parameters.type differ; keep one"):
        FAMILIES["qwen3"].parse(qwen3(rope_parameters=rope | {"type": "yarn", "factor": 4.0}))
