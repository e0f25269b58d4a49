"""The promise of `--exact`, with a real model: every logit the same, bit for bit, whatever happened before or beside.

The reference is a core that caches nothing and serves one request at a time.
"""

from functools import cached_property
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.cache.audit import audit
from cairn.cache.eviction import eviction_for
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.devices import Device
from cairn.engine.step_pipeline import StepPipeline
from cairn.errors import ConfigError
from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.layers.model import Model
from cairn.machine import Machine
from cairn.models.registry import OpenModel, open_model
from cairn.runner.plan_check import CheckedRunner, PlanLimits
from cairn.runner.runner import Runner
from cairn.scheduler.preempt import preempt
from cairn.scheduler.request import Request, Spec
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.state import SchedulerConfig
from cairn.types import Boundary, ManualClock, RequestId, SamplingParams
from doubles.counted_device import counted_device, counted_kernels
from doubles.engine_requests import generate_request
from models.covered import WHOLE_EXACTNESS
from tiers import first, first_of, long, more

TEXT = tuple(np.random.default_rng(7).integers(20, 4000, 500).tolist())
OTHER = tuple(np.random.default_rng(8).integers(20, 4000, 500).tolist())
ANSWER = 4
BLOCK = 16


class Loaded:
    """The tiny model in both numerics, and the answers it gives alone."""

    def __init__(self, folder: Path) -> None:
        self.opened: OpenModel = open_model(folder)
        if self.opened.config.num_mtp_layers:
            self.opened = self.opened.with_head()
        self.models: dict[bool, Model] = {exact: self.opened.build(exact=exact) for exact in (False, True)}
        # without a recurrent state, any matched length can be resumed
        self.grid = 64 if self.opened.layout(BLOCK).state_bytes else 1
        self._alone: dict[tuple, list[torch.Tensor]] = {}

    def alone(self, prompt, max_tokens=ANSWER, exact=True) -> list[torch.Tensor]:
        key = (prompt, max_tokens, exact)
        if key not in self._alone:
            self._alone[key] = Engine(self, None, exact=exact).ask(prompt, max_tokens)
        return self._alone[key]


class OnDevice(Loaded):
    """The same on a device that counts copies, but for the answers that it gives alone: they are the host's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        device, self.copies = counted_device()
        self._host = Loaded(folder)
        self.models = {
            exact: self.opened.build(exact=exact, backend=counted_kernels(backend), device=device)
            for exact, backend in ((False, "cpu"), (True, "exact"))
        }

    def alone(self, prompt, max_tokens=ANSWER, exact=True) -> list[torch.Tensor]:
        return self._host.alone(prompt, max_tokens, exact)


def load(name: str, made_model) -> Loaded:
    """`name`: a family, and "@device" behind it for one that is not on the host."""
    family, _, place = name.partition("@")
    return OnDevice(made_model(family)) if place else Loaded(made_model(family))


class Engine:
    """Scheduler and runner turned by hand; collects the logits of every request by its seed. On a device that counts
    them, each step has one copy in, and one out where something was drawn."""

    def __init__(
        self, loaded, mode="auto", num_pages=400, block_size=BLOCK, exact=True, budget=512, ahead=1, drafter=None
    ):
        layout = loaded.opened.layout(block_size)
        config = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=budget, exact=exact, max_in_flight=ahead, max_model_len=4096
        )
        placement = None if mode is None else placement_for(mode, block_size, exact)
        num_pages *= max(1, len(layout.groups))  # as many of each group
        self.cache = PrefixCache(layout, num_pages, CachePolicy(placement, eviction_for("value"), exact))
        self.scheduler = Scheduler(config, self.cache, ManualClock(), drafter=drafter)
        self.runner = Runner(loaded.models[exact], layout, num_pages, 4, exact, observe=self._observe)
        self._copies = getattr(loaded, "copies", None)
        self._limits = PlanLimits(
            layout, num_pages, 4, loaded.models[exact].vocab_size, exact and layout.state_bytes > 0
        )
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.requests: dict[int, Request] = {}
        self._numbers = count(1)

    def _observe(self, sample: SamplingMetadata, logits: torch.Tensor) -> None:
        self.logits[sample.params.seed].append(logits.clone())

    def submit(self, prompt, max_tokens=ANSWER, boundaries=(), **params) -> int:
        number = next(self._numbers)
        self.logits[number] = []
        name = RequestId(str(number))
        # the seed tells the requests apart, and does nothing else where tokens are not drawn by chance
        sampling = SamplingParams(**{"temperature": 0.0, "seed": number} | params)
        keys = np.array(prompt, np.int64)
        spec = Spec(
            request_id=name,
            prompt=keys,
            sampling=sampling,
            max_tokens=max_tokens,
            boundaries=tuple(map(Boundary, boundaries)),
        )
        self.scheduler.submit(spec)
        self.requests[number] = self.scheduler.state.requests[name]
        return number

    @cached_property
    def pipeline(self) -> StepPipeline:
        """Of the runner that is there at the first step: engines of several ranks put theirs in its place."""
        return StepPipeline(self.scheduler, CheckedRunner(self.runner, self._limits))

    def step(self) -> None:
        if self._copies is not None:
            self._copies.take()
        plans = []
        while self.pipeline.can_launch:
            plans.append(self.pipeline.launch())
        self.pipeline.collect()
        if self._copies is not None:
            assert self._copies.take() == (len(plans), sum(bool(len(plan.samples)) for plan in plans))
        audit(self.cache)

    def run(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work:
                assert not self.cache.pinned.sequences and not self.cache.pinned.steps
                return
            self.step()
        raise AssertionError("no end in sight")

    def ask(self, prompt, max_tokens=ANSWER, **arguments) -> list[torch.Tensor]:
        number = self.submit(prompt, max_tokens, **arguments)
        self.run()
        return self.logits[number]


# The other families, and devices, have a few cases in `test_exactness_families`, and all of these in the long run.
FAMILIES, LONG_FAMILIES = WHOLE_EXACTNESS.regular_families, WHOLE_EXACTNESS.long_families


@pytest.fixture(
    scope="module",
    params=[
        *first(1, FAMILIES),
        *(long(f"{name}@device") for name in FAMILIES),
        *(pytest.param(name, marks=pytest.mark.long) for name in LONG_FAMILIES),
    ],
)
def loaded(request: pytest.FixtureRequest, made_model) -> Loaded:
    return load(request.param, made_model)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for step, (one, other) in enumerate(zip(map(torch.Tensor.cpu, found), expected, strict=True)):
        assert torch.equal(one, other), f"token {step} differs by {(one - other).abs().max():.1e}"


FIRST_EDGES = (1, 17, 63, 64, 65)
MORE_EDGES = (2, 3, 15, 16, 127, 128, 129, 191, 192, 193, 320)
EDGES = [*FIRST_EDGES, *map(more, MORE_EDGES)]
WITH_LONGER = ((64, True), (129, True))
MODES = ("align", "all", "granular", "junction", "auto")


@pytest.mark.parametrize(
    ("shared", "longer"),
    first_of([*((shared, False) for shared in FIRST_EDGES), *WITH_LONGER], (*FIRST_EDGES, *MORE_EDGES), (False, True)),
)
def test_a_prompt_after_one_that_shares_its_beginning(loaded, shared, longer):
    engine = Engine(loaded)
    engine.ask(TEXT[: shared + 60] if longer else TEXT[:shared])
    prompt = TEXT[:shared] + OTHER[:70]
    assert_same(engine.ask(prompt), loaded.alone(prompt))
    assert engine.requests[2].stats.first_sequence.hit == shared // loaded.grid * loaded.grid


@pytest.mark.parametrize("length", EDGES)
def test_a_prompt_that_is_wholly_cached(loaded, length):
    engine = Engine(loaded)
    for _ in range(2):
        assert_same(engine.ask(TEXT[:length]), loaded.alone(TEXT[:length]))
    assert engine.requests[2].stats.first_sequence.hit == length


@pytest.mark.parametrize("length", [2, 64, 65, *map(more, (16, 128, 129, 200))])
def test_all_but_the_last_token(loaded, length):
    engine = Engine(loaded)
    engine.ask(TEXT[: length - 1])
    assert_same(engine.ask(TEXT[:length]), loaded.alone(TEXT[:length]))
    engine = Engine(loaded)
    engine.ask(TEXT[:length])
    assert_same(engine.ask(TEXT[: length - 1]), loaded.alone(TEXT[: length - 1]))


@pytest.mark.parametrize(
    ("mode", "block_size"), first_of([*((mode, 16) for mode in MODES), ("auto", 128)], MODES, (16, 48, 128))
)
def test_every_policy_and_block_size(loaded, mode, block_size):
    engine = Engine(loaded, mode, block_size=block_size)
    for prompt in (TEXT[:300], TEXT[:200] + OTHER[:90], TEXT[:200] + OTHER[50:99], TEXT[:300]):
        assert_same(engine.ask(prompt, boundaries=(100,)), loaded.alone(prompt))
    assert engine.cache.counters.hits > 0


@pytest.mark.parametrize("budget", [68, 128, *map(more, (100, 192, 400))])
def test_prompts_in_chunks(loaded, budget):
    engine = Engine(loaded, budget=budget)
    assert_same(engine.ask(TEXT[:333]), loaded.alone(TEXT[:333]))


@pytest.mark.parametrize("turns", [3, more(5)])
def test_a_chat_that_grows(loaded, turns):
    engine = Engine(loaded)
    prompt = TEXT[:90]
    for turn in range(turns):
        expected = loaded.alone(prompt, 12)
        assert_same(engine.ask(prompt, 12), expected)
        answer = tuple(int(logits.argmax()) for logits in expected)
        prompt = prompt + answer + OTHER[40 * turn : 40 * turn + 30]


def test_requests_side_by_side(loaded):
    engine = Engine(loaded, budget=150)
    prompts = [TEXT[:70], OTHER[:200], TEXT[:130] + OTHER[:33], TEXT[100:101], TEXT[:128], OTHER[:200]]
    numbers = []
    for prompt in prompts:
        numbers.append(engine.submit(prompt, 10))
        engine.step()
    engine.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert_same(engine.logits[number], loaded.alone(prompt, 10))


def test_planning_ahead(loaded):
    engine = Engine(loaded, ahead=2)
    numbers = [engine.submit(prompt, 10) for prompt in (TEXT[:100], OTHER[:70])]
    engine.run()
    assert_same(engine.logits[numbers[0]][:10], loaded.alone(TEXT[:100], 10))
    assert_same(engine.logits[numbers[1]][:10], loaded.alone(OTHER[:70], 10))


@pytest.mark.parametrize(("room", "steps"), first_of([(0, 5), (10_000, 1)], (0, 10_000), (1, 2, 5, 20)))
def test_a_preempted_request(loaded, room, steps):
    engine = Engine(loaded)
    number = engine.submit(TEXT[:150], 25)
    for _ in range(steps):
        engine.step()
    request = engine.requests[number]
    # with room 0 the state is saved and restored, with all pages wanted it is computed again
    preempt(engine.scheduler.state, request, request, room)
    engine.run()
    expected = loaded.alone(TEXT[:150], 25)
    tokens = [int(logits.argmax()) for logits in expected]
    assert request.output == tokens
    assert_same(engine.logits[number], expected)


def test_after_eviction(loaded):
    # two of the prompts, and four checkpoints
    engine = Engine(loaded, num_pages=36 + 4 * loaded.opened.layout(BLOCK).pages_per_checkpoint)
    for prompt in (TEXT[:300], OTHER[:300], TEXT[:300], OTHER[:250] + TEXT[:40], TEXT[:300]):
        assert_same(engine.ask(prompt), loaded.alone(prompt))
    assert engine.cache.checkpoints.evicted.total() > 0


@pytest.mark.parametrize("steps", [1, 4, *map(more, (2, 6))])
def test_after_an_abort_midway(loaded, steps):
    engine = Engine(loaded, budget=100)
    number = engine.submit(TEXT[:300], 10)
    for _ in range(steps):
        engine.step()
    engine.scheduler.abort(RequestId(str(number)))
    engine.run()
    assert_same(engine.ask(TEXT[:300]), loaded.alone(TEXT[:300]))
    assert engine.requests[2].stats.first_sequence.hit >= min(64 * steps, 256)


# The two that take longest.
NEMOTRON_FIRST = [
    "nemotron_h",
    *(pytest.param(name, marks=pytest.mark.long) for name in (*FAMILIES[1:], *LONG_FAMILIES)),
]
PIECES = (TEXT[:64], TEXT[:65], OTHER[:30], OTHER[:1], OTHER[64:180])


MIX = {
    "num_pages": st.sampled_from([26, 40, 90]),
    "ahead": st.sampled_from([1, 2]),
    "mixes": st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.sampled_from([1, 40]), st.integers(0, 4)),
        min_size=3,
        max_size=7,
    ),
}


@pytest.mark.parametrize("loaded", NEMOTRON_FIRST, indirect=True, scope="module")
@pytest.mark.parametrize("max_examples", [2, more(6)])
def test_random_mixes_in_a_tiny_pool(loaded, max_examples):
    @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(**MIX)
    def check(num_pages, ahead, mixes):
        check_mix(loaded, num_pages, ahead, mixes)

    check()


def check_mix(loaded, num_pages, ahead, mixes):
    engine = Engine(loaded, num_pages=num_pages, ahead=ahead, budget=100)
    expected = {}
    for parts, max_tokens, pause in mixes:
        prompt = tuple(token for part in parts for token in PIECES[part])
        expected[engine.submit(prompt, max_tokens)] = (prompt, max_tokens)
        for _ in range(pause):
            if engine.scheduler.has_work:
                engine.step()
    engine.run()
    for number, (prompt, max_tokens) in expected.items():
        assert_same(engine.logits[number], loaded.alone(prompt, max_tokens))
    assert engine.cache.clear(), "a page leaked"


@pytest.mark.more
@pytest.mark.parametrize("loaded", NEMOTRON_FIRST, indirect=True, scope="module")
def test_the_tiny_pool_really_preempts_and_evicts(loaded):
    engine = Engine(loaded, num_pages=26)
    # three prompts of 100 tokens fit 26 pages of 16, three answers of 90 do not
    prompts = [TEXT[i : i + 100] for i in range(4)]
    numbers = [engine.submit(prompt, 90) for prompt in prompts]
    engine.run()
    # what lies behind windows may be room enough
    is_limited = engine.cache.layout.is_limited
    assert is_limited or engine.scheduler.state.counters.preemptions > 0
    assert is_limited or engine.cache.checkpoints.evicted.total() > 0
    for number, prompt in zip(numbers, prompts, strict=True):
        assert_same(engine.logits[number], loaded.alone(prompt, 90))


TOLERANCE = 1e-4


@pytest.mark.parametrize("shared", EDGES)
def test_default_numerics_stay_within_the_tolerance(loaded, shared):
    """Not exact: cached and uncached logits differ by rounding alone, of the logits' standard deviation."""
    engine = Engine(loaded, exact=False)
    engine.ask(TEXT[: shared + 60], boundaries=(shared,))
    prompt = TEXT[:shared] + OTHER[:70]
    found, expected = [each.cpu() for each in engine.ask(prompt, 12)], loaded.alone(prompt, 12, exact=False)
    assert engine.requests[2].stats.first_sequence.hit == shared
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= TOLERANCE * other.std()
        best = other.topk(2).values
        if best[0] - best[1] < 10 * TOLERANCE * other.std():
            break  # a near tie may be decided either way, and all that follows with it
        assert one.argmax() == other.argmax()


def test_every_shared_prefix_is_hit_within_63_tokens(loaded):
    """The bar: free memory, default numerics, sharing with a prompt or with prompt + computed answer."""
    engine = Engine(loaded, num_pages=4000, exact=False)
    engine.ask(TEXT[:300], 100)
    path = TEXT[:300] + tuple(engine.requests[1].output)
    for shared in (1, 40, 64, 100, 299, 300, 301, 350, 363, 399):
        fresh = tuple(np.random.default_rng(shared).integers(20, 4000, 50).tolist())
        number = engine.submit(path[:shared] + fresh, 2)
        engine.run()
        assert engine.requests[number].stats.first_sequence.hit >= shared - 63
    assert engine.requests[number].stats.first_sequence.hit == 399


def test_build_core_runs_exact_on_its_own_self_test(tiny_model):
    core = build_core(EngineConfig(model=str(tiny_model), exact=True, kv_cache_memory_bytes=8 << 20))
    assert core.info.exact and core.info.cache.num_pages == 256


def test_sizes_that_nobody_asked_for_fit_the_memory(tiny_model, tmp_path):
    """Memory for a pool of 20 MiB: 50 MiB are left of what is available once the weights are counted."""
    weights = sum(file.stat().st_size for file in tiny_model.glob("*.safetensors"))
    machine = available(tmp_path, weights + (50 << 20))
    core = build_core(
        EngineConfig(model=str(tiny_model), kv_cache_memory_bytes=None, max_num_seqs=None), machine=machine
    )
    assert 0.39 * (50 << 20) < core.info.cache.num_pages * core.info.cache.page_bytes <= 0.4 * (50 << 20)
    # 640 pages of 16 tokens: each request finds 1,024 tokens, and a checkpoint of 6 pages
    assert core.info.max_num_seqs == core.info.cache.num_pages // (64 + 6) == 9
    assert core.info.cpu_threads == 1
    with pytest.raises(ConfigError, match=r"smallest pool, .* does not fit into memory"):
        build_core(
            EngineConfig(model=str(tiny_model), kv_cache_memory_bytes=None), machine=available(tmp_path, weights)
        )


def available(folder, count):
    (folder / "proc").mkdir(exist_ok=True)
    (folder / "proc/meminfo").write_text(f"MemAvailable: {count >> 10} kB\n")
    return Machine(folder)


def test_plans_are_checked_where_that_is_asked_for(tiny_model):
    core = build_core(EngineConfig(model=str(tiny_model), kv_cache_memory_bytes=8 << 20, check_plans=True))
    prompt = np.arange(20, 120).astype("<i8").tobytes()
    for name in ("a", "b"):
        core.submit(generate_request(request_id=name, prompt=prompt, max_tokens=4, ignore_eos=True))
        while core.has_work:
            core.step()
    # one prefill, and three steps for the other tokens of each
    assert core.stats().steps.forward_passes == 7
    core.submit(generate_request(request_id="c", prompt=prompt, max_tokens=4, ignore_eos=True))
    plan = core._scheduler.plan
    core._scheduler.plan = lambda: msgspec.structs.replace(plan(), admits=(), step=1)
    with pytest.raises(ValueError, match="step 1 does not follow step"):
        core.step()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_longest_sequence_finds_room_in_its_block_table(tiny_model, monkeypatch, in_flight):
    """Which is no wider: 16 pages of 2 tokens; and the answer is that of a server with wider ones."""
    monkeypatch.setattr("cairn.engine.build.choose_device", lambda *_: Device(max_in_flight=in_flight))
    prompt, answers = np.arange(20, 40).astype("<i8").tobytes(), []
    for longest in (32, 64):
        sizes = {"max_model_len": longest, "block_size": 2, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 3}
        core = build_core(EngineConfig(model=str(tiny_model), **sizes))
        assert core._runner._slot_tensors.block_tables[0].shape == (4, longest // 2)
        tokens: dict[str, list[int]] = {name: [] for name in "abc"}
        for name in tokens:
            core.submit(generate_request(request_id=name, prompt=prompt, max_tokens=12, ignore_eos=True))
        while core.has_work:
            for output in core.step():
                tokens[output.request_id] += output.token_ids
        assert {len(each) for each in tokens.values()} == {12}
        answers.append(tokens)
    assert answers[0] == answers[1]


# more than there are addresses, so that no machine promises it
@pytest.mark.parametrize("size", [1 << 50, 1 << 62])
def test_a_pool_that_does_not_fit_into_memory_is_refused_by_its_flag(tiny_model, size):
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes.* does not fit into memory: lower it"):
        build_core(EngineConfig(model=str(tiny_model)).model_copy(update={"kv_cache_memory_bytes": size}))
