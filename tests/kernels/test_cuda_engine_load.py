"""The engine on the CUDA backend against what does not come from cairn, and under load: interpreted, or on a GPU.

logits  in float32 and bfloat16, cold, decoded, behind a hit and in a batch, against transformers' in float64
images  the same of a model that reads images, against the CPU's
load    requests of all lengths that come, are preempted and are aborted, in a pool that is too small for them: every
        plan is checked, all accounts are audited, and greedy answers are the CPU's
"""

import os
import random
import sys
import time
from itertools import count
from types import ModuleType

import numpy as np
import pytest
import torch

from kernels.backends import BACKENDS, INTERPRETED

CUDA = next((backend for backend in BACKENDS if backend.__name__ == "cairn.kernels.cuda"), ModuleType("none"))
if CUDA not in BACKENDS:
    pytest.skip("there is nothing that runs Triton's kernels", allow_module_level=True)
pytest.importorskip("tokenizers", reason="the engine needs what `make gpu-wheels` collects")

from benchmarks.made_model import redraw  # noqa: E402

from cairn.models.random_weights.make_model import make_model  # noqa: E402
from doubles.engine_requests import generate_request  # noqa: E402
from kernels.test_cuda_engine import TEXT, Engine  # noqa: E402
from models.covered import LOGITS_ON_GPU  # noqa: E402

# numpy computes for Triton's interpreter
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]

on_gpu_only = pytest.mark.skipif(
    INTERPRETED and "SLOW_KERNELS" not in os.environ, reason="slow in Triton's interpreter: set SLOW_KERNELS=1"
)

SMALL = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "hidden_size": 64, "intermediate_size": 64}
"""Of a model whose steps take a tenth of a second where kernels are interpreted."""

SECONDS, MOST_REQUESTS = (600.0, 5) if INTERPRETED else (60.0, 100_000)
"""How long requests keep coming, and how many come."""

SEED = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("models") / family
            make_model(family.removesuffix("-small"), made[family])
            if family == "lfm2-small":
                redraw("lfm2", made[family], SMALL, 0, "float32")
        return made[family]

    return folder


def truth(folder, tokens, dtype):
    """transformers' logits of the checkpoint in float64 throughout, [n, vocab], and the error that cairn's may have:
    twice that of transformers in `dtype`, in standard deviations."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from models.wide_float import wide_float

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    given, options = torch.tensor([tokens]), {"experts_implementation": "eager"}
    with pytest.MonkeyPatch.context() as patch:
        # Where fla is installed transformers would call it, whose kernels are for a GPU's tensors.
        patch.setitem(sys.modules, "fla", None)
        narrow = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **options).eval()
        wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.inference_mode():
        found = narrow(given, use_cache=False).logits[0].double()
        with wide_float(sys.modules[type(wide).__module__]):
            wanted = wide.double()(given, use_cache=False).logits[0]
    assert wanted.dtype == torch.float64
    return wanted, 2 * float((found - wanted).abs().max() / wanted.std()) + 1e-6


class Observed:
    """The logits of every token that was sampled, in their order, with its position."""

    def __init__(self):
        self.rows = []

    def __call__(self, sample, logits):
        self.rows.append((sample.position, logits.double().cpu()))

    def check(self, logits, bar):
        for position, row in self.rows:
            error = float((row - logits[position - 1]).abs().max() / logits.std())
            assert error <= bar, f"position {position}: error {error:.2e}, bar {bar:.2e}"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype) if (family, dtype) == ("lfm2", "float32") else pytest.param(family, dtype, marks=on_gpu_only)
        for family in LOGITS_ON_GPU.families
        for dtype in ("float32", "bfloat16")
        if (family, dtype) != ("qwen3_5_moe", "bfloat16")  # a mixture's in float32
    ],
)
def test_cuda_logits_are_those_of_transformers(folders, family, dtype):
    prompt, observed = TEXT[:70], Observed()
    engine = Engine(folders(family), "cuda", observe=observed, dtype=dtype)
    ((answer,), _) = engine.ask(prompt, max_tokens=3)
    assert [position for position, _ in observed.rows] == [70, 71, 72]
    observed.check(*truth(folders(family), [*prompt.tolist(), *answer], dtype))

    # behind a hit inside the sequence, two at a time
    longer = np.append(prompt, TEXT[100:110])
    observed.rows.clear()
    _, cached = engine.ask(longer, longer[:75], max_tokens=1)
    assert min(cached) >= 64
    assert sorted(position for position, _ in observed.rows) == [75, 80]
    observed.check(*truth(folders(family), longer.tolist(), dtype))
    engine.core.close()


@on_gpu_only
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_cuda_gives_the_same_after_a_preemption_of_states(folders, family):
    """`test_cuda_engine` asks it of short convolutions, also where kernels are interpreted."""
    first = Engine(folders(family), "cpu")
    cache = first.core.info.cache
    pool = 16 * cache.page_bytes  # both prompts fit, and not both answers
    first.core.close()
    answers = {}
    for device in ("cpu", "cuda"):
        engine = Engine(folders(family), device, kv_cache_memory_bytes=pool, enable_prefix_caching=False)
        answers[device] = engine.ask(TEXT[:90], TEXT[100:190], max_tokens=60)[0]
        assert engine.core.stats().num_preemptions > 0
        engine.core.close()
    assert answers["cuda"] == answers["cpu"]


@on_gpu_only
def test_cuda_reads_images(folders):
    """Its vision model computes on the CPU; what it makes of an image goes to the device with the step."""
    asking = pytest.importorskip("engine.test_images_served", reason="Pillow is not installed")
    found = {}
    for device in ("cpu", "cuda"):
        asker = asking.Asker(folders("qwen3_5_vl"), device=device, dtype="float32")
        image = asking.image(64, 64, seed=1)
        cold = asker.ask(image, asking.text("What?"), max_tokens=2)
        hit = asker.ask(image, asking.text("Why?"), max_tokens=1)
        assert asker.encoded == 1 and hit[1].cached_tokens > 0
        found[device] = cold[0], hit[0], cold[2], hit[2]
        asker.core.close()
    assert found["cuda"][:2] == found["cpu"][:2]
    for own, cpus in zip(found["cuda"][2:], found["cpu"][2:], strict=True):
        assert (own.cpu() - cpus).abs().max() < 1e-4 * cpus.std()


class Load:
    """Random requests at one engine. `finished`: prompts and greedy answers of those that were not aborted."""

    def __init__(self, engine, seed):
        self.core, self.rng = engine.core, random.Random(seed)
        self.shared = [TEXT[:20], TEXT[200:220]]
        self.running, self.finished, self.names = {}, [], count()
        self.num_aborted = 0

    def submit(self):
        start = self.rng.choice([TEXT[:0], *self.shared])
        drawn = np.random.default_rng(self.rng.randrange(1 << 30))
        prompt = np.append(start, drawn.integers(20, 4000, self.rng.randint(10, 40)))
        name, is_greedy = f"load-{next(self.names)}", self.rng.random() < 0.7
        length = self.rng.randint(4, 24)
        self.core.submit(
            generate_request(
                request_id=name,
                prompt=prompt.astype(np.int64).tobytes(),
                max_tokens=length,
                temperature=0.0 if is_greedy else 1.0,
                top_p=1.0 if is_greedy else 0.9,
                seed=7,
                ignore_eos=True,
            )
        )
        self.running[name] = prompt, length, [], is_greedy

    def step(self):
        for output in self.core.step():
            assert output.error is None, output.error
            if output.request_id in self.running:
                prompt, length, tokens, is_greedy = self.running[output.request_id]
                tokens += output.token_ids
                assert len(tokens) <= length
                if len(tokens) == length:
                    del self.running[output.request_id]
                    if is_greedy:
                        self.finished.append((prompt, tokens))

    def abort(self):
        name = self.rng.choice([*self.running])
        del self.running[name]
        self.core.abort(name)
        self.num_aborted += 1

    def run(self, seconds, most):
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end and number < most:
            while len(self.running) < 6 and number < most:
                self.submit()
                number += 1
            self.step()
            if self.running and self.rng.random() < 0.03:
                self.abort()
        deadline = time.monotonic() + 120
        while self.core.has_work:
            assert time.monotonic() < deadline, f"{len(self.running)} requests do not end"
            self.step()
        assert not self.running


@pytest.mark.parametrize(
    "family", ["lfm2-small", *(pytest.param(family, marks=on_gpu_only) for family in ("lfm2", "qwen3_5", "nemotron_h"))]
)
def test_cuda_under_load(folders, family):
    least = Engine(folders(family), "cpu")
    cache = least.core.info.cache
    pages = 7 + cache.pages_per_checkpoint
    least.core.close()
    settings = {"kv_cache_memory_bytes": pages * cache.page_bytes, "max_num_seqs": 4, "check_plans": True}
    engine = Engine(folders(family), "cuda", max_model_len=96, **settings)
    load = Load(engine, SEED)
    load.run(SECONDS, MOST_REQUESTS)
    engine.core.idle()
    assert engine.core.reset_cache() == 0  # nobody holds a page
    engine.core.idle()
    stats = engine.core.stats()
    engine.core.close()
    assert len(load.finished) >= 2 and stats.num_preemptions > 0

    sample = load.finished if INTERPRETED else load.rng.sample(load.finished, min(100, len(load.finished)))
    cpu = Engine(folders(family), "cpu")
    same = sum(cpu.ask(prompt, max_tokens=len(tokens))[0] == [tokens] for prompt, tokens in sample)
    cpu.core.close()
    # where two tokens are nearly as likely, float32's last digits decide
    assert same >= 0.95 * len(sample), f"{same} of {len(sample)} answers are the CPU's"
