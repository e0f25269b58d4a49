"""Models with `--quantization int4`: how far off their logits are, what they take, what stays, what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cairn.check.report import CheckSettings, check
from cairn.errors import ConfigError
from cairn.kernels.cpu.int4 import PackedInt4
from cairn.kernels.cpu.products import PackedWeight
from cairn.models.registry import open_model
from cairn.transfer.digest import layout_hash
from engine.test_exactness import OTHER, TEXT
from kernels.test_int4 import NEEDS_INT4
from kernels.test_int8 import bytes_of
from models.covered import INT4
from models.test_served_int8 import Served, distance, parts_of, text
from tiers import first

MOST = {"qwen3_5": 0.7}
"""Of `distance`; something unrelated is 1.4 away. Of the others' random routers some choose other experts: 1.1 is less
than that. `cairn check --generate` holds a trained model to its perplexity."""


@pytest.fixture(scope="module", params=first(1, INT4.families))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(family: str, made_model: Callable[[str], Path]) -> Served:
    return Served(made_model(family), "bfloat16", "int4")


@NEEDS_INT4
def test_logits_are_near_those_in_full_precision(
    family: str, served: Served, made_model: Callable[[str], Path]
) -> None:
    wanted = Served(made_model(family), "float32").logits()
    wide = Served(made_model(family), "float32", "int4").logits()
    for found in (served.logits(), wide):
        assert 1e-2 < distance(found, wanted) < MOST.get(family, 1.1)


@NEEDS_INT4
def test_what_is_quantized(served: Served) -> None:
    """All matrices but routers' and the gate of a shared expert, as in int8."""
    for linear in served.models[False].linears:
        kept = linear.weight.dtype == torch.float32 or linear.shape[0] == 1
        assert isinstance(linear.weight, PackedWeight if kept else PackedInt4), linear.shape
    assert isinstance(served.models[False].lm_head, PackedInt4)


@NEEDS_INT4
def test_hits_and_neighbours_change_no_text(served: Served) -> None:
    asked = TEXT[:64] + OTHER[:70]
    engine = served.engine("auto")
    engine.ask(TEXT[:64])
    assert text(engine.ask(asked, 8)) == text(served.engine().ask(asked, 8))
    assert engine.requests[2].stats.first_sequence.hit == 64
    together = served.engine(budget=150)
    numbers = [together.submit(each, 6) for each in (TEXT[:70], OTHER[:200])]
    together.run()
    for number, each in zip(numbers, (TEXT[:70], OTHER[:200]), strict=True):
        assert text(together.logits[number]) == text(served.engine().ask(each, 6))


@NEEDS_INT4
def test_counted_weights_are_those_that_are_loaded(
    family: str, served: Served, made_model: Callable[[str], Path]
) -> None:
    counted = check(made_model(family), CheckSettings(dtype="bfloat16", quantization="int4")).weight_bytes
    loaded = bytes_of(*parts_of(served.models[False], Tensor))
    assert counted == pytest.approx(loaded, rel=0.05)


def test_pages_of_quantized_models_are_other_pages(tiny_model: Path) -> None:
    facts = [open_model(tiny_model, "bfloat16", each).transfer_facts() for each in (None, "int8", "int4")]
    assert facts[2] == {**facts[0], "quantization": "int4"}
    assert len({layout_hash(each) for each in facts}) == 3


def test_exact_is_refused_before_a_tensor_is_read(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--exact .*--quantization int4: leave one of them out"):
        open_model(tiny_model, "float32", "int4").build(exact=True)
