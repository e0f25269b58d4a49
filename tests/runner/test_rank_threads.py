"""Several runners behind the face of one."""

import pytest

from cairn.errors import EngineDead
from cairn.runner.runner import Runner
from cairn.step import PageCopy, SampledToken, StepPlan, StepResult, TokenMasks
from doubles.rank_threads import RankThreads
from doubles.step_results import step_result
from doubles.thread_ranks import thread_ranks
from runner.harness import build_tiny, parse, prompt, random_weights, ranks, raw_config, tiny


class Drawn:
    """A rank that draws what it is told to."""

    def __init__(self, token: int) -> None:
        self.forward_passes, self.steps = 3, 4
        self._token = token

    def launch(self, plan: StepPlan) -> None:
        pass

    def sample(self, step: int, masks: TokenMasks) -> None:
        pass

    def collect(self, step: int) -> StepResult:
        return step_result(step, [SampledToken(0, self._token)])


def test_ranks_that_draw_different_tokens_are_found_out() -> None:
    same, other = RankThreads([Drawn(5), Drawn(5)]), RankThreads([Drawn(5), Drawn(6)])
    assert same.run(StepPlan(1)).sampled == (SampledToken(0, 5),)
    assert (same.forward_passes, same.steps) == (3, 4)
    with pytest.raises(EngineDead, match="different tokens"):
        other.run(StepPlan(1))
    same.close()
    other.close()


def test_what_a_rank_raises_comes_out() -> None:
    config = parse(raw_config("M*"))
    driver = ranks(config, random_weights(config, 0), 2, exact=False)
    with pytest.raises(IndexError, match="512"):
        driver.runner.run(StepPlan(1, copies=(PageCopy(0, 512),)))
    driver.runner.close()


def test_a_rank_that_is_alone_gives_up() -> None:
    config = parse(raw_config("M*"))
    rank = thread_ranks(2, seconds=0.2)[1]
    model = build_tiny(config, random_weights(config, 0), exact=False, communicator=rank)
    alone = Runner(model, config.layout(16, 4, 2), 64, 2, exact=False)
    driver = tiny("M*", exact=False)
    row = driver.row(driver.sequence(0, 30), prompt(30, 0))
    with pytest.raises(EngineDead, match="rank 1 has waited"):
        alone.run(driver.writer.plan(1, [row]))


def test_rank_0_draws_for_all() -> None:
    """Another rank takes rank 0's token, whatever its own logits say."""
    config = parse(raw_config("M*"))
    weights = random_weights(config, 0)
    skewed = weights | {"lm_head.weight": weights["lm_head.weight"].flip(0)}
    communicators = thread_ranks(2)
    runners = [
        Runner(build_tiny(config, own, False, communicator=each), config.layout(16, 4, 2), 64, 2, exact=False)
        for each, own in zip(communicators, (weights, skewed), strict=True)
    ]
    threads, driver = RankThreads(runners), tiny("M*", exact=False)
    row = driver.row(driver.sequence(0, 30), prompt(30, 0))
    assert len(threads.run(driver.writer.plan(1, [row])).sampled) == 1
    assert runners[0]._slot_tensors.last_tokens[0] == runners[1]._slot_tensors.last_tokens[0]
    threads.close()
