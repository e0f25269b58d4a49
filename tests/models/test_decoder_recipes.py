"""What `make-model` writes for the families made of parts: transformers takes it as it is, and answers vary."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from cairn.check.report import check
from cairn.models.families import family_of
from cairn.models.random_weights.make_model import RECIPES, make_model
from cairn.models.random_weights.recipe import CheckpointOptions
from cairn.models.registry import open_model
from models.decoder_families import TinyDriver
from tiers import more

# A checkpoint's pages in float32 and in bfloat16, and the layers in words.
FAMILIES: dict[str, tuple[int, int, dict[str, int]]] = {
    "granitemoehybrid": (9, 17, {"Mamba2 with mixture of experts": 4, "attention with mixture of experts": 2}),
    "falcon_h1": (3, 5, {"Mamba2 beside attention with MLP": 4}),
    "lfm2": (1, 1, {"short convolution with MLP": 6, "attention with MLP": 2}),
    "granite": (1, 1, {"attention with MLP": 6}),
    "qwen3_moe": (1, 1, {"attention with mixture of experts": 6}),
    "lfm2_moe": (
        1,
        1,
        {
            "short convolution with MLP": 2,
            "attention with mixture of experts": 2,
            "short convolution with mixture of experts": 4,
        },
    ),
    "olmo_hybrid": (6, 10, {"gated delta net with MLP": 4, "attention with MLP": 2}),
    "qwen3": (1, 1, {"attention with MLP": 6}),
    "gemma4": (
        1,
        1,
        {
            "windowed attention with MLP beside mixture of experts": 2,
            "attention with MLP beside mixture of experts": 1,
            "windowed attention to keys of an earlier layer with MLP beside mixture of experts": 2,
            "attention to keys of an earlier layer with MLP beside mixture of experts": 1,
        },
    ),
    "gemma3": (1, 1, {"windowed attention with MLP": 4, "attention with MLP": 2}),
    "llama4": (
        1,
        1,
        {
            "chunked attention with MLP": 2,
            "chunked attention with mixture of experts": 1,
            "attention with mixture of experts": 1,
        },
    ),
    "lfm3": (
        1,
        1,
        {
            "short convolution with MLP": 5,
            "windowed attention with MLP": 1,
            "attention with MLP": 2,
        },
    ),
    "gemma2": (1, 1, {"windowed attention with MLP": 3, "attention with MLP": 3}),
    "gpt_oss": (
        1,
        1,
        {"windowed attention with mixture of experts": 3, "attention with mixture of experts": 3},
    ),
}

EACH_KIND = ("granitemoehybrid", "falcon_h1", "lfm2_moe", "olmo_hybrid", "gemma4")
"""Between them they have layers of every kind but attention in chunks."""
EACH_KIND_FIRST = [name if name in EACH_KIND else more(name) for name in FAMILIES]


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity(verbosity)


@pytest.mark.parametrize("family", EACH_KIND_FIRST)
def test_tiny(made_model: Callable[[str], Path], family: str) -> None:
    folder = made_model(family)
    narrow, wide = FAMILIES[family][:2]
    report = check(folder)
    assert report.ok
    assert report.layers == FAMILIES[family][2]
    assert 4e6 < report.parameters < 1e7
    assert report.layout.pages_per_checkpoint == narrow
    assert open_model(folder, "bfloat16").layout(16).pages_per_checkpoint == wide


@pytest.mark.parametrize("family", FAMILIES)
def test_small_has_about_300_million_parameters(family: str) -> None:
    recipe = RECIPES[family]
    raw = recipe.config("small", CheckpointOptions("float32", 4096, 32768, 2, 0, {}))
    served = family_of(raw)
    shapes = served.tensors(served.parse(raw)).values()
    assert 2.7e8 < sum(map(math.prod, shapes)) < 3.5e8


@pytest.mark.parametrize("family", EACH_KIND_FIRST)
def test_transformers_takes_it_and_answers_alike(made_model: Callable[[str], Path], family: str) -> None:
    theirs, report = AutoModelForCausalLM.from_pretrained(made_model(family), output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(20, 4000, (1, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(tokens).logits[0]
        answer = theirs.generate(tokens, max_new_tokens=16, do_sample=False)[0, 70:].tolist()
    assert 1 < wanted.std() < 3
    assert len(set(answer)) >= 8
    opened = open_model(made_model(family))
    driver = TinyDriver(_Opened(opened), [opened.build(exact=True)], exact=True)
    (found,) = driver.run(driver.row(driver.sequence(0, 80), tokens[0].tolist()))
    assert (found - wanted[-1]).abs().max() < 1e-4 * wanted.std()


class _Opened:
    """What the driver asks of a tiny model."""

    def __init__(self, opened: Any) -> None:
        self.family, self.config = opened.family, opened.config


@pytest.mark.more
def test_bfloat16(tmp_path: Path) -> None:
    make_model("granitemoehybrid", tmp_path, dtype="bfloat16")
    report = check(tmp_path)
    assert report.ok
    assert report.stored_dtypes == {"BF16": report.num_tensors}
    assert report.dtype == "bfloat16"
