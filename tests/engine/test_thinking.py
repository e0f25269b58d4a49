"""The bound of an answer's thinking, exact whatever else happens to the request."""

import numpy as np
import pytest

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, Structure, ThinkingBudget
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.engine.thinking import ThinkingConstraint
from cairn.errors import InvalidRequest
from cairn.scheduler.preempt import preempt
from cairn.scheduler.speculation import SpeculativeConfig
from doubles.engine_requests import NEVER, generate_request
from tiers import more

PROMPT = np.random.default_rng(5).integers(20, 4000, 150).tolist()
END = [*b"</think>"]
HEADS = ["<tool_call><function=f><parameter=", "<function=f><parameter="]


def constraint(num_tokens, *, is_open, grammar=None, call_heads=()):
    budget = ThinkingBudget(
        num_tokens=num_tokens, start="<think>", end="</think>", is_open=is_open, call_heads=list(call_heads)
    )
    return ThinkingConstraint(budget, lambda text: [*text.encode()], lambda token: bytes([token]), 259, grammar)


def forced(mask):
    """The one token that may come; None for any."""
    if mask is None:
        return None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits.sum() == 1
    return int(bits.argmax())


def written(made, text):
    """What a model that would write `text` has written in the end."""
    output, wishes = [], [*text.encode()]
    while wishes:
        token = forced(made.allowed(output))
        output.append(wishes.pop(0) if token is None else token)
    return bytes(output).decode()


@pytest.mark.parametrize(
    ("num_tokens", "is_open", "text", "expected"),
    [
        (3, True, "abcdef", "abc</think>def"),
        (0, True, "abc", "</think>abc"),
        (6, True, "abcdef", "abcdef"),
        # of an end that has begun, only the rest is forced
        (5, True, "ab</think>cdefgh", "ab</t" + "hink>" + "hink>cdefgh"),
        (5, True, "ab</tooth>", "ab</think>ooth>"),
        (3, True, "ab<cd", "ab</think>cd"),
        (10, True, "ab</think>cdefgh", "ab</think>cdefgh"),
        (2, False, "<think>abc", "<think>ab</think>c"),
        (2, False, "\n\n<think>abc", "\n\n<think>ab</think>c"),
        (2, False, "<thing>abc", "<thing>abc"),
        (2, False, "so <think>abc", "so <think>abc"),
        (20, False, "<think>a</think><think>" + "b" * 30, "<think>a</think><think>" + "b" * 30),
        (2, False, "\n" * 65 + "<think>abc", "\n" * 65 + "<think>abc"),
    ],
)
def test_the_end_is_forced_behind_so_many_tokens(num_tokens, is_open, text, expected):
    assert written(constraint(num_tokens, is_open=is_open), text) == expected


CALL = "<tool_call>\n<function=f>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("num_tokens", "text", "expected"),
    [
        # a call ends the thinking, also one whose head has begun
        *((num_tokens, f"ab\n{CALL} and on", f"ab\n{CALL} and on") for num_tokens in (40, 15, 14, 5, 4)),
        (3, f"ab\n{CALL}", f"ab\n</think>{CALL}"),
        # what is none does not
        (5, "ab <tool_call> tags", "ab <tool_call> t</think>ags"),
        (5, "ab <tool_box> of tools", "ab <tool_b</think>ox> of tools"),
        (4, "ab <cdefg", "ab <c</think>defg"),
        (5, f"ab <tool_call>{' ' * 99}", f"ab <tool_call>{' ' * 55}</think>{' ' * 44}"),
        (16, "ab <tool_call>\n<function=g>\n", "ab <tool_call>\n<function=g</think>>\n"),
    ],
)
def test_a_call_ends_the_thinking(num_tokens, text, expected):
    assert written(constraint(num_tokens, is_open=True, call_heads=HEADS), text) == expected


def test_a_head_may_begin_within_what_was_taken_for_one():
    """And within a token, and be all of one."""
    vocabulary = {1: b"a <tool", 2: b"_call><tool_call>\n<func", 3: b"tion=f><parameter=", 4: b"b", 5: b"</think>"}
    budget = ThinkingBudget(num_tokens=3, start="<think>", end="</think>", is_open=True, call_heads=HEADS)
    made = ThinkingConstraint(budget, lambda text: [5], vocabulary.get, 6)
    assert made.allowed([1, 2, 3]) is None and made.allowed([1, 2, 3, 4, 4]) is None
    assert forced(made.allowed([1, 2, 4])) == 5


def test_tokens_that_only_spell_a_part_of_the_end_are_completed_or_the_end_is_repeated():
    """What is left of the end may have no tokens of its own."""
    vocabulary = {1: b"a", 2: b"</th", 3: b"ink>", 4: b"</think>", 5: b" ink>"}
    for ink, expected in ((3, [1, 2, 3]), (5, [1, 2, 4])):
        budget = ThinkingBudget(num_tokens=2, start="<think>", end="</think>", is_open=True)
        made = ThinkingConstraint(budget, lambda text, ink=ink: [{"</think>": 4}.get(text, ink)], vocabulary.get, 6)
        assert [*[1, 2], forced(made.allowed([1, 2]))] == expected and made.allowed(expected) is None


def test_it_is_a_function_of_the_answer_alone():
    output, grown = [*b"<think>abc"], constraint(3, is_open=False)
    for end in (10, 4, 10, 0, 9, 10):
        found = forced(grown.allowed(output[:end]))
        assert found == forced(constraint(3, is_open=False).allowed(output[:end])) == (END[0] if end == 10 else None)


@pytest.mark.parametrize("ahead", [1, 3, 7, 80])
def test_drafts_that_were_looked_at_and_did_not_come_leave_no_trace(ahead):
    output = [*b"<think>abc</thi</think>" + b"x" * 90]
    plain = [forced(constraint(5, is_open=False).allowed(output[:n])) for n in range(len(output))]
    made = constraint(5, is_open=False)
    for n, expected in enumerate(plain):
        assert forced(made.allowed(output[:n])) == expected
        for count in range(1, ahead):
            made.allowed([*output[:n], *(b"</think>" * 10)[:count]])


class Engine:
    """A core of the tiny model, turned by hand."""

    def __init__(self, folder, **options):
        config = {"kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 4, "exact": True}
        self.core = build_core(EngineConfig(model=str(folder), **config, **options))
        self.outputs = {}

    def submit(self, name, prompt, **fields):
        fields = {"seed": 1, "ignore_eos": True, "max_tokens": 24} | fields
        keys = np.array(prompt, "<i8").tobytes()
        self.core.submit(generate_request(request_id=name, prompt=keys, **fields))
        self.outputs[name] = []

    def step(self):
        for output in self.core.step():
            self.outputs[output.request_id].append(output)

    def run(self):
        while self.core.has_work:
            self.step()

    def answer(self, name, index=0):
        return [token for output in self.outputs[name] if output.index == index for token in output.token_ids]


@pytest.fixture(scope="module")
def free(tiny_model):
    """An engine that has been asked by the seeds 1 and 2 for answers without a bound."""
    engine = Engine(tiny_model)
    for seed in (1, 2):
        engine.submit(f"free {seed}", PROMPT, seed=seed)
        engine.run()
    return engine


@pytest.fixture
def truth(free, tiny_model, num_tokens):
    """By seed: the answer without a bound, cut there, the end, and what the model says to a prompt that ends so."""
    found = {}
    end = ModelTokenizer(tiny_model).encode("</think>", add_special_tokens=False)
    for seed in (1, 2):
        begun = free.answer(f"free {seed}")[:num_tokens] + end
        name = f"{seed} {num_tokens}"
        free.submit(name, PROMPT + begun, seed=seed, max_tokens=24 - len(begun))
        free.run()
        found[seed] = begun + free.answer(name)
    return found


@pytest.mark.parametrize("num_tokens", [0, *map(more, (9, 1))])
def test_what_follows_is_what_follows_a_prompt_that_ends_so(tiny_model, truth, num_tokens):
    thinking = ThinkingBudget(num_tokens=num_tokens, start="<think>", end="</think>", is_open=True)
    engine = Engine(tiny_model)
    for name in ("computed", "cached"):  # the second one hits what the first one has left
        engine.submit(name, PROMPT, thinking=thinking, n=2)
        engine.submit(f"{name} beside", PROMPT[:70], seed=9)
        engine.run()
        assert [engine.answer(name, index) for index in (0, 1)] == [truth[1], truth[2]]
    engine = Engine(tiny_model, speculative=SpeculativeConfig(method="none"))
    for steps in (1, 3, 12, 16):
        engine.submit("preempted", PROMPT, thinking=thinking)
        for _ in range(steps):
            engine.step()
        victim = engine.core._scheduler.state.requests["preempted"]
        preempt(engine.core._scheduler.state, victim, victim, 0)
        engine.run()
        assert engine.answer("preempted") == truth[1]
    stats = engine.core.stats()
    assert (stats.num_running, stats.pool.held_pages, stats.pool.open_sequences) == (0, 0, 0)


def test_an_answer_has_its_form_behind_the_forced_end(tiny_model):
    thinking = ThinkingBudget(num_tokens=5, start="<think>", end="</think>", is_open=True)
    structure = Structure(kind="choice", text='["yes", "no"]', field="f", reasoning="opened")
    engine = Engine(tiny_model)
    engine.core.start(lambda: None)
    engine.submit("a", PROMPT, thinking=thinking, structure=structure, ignore_eos=False, stop=[NEVER])
    while not engine.outputs["a"] or engine.outputs["a"][-1].finish_reason is None:
        assert engine.core.poll_ready() == []
        engine.step() if engine.core.has_work else None
    text = "".join(output.text for output in engine.outputs["a"])
    assert text.partition("</think>")[2].strip("\n") in ("yes", "no")
    assert engine.outputs["a"][-1].finish_reason == "stop"
    engine.core.close()


@pytest.mark.parametrize("wrong", [{"num_tokens": -1}, {"num_tokens": 1 << 31}, {"end": ""}, {"end": "x" * 65}])
def test_a_bound_that_is_none_is_refused(tiny_model, wrong):
    thinking = ThinkingBudget(**({"num_tokens": 1, "start": "<think>", "end": "</think>"} | wrong))
    with pytest.raises(InvalidRequest) as caught:
        Engine(tiny_model).submit("a", PROMPT, thinking=thinking)
    assert caught.value.param == "thinking_token_budget"
