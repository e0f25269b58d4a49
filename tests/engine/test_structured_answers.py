"""Answers held to a form by a real model: each has it, whatever runs beside it and happens to it."""

import json
import random
import re
import threading
import time

import jsonschema
import numpy as np
import pytest

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, Structure
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import InvalidRequest
from cairn.scheduler.preempt import preempt
from doubles.engine_requests import NEVER, generate_request
from doubles.grammar_children import shared_grammar_child
from tiers import more

PROMPT = np.random.default_rng(3).integers(20, 4000, 90)


class Turned:
    """A core turned by hand. `texts`, `tokens`, `ends`: of each answer, by request and index. `refused`: why, by the
    first request of what came together."""

    def __init__(self, folder, **config):
        self.core = build_core(EngineConfig(**({"model": str(folder), "kv_cache_memory_bytes": 8 << 20} | config)))
        self._news = threading.Semaphore(0)
        self.core.start(self._news.release)
        self.texts, self.tokens, self.ends, self.refused = {}, {}, {}, {}
        self._open = {}

    def ask(self, name, structure=None, **fields):
        self.ask_together({name: {"structure": structure} | fields})

    def ask_together(self, asked):
        """Requests in one submission: a name -> its fields."""
        requests = []
        for name, fields in asked.items():
            prompt = np.array(fields.get("prompt", PROMPT), "<i8").tobytes()
            fields = {"max_tokens": 400, "seed": 1, "request_id": name, "stop": [NEVER]} | fields | {"prompt": prompt}
            requests.append(generate_request(**fields))
        self.core.submit(*requests)
        self._open |= {request.request_id: request.n for request in requests}
        self._together = {requests[0].request_id: list(asked)}

    def turn(self):
        refused = dict(self.core.poll_ready())
        self.refused |= refused
        for first in refused:
            self._open |= dict.fromkeys(self._together[first], 0)
        outputs = self.core.poll()
        if self.core.has_work:
            outputs += self.core.step()
        elif not outputs and not refused:
            assert self._news.acquire(timeout=20), "nothing to do, and nobody wakes the core"
        for output in outputs:
            key = (output.request_id, output.index)
            self.texts[key] = self.texts.get(key, "") + output.text
            self.tokens[key] = self.tokens.get(key, []) + output.token_ids
            if output.finish_reason is not None:
                self.ends[key] = output
                self._open[output.request_id] -= 1

    def run(self):
        deadline = time.monotonic() + 120
        while any(self._open.values()):
            assert time.monotonic() < deadline
            self.turn()
        while self.core.has_work:
            self.core.step()
        self.core.idle()
        return self

    def text(self, name, index=0):
        return self.texts[name, index]

    def end(self, name, index=0):
        return self.ends[name, index]

    def close(self):
        self.core.close()


@pytest.fixture(scope="module", autouse=True)
def grammar_child():
    with shared_grammar_child():
        yield


@pytest.fixture
def turned(tiny_model):
    made = []

    def make(**config):
        made.append(Turned(tiny_model, **config))
        return made[-1]

    yield make
    for one in made:
        one.close()


def form(kind, text, **more):
    text = text if isinstance(text, str) else json.dumps(text)
    return Structure(kind=kind, text=text, field=f"structured_outputs.{kind}", **more)


class Schemas:
    """Schemas drawn at random, all of whose values are small: a model that guesses comes to their ends."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def draw(self, depth=2):
        kinds = ["enum", "boolean", "integer", "string", "null", "const", "pattern"]
        kind = self._random.choice([*kinds, *(["object", "object", "array", "anyOf"] if depth else [])])
        return getattr(self, f"_{kind}")(depth)

    def _enum(self, depth):
        return {"enum": self._random.sample(["red", 'a "b"', 3, True, None, "\u00e9\n"], 3)}

    def _const(self, depth):
        return {"const": self._random.choice(["x", 7, [1, 2], {"a": None}])}

    def _boolean(self, depth):
        return {"type": "boolean"}

    def _null(self, depth):
        return {"type": "null"}

    def _integer(self, depth):
        low = self._random.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 500)}

    def _string(self, depth):
        low = self._random.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 4)}

    def _pattern(self, depth):
        return {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"}

    def _array(self, depth):
        low = self._random.randint(0, 2)
        return {"type": "array", "items": self.draw(depth - 1), "minItems": low, "maxItems": low + 2}

    def _anyOf(self, depth):
        return {"anyOf": [self.draw(depth - 1), self.draw(depth - 1)]}

    def _object(self, depth):
        names = self._random.sample(["a", "b c", "d", "e"], self._random.randint(1, 3))
        required = [name for name in names if self._random.random() < 0.7]
        properties = {name: self.draw(depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize("count", [20, more(50)])
def test_every_answer_is_valid_by_its_schema_beside_free_ones(turned, count):
    engine, schemas = turned(), [Schemas(seed).draw() for seed in range(count)]
    for number, schema in enumerate(schemas):
        engine.ask(f"s{number}", form("json", schema), seed=number, temperature=0.0 if number % 5 == 0 else 1.0)
        if number % 4 == 0:
            engine.ask(f"free{number}", seed=number, max_tokens=20, ignore_eos=True)
    engine.run()
    for number, schema in enumerate(schemas):
        assert engine.end(f"s{number}").finish_reason == "stop", schema
        jsonschema.validate(json.loads(engine.text(f"s{number}")), schema)
    assert all(len(engine.tokens[f"free{number}", 0]) == 20 for number in range(0, count, 4))
    assert len({engine.text(f"s{number}") for number in range(count)}) > count // 2


@pytest.mark.parametrize(
    ("structure", "fits"),
    [
        (form("regex", r"[a-f]{3,9}(-[0-9]{2})?"), r"[a-f]{3,9}(-[0-9]{2})?"),
        more(form("choice", ["never", "now", "nowhere"]), "never|now|nowhere"),
        (form("grammar", 'start: "[" item ("," item){0,3} "]"\nitem: /[xy]/'), r"\[[xy](,[xy]){0,3}\]"),
        (
            form(
                "calls",
                {
                    "tools": [
                        {"name": "f", "parameters": {"properties": {}, "additionalProperties": False}, "place": 0}
                    ],
                    "parallel": False,
                },
            ),
            r'<tool_call>\n\{"name": "f", "arguments": \{\s*\}\}\n</tool_call>',
        ),
    ],
)
def test_every_answer_of_a_kind_matches_as_a_whole(turned, structure, fits):
    engine = turned()
    for number in range(8):
        engine.ask(str(number), structure, seed=number)
    engine.run()
    for number in range(8):
        assert re.fullmatch(fits, engine.text(str(number))), engine.text(str(number))


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 4, "maxItems": 6},
        "b": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.more
def test_beside_others_preempted_and_alone_are_the_same(turned):
    alone = turned(exact=True)
    alone.ask("x", form("json", SCHEMA), seed=5)
    alone.run()
    free = turned(exact=True)
    free.ask("free", seed=7, max_tokens=24, ignore_eos=True)
    free.run()
    engine = turned(exact=True)
    engine.ask("x", form("json", SCHEMA), seed=5)
    state, preempted = engine.core._scheduler.state, 0
    while "x" not in state.requests:
        engine.turn()
    engine.ask("free", seed=7, max_tokens=24, ignore_eos=True)
    while "x" in state.requests or not preempted:
        engine.turn()
        request = next((one for one in state.running if one.id == "x"), None)
        others = [one for one in state.running if one.id != "x"]
        if request and others and request.num_in_flight == 0 and len(request.output) in (1, 4, 9) and preempted < 3:
            preempt(state, request, others[0], 0)
            preempted += 1
    engine.run()
    assert preempted == 3 and len(alone.tokens["x", 0]) > 10
    assert engine.tokens["x", 0] == alone.tokens["x", 0]
    assert engine.tokens["free", 0] == free.tokens["free", 0]
    jsonschema.validate(json.loads(alone.text("x")), SCHEMA)


@pytest.mark.more
def test_several_answers_to_one_prompt_each_have_the_form(turned):
    engine = turned()
    engine.ask("x", form("json", SCHEMA), n=4)
    engine.run()
    for index in range(4):
        jsonschema.validate(json.loads(engine.text("x", index)), SCHEMA)
    assert len({engine.text("x", index) for index in range(4)}) == 4
    for index in range(4):
        engine.ask(f"alone {index}", form("json", SCHEMA), seed=1 + index)
        engine.run()
        assert engine.text(f"alone {index}") == engine.text("x", index)


def test_the_form_ends_the_answer_whatever_else_is_asked(turned, tiny_model):
    tokenizer, engine = ModelTokenizer(tiny_model), turned()
    a = form("regex", "a{5}b")
    engine.ask("plain", a)
    engine.ask("at least", a, min_tokens=50)
    engine.ask("no end", a, ignore_eos=True)
    engine.ask("told", a, logprobs=2)
    engine.ask("stopped", a, stop=["aab"])
    engine.ask("short", a, max_tokens=1)
    engine.ask("optional", form("regex", "(ab)+"), min_tokens=12, seed=2)
    engine.ask("against", form("choice", ["a", "b"]), logit_bias={tokenizer.encode("a", False)[0]: -100.0})
    engine.run()
    for name in ("plain", "at least", "no end", "told"):
        assert (engine.text(name), engine.end(name).finish_reason) == ("aaaaab", "stop")
    assert (engine.text("stopped"), engine.end("stopped").stop_reason) == ("aaa", "aab")
    assert engine.end("short").finish_reason == "length" and "aaaaab".startswith(engine.text("short"))
    assert re.fullmatch("(ab)+", engine.text("optional")) and len(engine.tokens["optional", 0]) >= 12
    assert engine.text("against") == "b"


def test_the_form_begins_behind_the_reasoning(turned, tiny_model):
    end = ModelTokenizer(tiny_model).encode("</think>", False)[0]
    engine = turned()
    engine.ask("x", form("regex", "[xy]{3}", reasoning="opened"), logit_bias={end: 6.0})
    engine.run()
    thought, _, said = engine.text("x").partition("</think>")
    assert thought and re.fullmatch(r"\n{0,4}[xy]{3}", said) and engine.end("x").finish_reason == "stop"


def test_a_dead_end_is_an_error_that_says_so(turned, monkeypatch):
    engine = turned()
    engine.ask("x", form("regex", "a{5}b"))
    deadline = time.monotonic() + 20
    while "x" not in engine.core._scheduler.state.requests:
        assert time.monotonic() < deadline
        engine.turn()
    constraint = engine.core._scheduler.state.requests["x"].spec.constraint
    constraint._matcher.consume_token(11)  # now it is in no state that any answer leads to
    engine.run()
    end = engine.end("x")
    assert (end.finish_reason, end.status) == ("error", 400) and "cannot be held to the form" in end.error


def test_a_grammar_is_refused_before_anything_is_taken(turned):
    engine = turned()
    engine.ask("bad", form("grammar", "start: <nope>"))
    assert not engine.core.has_work
    engine.run()
    assert "unknown special token" in engine.refused["bad"].message and not engine.ends
    assert engine.refused["bad"].param == "structured_outputs"
    with pytest.raises(InvalidRequest, match="unknown special token") as refused:
        engine.ask("again", form("grammar", "start: <nope>"))
    assert refused.value.param == "structured_outputs"


TOO_LONG = {"prompt": [20] * 30, "max_tokens": 100_000}


def test_what_came_together_waits_for_its_grammars_together(turned):
    """Whichever of them is there first, and whichever needs none."""
    engine = turned()
    engine.ask("known", form("regex", "a{5}b"))
    engine.run()
    fields = {"free": {"max_tokens": 3, "ignore_eos": True}, "new": {"structure": form("regex", "c{5}d")}}
    engine.ask_together({"old": {"structure": form("regex", "a{5}b")}, **fields})
    assert not engine.core.has_work
    with pytest.raises(InvalidRequest, match="in use"):
        engine.ask("free")
    engine.run()
    assert (engine.text("old"), engine.text("new"), len(engine.tokens["free", 0])) == ("aaaaab", "cccccd", 3)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (TOO_LONG | {"structure": form("regex", "a{5}b")}, "max_tokens"),
        (TOO_LONG, "max_tokens"),
        ({"structure": form("grammar", "start: <nope>")}, "structured_outputs"),
    ],
)
def test_what_came_together_is_refused_together(turned, wrong, param):
    engine = turned()
    engine.ask_together({"good": {"structure": form("regex", "a{5}b")}, "bad": wrong})
    engine.run()
    assert engine.refused.keys() == {"good"} and engine.refused["good"].param == param
    assert not engine.ends and engine.core.stats().steps.num_steps == 0
    for name in ("good", "bad"):  # neither name is taken
        engine.ask(name, form("regex", "a{5}b"))
    engine.run()
    assert engine.text("good") == engine.text("bad") == "aaaaab"


def test_an_abort_among_what_came_together_holds_nobody_up(turned):
    engine = turned()
    engine.ask_together({"a": {"structure": form("regex", "a{5}b")}, "c": {"structure": form("regex", "c{5}d")}})
    engine.core.abort("a")
    engine._open["a"] = 0
    engine.run()
    assert engine.text("c") == "cccccd" and ("a", 0) not in engine.ends


def test_an_aborted_request_leaves_nothing(turned):
    engine = turned()
    engine.ask("gone", form("regex", "a{5}b"))
    engine.core.abort("gone")
    engine._open.clear()
    engine.ask("next", form("regex", "a{5}b"))
    engine.run()
    assert engine.text("next") == "aaaaab" and ("gone", 0) not in engine.ends


def test_a_request_that_waits_for_its_grammar_has_its_id_to_itself(turned):
    engine = turned()
    engine.ask("x", form("regex", "a{5}b"))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.core.submit(
            generate_request(request_id="x", prompt=PROMPT.astype("<i8").tobytes(), structure=form("regex", "a{5}b"))
        )
    engine.run()
    assert engine.text("x") == "aaaaab"
