"""What every runner does with a plan: run on the one of tensors and the one of tags."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.models.registry import open_model
from cairn.runner.runner import Runner
from cairn.step import SAMPLED, PageCopy, Restore, Save, Score, Snapshot, StepPlan
from cairn.types import SamplingParams
from doubles.hand_plans import PlanWriter, SampleOnly, WholeRow, decode_rows, masks_of
from doubles.simulated_runner import SimulatedRunner

PROMPT = np.random.default_rng(3).integers(20, 4000, 100)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def opened(tiny_model):
    model = open_model(tiny_model)
    return model, model.build(exact=True)


@pytest.fixture(params=["tensors", "tags"])
def subject(request, opened):
    """A runner, which is given plans in hand-written form, and the size of its checkpoint files."""
    model, built = opened
    layout = model.layout(16)
    if request.param == "tensors":
        return Subject(Runner(built, layout, 100, 4, exact=True)), layout.pages_per_checkpoint
    return Subject(SimulatedRunner(layout, 100, 4, 4096, numerics=True)), layout.pages_per_checkpoint


class Subject:
    """A runner of plans that are written by hand."""

    def __init__(self, runner):
        self.runner = runner
        self._writer = PlanWriter()

    @property
    def counts(self):
        return self.runner.forward_passes, self.runner.steps

    def launch(self, step, *rows):
        """And draw, without masks: its stop tokens may come."""
        plan = self._writer.plan(step, rows)
        allowed = np.zeros(len(plan.samples), np.bool_)
        self.runner.launch(
            msgspec.structs.replace(plan, samples=msgspec.structs.replace(plan.samples, bans_stop_tokens=allowed))
        )
        self.runner.sample(step, {})

    def collect(self, step):
        return self.runner.collect(step)

    def run(self, step, *rows, **records):
        return self.runner.run(self._writer.plan(step, rows, **records), masks_of(rows))


def pages(*numbers):
    return np.array(numbers, np.int32)


TABLE = pages(0, 1, 2, 3, 4, 5, 6)


def file(first, size):
    return np.arange(first, first + size, dtype=np.int32)


def prefill(slot=0, start=0, end=100, table=TABLE, write_from=0, sample=True):
    wanted = SamplingMetadata(GREEDY, end) if sample else None
    return WholeRow(slot, start, end, PROMPT[start:end], (table,), write_from, False, wanted)


def decode(slot, start, tokens, table=TABLE):
    return WholeRow(slot, start, start + 1, tokens, (table,), 0, True, SamplingMetadata(GREEDY, start + 1))


def tokens(result):
    return [(sampled.slot, sampled.token) for sampled in result.sampled]


def test_tokens_come_in_plan_order_and_passes_are_counted(subject):
    runner, _ = subject
    rows = (prefill(slot=2), prefill(slot=1, end=64, table=pages(10, 11, 12, 13), sample=False))
    first = runner.run(1, *rows)
    assert (first.step, [slot for slot, _ in tokens(first)]) == (1, [2])
    empty = runner.run(2)
    assert tokens(empty) == [] and runner.counts == (1, 2)


def test_a_kept_state_goes_on_like_the_one_it_was_taken_from(subject):
    runner, size = subject
    snapshots = (Snapshot(0, 64, file(20, size)), Snapshot(0, 100, file(40, size)))
    whole = runner.run(1, prefill(), snapshots=snapshots)
    again = runner.run(2, prefill(1, 64, write_from=100), restores=(Restore(1, file(20, size)),))
    assert tokens(again)[0][1] == tokens(whole)[0][1]
    passes, _ = runner.counts
    drawn = (SampleOnly(3, SamplingMetadata(GREEDY, 100)),)
    only = runner.run(3, restores=(Restore(3, file(40, size)),), sample_only=drawn)
    assert tokens(only) == [(3, tokens(whole)[0][1])]
    assert runner.counts[0] == passes


def test_saves_copies_and_tokens_fed_ahead(subject):
    runner, size = subject
    (_, token) = tokens(runner.run(1, prefill()))[0]
    runner.run(2, saves=(Save(0, file(40, size)),))
    rows = (decode(0, 100, SAMPLED), decode(1, 100, np.array([token]), pages(0, 1, 2, 3, 4, 5, 16)))
    records = {"saves": (Save(0, file(20, size)),), "restores": (Restore(1, file(40, size)),)}
    both = tokens(runner.run(3, *rows, copies=(PageCopy(6, 16),), **records))
    assert both[0][1] == both[1][1]
    # the save is of before the pass: from it the same step can be taken again
    restored = runner.run(4, decode(2, 100, np.array([token])), restores=(Restore(2, file(20, size)),))
    assert tokens(restored)[0][1] == both[0][1]


def test_a_row_from_the_start_forgets_what_the_slot_held(subject):
    runner, _ = subject
    first = tokens(runner.run(1, prefill()))
    runner.run(2, decode(0, 100, SAMPLED))
    assert tokens(runner.run(3, prefill())) == first


@pytest.mark.parametrize("num_out", [1, 2, 3])
def test_steps_behind_a_stop_token_leave_the_slot_alone(subject, num_out):
    """As many steps are out: they go on with the stop token and with what they draw themselves. What is saved then is
    the state before the stop token, and a neighbour notices nothing."""
    runner, size = subject
    other = pages(*range(60, 68))
    stop = tokens(runner.run(1, prefill(), prefill(1, table=other)))
    runner.run(2, saves=(Save(0, file(20, size)),))
    ends = {"banned_tokens": (stop[0][1],)}  # that is how a slot's stop tokens are told here
    runner.launch(3, replace(prefill(), sample=SamplingMetadata(GREEDY, 100, **ends)), prefill(1, table=other))
    for step in range(4, 4 + num_out):
        ended = replace(decode(0, 96 + step, SAMPLED), sample=SamplingMetadata(GREEDY, 97 + step, **ends))
        runner.launch(step, ended, decode(1, 96 + step, SAMPLED, other))
    drawn = [tokens(runner.collect(step)) for step in range(3, 4 + num_out)]
    assert drawn[0] == stop
    runner.run(10, saves=(Save(0, file(40, size)),))
    again = [file(20, size), file(40, size)]
    told = [
        tokens(runner.run(11 + i, decode(2, 100, np.array([7])), restores=(Restore(2, one),)))
        for i, one in enumerate(again)
    ]
    assert told[0] == told[1]
    alone = [runner.run(20, prefill(1, table=other))]
    alone += [runner.run(17 + step, decode(1, 96 + step, SAMPLED, other)) for step in range(4, 4 + num_out)]
    assert [found[1] for found in drawn] == [tokens(one)[0] for one in alone]


def test_a_token_of_another_position_is_refused(subject):
    runner, _ = subject
    runner.run(1, prefill())
    runner.run(2, replace(decode(0, 100, SAMPLED), sample=None))
    with pytest.raises((ValueError, LookupError)):
        runner.run(3, decode(0, 101, SAMPLED))


def test_tokens_of_nobody_are_refused(subject):
    """Also by the one of tensors, which does not check its plans."""
    runner, _ = subject
    with pytest.raises((ValueError, LookupError), match="nobody was admitted to slot 2"):
        runner.runner.run(StepPlan(1, decodes=decode_rows([decode(2, 100, SAMPLED)])))


def test_what_may_come_and_what_is_told_of_it(subject):
    runner, _ = subject
    mask = np.zeros(128, np.int32)
    mask[3] = 0b110  # tokens 97 and 98
    tell = {"allowed_mask": mask, "logprobs": 4}
    row = replace(prefill(), sample=SamplingMetadata(GREEDY, 100, **tell))
    (one,) = runner.run(1, row).sampled
    assert one.token in (97, 98)
    assert one.logprobs.token_ids.shape == one.logprobs.values.shape == (1, 5) and one.logprobs.ranks.shape == (1,)
    assert one.logprobs.token_ids[0, 0] == one.token
    assert all(one.logprobs.values[0, 1:] <= one.logprobs.values[0, 1])
    banned = replace(row, sample=SamplingMetadata(GREEDY, 100, banned_tokens=(one.token,), **tell))
    (other,) = runner.run(2, banned).sampled
    assert {one.token, other.token} == {97, 98}


def test_a_history_goes_on_with_what_was_sampled(subject):
    """A token that was drawn since the admit counts as much as one that the admit told of."""
    runner, _ = subject
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1e6)
    drawn, known = [], PROMPT
    whole = replace(prefill(), sample=SamplingMetadata(params, 100, history=known, num_prompt_tokens=100))
    drawn += tokens(runner.run(1, whole))
    for step in range(2, 6):
        drawn += tokens(
            runner.run(step, replace(decode(0, 98 + step, SAMPLED), sample=SamplingMetadata(params, 99 + step)))
        )
    answer = [token for _, token in drawn]
    again = []
    for number, token in enumerate([None, *answer[:-1]]):
        history = np.concatenate([PROMPT, answer[:number]]).astype(np.int64)
        sample = SamplingMetadata(params, 100 + number, history=history, num_prompt_tokens=100)
        if token is None:
            row = replace(prefill(slot=1, table=pages(*range(20, 27))), sample=sample)
        else:
            row = decode(1, 99 + number, np.array([token]), pages(*range(20, 27)))
            row = replace(row, sample=sample)
        again += tokens(runner.run(10 + number, row))
    assert [token for _, token in again] == answer and len(answer) == 5


def test_prompts_are_scored_the_same_in_one_row_and_in_two(subject):
    runner, _ = subject
    whole = replace(prefill(), score=Score(PROMPT[1:], 2))
    result = runner.run(1, prefill(slot=1, table=pages(*range(10, 17))), whole)
    halves = [replace(prefill(end=64, sample=False), score=Score(PROMPT[1:65], 2))]
    halves.append(replace(prefill(start=64), score=Score(PROMPT[65:], 2)))
    parts = [scored for number, half in enumerate(halves, 2) for scored in runner.run(number, half).scored]
    for found in (result.scored, parts):
        assert [
            place for part in found for place in range(part.position, part.position + len(part.logprobs.ranks))
        ] == [*range(1, 100)]
        assert np.concatenate([part.logprobs.token_ids[:, 0] for part in found]).tolist() == PROMPT[1:].tolist()
        assert {part.slot for part in found} == {0}
    one, other = (np.concatenate([part.logprobs.values for part in found]) for found in (result.scored, parts))
    assert np.array_equal(one, other)
