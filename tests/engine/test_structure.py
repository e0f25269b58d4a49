"""Grammars: what they are made of, what is refused, and that an answer keeps to them."""

import contextlib
import json
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from cairn.engine.contract import Structure
from cairn.engine.grammars.compiler import (
    CheckedGrammar,
    CheckResult,
    GrammarChecker,
    GrammarCompiler,
    GrammarKey,
    PendingGrammars,
)
from cairn.engine.grammars.constraint import GrammarConstraint
from cairn.engine.grammars.structure import MAX_CHOICES, MAX_DEPTH, MAX_TEXT, grammar_of
from cairn.engine.grammars.vocabulary import grammar_tokenizer
from cairn.engine.grammars.worker import byte_tokenizer
from cairn.engine.grammars.worker import find_grammar_error as reason_of
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import InvalidRequest, Overloaded
from cairn.types import ManualClock, SystemClock
from doubles.engine_requests import generate_request
from tiers import more

EOS = 2
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def structure(kind, text, **more):
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return Structure(kind=kind, text=text, **({"field": "structured_outputs." + kind} | more))


def tagged(form):
    return structure("structural_tag", {"type": "structural_tag", "format": form})


def sequence(*elements):
    return {"type": "sequence", "elements": elements}


def const(value):
    return {"type": "const_string", "value": value}


CITY = {"type": "tag", "begin": "<f=city>", "content": {"type": "json_schema", "json_schema": WEATHER}, "end": "</f>"}
WORD = {"begin": "<f=word>", "content": {"type": "regex", "pattern": "[a-z/]+"}, "end": ["</f>", "</g>"]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CITY, WORD]}
SEPARATED = {"type": "tags_with_separator", "tags": [WORD], "separator": ", "}
ANY = {"type": "any_text"}


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return ModelTokenizer(tiny_model)


@pytest.fixture(scope="module")
def words(tokenizer):
    """A model's vocabulary is often larger than its tokenizer's."""
    return tokenizer.vocab_size + 37


@pytest.fixture(scope="module")
def compiled(tokenizer, words):
    ready = grammar_tokenizer(tokenizer, words, (EOS,))
    return lambda asked: GrammarConstraint.compile(grammar_of(asked), ready, words)


def find_grammar_error(asked):
    return reason_of(asked, byte_tokenizer())


def ids(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walk(constraint, seed, most=3000):
    """Tokens drawn at random from what is allowed, until nothing may follow."""
    random, output = np.random.default_rng(seed), []
    while not constraint.complete:
        assert constraint.failure is None and len(output) < most
        token = int(random.choice(ids(constraint.allowed(output))))
        output.append(token)
        constraint.follow(output)
    return [token for token in output if token != EOS]


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        (structure("json", WEATHER), lambda text: json.loads(text).keys() == {"city", "days"}),
        (structure("json", {"type": "integer"}), lambda text: isinstance(json.loads(text), int)),
        (structure("regex", r"^(ab|c/d\n){2}\$$"), lambda text: re.fullmatch(r"(ab|c/d\n){2}\$", text)),
        (structure("regex", r"[a-c]{2,5}\\$"), lambda text: re.fullmatch(r"[a-c]{2,5}\\", text)),
        (structure("choice", ["yes", "no", "yet"]), lambda text: text in ("yes", "no", "yet")),
        (
            structure("choice", ['"é"\n', "<think>", "<|im_end|>!", "</tool_call>"]),
            lambda text: text in ('"é"\n', "<think>", "<|im_end|>!", "</tool_call>"),
        ),
        (structure("choice", ["<|im_end|>!"]), lambda text: text == "<|im_end|>!"),
        (structure("grammar", 'start: "a" b\nb: /[0-9]{2}/ | "x"'), lambda text: re.fullmatch(r"a([0-9]{2}|x)", text)),
        (structure("grammar", 'root ::= "a" [0-9] b\nb ::= "z" | "y"'), lambda text: re.fullmatch("a[0-9][yz]", text)),
        (
            tagged(sequence(const("is "), TRIGGERED | {"at_least_one": True, "stop_after_first": True})),
            lambda text: re.fullmatch(r"is <f=(word>[a-z/]+</[fg]>|city>\{.*\}</f>)", text, re.DOTALL),
        ),
        (structure("regex", "[ab]{2}", reasoning="possible"), lambda text: re.fullmatch("[ab]{2}", text)),
    ],
)
def test_every_answer_has_the_form(compiled, tokenizer, asked, fits):
    assert find_grammar_error(asked) is None
    for seed in range(6):
        text = tokenizer.decode(walk(compiled(asked), seed))
        assert fits(text), text


FORMS = [
    (const('a"\n'), ['a"\n'], ["", "a", 'a"\nb']),
    ({"type": "json_schema", "json_schema": True}, ["[1]", '{"a": 2}'], ["x"]),
    ({"type": "regex", "pattern": "a/b|c"}, ["a/b", "c"], ["a", "d"]),
    ({"type": "grammar", "grammar": 'root ::= "x" [0-9]'}, ["x1"], ["x", "y1"]),
    ({"type": "any_text", "excludes": ["<f", "\n"]}, ["", "a <g"], ["a <f", "a\nb"]),
    ({"type": "any_text", "max_chars": 3}, ["", "äöü"], ["abcd"]),
    (
        {"type": "sequence", "elements": [const("a"), {"type": "optional", "content": const("b")}, ANY]},
        ["a", "abx"],
        ["b"],
    ),
    (
        {"type": "or", "elements": [const("a"), {"type": "sequence", "elements": [const("b"), ANY]}]},
        ["a", "bc"],
        ["ac"],
    ),
    ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "a"]),
    ({"type": "star", "content": const("ab")}, ["", "abab"], ["a"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "a" * 9], ["a"]),
    ({"type": "tag", "begin": "<o>", "content": ANY, "end": ["</o>", "."]}, ["<o>x</o>", "<o>."], ["<o>x", "<o>.x"]),
    (WORD | {"type": "tag"}, ["<f=word>a/b</f>", "<f=word>a</g>"], ["<f=word></f>", "<f=word>a</h>"]),
    (
        TRIGGERED,
        ["", "no tag", 'x <f=city>{"city": "Oslo", "days": 3}</f> and <f=word>b</f>', "<f word"],
        ["x <f=", "x <f=city>{}</f>", "<f=other>"],
    ),
    (TRIGGERED | {"at_least_one": True}, ["<f=word>b</f>", "<f=word>b</f> text"], ["", "text", "text <f=word>b</f>"]),
    (TRIGGERED | {"stop_after_first": True}, ["text", "text <f=word>b</f>"], ["<f=word>b</f> text"]),
    (TRIGGERED | {"at_least_one": True, "stop_after_first": True}, ["<f=word>b</f>"], ["", "<f=word>b</f>."]),
    (TRIGGERED | {"excludes": ["\n"]}, ["text <f=word>b</f> text"], ["text\n", "text\n<f=word>b</f>"]),
    (
        {
            "type": "sequence",
            "elements": [{"type": "tag", "begin": "<o>", "content": TRIGGERED, "end": "</o>"}, const("!")],
        },
        ["<o>a<f=word>b</f>c</o>!", "<o></o>!"],
        ["<o>a<f=word>b</f>c</o>", "<o>a<f=", "<o>a</o>?"],
    ),
    (
        SEPARATED,
        ["", "<f=word>b</f>", "<f=word>b</f>, <f=word>c</f>"],
        ["<f=word>b</f><f=word>c</f>", "<f=word>b</f>, "],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [WORD],
            "separator": "",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<f=word>b</f>"],
        ["", "<f=word>b</f><f=word>c</f>"],
    ),
]


@pytest.mark.parametrize(("form", "fits", "others"), FORMS, ids=[str(i) for i in range(len(FORMS))])
def test_a_structural_tag_takes_what_xgrammars_takes(form, fits, others):
    matcher = LLMatcher(byte_tokenizer(), grammar_of(tagged(form)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()

    def is_whole(text):
        matcher.reset()
        data = list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    assert [text for text in fits if not is_whole(text)] == []
    assert [text for text in others if is_whole(text)] == []


def test_the_older_form_of_a_structural_tag():
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=city>", "schema": WEATHER, "end": "</f>"}],
        "triggers": ["<f="],
    }
    assert grammar_of(structure("structural_tag", older)) == grammar_of(tagged(TRIGGERED | {"tags": [CITY]}))
    assert find_grammar_error(structure("structural_tag", older, reasoning="possible")) is None


def deep(depth):
    return {"type": "optional", "content": deep(depth - 1)} if depth else const("a")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (structure("structural_tag", "{"), "is no JSON"),
        (structure("structural_tag", "[]"), "no structural tag"),
        (structure("structural_tag", {"type": "structural_tag"}), "missing required field `format`"),
        (structure("structural_tag", {"structures": [], "triggers": ["a"]}), "`$.structures`"),
        (structure("structural_tag", {"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]}), "field `end`"),
        (tagged({"type": "token", "token": 5}), "Invalid value 'token'"),
        (tagged({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}), "$.format.style"),
        (tagged({"type": "json_schema", "json_schema": {"uniqueItems": True}}), "uniqueItems"),
        (tagged({"type": "json_schema", "json_schema": {}, "any_order": True}), "any_order"),
        (tagged({"type": "sequence", "elements": []}), "$.format.elements"),
        (tagged({"type": "sequence", "elements": [ANY, const("a")]}), "may only come last"),
        (tagged({"type": "star", "content": ANY}), "may only come last"),
        (tagged({"type": "tag", "begin": "a", "content": ANY, "end": ""}), "needs an end that is not empty"),
        (tagged({"type": "tag", "begin": "a", "content": const("b"), "end": []}), "one at least"),
        (tagged(TRIGGERED | {"triggers": ["<g"]}), "must begin with one trigger"),
        (tagged(TRIGGERED | {"triggers": ["<f", "<f="]}), "must begin with one trigger"),
        (tagged({"type": "repeat", "min": 3, "max": 2, "content": const("a")}), "max is 2"),
        (tagged({"type": "repeat", "min": 0, "max": 10**9, "content": const("a")}), "$.format.max"),
        (tagged({"type": "or", "elements": [const("a")] * 5000}), "more than 1024 formats"),
        (tagged({"type": "regex", "pattern": "(?=a)"}), "cannot be used"),
        (tagged({"type": "grammar", "grammar": "root ::= ["}), "cannot be used"),
        (tagged(deep(200)), "nested"),
    ],
)
def test_structural_tags_that_are_refused(asked, words):
    assert words in (find_grammar_error(asked) or "")


CALLS = {
    "tools": [
        {"name": "weather", "parameters": WEATHER, "place": 0},
        {
            "name": 'n"é',
            "place": 1,
            "parameters": {
                "properties": {"x": {"$ref": "#/$defs/X"}},
                "required": ["x"],
                "additionalProperties": False,
                "$defs": {"X": {"enum": [1, 2]}},
                "unheard-of": 1,
            },
        },
    ],
    "parallel": False,
}


def test_calls_have_a_tools_name_and_its_arguments(compiled, tokenizer):
    names = set()
    for seed in range(12):
        text = tokenizer.decode(walk(compiled(structure("calls", CALLS)), seed))
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        names.add(call["name"])
        keys = {"weather": {"city", "days"}, 'n"é': {"x"}}[call["name"]]
        assert call.keys() == {"name", "arguments"} and call["arguments"].keys() == keys
    assert names == {"weather", 'n"é'}
    counts = set()
    for seed in range(6):
        text = tokenizer.decode(walk(compiled(structure("calls", CALLS | {"parallel": True})), seed))
        counts.add(text.count("<tool_call>"))
        assert text.count("<tool_call>") == text.count("</tool_call>") == len(text.split("\n<tool_call>"))
    assert len(counts) > 1


def test_the_form_begins_behind_the_reasoning(compiled, tokenizer):
    def allows(constraint, said, then):
        output = tokenizer.encode(said, add_special_tokens=False)
        return tokenizer.encode(then, add_special_tokens=False)[0] in ids(constraint.allowed(output))

    opened = compiled(structure("regex", "[ab]{2}", reasoning="opened"))
    assert allows(opened, "any thought {", " at")
    assert allows(opened, "any thought", "</think>")
    assert not allows(opened, "any thought</think>\n\n", "x")
    assert allows(opened, "any thought</think>\n\n", "a")
    assert EOS not in ids(opened.allowed(tokenizer.encode("any thought", add_special_tokens=False)))
    opened.follow(tokenizer.encode("any thought</think>\n\nab", add_special_tokens=False))
    assert opened.complete
    possible = compiled(structure("regex", "[ab]{2}", reasoning="possible"))
    assert allows(possible, "", "a") and allows(possible, "", "<think>") and not allows(possible, "", "x")
    assert allows(possible, "<think>so", " it")
    assert not allows(possible, "<think>so</think>", "x")


def test_the_end_may_come_only_where_the_form_allows_it(compiled, tokenizer):
    constraint = compiled(structure("regex", "a{1,3}"))
    a = tokenizer.encode("a", add_special_tokens=False)
    assert EOS not in ids(constraint.allowed([]))
    assert EOS in ids(constraint.allowed(a))
    constraint.follow([*a, EOS])
    assert constraint.complete and constraint.failure is None
    constraint.follow(a * 3)
    assert constraint.complete


def test_a_constraint_is_a_function_of_the_answer(compiled, tokenizer):
    one = compiled(structure("json", WEATHER))
    output = walk(one.start(), 3)
    masks = [one.allowed(output[:n]).tobytes() for n in range(len(output))]
    other = one.start()
    for n in (5, 2, 0, len(output) - 1, 3):
        assert other.allowed(output[:n]).tobytes() == masks[n]
    others = walk(one.start(), 4)
    assert (
        others != output
        and one.allowed(others[:4]).tobytes() == compiled(structure("json", WEATHER)).allowed(others[:4]).tobytes()
    )


@pytest.mark.parametrize("ahead", [1, 4, 40])
def test_drafts_that_were_looked_at_and_did_not_come_leave_no_trace(compiled, ahead):
    """Also after drafts that complete the form."""
    made, random = compiled(structure("json", WEATHER)), np.random.default_rng(9)
    output = walk(made.start(), 3)
    constraint, num_complete = made.start(), 0
    for n in range(len(output)):
        expected = made.start().allowed(output[:n]).tobytes()
        assert constraint.allowed(output[:n]).tobytes() == expected
        drafted = output[:n]
        while len(drafted) < n + ahead and not constraint.complete:
            drafted.append(int(random.choice(ids(constraint.allowed(drafted)))))
            constraint.follow(drafted)
        num_complete += constraint.complete
        assert constraint.allowed(output[:n]).tobytes() == expected
    assert num_complete == 0 or ahead > 1
    assert num_complete or ahead < 40


def test_tokens_that_the_model_has_and_the_tokenizer_has_not_are_never_allowed(compiled, tokenizer, words):
    mask = compiled(structure("regex", "(?s:.*)")).allowed([])
    assert mask.shape == (-(-words // 32),) and mask.dtype == np.int32
    assert max(ids(mask)) < tokenizer.vocab_size and len(ids(mask)) > 3000
    # control tokens are no text, but marks are
    assert not {0, 1} & set(ids(mask).tolist())
    assert set(tokenizer.encode("<think>", add_special_tokens=False)) <= set(ids(mask).tolist())


def test_marks_of_harmony_are_tokens_of_a_form_and_its_ends_are_none(plain_tokenizer, tmp_path):
    """A token writes each; `<|call|>` and `<|return|>` end the answer."""
    shutil.copytree(plain_tokenizer, tmp_path, dirs_exist_ok=True)
    source = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    marks = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"]
    source.add_special_tokens([*marks, "<|call|>", "<|return|>"])
    source.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ModelTokenizer(tmp_path)
    ready = grammar_tokenizer(tokenizer, tokenizer.vocab_size, (EOS, *tokenizer.harmony_ends))
    tool = {"name": "weather", "parameters": WEATHER, "place": 0}
    calls = structure("calls", {"tools": [tool], "parallel": True}, is_harmony=True, reasoning="possible")
    choice = structure("choice", ["yes", "no"], is_harmony=True, reasoning="possible")
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for asked, answer in (
        (choice, "<|channel|>final<|message|>yes"),
        (choice, f"{thought}<|channel|>final <|constrain|>json<|message|>no"),
        (
            calls,
            f"{thought}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            '{"city": "Oslo", "days": 3}',
        ),
    ):
        constraint = GrammarConstraint.compile(grammar_of(asked), ready, tokenizer.vocab_size)
        output = tokenizer.encode(answer, add_special_tokens=False)
        for count, token in enumerate(output):
            allowed = ids(constraint.allowed(output[:count])).tolist()
            assert token in allowed and not {*tokenizer.harmony_ends} & {*allowed}
            constraint.follow(output[: count + 1])
        assert constraint.failure is None and constraint.complete


def test_a_token_that_the_tokenizer_has_and_the_model_has_not_is_no_way_on(tokenizer):
    words = tokenizer.vocab_size - tokenizer.vocab_size % 32 - 1  # one bit of the last word is beyond them
    ready = grammar_tokenizer(tokenizer, words, (EOS,))
    asked = grammar_of(structure("grammar", f"start: <[{words}]>"))
    with pytest.raises(ValueError, match="no token can follow"):
        GrammarConstraint.compile(asked, ready, words)
    asked = grammar_of(structure("grammar", f"start: <[{words - 1}]>"))
    assert ids(GrammarConstraint.compile(asked, ready, words).allowed([])).tolist() == [words - 1]


def test_what_is_too_much_for_the_whole_vocabulary_is_refused(compiled):
    with pytest.raises(ValueError, match="too many expressions"):
        compiled(structure("regex", "(.{0,1000}){0,1000}x"))


def test_an_answer_that_leaves_its_form_has_failed(compiled, tokenizer):
    constraint = compiled(structure("regex", "a{2}"))
    constraint.follow(tokenizer.encode("b", add_special_tokens=False))
    assert constraint.failure and not constraint.complete


@pytest.mark.parametrize(
    ("asked", "words_of_refusal"),
    [
        (structure("json", "{"), "structured_outputs.json is no JSON"),
        (structure("json", "3"), "must be a JSON schema"),
        (structure("json", "false"), "must be a JSON schema"),
        (structure("json", {"type": "foo"}), "Invalid type: foo"),
        (structure("json", '{"a":' * 10_000 + "1" + "}" * 10_000), "nested too deeply"),
        (structure("json", '{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)), "nested too deeply: at most 64"),
        (structure("json", "[" * 100_000), "structured_outputs.json is"),
        (structure("json", {"not": {"type": "string"}}), "Unimplemented keys"),
        (structure("json", {"$ref": "#/$defs/x"}), "does not exist"),
        (structure("json", {"enum": []}), "Unsatisfiable"),
        (structure("json", {"type": "string", "pattern": "("}), "cannot be used"),
        (structure("regex", "("), "unclosed group"),
        (structure("regex", "(?=a)b"), "look-ahead"),
        (structure("regex", "a" * (MAX_TEXT + 1)), "at most 524288 are read"),
        (structure("choice", []), "must be a list of texts"),
        (structure("choice", ["a", 1]), "must be a list of texts"),
        (structure("choice", [""]), "must be a list of texts"),
        (structure("choice", ["a"] * (MAX_CHOICES + 1)), "at most 1024 are taken"),
        (structure("grammar", "no grammar"), "cannot be used"),
        (structure("grammar", "start: foo"), "unknown name"),
        (structure("json", {"$ref": "#"}), "it refers to itself with nothing before that"),
        (structure("grammar", "start: start"), "it refers to itself with nothing before that"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_field(asked, words_of_refusal):
    reason = find_grammar_error(asked)
    assert reason is not None and words_of_refusal in reason and reason.startswith(asked.field)
    assert len(reason) < 500 and "verbose" not in reason


@pytest.mark.parametrize("reasoning", ["none", "opened", "possible"])
@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "bogus"}, 'tools[7].function.parameters.type must be "object", not "bogus"'),
        ({"type": None}, 'tools[7].function.parameters.type must be "object", not null'),
        ({"type": ["string"]}, 'tools[7].function.parameters.type must be "object", not ["string"]'),
        (
            {"properties": {"a": {"type": "bogus"}}},
            "tools[7].function.parameters cannot be used: Invalid type: bogus",
        ),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused_by_its_place(parameters, said, reasoning):
    tools = [*CALLS["tools"], {"name": "f", "parameters": parameters, "place": 7}, {**CALLS["tools"][0], "place": 8}]
    asked = structure("calls", {"tools": tools, "parallel": True}, field="tools", reasoning=reasoning)
    assert find_grammar_error(asked) == said


def test_a_tool_may_be_of_more_types_than_objects(compiled):
    tools = [{"name": "f", "parameters": {"type": ["object", "null"], "properties": {}}, "place": 0}]
    assert compiled(structure("calls", {"tools": tools, "parallel": False})).failure is None


@pytest.mark.parametrize(
    ("asked", "refused", "failure"),
    [
        (structure("json", {"type": "object", "properties": {"a": {"pattern": "(a+)+$"}}}), None, None),
        (structure("regex", "(a+)+$"), None, None),
        (structure("regex", "(?:.*a.{30}){20}"), None, None),
        (structure("regex", "((a{0,100}){0,100}){0,100}"), None, "lexer error: too many expressions"),
        (
            structure(
                "json",
                {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(3)]} for i in range(14)]},
            ),
            "schema too large",
            None,
        ),
        (
            structure(
                "json",
                {
                    "$ref": "#/$defs/d0",
                    "$defs": {"d24": {"type": "string"}}
                    | {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(24)},
                },
            ),
            None,
            None,
        ),
    ],
)
def test_what_explodes_ends(asked, refused, failure):
    """Refused, or followed for as many steps as there are, or ended with a reason in a line."""
    reason = find_grammar_error(asked)
    assert (reason is None) == (refused is None) and (refused or "") in (reason or "")
    if refused is not None:
        return
    constraint = GrammarConstraint.compile(grammar_of(asked), byte_tokenizer(), 257)
    output = []
    while constraint.failure is None and len(output) < 60:
        assert not constraint.complete
        may = ids(constraint.allowed(output)).tolist()
        output.append(next((byte for byte in b'a{":' if byte in may), may[0]))
        constraint.follow(output)
    assert (len(output) < 60) == (constraint.failure is not None) == (failure is not None)
    assert (failure or "") in (constraint.failure or "") and "<grammar>" not in (constraint.failure or "")


# -- compiled beside the core -----------------------------------------------------------------------------------------


def request(name, asked):
    return generate_request(request_id=name, prompt=b"\1" + bytes(7), structure=asked)


class NoCheck:
    """Lets every grammar pass."""

    def check(self, structure):
        return CheckResult(None)

    def close(self):
        pass


class Waiting:
    """Requests that come one by one. `wait` returns when something has been compiled."""

    def __init__(self, compiler, wake=None):
        self.compiler = compiler
        self.pending = PendingGrammars(compiler)
        self._news = threading.Semaphore(0)
        compiler.start(wake or self._news.release)

    def take(self, name, asked):
        """The constraint, or None for one that waits."""
        forms = self.pending.add([request(name, asked)], {name: GrammarKey(asked, False)})
        return None if forms is None else forms[name]

    def poll(self):
        found = self.pending.poll()
        assert all(len(requests) == 1 for requests, _ in found)
        return {one.request_id: forms[one.request_id] if isinstance(forms, dict) else forms for (one,), forms in found}

    def wait(self):
        assert self._news.acquire(timeout=20)


@pytest.fixture
def waiting(tokenizer, words):
    made = []

    def make():
        made.append(1)
        return grammar_tokenizer(tokenizer, words, (EOS,))

    waiting = Waiting(GrammarCompiler(make, words, SystemClock(), NoCheck(), max_cached=2))
    waiting.made = made
    return waiting


def test_a_grammar_is_compiled_once_and_remembered(waiting):
    asked = structure("regex", "a+")
    assert waiting.take("1", asked) is None and waiting.take("2", asked) is None
    assert len(waiting.pending) == 2
    with pytest.raises(InvalidRequest, match="in use"):
        waiting.take("2", asked)
    waiting.wait()
    ready = waiting.poll()
    assert ready.keys() == {"1", "2"} and ready["1"] is not ready["2"] and len(waiting.pending) == 0
    assert isinstance(waiting.take("3", asked), GrammarConstraint)
    for number in range(2):  # two more: the first one is forgotten
        assert waiting.take("4", structure("regex", f"b{number}")) is None
        waiting.wait()
        assert len(waiting.poll()) == 1
    assert waiting.take("5", asked) is None
    assert waiting.made == [1]


def test_of_those_remembered_the_longest_unused_goes_first(waiting):
    for pattern in "aba":
        if waiting.take(pattern, structure("regex", pattern)) is None:
            waiting.wait()
            waiting.poll()
    assert waiting.take("c", structure("regex", "c")) is None
    waiting.wait()
    waiting.poll()
    assert waiting.take("1", structure("regex", "a")) is not None
    assert waiting.take("2", structure("regex", "b")) is None


def test_of_those_that_came_together_none_waits_when_one_is_refused(waiting):
    refused = structure("grammar", "start: <nope>")
    assert waiting.take("1", refused) is None
    waiting.wait()
    waiting.poll()
    asked = {"2": structure("regex", "a+"), "3": refused}
    with pytest.raises(InvalidRequest):
        waiting.pending.add(
            [request(*one) for one in asked.items()], {name: GrammarKey(one, False) for name, one in asked.items()}
        )
    assert len(waiting.pending) == 0
    waiting.wait()
    assert waiting.poll() == {}


def test_the_next_grammar_is_compiled_as_soon_as_one_is_there(waiting):
    """Also while the thread that has just told of it has not ended."""
    told, go_on = threading.Semaphore(0), threading.Event()

    def wake():
        told.release()
        assert go_on.wait(20)

    waiting.compiler.start(wake)
    for number in range(5):
        assert waiting.take(str(number), structure("regex", f"a{number}")) is None
    found = {}
    while len(found) < 5:
        assert told.acquire(timeout=20), f"{5 - len(found)} grammars are not compiled"
        found |= waiting.poll()
    go_on.set()


def test_a_grammar_that_cannot_be_compiled_is_refused_and_remembered(waiting):
    asked = structure("grammar", "start: <nope>")
    assert waiting.take("1", asked) is None
    waiting.wait()
    refused = waiting.poll()["1"]
    assert isinstance(refused, InvalidRequest) and refused.param == "structured_outputs"
    with pytest.raises(InvalidRequest, match="unknown special token"):
        waiting.take("2", asked)


def test_a_refusal_keeps_nothing_of_those_who_were_refused(waiting):
    asked = structure("grammar", "start: <nope>")
    assert waiting.take("1", asked) is None
    waiting.wait()
    waiting.poll()
    found = []
    for number in range(2):
        with pytest.raises(InvalidRequest) as refused:
            waiting.take(f"again {number}", asked)
        found.append(refused.value)
    first, second = found
    assert first is not second and first.param == second.param == "structured_outputs"


def test_what_failed_for_another_reason_is_tried_again(tokenizer, words):
    tries = []

    def make():
        tries.append(1)
        if len(tries) == 1:
            raise MemoryError("not now")
        return grammar_tokenizer(tokenizer, words, (EOS,))

    waiting = Waiting(GrammarCompiler(make, words, SystemClock(), NoCheck()))
    asked = structure("regex", "a+")
    assert waiting.take("1", asked) is None
    waiting.wait()
    assert isinstance(waiting.poll()["1"], Overloaded)
    assert waiting.take("2", asked) is None
    waiting.wait()
    assert isinstance(waiting.poll()["2"], GrammarConstraint)


def test_a_grammar_that_nobody_waits_for_is_not_compiled(tokenizer, words):
    begun, go_on = threading.Semaphore(0), threading.Event()

    def make():
        begun.release()
        assert go_on.wait(20)
        return grammar_tokenizer(tokenizer, words, (EOS,))

    waiting = Waiting(GrammarCompiler(make, words, SystemClock(), NoCheck()))
    for number in range(6):
        assert waiting.take(str(number), structure("regex", f"a{number}")) is None
    assert begun.acquire(timeout=20)
    for number in range(5):
        waiting.pending.cancel(str(number))
    # two that have begun, and the one that is waited for
    assert len(waiting.pending) == 1 and len(waiting.compiler._jobs) == 3
    go_on.set()
    found = {}
    while not found:
        waiting.wait()
        found = waiting.poll()
    assert found.keys() == {"5"}


def test_what_is_only_tried_is_not_compiled(tokenizer, words):
    class NoLookAhead(NoCheck):
        def check(self, asked):
            return CheckResult("no look-ahead" if "?=" in asked.text else None)

    waiting = Waiting(GrammarCompiler(pytest.fail, words, SystemClock(), NoLookAhead()))
    for name, text in (("1", "a+"), ("2", "(?=a)")):
        asked = structure("regex", text)
        assert waiting.pending.add([request(name, asked)], {name: GrammarKey(asked, True)}) is None
    found = {}
    while len(found) < 2:
        waiting.wait()
        found |= waiting.poll()
    assert isinstance(found["1"], CheckedGrammar) and found["2"].message == "no look-ahead"


def test_an_aborted_request_waits_no_more(waiting):
    asked = structure("regex", "a+")
    assert waiting.take("1", asked) is None and waiting.take("2", asked) is None
    waiting.pending.cancel("1")
    waiting.pending.cancel("unknown")
    waiting.wait()
    assert waiting.poll().keys() == {"2"}


def test_compiling_that_does_not_end_is_given_up_and_what_waited_for_it_is_told_to_come_back(words):
    clock, ended = ManualClock(), threading.Event()

    def hang():
        assert ended.wait(20)
        raise RuntimeError("the end")

    def until(condition):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    waiting = Waiting(GrammarCompiler(hang, words, clock, NoCheck(), seconds=30))
    for number in range(4):
        assert waiting.take(str(number), structure("regex", f"a{number}")) is None
    assert waiting.poll() == {}
    until(lambda: sum(job.started_at == 0 for job in waiting.compiler._jobs.values()) == 2)
    clock.advance(31)
    refused = waiting.poll()  # two at a time
    assert all("not ended within 30 s" in refused[name].message for name in "01")
    assert all(isinstance(refused[name], Overloaded) and "too many" in refused[name].message for name in "23")
    # the two that hang are the most there may be
    assert waiting.take("4", structure("regex", "b")) is None and waiting.poll() == {}
    assert sum(thread.name == "cairn-grammar" for thread in threading.enumerate()) == 2
    ended.set()
    results = {}
    until(lambda: results.update(waiting.poll()) or results)
    assert isinstance(results["4"], Overloaded) and "the end" in results["4"].message


# -- the process that tries them ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def checking(**settings):
    with contextlib.closing(GrammarChecker(**settings)) as check:
        yield check


def reason(check, kind, text):
    return check.check(structure(kind, text)).reason


def test_grammars_are_tried_in_a_process():
    with checking() as check:
        assert [reason(check, "regex", "a+") for _ in range(3)] == [None] * 3
        assert "look-ahead" in reason(check, "regex", "(?=a)")
        first = check._child.process.pid
        assert reason(check, "json", WEATHER) is None
        assert check._child.process.pid == first
        check.close()
        assert reason(check, "regex", "b+") is None
        assert "look-ahead" in reason(check, "regex", "(?=a)")


def test_a_process_that_hangs_or_dies_is_replaced(children):
    with checking(seconds=2, module=children) as check:
        assert "structured_outputs.regex takes more than 2 s" in reason(check, "regex", "hang")
        assert reason(check, "regex", "a") is None
        assert "too much memory" in reason(check, "regex", "die")
        assert reason(check, "regex", "b") is None
        assert check._child.exit_reason() is None


@pytest.mark.parametrize("fate", ["die", more("hang")])
def test_what_time_or_memory_was_short_for_is_asked_again_later(children, words, tokenizer, tmp_path, fate):
    """The machine may have been busy with something else: a grammar is not refused for good for that."""
    asked, clock = structure("regex", fate), ManualClock()
    with checking(seconds=2, module=children) as check:
        compiler = GrammarCompiler(lambda: grammar_tokenizer(tokenizer, words, (EOS,)), words, clock, check)
        waiting = Waiting(compiler)
        assert waiting.take("0", asked) is None
        waiting.wait()
        assert "simplify it" in waiting.poll()["0"].message
        clock.advance(59)
        with pytest.raises(InvalidRequest, match="simplify it"):
            waiting.take("1", asked)
        (tmp_path / "better").touch()
        clock.advance(1)
        for name, seconds in (("2", 10_000), ("3", 0)):
            if waiting.take(name, asked) is None:
                waiting.wait()
                assert isinstance(waiting.poll()[name], GrammarConstraint)
            clock.advance(seconds)
        assert (tmp_path / "asked").read_text() == "xx"


def test_closing_does_not_wait_for_a_grammar_that_hangs(children, tmp_path):
    with checking(seconds=60, module=children) as check:
        found = []
        asking = threading.Thread(target=lambda: found.append(reason(check, "regex", "hang")))
        asking.start()
        deadline = time.monotonic() + 20
        while not (tmp_path / "asked").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        check.close()
        asking.join(20)
        assert not asking.is_alive() and "simplify it" in found[0]


@pytest.fixture
def children(monkeypatch, tmp_path):
    """The module of a child that hangs and dies as it is told to, and the answers that it gives."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("GRAMMAR_CHILD_FOLDER", str(tmp_path))
    return "grammar_child"


def test_a_child_that_cannot_start_is_no_fault_of_the_grammar(words, monkeypatch, tmp_path):
    waiting = Waiting(GrammarCompiler(lambda: None, words, SystemClock(), GrammarChecker(module="nowhere")))
    for executable in (sys.executable, str(tmp_path / "nothing")):
        monkeypatch.setattr(sys, "executable", executable)
        for _ in range(2):  # and that is not remembered
            assert waiting.take("1", structure("regex", "a")) is None
            waiting.wait()
            refused = waiting.poll()["1"]
            assert isinstance(refused, Overloaded) and "at the moment" in refused.message
