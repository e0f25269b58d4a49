"""Drafts change no bit of the CUDA backend's logits with `--exact`: scheduler, runner and kernels, turned by hand."""

from pathlib import Path

import pytest
from torch import Tensor

from kernels.backends import DEVICES, INTERPRETED, ON_GPU
from tiers import more

if not INTERPRETED and not ON_GPU:
    pytest.skip("there is nothing that runs Triton's kernels", allow_module_level=True)
pytest.importorskip("tokenizers", reason="the engine needs what `make gpu-wheels` collects")

from cairn.kernels import cuda_exact
from cairn.models.random_weights.make_model import make_model
from cairn.models.registry import open_model
from engine.test_exactness import OTHER, TEXT, Engine, assert_same
from engine.test_exactness_drafts import Drafted

pytestmark = [
    pytest.mark.usefixtures("products_as_on_a_gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy computes for Triton's interpreter
]


class LoadedOnCuda:
    """As `engine.test_exactness.Loaded`, of `cuda_exact` alone."""

    def __init__(self, folder: Path) -> None:
        self.opened = open_model(folder)
        self.models = {True: self.opened.build(exact=True, backend="cuda_exact", device=DEVICES[cuda_exact])}

    def alone(self, prompt: tuple[int, ...], max_tokens: int) -> list[Tensor]:
        """The logits of an answer without drafts."""
        answer: list[Tensor] = Engine(self, None).ask(prompt, max_tokens)
        return answer


@pytest.fixture(scope="module", params=["qwen3_5", more("nemotron_h")])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedOnCuda:
    """The gated delta rule, and Mamba2 with experts; each with convolutions and attention."""
    folder = tmp_path_factory.mktemp("models") / request.param
    make_model(request.param, folder)
    return LoadedOnCuda(folder)


def test_answers_have_the_logits_that_they_have_without_drafts(loaded: LoadedOnCuda) -> None:
    """Verifies of which none, one and two drafts are right, folds of them, one with a checkpoint in it, and a prompt
    beside them. A step takes seconds."""
    expected = loaded.alone(TEXT[:62], 6)
    drafted = Drafted(loaded, "rising", num_drafts=2)
    number = drafted.submit(TEXT[:62], expected)
    for _ in range(2):
        drafted.engine.step()
    beside = drafted.engine.submit(OTHER[:5], 1)
    drafted.engine.run()
    assert_same(drafted.engine.logits[number], expected)
    assert_same(drafted.engine.logits[beside], loaded.alone(OTHER[:5], 1))
    assert drafted.num_accepted > 1
