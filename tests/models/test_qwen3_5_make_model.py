"""Random-weight Qwen3.5 checkpoints: their form, and that transformers takes them as they are."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn.check.report import check
from cairn.models.families import family_of
from cairn.models.families.qwen3_5 import IMAGE_TOKENS
from cairn.models.random_weights.make_model import RECIPES, VOCAB_SIZE, make_model
from cairn.models.random_weights.make_tokenizer import MARK_TOKENS
from cairn.models.random_weights.recipe import CheckpointOptions
from cairn.models.registry import open_model
from runner.harness import Driver

FAMILIES = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_takes_it_and_gives_the_same_logits(made_model, family: str) -> None:
    folder = made_model(family)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == [FAMILIES[family]]
    theirs, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    assert type(theirs).__name__ == FAMILIES[family]
    opened = open_model(folder)
    driver = Driver(opened.config, opened.build(exact=False), exact=False)
    tokens = torch.randint(0, VOCAB_SIZE, (100,), generator=torch.manual_seed(1)).tolist()
    (found,) = driver.run(driver.row(driver.sequence(0, 100), tokens))
    with torch.inference_mode():
        wanted = theirs.eval()(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert 1.5 < wanted.std() < 2.5
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_is_tiny_and_its_checkpoints_are_worth_several_pages(made_model, family: str) -> None:
    report = check(made_model(family))
    assert report.ok
    assert report.layers == {"gated delta net": 3, "gated attention": 1}
    assert 4e6 < report.parameters < 7e6
    assert report.layout.pages_per_checkpoint == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_small_has_the_published_ratio_of_state_to_tokens(family: str) -> None:
    recipe = RECIPES[family]
    raw = recipe.config("small", CheckpointOptions("bfloat16", VOCAB_SIZE, 32768, 1, 2, {}))
    served = family_of(raw)
    config = served.parse(raw)
    layout = config.layout(16, 2)
    tokens = layout.checkpoint_bytes / layout.bytes_per_token
    assert 2500 < tokens < 7000  # Qwen3.5-35B-A3B: 3,144
    parameters = sum(torch.Size(shape).numel() for shape in served.tensors(config).values())
    assert 2e8 < parameters < 6e8
    for size in (2, 4):
        config.layout(16, 2, size)


def test_tokenizer_has_one_id_for_each_mark(made_model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made_model("qwen3_5"))
    assert len(tokenizer) == VOCAB_SIZE
    for token in (*IMAGE_TOKENS, *MARK_TOKENS):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    ids = tokenizer.encode(f"a{IMAGE_TOKENS[0]}{IMAGE_TOKENS[2]}{IMAGE_TOKENS[1]}b")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    plain = AutoTokenizer.from_pretrained(made_model("nemotron_h"))
    assert len(plain.encode(IMAGE_TOKENS[0])) > 1


def test_bfloat16_keeps_decays_in_float32(tmp_path: Path) -> None:
    make_model("qwen3_5_moe", tmp_path / "a", dtype="bfloat16", seed=3)
    make_model("qwen3_5_moe", tmp_path / "b", dtype="bfloat16", seed=3)
    report = check(tmp_path / "a")
    assert report.ok and report.dtype == "bfloat16"
    assert report.stored_dtypes["F32"] == 3
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
