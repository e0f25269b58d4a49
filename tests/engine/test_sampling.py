"""Sampling from end to end in the core, with a real tiny model: the same alone, side by side, preempted, and with n."""

import asyncio
import math
from itertools import pairwise

import numpy as np
import pytest
from test_core import core as simulated_core
from test_core import request, run, tokens_of
from turned_engine import Engine, answer

from cairn.engine.client import OutputQueue
from cairn.engine.contract import MAX_LOGPROBS, GenerateOutput, RepetitionDetection
from cairn.engine.contract.output import pack_logprobs
from cairn.engine.output_processor import StopStringChecker
from cairn.engine.specs import seed_of
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import InvalidRequest
from cairn.scheduler.preempt import preempt
from cairn.scheduler.scheduler import Progress
from cairn.step import Logprobs
from tiers import first_of, more

TEXT = np.random.default_rng(5).integers(20, 4000, 200).tolist()
OTHER = np.random.default_rng(6).integers(20, 4000, 150).tolist()
LIVELY = {
    "temperature": 0.3,
    "frequency_penalty": 1.5,
    "presence_penalty": 1.0,
    "repetition_penalty": 5.0,
    "min_p": 0.01,
}


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Answers of an engine that does nothing else and caches nothing."""
    found, engine = {}, Engine(tiny_model, enable_prefix_caching=False)

    def alone(prompt, **fields):
        key = tuple(prompt), repr(sorted(fields.items()))
        if key not in found:
            found[key] = answer(engine.ask(prompt, **fields))
        return found[key]

    return alone


def test_penalties_side_by_side_and_after_a_hit_are_those_of_the_request_alone(tiny_model, expected):
    engine = Engine(tiny_model)
    engine.ask(TEXT[:100])
    engine.submit("a", TEXT, **LIVELY, max_tokens=20)
    engine.submit("b", TEXT[:150] + OTHER[:30], **LIVELY, seed=3, max_tokens=20)
    engine.step()
    engine.submit("c", OTHER, max_tokens=20)
    engine.run()
    assert answer(engine.outputs["a"]) == expected(TEXT, **LIVELY, max_tokens=20)
    assert answer(engine.outputs["b"]) == expected(TEXT[:150] + OTHER[:30], **LIVELY, seed=3, max_tokens=20)
    assert answer(engine.outputs["c"]) == expected(OTHER, max_tokens=20)
    plain = {key: value for key, value in LIVELY.items() if "penalty" not in key}
    assert expected(TEXT, **LIVELY, max_tokens=20) != expected(TEXT, **plain, max_tokens=20)


def rules_of(tokens):
    """What keeps an answer from going as `tokens` do: not the first one, and behind none of them its next."""
    pairs = [list(pair) for pair in pairwise(tokens)]
    return {"bad_words": [tokens[:1], *pairs, [4001, 4002, 4003]], "temperature": 0.0}


@pytest.mark.parametrize("steps", [2, *map(more, (0, 7))])
def test_rules_are_kept_side_by_side_after_a_hit_and_after_a_preemption(tiny_model, expected, steps):
    """The same answer as alone, in which no forbidden word is."""
    free = expected(TEXT[:120], temperature=0.0, max_tokens=20)
    rules = rules_of(free)
    alone = expected(TEXT[:120], **rules, max_tokens=20)
    words = {tuple(word) for word in rules["bad_words"]}
    assert not words & {*((token,) for token in alone), *pairwise(alone)}
    engine = Engine(tiny_model)
    engine.ask(TEXT[:100])
    allowed = list(range(100, 1100))
    engine.submit("a", TEXT[:120], **rules, max_tokens=20)
    engine.submit("b", TEXT[:150], allowed_token_ids=allowed, max_tokens=20)
    for _ in range(steps):
        engine.step()
    if steps:
        preempt(engine.state, engine.state.requests["a"], engine.state.requests["a"], 0)
    engine.run()
    assert answer(engine.outputs["a"]) == alone != free
    assert answer(engine.outputs["b"]) == expected(TEXT[:150], allowed_token_ids=tuple(allowed), max_tokens=20)
    assert set(answer(engine.outputs["b"])) <= set(allowed)


def test_a_word_is_kept_out_where_it_would_have_come_again(tiny_model):
    engine = Engine(tiny_model)
    fields = {"temperature": 0.0, "max_tokens": 6, "allowed_token_ids": [50, 60]}
    free = answer(engine.ask(TEXT[:70], **fields))
    other = {50: 60, 60: 50}
    # it begins as it did, and then has to go the other way
    for length in range(1, 6):
        held = answer(engine.ask(TEXT[:70], **fields, bad_words=[free[:length]]))
        assert held[:length] == [*free[: length - 1], other[free[length - 1]]]
    # both are forbidden, and one of them has to come
    assert answer(engine.ask(TEXT[:70], **fields, bad_words=[[50], [60]])) == free


def test_several_answers_have_their_own_words(tiny_model, expected):
    engine = Engine(tiny_model)
    fields = {"temperature": 0.7, "max_tokens": 8, "allowed_token_ids": (70, 80, 90)}
    words = ((70, 80), (80, 90), (90, 90, 70))
    engine.submit("a", TEXT, n=4, seed=40, bad_words=words, **fields)
    engine.run()
    for index in range(4):
        own = answer(engine.outputs["a"], index)
        assert own == expected(TEXT, seed=40 + index, bad_words=words, **fields)
        assert not {*words} & {*pairwise(own), *zip(own, own[1:], own[2:], strict=False)}
    assert len({tuple(answer(engine.outputs["a"], index)) for index in range(4)}) > 1


@pytest.mark.parametrize(("steps", "room"), first_of([(2, 0), (7, 10_000)], (2, 7), (0, 10_000)))
def test_a_preempted_request_draws_as_if_nothing_had_happened(tiny_model, expected, room, steps):
    engine = Engine(tiny_model)
    engine.submit("a", TEXT[:120], **LIVELY, max_tokens=20, logprobs=2)
    for _ in range(steps):
        engine.step()
    victim = engine.state.requests["a"]
    preempt(engine.state, victim, victim, room)
    engine.run()
    assert answer(engine.outputs["a"]) == expected(TEXT[:120], **LIVELY, max_tokens=20)
    told = [token for output in engine.outputs["a"] for _, ((token, _), *_) in output.logprobs or ()]
    assert told == answer(engine.outputs["a"])


@pytest.mark.parametrize("cached", [True, False])
def test_n_answers_are_those_of_n_requests_and_the_prompt_is_computed_once(tiny_model, expected, cached):
    engine = Engine(tiny_model, enable_prefix_caching=cached)
    engine.submit("a", TEXT, n=6, seed=40, max_tokens=6)
    engine.submit("b", OTHER, max_tokens=6)
    engine.run()
    for index in range(6):
        assert answer(engine.outputs["a"], index) == expected(TEXT, seed=40 + index, max_tokens=6)
    assert answer(engine.outputs["b"]) == expected(OTHER, max_tokens=6)
    stats = engine.core.stats()
    assert stats.tokens.computed_prompt == stats.tokens.prompt == len(TEXT) + len(OTHER)
    assert stats.pool.held_pages == stats.pool.open_sequences == 0
    finishes = [output for output in engine.outputs["a"] if output.finish_reason]
    assert sorted(output.index for output in finishes) == list(range(6))
    assert [output.index for output in finishes if output.cache is not None] == [0]
    assert all(output.timings is not None for output in finishes)


def test_logprobs_are_the_softmax_of_what_was_sampled_from(tiny_model):
    engine = Engine(tiny_model)
    outputs = engine.ask(TEXT[:70], logprobs=5, temperature=0.7, logit_bias={7: 50.0}, top_k=3)
    place = len(TEXT[:70])
    for output in outputs:
        assert len(output.token_ids) == len(output.logprobs)
        for sampled, (rank, ((token, value), *best)) in zip(output.token_ids, output.logprobs, strict=True):
            assert token == sampled
            truth = engine.logits[1, place].double().log_softmax(-1)
            assert value == pytest.approx(truth[token].item(), abs=1e-4)
            order = truth.argsort(descending=True).tolist()
            assert [other for other, _ in best] == order[:5] and order[rank - 1] == token
            place += 1


def test_log_probabilities_of_listed_tokens(tiny_model):
    engine = Engine(tiny_model)
    listed = [7, 3, 4000]
    engine.submit("a", TEXT[:70], logprobs=2, logprob_token_ids=listed, n=2)
    engine.submit("b", TEXT[:70], logprobs=2)
    engine.run()
    for place, output in enumerate(one for one in engine.outputs["a"] if one.index == 0):
        ((_, ((token, value), *others)),) = output.logprobs
        truth = engine.logits[1, 70 + place].double().log_softmax(-1)
        assert [token] == output.token_ids and [other for other, _ in others] == listed
        assert [value, *(own for _, own in others)] == pytest.approx(
            [truth[i].item() for i in (token, *listed)], abs=1e-4
        )
    assert answer(engine.outputs["a"]) == answer(engine.outputs["b"])
    assert all(len(output.logprobs) == 1 and output.logprobs.width == 3 for output in engine.outputs["b"])


def test_prompt_logprobs_are_what_the_prompt_prefix_would_have_been_sampled_from(tiny_model):
    prompt = TEXT[:130]
    engine = Engine(tiny_model, max_num_batched_tokens=68, max_num_seqs=1)
    engine.ask(prompt)  # all of it is cached now, and none of it may be used
    outputs = engine.ask(prompt, prompt_logprobs=3, n=2, max_tokens=2)
    told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(told) == 1 and len(told[0]) == len(prompt) - 1
    assert outputs[-1].cache is None or outputs[-1].cache.cached_tokens == 0
    rows = list(told[0])
    assert [pairs[0][0] for _, pairs in rows] == prompt[1:]
    probe = Engine(tiny_model, max_num_seqs=1)
    for length in (1, 2, 63, 64, 65, 100, 129):
        probe.ask(prompt[:length], max_tokens=1, seed=length)
        truth = probe.logits[length, length].log_softmax(-1)
        rank, ((token, value), *best) = rows[length - 1]
        assert value == truth[token].item(), "exact mode: bit for bit"
        assert [other for other, _ in best] == truth.topk(3).indices.tolist()
        assert rank == int((truth > truth[token]).sum()) + 1


def test_a_bias_forces_and_forbids(tiny_model):
    engine = Engine(tiny_model)
    assert answer(engine.ask(TEXT[:30], logit_bias={77: 100.0}, max_tokens=3)) == [77] * 3
    free = answer(engine.ask(TEXT[:30], temperature=0.0, max_tokens=1))
    assert answer(engine.ask(TEXT[:30], temperature=0.0, max_tokens=1, logit_bias={free[0]: -100.0})) != free


def test_seeds_of_answers_wrap_within_int64():
    assert [seed_of(5, i) for i in range(3)] == [5, 6, 7]
    assert seed_of((1 << 63) - 1, 1) == -(1 << 63)
    assert seed_of(-1, 1) == 0


# -- with a runner of tags ---------------------------------------------------------------------------------------------


def test_one_branch_that_meets_its_stop_leaves_the_others_running():
    engine = simulated_core()
    lone = [tokens_of(run(simulated_core(), request(max_tokens=12, seed=i))) for i in range(3)]
    stop = chr(lone[1][4]) + chr(lone[1][5])
    outputs = run(engine, request(max_tokens=12, seed=0, n=3, stop=[stop]))
    for index in range(3):
        own = [output for output in outputs if output.index == index]
        text = "".join(map(chr, lone[index]))
        met = stop in text
        assert own[-1].finish_reason == ("stop" if met else "length")
        assert "".join(output.text for output in own) == text.partition(stop)[0]
        assert answer(own, index) == lone[index][: len(answer(own, index))]
    assert "stop" in {output.finish_reason for output in outputs}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_all_answers_and_leaves_nothing(steps):
    engine = simulated_core(max_num_seqs=3)
    engine.submit(request(n=7, max_tokens=50))
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    assert engine._outputs._answers == engine._outputs._ids == {}
    while engine.has_work:
        assert engine.step() == []
    engine.idle()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pool.held_pages, stats.pool.open_sequences) == (0, 0, 0, 0)


@pytest.mark.parametrize("room", [0, 10_000])
def test_an_answer_that_repeats_itself_ends_with_nothing_left(tiny_model, room):
    fields = {"logit_bias": {77: 100.0}, "max_tokens": 50}
    limit = RepetitionDetection(max_pattern_size=4, min_pattern_size=2, min_count=3)
    engine = Engine(tiny_model)
    engine.submit("a", TEXT[:70], **fields, repetition_detection=limit, n=2)
    engine.submit("b", TEXT[:70], **fields, repetition_detection=limit, min_tokens=9)
    engine.step()
    engine.step()
    victim = engine.state.requests["a"]
    preempt(engine.state, victim, victim, room)
    engine.run()
    for name, index, length in (("a", 0, 6), ("a", 1, 6), ("b", 0, 9)):
        last = [output for output in engine.outputs[name] if output.index == index][-1]
        assert answer(engine.outputs[name], index) == [77] * length
        assert (last.finish_reason, last.stop_reason) == ("repetition", "repetition_detected")
    stats = engine.core.stats()
    assert (stats.num_running, stats.pool.held_pages, stats.pool.open_sequences) == (0, 0, 0)


def test_an_error_of_one_answer_ends_them_all():
    engine = simulated_core()
    engine.submit(request(n=3, max_tokens=50))
    for _ in range(3):
        engine.step()
    failed = engine._scheduler.state.requests["a"]
    failed.outcome.failure = "it did not come"
    engine._scheduler.finish(failed, "error")
    (output,) = engine._outputs.process_outputs([Progress(failed, (), "error")])
    assert (output.finish_reason, output.error, output.status) == ("error", "it did not come", 502)
    while engine.has_work:
        assert engine.step() == []
    engine.idle()
    assert engine._outputs._answers == engine._outputs._ids == {} and engine.stats().pool.open_sequences == 0


def test_ids_of_answers_are_forgotten_at_their_end():
    engine = simulated_core()
    run(engine, request(n=3, max_tokens=4))
    assert engine._outputs._answers == engine._outputs._ids == {}


def test_a_stop_string_across_tokens_with_and_without_itself():
    whole = tokens_of(run(simulated_core(), request(max_tokens=12)))
    text = "".join(map(chr, whole))
    stop = text[4:7]
    assert text.index(stop) == 4
    for include, expected_text in ((False, text[:4]), (True, text[:7])):
        asked = request(max_tokens=12, stop=[stop], include_stop_str_in_output=include)
        outputs = run(simulated_core(), asked)
        assert "".join(output.text for output in outputs) == expected_text
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    late = run(simulated_core(), request(max_tokens=12, stop=[stop], min_tokens=7))
    assert late[-1].finish_reason == "length" and "".join(output.text for output in late) == text


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_stop_that_ends_too_early_is_never_met_later(cut):
    stops = StopStringChecker(["ab", "xxabyyyy"])
    text = "xxaby"
    said, met = stops.push(text[:cut], check=False)
    rest, met = stops.push(text[cut:], check=False)
    more, met = stops.push("z")
    assert met is None and said + rest + more + stops.flush() == "xxabyz"
    stops = StopStringChecker(["ab"])
    assert stops.push("a", check=False)[1] is None
    assert stops.push("b") == ("", "ab")


BAD = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": -1.0}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": math.nan}, "min_p"),
    ({"frequency_penalty": math.nan}, "frequency_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": math.inf}, "repetition_penalty"),
    ({"logit_bias": {128: 1.0}}, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: math.nan}}, "logit_bias"),
    ({"logit_bias": {1: 101.0}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [5, 128]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
    ({"bad_words": [[]]}, "bad_words"),
    ({"bad_words": [[1], [5, 128]]}, "bad_words"),
    ({"bad_words": [[-1]]}, "bad_words"),
    ({"bad_words": [[1]] * 257}, "bad_words"),
    ({"bad_words": [[1] * 1089]}, "bad_words"),
    ({"stop_token_ids": [128]}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprob_token_ids": [128]}, "logprob_token_ids"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
    ({"logprob_token_ids": [1] * 129}, "logprob_token_ids"),
    ({"logprobs": -1}, "logprobs"),
    ({"repetition_detection": RepetitionDetection(max_pattern_size=-1)}, "repetition_detection"),
    ({"repetition_detection": RepetitionDetection(max_pattern_size=4097, min_count=2)}, "repetition_detection"),
    ({"repetition_detection": RepetitionDetection(max_pattern_size=2, min_count=1)}, "repetition_detection"),
    ({"repetition_detection": RepetitionDetection(max_pattern_size=2, min_pattern_size=3)}, "repetition_detection"),
    ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"),
    ({"prompt_logprobs": MAX_LOGPROBS + 1}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 20, "prompt": [1] * 60_000}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_is_out_of_range_is_refused_by_name(fields, param):
    engine = simulated_core()
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(request(**fields))
    assert caught.value.param == param
    assert not engine.has_work


def test_outputs_that_wait_are_merged_by_answer_with_their_logprobs():
    def output(index, token, **fields):
        one = Logprobs(np.array([[token, 0]]), np.array([[-1.0, -0.5]]), np.array([3]))
        return GenerateOutput(
            request_id="a", index=index, token_ids=[token], text=chr(token), logprobs=pack_logprobs([one], 1), **fields
        )

    mailbox = OutputQueue()
    prompt = pack_logprobs([], 2)
    mailbox.put(output(0, 97, prompt_logprobs=prompt))
    mailbox.put(output(1, 65))
    mailbox.put(output(0, 98, finish_reason="stop"))

    async def both():
        return [await mailbox.get(), await mailbox.get()]

    first, second = asyncio.run(both())
    assert (first.index, first.text, first.token_ids, first.finish_reason) == (0, "ab", [97, 98], "stop")
    assert [pairs[0][0] for _, pairs in first.logprobs] == [97, 98] and first.prompt_logprobs is prompt
    assert (second.index, second.text, len(second.logprobs)) == (1, "A", 1)


def test_the_tokens_of_a_text_spell_it_byte_by_byte(tiny_model):
    tokenizer = ModelTokenizer(tiny_model)
    text = "def naïve(): return '日本語 🙂' # \t ok\n"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == text
    assert tokenizer.token_bytes(10**6) == b""
