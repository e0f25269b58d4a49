"""The published table of incremental images, as the benchmark prints it: what policies find, and in how many rounds."""

import pytest
from benchmarks.incremental_images import BLOCK, FIVE_TOKENS, FOUR_TOKENS, Prompts, measure, measure_text

from cairn.engine.text.tokenizer import ModelTokenizer


def by_policy(found):
    rows = {}
    for asked in found:
        rows.setdefault(asked.policy, []).append(asked)
    return rows


def check(rows, shared):
    """What the policies find, whatever the length of a step."""
    assert [asked.share for asked in rows["align"][1:]] == ["96.5 %", rows["align"][2].share, "94.9 %"]
    cold, repeated, incremental, again = rows["auto"]
    assert [asked.tokens for asked in rows["auto"]] == [FOUR_TOKENS, FOUR_TOKENS, FIVE_TOKENS, FIVE_TOKENS]
    assert (cold.cached, repeated.cached, incremental.cached, again.cached) == (0, FOUR_TOKENS, shared, FIVE_TOKENS)
    assert (cold.encoded, repeated.encoded, incremental.encoded, again.encoded) == (4, 0, 1, 0)


@pytest.fixture(scope="module")
def shared(tiny_vl_model):
    prompts = Prompts(ModelTokenizer(tiny_vl_model), 0)
    fourth = prompts.four.images[3]
    assert prompts.shared == fourth.start + fourth.length + 1
    assert 3 * BLOCK <= prompts.shared < 4 * BLOCK
    return prompts.shared


@pytest.mark.more
def test_steps_of_8192_tokens(tiny_vl_model, shared):
    rows = by_policy(measure(tiny_vl_model, [8192], 0, ("align", "auto")))
    check(rows, shared)
    assert rows["align"][2].cached == 0
    assert [asked.rounds for asked in rows["auto"]] == [1, 0, 1, 0]


@pytest.mark.long
def test_steps_of_2048_tokens_and_of_a_block(tiny_vl_model, shared):
    rows = by_policy(measure(tiny_vl_model, [2048], 0))
    check(rows, shared)
    assert rows["granular"][2].cached == 3 * BLOCK
    assert [asked.rounds for asked in rows["off"]] == [2, 2, 3, 3]
    assert [asked.rounds for asked in rows["auto"]] == [2, 0, 2, 0]
    assert [asked.rounds for asked in rows["granular"]] == [8, 1, 6, 1]
    assert [asked.cached for asked in rows["auto, blocks of 544"]] == [asked.cached for asked in rows["auto"]]


@pytest.mark.more
def test_text_alone_hits_the_same_with_and_without_the_vision_model(tiny_vl_model):
    with_it, without = measure_text(tiny_vl_model, 0).values()
    assert [asked.cached for asked in with_it] == [asked.cached for asked in without]
    assert [asked.cached > 0 for asked in with_it] == [False, True, True, True]
