"""The whole engine on the CUDA backend gives the tokens of the CPU's: interpreted, or on a GPU."""

import os
import sys
from itertools import count, cycle
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.backends import BACKENDS, INTERPRETED
from kernels.comparison import same_bits
from models.covered import IMAGES_ON_GPU, ON_GPU

CUDA = next((backend for backend in BACKENDS if backend.__name__ == "cairn.kernels.cuda"), ModuleType("none"))

pytestmark = [
    pytest.mark.skipif(CUDA not in BACKENDS, reason="there is nothing that runs Triton's kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy computes for Triton's interpreter
]

TEXT = np.random.default_rng(7).integers(20, 4000, 500)
NUMBERS = count()

GREEDY = ({"temperature": 0.0},)
SAMPLED = (
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 1, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.8, "seed": 2, "logit_bias": ((7, 2.0), (8, -100.0)), "logprobs": 2},
)
SAMPLED_AGAIN = ({"temperature": 0.9, "top_k": 20, "seed": 3}, {"temperature": 1.0, "seed": 4})
"""By which requests are drawn again as they were before they were preempted."""


LAYERS = {"lfm2": (1, 2), "qwen3_5": (2, 3), "nemotron_h": (0, 1, 3, 5), "gemma3": (0, 1, 2)}
"""One of each kind: a step of all takes many seconds where kernels are interpreted."""


@pytest.fixture(scope="module", params=ON_GPU.families)
def folder(request, tmp_path_factory) -> Path:
    """Short convolutions, the gated delta rule, Mamba2 with experts, and windows; each with attention."""
    pytest.importorskip("tokenizers", reason="the engine needs what `make gpu-wheels` collects")
    from cairn.models.random_weights.make_model import make_model
    from kernels.test_cuda_fp8 import keep_layers

    made = tmp_path_factory.mktemp("models") / request.param
    make_model(request.param.removesuffix("+mtp"), made, mtp=request.param.endswith("+mtp"))
    if INTERPRETED and request.param in LAYERS:
        keep_layers(made, LAYERS[request.param])
    return made


class KnownByTurn(dict):
    """Answers by request, whose names nobody knows before: in the turn in which they are asked for first."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__()
        self._left = iter(answers)

    def get(self, name: str, default: list[int]) -> list[int]:
        return self.setdefault(name, next(self._left) if name not in self else default)


class Engine:
    """A core that is turned by hand."""

    def __init__(self, folder: Path, device: str, observe=None, make_graphs=None, **settings) -> None:
        from cairn.engine.build import build_core
        from cairn.engine.contract import EngineConfig

        asked = {"kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 3, "dtype": "float32"} | settings
        config = EngineConfig(model=str(folder), device=device, **asked)
        self.logits: list[Tensor] = []
        observe = observe or (lambda _, logits: self.logits.append(logits.clone()))
        self.core = build_core(config, observe=observe, make_graphs=make_graphs)
        self.max_in_flight = self.core._scheduler.state.config.max_in_flight

    def ask(
        self, *prompts: np.ndarray, max_tokens: int, more: int = 0, sampling=GREEDY
    ) -> tuple[list[list[int]], list[int]]:
        """Of requests that run at once the tokens, `more` for each than for the one before, and how many of each prompt
        were cached. `sampling`: parameters, of each by turns."""
        from doubles.engine_requests import generate_request

        tokens: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        for number, (prompt, params) in enumerate(zip(prompts, cycle(sampling))):
            name = f"request-{next(NUMBERS)}"
            tokens[name] = []
            self.core.submit(
                generate_request(
                    request_id=name,
                    prompt=prompt.astype(np.int64).tobytes(),
                    max_tokens=max_tokens + number * more,
                    ignore_eos=True,
                    **params,
                )
            )
        while self.core.has_work:
            for output in self.core.step():
                tokens[output.request_id] += output.token_ids
                if output.cache is not None:
                    cached[output.request_id] = output.cache.cached_tokens
        return list(tokens.values()), [cached[name] for name in tokens]


def test_cuda_gives_the_tokens_of_the_cpu(folder):
    """Cold, a hit in mid-block, and two at once of which one is behind the other, whose tokens are drawn."""
    few = 2 if folder.name == "nemotron_h" else 3 if INTERPRETED else 5  # a step takes seconds there
    answers = {}
    for device in ("cpu", "cuda"):
        engine = Engine(folder, device)
        cold = engine.ask(TEXT[:70], max_tokens=few)
        hit = engine.ask(np.append(TEXT[:70], [5, 6, 7]), max_tokens=few)
        both = engine.ask(TEXT[:40], TEXT[30:100], max_tokens=few, sampling=SAMPLED)
        answers[device] = cold, hit, both
        assert hit[1] == [70] and cold[1] == [0]
        assert engine.max_in_flight == (1 if device == "cpu" else 2)
        engine.core.close()
    assert answers["cuda"] == answers["cpu"]


@pytest.mark.skipif(not INTERPRETED, reason="what records launches records those of Triton's interpreter")
@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_graphs_give_the_tokens_of_the_cpu(folder):
    """Batches that shrink and are padded, with two steps in flight."""
    from doubles.recorded_graphs import RecordedGraphs

    graphs, settings = RecordedGraphs(), {"cudagraph_capture_sizes": [1, 3], "max_model_len": 128}
    answers = []
    for device, make_graphs in (("cpu", None), ("cuda", lambda: graphs)):
        engine = Engine(folder, device, make_graphs=make_graphs, **settings)
        answers.append(engine.ask(TEXT[:9], TEXT[5:25], max_tokens=3, more=2))
        engine.core.close()
    assert answers[0] == answers[1]
    # The first of the tokens come with the prefill; a step more is out when the last ones are seen.
    assert graphs.num_captured == 2 and 4 <= graphs.num_replays <= 6


@pytest.mark.skipif(not INTERPRETED, reason="what records launches records those of Triton's interpreter")
@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_enforce_eager_captures_nothing(folder):
    from doubles.recorded_graphs import RecordedGraphs

    graphs = RecordedGraphs()
    engine = Engine(folder, "cuda", make_graphs=lambda: graphs, enforce_eager=True)
    engine.core.close()
    assert graphs.num_captured == 0


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_cuda_gives_the_tokens_of_the_cpu_with_drafts(folder):
    """Two at once, of both of which some drafts are right, beside decodes that are replayed and with one step out."""
    from cairn.engine.contract import SpeculativeConfig
    from cairn.scheduler.lookup_drafter import LookupDrafter
    from doubles.drafters import KnowingDrafter
    from doubles.recorded_graphs import RecordedGraphs

    prompts, settings = (TEXT[:5], TEXT[5:9]), {"cudagraph_capture_sizes": [2], "max_model_len": 128}
    plain = Engine(folder, "cpu", speculative=SpeculativeConfig(method="none"), **settings)
    wanted = plain.ask(*prompts, max_tokens=4, more=1)[0]
    plain.core.close()
    make_graphs = RecordedGraphs if INTERPRETED else None
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    engine = Engine(folder, "cuda", make_graphs=make_graphs, speculative=speculative, **settings)
    state = engine.core._scheduler.state
    assert isinstance(state.drafting.drafter, LookupDrafter) and engine.max_in_flight == 1
    answers = KnownByTurn(wanted)
    state.drafting.drafter = KnowingDrafter(answers, 2, lambda proposal: proposal % 3, 1000)
    assert engine.ask(*prompts, max_tokens=4, more=1)[0] == wanted
    assert 0 < state.counters.spec_decode.num_accepted_tokens < state.counters.spec_decode.num_draft_tokens
    engine.core.close()


@pytest.mark.parametrize("folder", ["qwen3_5+mtp"], indirect=True)
def test_cuda_gives_the_tokens_of_the_cpu_with_drafts_of_the_models_head(folder):
    from cairn.engine.contract import SpeculativeConfig
    from doubles.drafters import LeftToTheHead

    answers = {}
    for device, method in (("cpu", "none"), ("cuda", "mtp")):
        engine = Engine(folder, device, speculative=SpeculativeConfig(method=method, num_speculative_tokens=2))
        state = engine.core._scheduler.state
        if state.drafting.drafter is not None:
            state.drafting.drafter = LeftToTheHead(2)
        answers[device] = engine.ask(TEXT[:9], max_tokens=4)
        assert (state.counters.spec_decode.num_drafts > 0) is (device == "cuda")
        engine.core.close()
    assert answers["cuda"] == answers["cpu"]


@pytest.mark.parametrize("folder", ["lfm2"], indirect=True)
def test_cuda_gives_the_same_after_a_preemption(folder):
    first = Engine(folder, "cpu")
    pool = 11 * first.core.info.cache.page_bytes  # both prompts fit, and not both answers
    first.core.close()
    answers = {}
    for device in ("cpu", "cuda"):
        engine = Engine(folder, device, kv_cache_memory_bytes=pool, enable_prefix_caching=False)
        answers[device] = engine.ask(TEXT[:70], TEXT[100:170], max_tokens=12, sampling=SAMPLED_AGAIN)[0]
        assert engine.core.stats().num_preemptions > 0
        engine.core.close()
    assert answers["cuda"] == answers["cpu"]


@pytest.mark.skipif(not INTERPRETED and torch.cuda.device_count() < 2, reason="each rank has a GPU of its own")
@pytest.mark.parametrize("folder", ["lfm2"], indirect=True)
def test_cuda_on_two_ranks_gives_the_tokens_of_one(folder, tmp_path, monkeypatch):
    """Cold, a hit in mid-block, and two at once of which one is preempted; over gloo where it is interpreted. There
    decode steps are records of launches, of each rank its own, padded to two rows, and what is prefill is not."""
    from cairn.models.registry import open_model
    from doubles.recorded_graphs import GRAPHS_LOG, LoggedGraphs

    monkeypatch.setenv(GRAPHS_LOG, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    answers, settings = {}, {"cudagraph_capture_sizes": [2], "max_model_len": 128}
    make_graphs = LoggedGraphs if INTERPRETED else None
    for device, ranks in (("cpu", 1), ("cuda", 2)):
        pool = 7 * open_model(folder, "float32").layout(16, ranks).page_bytes  # both prompts fit, and not both answers
        asked = {"tensor_parallel_size": ranks, "kv_cache_memory_bytes": pool} | settings
        engine = Engine(folder, device, make_graphs=make_graphs if device == "cuda" else None, **asked)
        assert engine.max_in_flight == ranks
        cold = engine.ask(TEXT[:20], max_tokens=2)
        hit = engine.ask(np.append(TEXT[:20], [5, 6, 7]), max_tokens=2)
        assert (cold[1], hit[1]) == ([0], [20])
        both = engine.ask(TEXT[100:147], TEXT[200:247], max_tokens=5)[0]
        assert engine.core.stats().num_preemptions > 0
        answers[device] = cold, hit, both
        passes = engine.core._runner.forward_passes
        engine.core.close()
    assert answers["cuda"] == answers["cpu"]
    if INTERPRETED:
        lines, others = (path.read_text().splitlines() for path in tmp_path.iterdir())
        assert lines == others, "a step was replayed by one rank alone"
        assert lines == ["captured 1"] + ["replayed 1"] * (len(lines) - 1) and 5 < len(lines) - 1 < passes


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's memory is all of it")
def test_cuda_takes_what_it_is_given_where_it_is_interpreted(folder):
    engine = Engine(folder, "cuda")
    cache = engine.core.info.cache
    assert cache.num_pages == (16 << 20) // cache.page_bytes
    engine.core.close()


@pytest.mark.parametrize("folder", IMAGES_ON_GPU.families, indirect=True)
def test_cuda_gives_the_tokens_of_the_cpu_for_an_image(folder):
    from cairn.engine.contract import Pixels
    from cairn.engine.text.tokenizer import ModelTokenizer
    from doubles.engine_requests import generate_request

    rgb = np.random.default_rng(5).integers(0, 256, (64, 64, 3), dtype=np.uint8).tobytes()
    picture = {"type": "image", "image": Pixels(width=64, height=64, rgb=rgb)}
    made = ModelTokenizer(folder).render_chat([{"role": "user", "content": [picture]}])
    answers = {}
    for device in ("cpu", "cuda"):
        engine = Engine(folder, device)
        engine.core.submit(
            generate_request(
                request_id="image",
                prompt=np.array(made.token_ids, np.int64).tobytes(),
                images=made.images,
                max_tokens=2,
                temperature=0.0,
                ignore_eos=True,
            )
        )
        answers[device] = []
        while engine.core.has_work:
            answers[device] += [token for output in engine.core.step() for token in output.token_ids]
        assert engine.core.stats().images.num_encoded == 1 and len(answers[device]) == 2
        engine.core.close()
    assert answers["cuda"] == answers["cpu"]


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_cuda_with_kernels_of_libraries(folder, monkeypatch):
    """Doubles of flashinfer and fla: one prompt goes to fla, its continuation behind the hit to cairn's own kernel."""
    from doubles.gpu_libraries import FLASHINFER, Fla

    fla = Fla()
    monkeypatch.setitem(sys.modules, "flashinfer", FLASHINFER)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", fla)
    logits = {}
    for names in ({}, {"attention_backend": "flashinfer", "gdn_prefill_backend": "fla"}):
        seen = logits[bool(names)] = []
        engine = Engine(
            folder,
            "cuda",
            observe=lambda request, row, seen=seen: seen.append(row.double().cpu()),
            dtype="bfloat16",
            mamba_cache_mode="align",
            **names,
        )
        fla.calls.clear()  # those of the start
        engine.ask(TEXT[:32], max_tokens=2)
        assert engine.ask(TEXT[:36], max_tokens=1)[1] == [32]
        engine.core.close()
    assert fla.calls and {tuple(call) for call in fla.calls} == {(32,)} and len(logits[True]) == 3
    for own, theirs in zip(logits[False], logits[True], strict=True):
        assert (own - theirs).abs().max() < 0.05 * own.abs().max()


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
