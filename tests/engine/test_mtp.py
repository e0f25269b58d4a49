"""A checkpoint's head of multi-token prediction, from the setting to the answers: who is served with one, and that what
it drafts changes no answer, however it is held to a form, or preempted, or about images.
"""

import json
import logging

import numpy as np
import pytest

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, Structure, ThinkingBudget
from cairn.engine.devices import open_head
from cairn.errors import ConfigError
from cairn.models import registry
from cairn.models.registry import open_model
from cairn.scheduler.draft_cost import VerifyCost
from cairn.scheduler.mtp_drafter import MTPDrafter
from cairn.scheduler.preempt import preempt
from cairn.scheduler.speculation import SpeculativeConfig
from doubles.drafters import KnowingHead
from doubles.engine_requests import NEVER, generate_request
from doubles.grammar_children import shared_grammar_child
from engine.test_exactness import OTHER, TEXT, Engine, Loaded, assert_same, load
from engine.test_exactness_drafts import Drafted, tokens_of
from models.published_qwen3_5 import QWEN35
from runner.harness import parse
from tiers import first, more

MTP = SpeculativeConfig(method="mtp")


def core_of(folder, method, **config):
    asked = SpeculativeConfig(method=method)
    return build_core(EngineConfig(model=str(folder), kv_cache_memory_bytes=16 << 20, speculative=asked, **config))


def head_of(core):
    return core._runner._model.head


@pytest.fixture(scope="module", params=["nemotron_h+mtp", more("qwen3_5+mtp"), more("qwen3_5_moe+mtp")])
def loaded(request, made_model) -> Loaded:
    return load(request.param, made_model)


# -- who is served with one --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "mtp", more("suffix"), more("none")])
def test_a_head_is_a_part_of_the_model_where_it_drafts(made_model, caplog, monkeypatch, method):
    if method == "auto":  # as of a model whose steps are longer
        monkeypatch.setattr(registry, "MOST_HEAD_SHARE", 1.0)
    with caplog.at_level(logging.INFO):
        core = core_of(made_model("qwen3_5+mtp"), method)
    drafts = method in ("auto", "mtp")
    assert (head_of(core) is not None) is drafts is ("head of multi-token prediction is served" in caplog.text)
    assert isinstance(core._scheduler.state.drafting.drafter, MTPDrafter) is drafts
    # one of two attention layers, each of two kv heads of 64 numbers
    assert core.info.cache.bytes_per_token == (2 if drafts else 1) * 2 * 2 * 64 * 4
    assert (core.info.num_speculative_tokens > 0) is (method != "none")
    core.close()


def test_the_checkpoints_of_other_servers_are_others(made_model):
    """What pages are is told apart by the facts that servers compare."""
    plain = load("qwen3_5+mtp", made_model).opened
    assert plain.config.serves_mtp and plain.transfer_facts()["mtp"] == 1
    core = core_of(made_model("qwen3_5"), "auto")
    assert head_of(core) is None
    core.close()


def test_a_head_that_would_take_much_of_short_steps_is_not_served_unasked(made_model):
    """Here it takes a twentieth of a token's products; of a published model less than a hundredth."""
    opened = open_model(made_model("qwen3_5+mtp"))
    config = EngineConfig(model=str(opened.folder))
    assert 0.03 < opened.with_head().config.served().head_share < 0.1
    assert not open_head(config, opened).config.serves_mtp
    assert open_head(config.model_copy(update={"speculative": MTP}), opened).config.serves_mtp
    published = parse(QWEN35).asking(serves_mtp=True).served().head_share
    # 2,048 x 4,096 of the projection and 2 x 512 x 2,048 of keys and values
    assert 0.002 < published < 0.005


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("qwen3_5", {}, "the checkpoint has none: mtp.pre_fc_norm_embedding.weight is not stored; use suffix or ngram"),
        ("nemotron_h", {}, "the checkpoint has none: mtp.layers.0.enorm.weight is not stored; use suffix or ngram"),
        ("lfm2", {}, "there is none that is known of lfm2; use suffix or ngram, or leave it out"),
        ("qwen3_5+mtp", {"tensor_parallel_size": 3}, "its hidden_size 256 does not divide among 3 ranks; use suffix"),
    ],
)
def test_where_there_is_none_the_fix_is_named(made_model, family, config, said):
    with pytest.raises(ConfigError) as raised:
        core_of(made_model(family), "mtp", **config)
    start = "--speculative-config: method: 'mtp' drafts with a checkpoint's own head: "
    assert str(raised.value).startswith(start + said)


@pytest.mark.parametrize(("num_ranks", "serves"), [(1, True), (2, True), (4, True), (3, False)])
def test_several_ranks_have_a_head_that_divides(made_model, monkeypatch, num_ranks, serves):
    """With auto nobody is refused."""
    monkeypatch.setattr(registry, "MOST_HEAD_SHARE", 1.0)
    opened = open_model(made_model("nemotron_h+mtp"))
    config = EngineConfig(model=str(opened.folder), tensor_parallel_size=num_ranks)
    assert open_head(config, opened).config.serves_mtp is serves


def test_a_model_without_recurrent_layers_has_no_hidden_states_to_go_on_from(made_model, tmp_path):
    folder = made_model("qwen3_5+mtp")
    raw = json.loads((folder / "config.json").read_text()) | {"layer_types": ["full_attention"] * 4}
    for each in folder.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="the model has no recurrent layers"):
        core_of(tmp_path, "mtp")
    raw |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "mtp_num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="has 2 of them, and one is what is implemented"):
        core_of(tmp_path, "mtp")


# -- answers -----------------------------------------------------------------------------------------------------------


def test_the_models_own_logits_are_those_without_a_head(made_model, loaded):
    """Bit for bit: the head only reads what the model makes."""
    family = loaded.opened.family.model_type
    name = {"nemotron_h": "nemotron_h", "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}[family]
    without = Loaded.__new__(Loaded)
    without.opened = type(loaded.opened)(
        **{field: getattr(loaded.opened, field) for field in loaded.opened.__dataclass_fields__ if field != "config"},
        config=loaded.opened.family.parse(json.loads((made_model(f"{name}+mtp") / "config.json").read_text())),
    )
    without.models, without._alone = {True: without.opened.build(exact=True)}, {}
    assert without.models[True].head is None
    for prompt in (TEXT[:130], OTHER[:7]):
        assert_same(loaded.alone(prompt, 12), without.alone(prompt, 12))


def test_answers_of_the_heads_own_drafts(loaded):
    """Whatever it drafts, and however deep is chosen: next turns hit, alone and beside another one."""
    engine = Engine(loaded)
    engine.scheduler.state.drafting.drafter = MTPDrafter(MTP, VerifyCost(0.0, 0.0), VerifyCost(0.0, 0.01))
    prompt = TEXT[:70]
    for turn in range(2):
        expected, beside = loaded.alone(prompt, 20), loaded.alone(OTHER[:130], 20)
        number, other = engine.submit(prompt, 20), engine.submit(OTHER[:130], 20) if turn else None
        engine.run()
        assert_same(engine.logits[number], expected)
        assert other is None or assert_same(engine.logits[other], beside) is None
        prompt += tuple(tokens_of(expected)[:15]) + OTHER[200:209]
    counters = engine.scheduler.state.counters.spec_decode
    assert counters.num_drafts > 0


@pytest.mark.parametrize("room", [0, more(10_000)])
def test_a_request_preempted_while_its_head_drafts(loaded, room):
    """With and without a state that was saved for it; its drafts are those of one that nobody preempted."""
    drafted = Drafted(loaded, "rising")
    expected = loaded.alone(TEXT[:150], 25)
    number = drafted.submit(TEXT[:150], expected)
    for steps in (3, 4):
        for _ in range(steps):
            drafted.engine.step()
        preempt(drafted.engine.scheduler.state, drafted.engine.requests[number], drafted.engine.requests[number], room)
    drafted.engine.run()
    assert drafted.engine.requests[number].output == tokens_of(expected)
    assert isinstance(drafted.drafter, KnowingHead) and drafted.drafter.num_made > 10


@pytest.fixture(scope="module", autouse=True)
def grammar_child():
    with shared_grammar_child():
        yield


SCHEMA = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}}, "required": ["color"]}
FORMS = {
    "schema": {"structure": Structure(kind="json", text=json.dumps(SCHEMA), field="f")},
    "reasoning": {
        "structure": Structure(kind="choice", text='["yes, it is", "no, never"]', field="f", reasoning="opened"),
        "thinking": ThinkingBudget(num_tokens=9, start="<think>", end="</think>", is_open=True),
    },
    "several": {"n": 3},
    "least tokens": {"min_tokens": 20, "ignore_eos": True},
    "penalties": {"presence_penalty": 0.7, "repetition_penalty": 1.2},
    "filters": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
}


def answers_of(core, **fields):
    """Tokens, texts and log-probabilities by answer."""
    prompt = np.array(TEXT[:40], "<i8").tobytes()
    flat = {"temperature": 1.0, "seed": 3, "logprobs": 2, "max_tokens": 40, "stop": [NEVER]} | fields
    core.submit(generate_request(request_id="r", prompt=prompt, **flat))
    answers, num_ended = {}, 0
    while num_ended < fields.get("n", 1):
        assert core.poll_ready() == []
        for output in core.step() if core.has_work else ():
            num_ended += output.finish_reason is not None
            tokens, texts, told = answers.setdefault(output.index, ([], [], []))
            tokens += output.token_ids
            texts.append(output.text)
            told += [] if output.logprobs is None else np.frombuffer(output.logprobs.values, np.float32).tolist()
    return {index: (tokens, "".join(texts), told) for index, (tokens, texts, told) in sorted(answers.items())}


@pytest.fixture(scope="module")
def cores(made_model):
    """Without drafts, and with a head."""
    made = [core_of(made_model("nemotron_h+mtp"), method, exact=True) for method in ("none", "mtp")]
    for core in made:
        core.start(lambda: None)
    yield made
    for core in made:
        core.close()


@pytest.mark.parametrize("form", first(3, FORMS))
def test_what_is_asked_of_an_answer_holds_for_each_draft(cores, form):
    """Drafts that the model would have drawn, and others that it may not draw: each has the mask of its position."""
    plain, headed = cores
    expected = answers_of(plain, **FORMS[form])
    known = {f"r/{index}" if index else "r": tokens for index, (tokens, _, _) in expected.items()}
    head = KnowingHead(known, 4, lambda proposal: proposal % 5, 4096, headed._runner)
    headed._scheduler.state.drafting.drafter = head
    before = headed.stats().spec_decode.num_accepted_tokens
    assert answers_of(headed, **FORMS[form]) == expected
    assert headed.stats().spec_decode.num_accepted_tokens - before > 2 and head.num_made > 8


def test_a_form_that_is_complete_ends_the_chain(cores):
    """Of drafts behind the end of what a form allows none is looked at, though all of them were computed."""
    plain, headed = cores
    form = {"structure": Structure(kind="choice", text='["ab", "cd"]', field="f"), "ignore_eos": True}
    expected = answers_of(plain, **form)
    drafts = {"r": expected[0][0] + [5, 6, 7, 8, 9, 10]}
    headed._scheduler.state.drafting.drafter = KnowingHead(drafts, 6, lambda proposal: 99, 4096, headed._runner)
    assert answers_of(headed, **form) == expected


def test_a_checkpoint_whose_head_nobody_can_use_drafts_nothing_by_it(cores):
    """The head's own drafts: of a model with random weights hardly one is right, and none is made after a while."""
    _, headed = cores
    vars(headed._runner._head).pop("advance", None)
    headed._scheduler.state.drafting.drafter = MTPDrafter(MTP, VerifyCost(), VerifyCost(0.3, 0.1))
    before = headed.stats().spec_decode
    answers_of(headed, max_tokens=60, seed=4, ignore_eos=True)
    after = headed.stats().spec_decode
    assert 0 < after.num_draft_tokens - before.num_draft_tokens < 30
