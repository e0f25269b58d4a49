"""The promise of `--exact` on several ranks: every logit the same, bit for bit, whatever happened before or beside.

The reference is a core of the same number of ranks that caches nothing and serves one request at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from cairn.cache.layout import CacheLayout
from cairn.models.registry import OpenModel, open_model
from cairn.runner.runner import Runner
from cairn.scheduler.preempt import preempt
from doubles.rank_threads import RankThreads
from doubles.thread_ranks import thread_ranks
from engine.test_exactness import ANSWER, OTHER, TEXT, Engine, assert_same
from tiers import long, more


@dataclass
class Layouts:
    """An opened model whose layouts are those of one of several ranks."""

    opened: OpenModel
    size: int

    def layout(self, block_size: int) -> CacheLayout:
        return self.opened.layout(block_size, self.size)


class LoadedRanks:
    """The tiny model on several ranks, and the answers it gives alone."""

    def __init__(self, opened: OpenModel, size: int) -> None:
        self.opened = Layouts(opened, size)
        self.ranks = [opened.build(exact=True, communicator=each) for each in thread_ranks(size)]
        self.models = {True: self.ranks[0]}
        self.engines: list[RanksEngine] = []
        self._alone: dict[tuple, list[torch.Tensor]] = {}

    def engine(self, mode="auto", **arguments) -> "RanksEngine":
        self.engines.append(RanksEngine(self, mode, **arguments))
        return self.engines[-1]

    def alone(self, prompt, max_tokens=ANSWER) -> list[torch.Tensor]:
        if (prompt, max_tokens) not in self._alone:
            self._alone[prompt, max_tokens] = self.engine(None).ask(prompt, max_tokens)
        return self._alone[prompt, max_tokens]


class RanksEngine(Engine):
    """Scheduler and all ranks turned by hand."""

    def __init__(self, loaded: LoadedRanks, mode="auto", num_pages=400, block_size=16, **arguments) -> None:
        super().__init__(loaded, mode, num_pages, block_size, **arguments)
        layout = loaded.opened.layout(block_size)
        observers = [self._observe, *(None for _ in loaded.ranks[1:])]
        self.runner = RankThreads(
            [
                Runner(model, layout, num_pages, 4, True, observe=observe)
                for model, observe in zip(loaded.ranks, observers, strict=True)
            ]
        )


# Four ranks are in the runner's own tests, too.
@pytest.fixture(scope="module", params=[2, long(4)])
def several(request, tiny_model) -> Iterator[LoadedRanks]:
    loaded = LoadedRanks(open_model(tiny_model), request.param)
    yield loaded
    for engine in loaded.engines:
        engine.runner.close()


@pytest.mark.parametrize("shared", [64, 129, more(1), *map(long, (16, 63, 65, 192))])
def test_a_prompt_after_one_that_shares_its_beginning(several, shared):
    engine = several.engine()
    engine.ask(TEXT[: shared + 60])
    prompt = TEXT[:shared] + OTHER[:70]
    assert_same(engine.ask(prompt), several.alone(prompt))
    assert engine.requests[2].stats.first_sequence.hit == shared // 64 * 64


@pytest.mark.parametrize("length", [16, 65, *map(long, (1, 64, 129))])
def test_a_prompt_that_is_wholly_cached(several, length):
    engine = several.engine()
    for _ in range(2):
        assert_same(engine.ask(TEXT[:length]), several.alone(TEXT[:length]))
    assert engine.requests[2].stats.first_sequence.hit == length


@pytest.mark.parametrize(("mode", "block_size"), [("auto", 48), long("align", 16), long("all", 128)])
def test_every_policy_and_block_size(several, mode, block_size):
    engine = several.engine(mode, block_size=block_size)
    for prompt in (TEXT[:300], TEXT[:200] + OTHER[:90], TEXT[:200] + OTHER[50:99], TEXT[:300]):
        assert_same(engine.ask(prompt, boundaries=(100,)), several.alone(prompt))
    assert engine.cache.counters.hits > 0


@pytest.mark.parametrize("budget", [192, long(68)])
def test_prompts_in_chunks(several, budget):
    engine = several.engine(budget=budget)
    assert_same(engine.ask(TEXT[:333]), several.alone(TEXT[:333]))


def test_requests_side_by_side(several):
    engine = several.engine(budget=150)
    prompts = [TEXT[:70], OTHER[:200], TEXT[:130] + OTHER[:33], TEXT[100:101], OTHER[:200]]
    numbers = []
    for prompt in prompts:
        numbers.append(engine.submit(prompt, 6))
        engine.step()
    engine.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert_same(engine.logits[number], several.alone(prompt, 6))


@pytest.mark.parametrize(("room", "steps"), [(0, 2), (10_000, 5)])
def test_a_preempted_request(several, room, steps):
    engine = several.engine()
    number = engine.submit(TEXT[:150], 12)
    for _ in range(steps):
        engine.step()
    preempt(engine.scheduler.state, engine.requests[number], engine.requests[number], room)
    engine.run()
    assert_same(engine.logits[number], several.alone(TEXT[:150], 12))


@pytest.mark.more
def test_planning_ahead_and_after_eviction(several):
    engine = several.engine(num_pages=60, ahead=2)
    for prompt in (TEXT[:300], OTHER[:300], TEXT[:300], OTHER[:250] + TEXT[:40]):
        assert_same(engine.ask(prompt)[:ANSWER], several.alone(prompt))
    assert engine.cache.checkpoints.evicted.total() > 0
    assert engine.cache.clear(), "a page leaked"
