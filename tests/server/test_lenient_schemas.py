"""Schemas as zod and pydantic write them: what no grammar is made for is left out, or refused."""

import json

import pytest
from llguidance import LLMatcher

from cairn.server.openai.lenient_schema import LEFT_OUT, make_lenient
from server.asking import ask

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
VALUES = {
    **dict.fromkeys(("uniqueItems", "unevaluatedItems", "unevaluatedProperties"), False),
    **{name: {"type": "string"} for name in ("contains", "propertyNames", "not", "if", "then", "else")},
    **dict.fromkeys(("minContains", "maxContains"), 1),
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
}
PATTERNS = [r"^(?!admin)[a-z]+$", "(?=.*[0-9]).+", "(?<=a)b", "(?<!a)b", r"(a)\1", r"\bword\b"]
FINE = [r"^[a-z]+$", r"\d{4}-\d\d", r"\(\?=\)", r"\\1", r"(?:a|b)", r"(?P<x>a)", r"\p{L}", r"[(?]=!"]


def problems(schema):
    wrong, messages = LLMatcher.validate_grammar_with_warnings(json.dumps({"grammars": [{"json_schema": schema}]}))
    return messages if wrong else []


def test_what_is_left_out_is_what_there_is_no_grammar_for():
    assert VALUES.keys() == LEFT_OUT
    needed = {"minContains": {"contains": {}}, "maxContains": {"contains": {}}}
    alone = {name: value for name, value in VALUES.items() if name not in ("then", "else")}
    assert [name for name, value in alone.items() if not problems({name: value} | needed.get(name, {}))] == []


@pytest.mark.parametrize(("pattern", "is_fine"), [(one, False) for one in PATTERNS] + [(one, True) for one in FINE])
def test_patterns(pattern, is_fine):
    told = []
    schema = {"type": "string", "pattern": pattern}
    assert (make_lenient(schema, told.append) == schema) is is_fine is not bool(told)
    assert bool(problems(schema)) is not is_fine


def test_what_only_looks_like_a_keyword_stays():
    told = []
    schema = {
        "type": "object",
        "properties": {"not": {"type": "array", "uniqueItems": True}, "pattern": {"const": {"if": 1}}},
        "$defs": {"contains": {"anyOf": [{"propertyNames": {"pattern": "^a"}}, {"enum": [{"not": 1}]}]}},
        "required": ["not"],
        "items": [{"not": {}}],
    }
    kept = make_lenient(schema, told.append)
    assert kept["properties"] == {"not": {"type": "array"}, "pattern": {"const": {"if": 1}}}
    assert kept["$defs"] == {"contains": {"anyOf": [{}, {"enum": [{"not": 1}]}]}} and kept["items"] == [{}]
    assert sorted(told) == ["not", "propertyNames", "uniqueItems"]
    assert schema["properties"]["not"] == {"type": "array", "uniqueItems": True}


def test_a_pattern_of_names_leaves_nothing_forbidden():
    schema = {"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}}, "additionalProperties": False}
    assert make_lenient(schema, lambda keyword: None) == {"type": "object"}


@pytest.mark.parametrize("odd", [True, None, 5, "x", {"properties": 5}, {"items": None, "allOf": {}}, {"pattern": 5}])
def test_what_is_no_schema_is_left_to_the_engine(odd):
    assert make_lenient(odd, lambda keyword: None) == odd


SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "uniqueItems": True, "items": {"type": "string", "pattern": "^(?!x)[a-z]+$"}}
    },
    "propertyNames": {"pattern": "^[a-z]+$"},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.mark.parametrize("lenient", ["none", "tools", "all"])
def test_where_they_are_left_out(running_server, caplog, lenient):
    server = running_server({"lenient_schemas": lenient})
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with caplog.at_level("INFO", "cairn.server.notices"):
        for _ in range(2):
            ask(server, "/v1/chat/completions", **CHAT, tools=[TOOL])
            called = server.post("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"})
            assert called.status_code == (400 if lenient == "none" else 200), called.text
            formed = server.post("/v1/chat/completions", CHAT | {"response_format": form})
            assert formed.status_code == (200 if lenient == "all" else 400), formed.text
    if lenient != "all":
        assert formed.json()["error"]["param"] == "response_format"
    said = {"none": [], "tools": ["pattern", "propertyNames", "uniqueItems"]}
    said["all"] = said["tools"]
    assert sorted(message.split("'")[1] for message in caplog.messages) == said[lenient]
    server.drain()
    assert server.join() == 0
