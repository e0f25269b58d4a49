"""What every runner does with a plan: run on the one of tensors and the one of tags."""

from dataclasses import replace

import numpy as np
import pytest

from cairn.models.registry import open_model
from cairn.runner.runner import Runner
from cairn.runner.simulated import SimulatedRunner
from cairn.step import Fork, FromStep, Keep, PageCopy, Restore, Row, Sample, SampleOnly, Save, Score, StepPlan
from cairn.types import SamplingParams

PROMPT = np.random.default_rng(3).integers(20, 4000, 100)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def opened(tiny_model):
    model = open_model(tiny_model)
    return model, model.build(exact=True)


@pytest.fixture(params=["tensors", "tags"])
def subject(request, opened):
    """A runner and the size of its checkpoint files."""
    model, built = opened
    layout = model.layout(16)
    if request.param == "tensors":
        return Runner(built, layout, 100, 4, exact=True), layout.pages_per_checkpoint
    return SimulatedRunner(layout, 4096, numerics=True), layout.pages_per_checkpoint


def pages(*numbers):
    return np.array(numbers, np.int32)


TABLE = pages(0, 1, 2, 3, 4, 5, 6)


def file(first, size):
    return np.arange(first, first + size, dtype=np.int32)


def prefill(slot=0, start=0, end=100, table=TABLE, write_from=0, sample=True):
    wanted = Sample(GREEDY, end) if sample else None
    return Row(slot, start, end, PROMPT[start:end], (table,), write_from, False, wanted)


def decode(slot, start, tokens, table=TABLE):
    return Row(slot, start, start + 1, tokens, (table,), 0, True, Sample(GREEDY, start + 1))


def tokens(result):
    return [(sampled.slot, sampled.token) for sampled in result.sampled]


def test_tokens_come_in_plan_order_and_passes_are_counted(subject):
    runner, _ = subject
    rows = (prefill(slot=2), prefill(slot=1, end=64, table=pages(10, 11, 12, 13), sample=False))
    first = runner.run(StepPlan(1, rows=rows))
    assert (first.step, [slot for slot, _ in tokens(first)]) == (1, [2])
    empty = runner.run(StepPlan(2))
    assert tokens(empty) == [] and (runner.forward_passes, runner.steps) == (1, 2)


def test_a_kept_state_goes_on_like_the_one_it_was_taken_from(subject):
    runner, size = subject
    whole = runner.run(
        StepPlan(1, rows=(prefill(),), keeps=(Keep(0, 64, file(20, size)), Keep(0, 100, file(40, size))))
    )
    again = runner.run(StepPlan(2, restores=(Restore(1, file(20, size)),), rows=(prefill(1, 64, write_from=100),)))
    assert tokens(again)[0][1] == tokens(whole)[0][1]
    passes = runner.forward_passes
    only = StepPlan(3, restores=(Restore(3, file(40, size)),), sample_only=(SampleOnly(3, Sample(GREEDY, 100)),))
    assert tokens(runner.run(only)) == [(3, tokens(whole)[0][1])]
    assert runner.forward_passes == passes


def test_saves_forks_copies_and_tokens_fed_ahead(subject):
    runner, size = subject
    (_, token) = tokens(runner.run(StepPlan(1, rows=(prefill(),))))[0]
    plan = StepPlan(
        2,
        copies=(PageCopy(6, 16),),
        forks=(Fork(0, 1),),
        saves=(Save(0, file(20, size)),),
        rows=(decode(0, 100, FromStep(1)), decode(1, 100, np.array([token]), pages(0, 1, 2, 3, 4, 5, 16))),
    )
    both = tokens(runner.run(plan))
    assert both[0][1] == both[1][1]
    # the save is of before the pass: from it the same step can be taken again
    restored = StepPlan(3, restores=(Restore(2, file(20, size)),), rows=(decode(2, 100, np.array([token])),))
    assert tokens(runner.run(restored))[0][1] == both[0][1]


def test_a_row_from_the_start_forgets_what_the_slot_held(subject):
    runner, _ = subject
    first = tokens(runner.run(StepPlan(1, rows=(prefill(),))))
    runner.run(StepPlan(2, rows=(decode(0, 100, FromStep(1)),)))
    assert tokens(runner.run(StepPlan(3, rows=(prefill(),)))) == first


def test_a_token_of_another_step_is_refused(subject):
    runner, _ = subject
    runner.run(StepPlan(1, rows=(prefill(),)))
    runner.run(StepPlan(2, rows=(decode(0, 100, FromStep(1)),)))
    with pytest.raises((ValueError, LookupError)):
        runner.run(StepPlan(3, rows=(decode(0, 101, FromStep(1)),)))


def test_what_may_come_and_what_is_told_of_it(subject):
    runner, _ = subject
    mask = np.zeros(128, np.int32)
    mask[3] = 0b110  # tokens 97 and 98
    tell = {"allowed": mask, "logprobs": 4}
    row = replace(prefill(), sample=Sample(GREEDY, 100, **tell))
    (one,) = runner.run(StepPlan(1, rows=(row,))).sampled
    assert one.token in (97, 98)
    assert one.logprobs.token_ids.shape == one.logprobs.values.shape == (1, 5) and one.logprobs.ranks.shape == (1,)
    assert one.logprobs.token_ids[0, 0] == one.token
    assert all(one.logprobs.values[0, 1:] <= one.logprobs.values[0, 1])
    banned = replace(row, sample=Sample(GREEDY, 100, banned=(one.token,), **tell))
    (other,) = runner.run(StepPlan(2, rows=(banned,))).sampled
    assert {one.token, other.token} == {97, 98}


def test_prompts_are_scored_the_same_in_one_row_and_in_two(subject):
    runner, _ = subject
    whole = replace(prefill(), score=Score(PROMPT[1:], 2))
    result = runner.run(StepPlan(1, rows=(prefill(slot=1, table=pages(*range(10, 17))), whole)))
    halves = [replace(prefill(end=64, sample=False), score=Score(PROMPT[1:65], 2))]
    halves.append(replace(prefill(start=64), score=Score(PROMPT[65:], 2)))
    parts = [
        scored for number, half in enumerate(halves, 2) for scored in runner.run(StepPlan(number, rows=(half,))).scored
    ]
    for found in (result.scored, parts):
        assert [
            place for part in found for place in range(part.position, part.position + len(part.logprobs.ranks))
        ] == [*range(1, 100)]
        assert np.concatenate([part.logprobs.token_ids[:, 0] for part in found]).tolist() == PROMPT[1:].tolist()
        assert {part.slot for part in found} == {0}
    one, other = (np.concatenate([part.logprobs.values for part in found]) for found in (result.scored, parts))
    assert np.array_equal(one, other)
