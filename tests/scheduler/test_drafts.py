"""Drafts: what is verified, what of it counts, and that the state is folded before anybody looks at it."""

import numpy as np
import pytest
from driver import Driver, alone

from cairn.cache.sequence_blocks import Namespace
from cairn.scheduler.request import Phase
from cairn.types import SamplingParams
from doubles.drafters import KnowingDrafter

PROMPT = tuple(range(40))
VOCAB = 50


def drafted(answers, num_drafts=4, num_right=lambda proposal: 99, **config):
    drafter = KnowingDrafter(answers, num_drafts, num_right, VOCAB)
    return Driver(drafter=drafter, **config)


def ask(driver, prompt=PROMPT, max_tokens=21, name="r", **arguments):
    driver.submit(prompt, max_tokens=max_tokens, name=name, **arguments)
    driver.run()
    return driver.requests[name]


@pytest.mark.parametrize(
    ("num_right", "brought"),
    # the first of the 21 tokens comes from the prompt
    [(99, [1, 5, 5, 5, 5]), (0, [1] * 21), (1, [1, *[2] * 10]), (3, [1, *[4] * 5])],
)
def test_a_verify_row_brings_its_right_drafts_and_one_token_more(num_right, brought):
    answer = alone(PROMPT, False, max_tokens=21)
    driver = drafted({"r": answer}, num_right=lambda proposal: num_right)
    driver.submit(PROMPT, max_tokens=21, name="r")
    request, numbers = driver.requests["r"], []
    while driver.scheduler.has_work:
        numbers += [len(progress.tokens) for progress in driver.step()]
    assert request.output == answer
    assert numbers == brought
    rows = [row for plan in driver.plans for row in plan.verifies]
    # where one token is left to come there is nothing to draft
    assert len(rows) == sum(len(PROMPT) + 19 > row.start for row in rows) >= len(brought) - 2
    folds = [fold.num_tokens for plan in driver.plans for fold in plan.folds]
    assert folds == brought[1 : 1 + len(rows)]
    counters = driver.scheduler.state.counters.spec_decode
    assert counters.num_drafts == len(rows)
    assert counters.num_accepted_tokens == sum(folds) - len(folds)
    assert request.stats.num_accepted_draft_tokens == counters.num_accepted_tokens
    assert request.stats.num_draft_tokens == counters.num_draft_tokens == sum(len(row.tokens) - 1 for row in rows)


def test_no_more_is_drafted_than_the_answer_can_have():
    answer = alone(PROMPT, False, max_tokens=4)
    driver = drafted({"r": [*answer, 7, 7, 7]}, num_drafts=32)
    assert ask(driver, max_tokens=4).output == answer
    assert [len(row.tokens) for plan in driver.plans for row in plan.verifies] == [3]


def test_nothing_is_drafted_where_the_step_has_no_tokens_left():
    """A prompt's chunk leaves each other request one token of the budget."""
    answer = alone(PROMPT, False, max_tokens=40)
    driver = drafted({"r": answer}, num_drafts=32, max_num_batched_tokens=68)
    driver.submit(PROMPT, max_tokens=40, name="r")
    driver.step()
    driver.submit(tuple(range(1000, 1400)), max_tokens=1, name="long")
    driver.run()
    assert driver.output("r") == answer
    for plan in driver.plans:
        tokens = len(plan.decodes) + sum(len(row.tokens) for row in plan.long_rows)
        assert tokens <= 68


@pytest.mark.parametrize("place", [1, 2, 4, 5, 6])
def test_a_stop_token_within_a_chain_ends_the_answer_and_the_state(place):
    """The state is that before the stop token: the next turn goes on from there."""
    whole = alone(PROMPT, False, max_tokens=21)
    stop = whole[place]
    if stop in whole[:place]:
        pytest.skip("it comes sooner")
    driver = drafted({"r": whole}, num_drafts=5)
    request = ask(driver, stop=(stop,))
    assert request.output == whole[: place + 1]
    assert request.outcome.finish_reason == "stop" and request.outcome.stop_token == stop
    following = (*PROMPT, *request.output[:-1], 77, 78)
    turn = ask(driver, following, name="turn", max_tokens=3)
    assert turn.stats.first_sequence.hit == len(PROMPT) + place
    assert turn.output == alone(following, False, max_tokens=3)


@pytest.mark.parametrize("kept", [1, 2, 3, 4, 5])
def test_an_answer_that_is_ended_within_a_chain_leaves_the_state_of_what_counts(kept):
    """As at a stop string: the core finds it after the step has been applied."""
    answer = alone(PROMPT, False, max_tokens=21)
    driver = drafted({"r": answer})
    driver.submit(PROMPT, max_tokens=21, name="r")
    request = driver.requests["r"]
    driver.step()
    driver.step()
    assert request.output == answer[:6]
    generated = driver.scheduler.state.counters.generation_tokens
    driver.scheduler.finish(request, "stop", 1 + kept)
    assert driver.scheduler.state.counters.generation_tokens == generated - 5 + kept
    driver.run()
    assert request.output == answer[: 1 + kept]
    following = (*PROMPT, *answer[:kept], 77, 78)
    turn = ask(driver, following, name="turn", max_tokens=3)
    assert turn.stats.first_sequence.hit == len(PROMPT) + kept
    assert turn.output == alone(following, False, max_tokens=3)


def test_what_is_aborted_while_its_drafts_are_out_goes_on_from_before_them():
    answer = alone(PROMPT, False, max_tokens=21)
    driver = drafted({"r": answer})
    driver.submit(PROMPT, max_tokens=21, name="r")
    driver.step()
    plan = driver.pipeline.launch()
    assert plan.verifies
    driver.scheduler.abort("r")
    driver.pipeline.collect()
    assert driver.requests["r"].phase is Phase.FINISHED
    driver.run()
    following = (*PROMPT, *answer[:3], 77)
    turn = ask(driver, following, name="turn", max_tokens=3)
    assert turn.output == alone(following, False, max_tokens=3)
    assert driver.cache.clear()


def test_a_checkpoint_within_an_accepted_run_is_hit():
    """Multiples of 64 are kept while an answer grows, wherever chains begin and end."""
    answer = alone(PROMPT, False, max_tokens=100)
    driver = drafted({"r": answer}, num_drafts=5)
    plain = Driver()
    ask(plain, max_tokens=100)
    ask(driver, max_tokens=100)
    positions = [snapshot.position for plan in driver.plans for fold in plan.folds for snapshot in fold.snapshots]
    decoded = [
        int(plan.decodes.positions[snapshot.row]) + 1
        for plan in plain.plans
        for snapshot in plan.snapshots
        if snapshot.row < len(plan.decodes)
    ]
    assert positions == decoded == [64, 128]
    following = (*PROMPT, *answer[:30], 77)
    turn = ask(driver, following, name="turn", max_tokens=3)
    assert turn.stats.first_sequence.hit == 64
    assert turn.output == alone(following, False, max_tokens=3)


def test_a_request_preempted_between_verify_and_fold_goes_on_with_the_same_answer():
    """Its save comes after its fold; and a slot that is given away is not folded."""
    answers = {name: alone(tuple(range(i, i + 60)), False, max_tokens=90) for i, name in enumerate("abc")}
    num_preempted = 0
    for num_pages in range(24, 40):
        driver = drafted(dict(answers), num_pages=num_pages, max_num_seqs=3)
        for i, name in enumerate("abc"):
            driver.submit(tuple(range(i, i + 60)), max_tokens=90, name=name)
        driver.run()
        for name, answer in answers.items():
            assert driver.output(name) == answer
        num_preempted += driver.scheduler.state.counters.preemptions
        saved = {save.slot for plan in driver.plans for save in plan.saves if plan.folds}
        folded = {fold.slot for plan in driver.plans for fold in plan.folds if plan.saves}
    assert num_preempted > 0 and saved and folded


class EvenTokens:
    """Only even tokens, and nothing after `length` of them."""

    def __init__(self, length):
        self.length = length

    def allowed(self, output):
        mask = np.zeros(2, np.int32)
        if len(output) < self.length:
            for token in range(0, VOCAB, 2):
                mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        return mask


def test_drafts_of_a_constrained_answer_are_those_that_it_allows():
    plain = Driver()
    plain.submit(PROMPT, max_tokens=12, name="r", constraint=EvenTokens(99))
    plain.run()
    answer = plain.output("r")
    assert all(token % 2 == 0 for token in answer)
    driver = drafted({"r": answer}, num_right=lambda proposal: [99, 2][proposal % 2])
    driver.submit(PROMPT, max_tokens=12, name="r", constraint=EvenTokens(99))
    driver.run()
    assert driver.output("r") == answer
    rows = [row for plan in driver.plans for row in plan.verifies]
    assert all(token % 2 == 0 for row in rows for token in row.tokens.tolist())
    assert {len(row.tokens) for row in rows} == {5, 3}


def test_nothing_is_drafted_after_what_completes_a_constraint():
    plain = Driver()
    plain.submit(PROMPT, max_tokens=3, name="r", constraint=EvenTokens(3))
    plain.run()
    answer = plain.output("r")
    driver = drafted({"r": [*answer, 2, 4, 6]}, num_drafts=6)
    driver.submit(PROMPT, max_tokens=12, name="r", constraint=EvenTokens(3))
    driver.step()
    driver.step()
    assert driver.output("r") == answer
    assert [row.tokens.tolist() for plan in driver.plans for row in plan.verifies] == [answer[:2]]


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(presence_penalty=1.0), SamplingParams(bad_words=((3, 4), (7,)))],
    ids=["penalty", "words"],
)
def test_what_depends_on_the_tokens_before_it_sees_those_of_the_chain(sampling):
    plain = Driver()
    plain.submit(PROMPT, max_tokens=21, name="r", sampling=sampling)
    plain.run()
    driver = drafted({"r": plain.output("r")}, num_right=lambda proposal: [99, 1, 3][proposal % 3])
    assert ask(driver, sampling=sampling).output == plain.output("r")
    assert driver.scheduler.state.counters.spec_decode.num_accepted_tokens > 8


def test_log_probabilities_are_those_of_decodes():
    progress: dict[str, list] = {}
    for name, driver in (("plain", Driver()), ("drafted", None)):
        if driver is None:
            answer = [token for each in progress["plain"] for token in each.tokens]
            driver = drafted({"r": answer}, num_right=lambda proposal: [99, 2][proposal % 2])
        driver.submit(PROMPT, max_tokens=21, name="r", logprobs=3)
        progress[name] = []
        while driver.scheduler.has_work:
            progress[name] += driver.step()
    for field in ("token_ids", "values", "ranks"):
        plain, drafts = (
            np.concatenate([getattr(each.logprobs, field) for each in progress[name]]) for name in ("plain", "drafted")
        )
        assert np.array_equal(plain, drafts)
    assert len(progress["drafted"]) < len(progress["plain"]) == 21


def test_no_stop_token_comes_before_the_least_number_within_a_chain():
    whole = alone(PROMPT, False, max_tokens=30)
    stop = whole[3]
    plain = Driver()
    plain.submit(PROMPT, max_tokens=30, name="r", stop=(stop,), min_tokens=9)
    plain.run()
    driver = drafted({"r": plain.output("r")}, num_drafts=6)
    assert ask(driver, max_tokens=30, stop=(stop,), min_tokens=9).output == plain.output("r")
    assert stop not in plain.output("r")[:8]


def test_several_answers_to_one_prompt_draft_each_its_own():
    plain = Driver()
    plain.submit(PROMPT, max_tokens=15, n=3, name="r")
    plain.run()
    answers = {name: plain.output(name) for name in ("r", "r.1", "r.2")}
    driver = drafted(dict(answers))
    driver.submit(PROMPT, max_tokens=15, n=3, name="r")
    driver.run()
    assert {name: driver.output(name) for name in answers} == answers
    assert max(len(plan.verifies) for plan in driver.plans) == 3


def test_a_namespace_sees_nothing_of_others_drafts():
    answer = alone(PROMPT, False, max_tokens=21)
    driver = drafted({"r": answer})
    ask(driver, namespace=Namespace(cache_salt="s"))
    assert ask(driver, name="other", max_tokens=2).stats.first_sequence.hit == 0


def test_a_drafter_is_told_how_long_steps_of_decodes_take():
    answer = alone(PROMPT, False, max_tokens=12)
    driver = drafted({"r": answer})
    driver.submit(PROMPT, max_tokens=12, name="r")
    driver.step()
    for seconds in (0.25, 0.5):
        driver.pipeline.launch()
        driver.clock.advance(seconds)
        driver.pipeline.collect()
    assert driver.scheduler.state.drafting.drafter.steps == [(1, 4, 0.25), (1, 4, 0.5)]


def test_a_drafter_is_asked_again_when_it_said_or_when_others_run():
    class Idle(KnowingDrafter):
        asked = ()

        def propose(self, request, most, num_decodes):
            self.asked += (len(request.output),)
            return super().propose(request, most, num_decodes)

        def idle_tokens(self, request):
            return 8

    answers = {"late": alone(tuple(range(50, 90)), False, max_tokens=4)}
    drafter = Idle(answers, 4, lambda proposal: 99, VOCAB)
    driver = Driver(drafter=drafter)
    driver.submit(PROMPT, max_tokens=30, name="r")
    while len(driver.requests["r"].output) < 20:
        driver.step()
    assert drafter.asked == (1, 9, 17)
    assert 0 < len(drafter.steps) < 8, "it learns from some of the steps alone"
    driver.submit(tuple(range(50, 90)), max_tokens=4, name="late")
    driver.run()
    assert driver.output("late") == answers["late"] and driver.scheduler.state.counters.spec_decode.num_drafts == 1


def test_in_steps_of_many_sequences_nobody_is_asked_for_drafts():
    prompts = {str(i): tuple(range(i, i + 40)) for i in range(4)}
    driver = drafted({name: alone(prompt, False, max_tokens=20) for name, prompt in prompts.items()})
    drafter = driver.scheduler.state.drafting.drafter
    drafter.max_decodes = 3
    for name, prompt in prompts.items():
        driver.submit(prompt, max_tokens=12 if name == "0" else 20, name=name)
    driver.run()
    sizes = [(len(plan.decodes), len(plan.verifies)) for plan in driver.plans]
    assert (4, 0) in sizes and (0, 3) in sizes
    assert not any(verifies for decodes, verifies in sizes if decodes + verifies > 3)


def test_drafts_want_one_plan_out_at_a_time():
    with pytest.raises(ValueError, match="one plan out"):
        drafted({}, max_in_flight=2)
