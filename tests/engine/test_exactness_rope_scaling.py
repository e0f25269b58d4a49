"""Scaled positions and the prefix cache: under `--exact` every logit is the same bit for bit, before, at and beyond the
length that the model was trained for."""

import json
import shutil

import pytest
import torch

from engine.test_exactness import OTHER, TEXT, Engine, Loaded, assert_same
from tiers import first

ORIGINAL = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}


@pytest.fixture(scope="module", params=first(1, ["qwen3", "qwen3_5"]))
def loaded(request, made_model, tmp_path_factory) -> Loaded:
    folder = shutil.copytree(made_model(request.param), tmp_path_factory.mktemp("scaled") / "model")
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    raw["rope_parameters"] = raw.get("rope_parameters", {}) | YARN
    config.write_text(json.dumps(raw))
    return Loaded(folder)


@pytest.mark.parametrize("shared", [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL + 1])
def test_what_is_cached_changes_nothing(loaded, shared):
    engine = Engine(loaded)
    engine.ask(TEXT[: shared + 60])
    prompt = TEXT[:shared] + OTHER[:70]
    assert_same(engine.ask(prompt), loaded.alone(prompt))
    assert engine.requests[2].stats.first_sequence.hit == shared // loaded.grid * loaded.grid


def test_the_scaling_counts(loaded, made_model):
    plain = Loaded(made_model("qwen3" if loaded.grid == 1 else "qwen3_5"))
    assert loaded.opened.config.max_model_len == 4 * ORIGINAL
    prompt = TEXT[: ORIGINAL // 2]
    assert not torch.equal(loaded.alone(prompt)[0], plain.alone(prompt)[0])
