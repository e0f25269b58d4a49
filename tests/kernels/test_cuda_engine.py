"""The whole engine on the CUDA backend gives the tokens of the CPU's: interpreted, or on a GPU."""

from itertools import count
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from torch import Tensor

from kernels.backends import BACKENDS, INTERPRETED
from kernels.comparison import same_bits

CUDA = next((backend for backend in BACKENDS if backend.__name__ == "cairn.kernels.cuda"), ModuleType("none"))

pytestmark = [
    pytest.mark.skipif(CUDA not in BACKENDS, reason="there is nothing that runs Triton's kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy computes for Triton's interpreter
]

TEXT = np.random.default_rng(7).integers(20, 4000, 500)
NUMBERS = count()


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5", "nemotron_h"])
def folder(request, tmp_path_factory) -> Path:
    """Short convolutions, the gated delta rule, and Mamba2 with experts; each with attention."""
    pytest.importorskip("tokenizers", reason="the engine needs what `make gpu-wheels` collects")
    from cairn.models.random_weights.make_model import make_model

    made = tmp_path_factory.mktemp("models") / request.param
    make_model(request.param, made)
    return made


class Engine:
    """A core that is turned by hand."""

    def __init__(self, folder: Path, device: str, **settings) -> None:
        from cairn.engine.build import build_core
        from cairn.engine.contract import EngineConfig

        asked = {"kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 3} | settings
        config = EngineConfig(model=str(folder), device=device, dtype="float32", **asked)
        self.logits: list[Tensor] = []
        self.core = build_core(config, observe=lambda _, logits: self.logits.append(logits.clone()))
        self.max_in_flight = self.core._scheduler.state.config.max_in_flight

    def ask(self, *prompts: np.ndarray, max_tokens: int) -> tuple[list[list[int]], list[int]]:
        """Of requests that run at once the tokens, and how many of each prompt were cached."""
        from doubles.engine_requests import generate_request

        tokens: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        for prompt in prompts:
            name = f"request-{next(NUMBERS)}"
            tokens[name] = []
            self.core.submit(
                generate_request(
                    request_id=name,
                    prompt=prompt.astype(np.int64).tobytes(),
                    max_tokens=max_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                )
            )
        while self.core.has_work:
            for output in self.core.step():
                tokens[output.request_id] += output.token_ids
                if output.cache is not None:
                    cached[output.request_id] = output.cache.cached_tokens
        return list(tokens.values()), [cached[name] for name in tokens]


def test_cuda_gives_the_tokens_of_the_cpu(folder):
    """Cold, a hit in mid-block, and two at once of which one is behind the other."""
    few = 2 if folder.name == "nemotron_h" else 5  # a step takes seconds there
    answers = {}
    for device in ("cpu", "cuda"):
        engine = Engine(folder, device)
        cold = engine.ask(TEXT[:70], max_tokens=few)
        hit = engine.ask(np.append(TEXT[:70], [5, 6, 7]), max_tokens=few)
        both = engine.ask(TEXT[:40], TEXT[30:100], max_tokens=few)
        answers[device] = cold, hit, both
        assert hit[1] == [70] and cold[1] == [0]
        assert engine.max_in_flight == (1 if device == "cpu" else 2)
        engine.core.close()
    assert answers["cuda"] == answers["cpu"]


@pytest.mark.parametrize("folder", ["lfm2"], indirect=True)
def test_cuda_gives_the_same_after_a_preemption(folder):
    first = Engine(folder, "cpu")
    pool = 13 * first.core.info.cache.page_bytes  # both prompts fit, and not both answers
    first.core.close()
    answers = {}
    for device in ("cpu", "cuda"):
        engine = Engine(folder, device, kv_cache_memory_bytes=pool, enable_prefix_caching=False)
        answers[device] = engine.ask(TEXT[:90], TEXT[100:190], max_tokens=20)[0]
        assert engine.core.stats().num_preemptions > 0
        engine.core.close()
    assert answers["cuda"] == answers["cpu"]


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's memory is all of it")
def test_cuda_takes_what_it_is_given_where_it_is_interpreted(folder):
    engine = Engine(folder, "cuda")
    cache = engine.core.info.cache
    assert cache.num_pages == (16 << 20) // cache.page_bytes
    engine.core.close()


@pytest.mark.parametrize("folder", ["lfm2"], indirect=True)
def test_exact_logits_are_the_same_bits_for_a_prompt_that_is_cached(folder, products_as_on_a_gpu):
    """Beside another one; `test_cuda_exactness` has the other cases."""
    engine = Engine(folder, "cuda", exact=True)
    assert engine.core.info.exact and engine.max_in_flight == 2
    engine.ask(TEXT[:5], max_tokens=1)
    (wanted,) = engine.logits
    engine.logits.clear()
    _, cached = engine.ask(TEXT[:5], TEXT[50:52], max_tokens=1)
    assert cached == [5, 0] and len(engine.logits) == 2
    assert any(same_bits(found.cpu(), wanted.cpu()) for found in engine.logits)
    engine.core.close()
