"""The promise of `--exact` for the families made of parts, a few cases each; `test_exactness` has all of them.

The reference is a core that caches nothing and serves one request at a time.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from cairn.models.registry import open_model
from cairn.scheduler.preempt import preempt
from engine.test_exactness import OTHER, TEXT, TOLERANCE, Engine, Loaded, assert_same, load
from engine.test_ranks_exactness import LoadedRanks
from models.covered import EXACTNESS, RANKS
from tiers import first, long, more

NAMES = ["falcon_h1", "qwen3_5@device", "nemotron_h@device", "granitemoehybrid", *EXACTNESS.families[2:]]
DEVICES = tuple(f"{name}@device" for name in (*EXACTNESS.families[:9], "qwen3_5_moe"))
"""The last families have no layers that these have not."""

on_all_devices = pytest.mark.parametrize("loaded", first(2, (*NAMES, *DEVICES)), indirect=True, scope="module")
"""What a device counts is no matter of a prompt: steps of every kind are enough."""


@pytest.fixture(scope="module", params=first(2, NAMES))
def loaded(request, made_model) -> Loaded:
    return load(request.param, made_model)


@pytest.mark.parametrize("shared", [129, more(64)])
def test_a_prompt_after_one_that_shares_its_beginning(loaded, shared):
    engine = Engine(loaded)
    engine.ask(TEXT[: shared + 60])
    prompt = TEXT[:shared] + OTHER[:70]
    assert_same(engine.ask(prompt), loaded.alone(prompt))
    assert engine.requests[2].stats.first_sequence.hit == shared // loaded.grid * loaded.grid


def test_a_prompt_that_is_wholly_cached(loaded):
    engine = Engine(loaded)
    assert_same(engine.ask(TEXT[:65]), loaded.alone(TEXT[:65]))
    passes = engine.runner.forward_passes
    assert_same(engine.ask(TEXT[:65]), loaded.alone(TEXT[:65]))
    assert engine.requests[2].stats.first_sequence.hit == 65
    # the first token comes from what was kept, the three others take a pass each
    assert engine.runner.forward_passes == passes + 3


@on_all_devices
def test_requests_side_by_side_in_chunks(loaded):
    engine = Engine(loaded, budget=100, ahead=2, block_size=48)
    prompts = [TEXT[:70], OTHER[:200], TEXT[:130] + OTHER[:33], TEXT[100:101], OTHER[:200]]
    numbers = []
    for prompt in prompts:
        numbers.append(engine.submit(prompt, 6))
        engine.step()
    engine.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert_same(engine.logits[number][:6], loaded.alone(prompt, 6))


@on_all_devices
def test_a_preempted_request(loaded):
    engine = Engine(loaded)
    number = engine.submit(TEXT[:150], 12)
    for _ in range(5):
        engine.step()
    preempt(engine.scheduler.state, engine.requests[number], engine.requests[number], 0)
    engine.run()
    assert_same(engine.logits[number], loaded.alone(TEXT[:150], 12))


@pytest.mark.more
@pytest.mark.parametrize("loaded", ["falcon_h1", "lfm2", "qwen3", "gpt_oss", "gemma4"], indirect=True, scope="module")
def test_a_chat_that_grows_to_the_end_of_the_pool(loaded):
    """Each turn leaves a copy of the page that it ends in, and all of them are on the path of the last one."""
    engine = Engine(loaded, num_pages=4)
    for length in (3, 6):
        engine.ask(TEXT[:length], 1)
    most = engine.scheduler.max_tokens_for(9)
    found = engine.ask(TEXT[:9], most)
    # what lies behind a window gives way first, and pages of several groups hold what they have room for
    assert engine.cache.layout.is_limited or most == 39
    assert engine.cache.layout.is_limited or engine.scheduler.state.counters.preemptions > 0
    assert_same(found, loaded.alone(TEXT[:9], most))


def test_default_numerics_stay_within_the_tolerance(loaded):
    engine = Engine(loaded, exact=False)
    engine.ask(TEXT[:97], boundaries=(37,))
    prompt = TEXT[:37] + OTHER[:70]
    (found, *_), (expected, *_) = engine.ask(prompt), loaded.alone(prompt, exact=False)
    assert engine.requests[2].stats.first_sequence.hit == 37
    assert (found.cpu() - expected).abs().max() <= TOLERANCE * expected.std()


def test_every_shared_prefix_is_hit_within_63_tokens(loaded):
    engine = Engine(loaded, num_pages=4000, exact=False)
    engine.ask(TEXT[:300], 20)
    path = TEXT[:300] + tuple(engine.requests[1].output)
    for shared in (1, 100, 299, 301, 319):
        fresh = tuple(np.random.default_rng(shared).integers(20, 4000, 50).tolist())
        number = engine.submit(path[:shared] + fresh, 2)
        engine.run()
        hit = engine.requests[number].stats.first_sequence.hit
        assert shared - loaded.grid < hit <= shared
    assert hit == 319


@pytest.fixture(scope="module", params=["lfm2-4", *(long(f"{name}-2") for name in ("lfm2", *RANKS.long_families))])
def several(request, made_model) -> Iterator[LoadedRanks]:
    family, size = request.param.split("-")
    loaded = LoadedRanks(open_model(made_model(family)), int(size))
    yield loaded
    for engine in loaded.engines:
        engine.runner.close()


@pytest.mark.parametrize("shared", [129, long(64)])
def test_several_ranks(several, shared):
    engine = several.engine()
    engine.ask(TEXT[: shared + 60])
    for prompt in (TEXT[:shared] + OTHER[:70], TEXT[: shared + 60]):
        assert_same(engine.ask(prompt), several.alone(prompt))
    assert engine.requests[3].stats.first_sequence.hit == shared + 60
