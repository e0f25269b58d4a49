"""Where drafts and recurrent states have gone wrong elsewhere, one test each, by the number of the report.

The reference is a core that caches nothing, drafts nothing and serves one request at a time; logits are compared bit
for bit. Hand-overs (vllm#53505, dynamo#12198) are in `tests/pd/test_drafts.py`.
"""

import json

import jsonschema
import numpy as np
import pytest

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, Structure, ThinkingBudget
from cairn.scheduler.speculation import SpeculativeConfig
from doubles.drafters import KnowingDrafter
from doubles.engine_requests import generate_request
from doubles.grammar_children import shared_grammar_child
from engine.test_exactness import OTHER, TEXT, Loaded, assert_same, load
from engine.test_exactness_drafts import PATTERNS, Drafted, tokens_of
from tiers import more


@pytest.fixture(scope="module", params=["nemotron_h", more("qwen3_5")])
def loaded(request, made_model) -> Loaded:
    return load(request.param, made_model)


def test_a_prefix_cache_with_drafts_changes_no_answer_vllm_53912(loaded):
    """A chat whose turns hit what the drafted turns before have left: ends of answers, points within accepted runs."""
    drafted, prompt = Drafted(loaded, "alternating"), TEXT[:90]
    for turn in range(4):
        expected = loaded.alone(prompt, 40)
        assert_same(drafted.ask(prompt, expected), expected)
        prompt = prompt + tuple(tokens_of(expected)[: 13 + 9 * turn]) + OTHER[40 * turn : 40 * turn + 11]
    hits = [request.stats.first_sequence.hit for request in drafted.engine.requests.values()]
    assert hits[1:] == sorted(hits[1:]) and hits[1] >= 64


def test_accepted_counts_stay_with_their_sequences_vllm_53919(loaded):
    """Sequences end, and others come, between steps of which each accepts another number for each of them."""
    drafted, numbers = Drafted(loaded, "rising", budget=200), {}
    for index in range(6):
        prompt, length = TEXT[20 * index : 20 * index + 30], 9 + 7 * (index % 3)
        expected = loaded.alone(prompt, length)
        numbers[drafted.submit(prompt, expected)] = expected
        drafted.engine.step()
        drafted.engine.step()
    drafted.engine.run()
    for number, expected in numbers.items():
        assert_same(drafted.engine.logits[number], expected)
    per_step = {tuple(each) for each in zip(*[iter(record[2] for record in drafted.drafter.records)] * 3, strict=False)}
    assert len(per_step) > 4


def test_steps_without_drafts_read_the_state_that_those_with_drafts_have_left_vllm_39273(loaded):
    class Now(KnowingDrafter):
        """Drafts in every third step alone."""

        asked = 0

        def propose(self, request, most, num_decodes):
            self.asked += 1
            return super().propose(request, most if self.asked % 3 == 0 else 0, num_decodes)

    drafted, expected = Drafted(loaded), loaded.alone(TEXT[:70], 40)
    drafted.drafter = drafted.engine.scheduler.state.drafting.drafter = Now(
        drafted.answers, 4, PATTERNS["rising"], loaded.models[True].vocab_size
    )
    assert_same(drafted.ask(TEXT[:70], expected), expected)
    assert drafted.num_accepted > 0


@pytest.mark.parametrize("block_size", [48, more(16), more(128)])
def test_chains_over_ends_of_blocks_and_chunks_vllm_55600(loaded, block_size):
    expected = loaded.alone(TEXT[:120], 30)
    for start in range(1, 4):
        drafted = Drafted(loaded, num_drafts=4 + start, block_size=block_size)
        assert_same(drafted.ask(TEXT[:120], expected), expected)
        following = TEXT[:120] + tuple(tokens_of(expected)[: 10 * start]) + OTHER[:9]
        assert_same(drafted.ask(following, loaded.alone(following)), loaded.alone(following))


@pytest.fixture(scope="module", autouse=True)
def grammar_child():
    with shared_grammar_child():
        yield


SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "many": {"type": "boolean"}},
    "required": ["color", "many"],
    "additionalProperties": False,
}


def answers_of(folder, method, **fields):
    """The answer of a core, and how many drafts it has accepted; with what it has answered once already as prediction,
    which is where most drafts come from."""
    speculative = SpeculativeConfig(method=method, prompt_lookup_min=1)
    core = build_core(
        EngineConfig(model=str(folder), kv_cache_memory_bytes=8 << 20, exact=True, speculative=speculative)
    )
    core.start(lambda: None)
    prompt, found = np.random.default_rng(3).integers(20, 4000, 60), []
    for name in ("first", "second"):
        core.submit(
            generate_request(request_id=name, prompt=prompt.astype("<i8").tobytes(), max_tokens=80, seed=5, **fields)
        )
        outputs = []
        while not outputs or outputs[-1].finish_reason is None:
            assert core.poll_ready() == []
            outputs += core.step() if core.has_work else []
        found.append(([token for output in outputs for token in output.token_ids], "".join(o.text for o in outputs)))
    accepted = core.stats().spec_decode.num_accepted_tokens
    core.close()
    return found, accepted


@pytest.mark.parametrize("temperature", [1.0, more(0.0)])
def test_each_draft_has_the_mask_of_its_own_position_vllm_44006(tiny_model, temperature):
    structure = Structure(kind="json", text=json.dumps(SCHEMA), field="f")
    fields = {"structure": structure, "temperature": temperature, "stop": ["\x00 nobody says this"]}
    expected, none = answers_of(tiny_model, "none", **fields)
    found, accepted = answers_of(tiny_model, "suffix", **fields)
    assert found == expected and none == 0 and accepted > 5
    for _, text in found:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_reasoning_that_ends_within_drafts_turns_the_form_on_there_vllm_36138(tiny_model):
    fields = {
        "structure": Structure(kind="choice", text='["yes, it is", "no, never"]', field="f", reasoning="opened"),
        "thinking": ThinkingBudget(num_tokens=12, start="<think>", end="</think>", is_open=True),
        "temperature": 0.0,
        "stop": ["\x00 nobody says this"],
    }
    expected, _ = answers_of(tiny_model, "none", **fields)
    found, accepted = answers_of(tiny_model, "suffix", **fields)
    assert found == expected and accepted > 5
    assert all(text.split("</think>")[1].strip() in ("yes, it is", "no, never") for _, text in found)
