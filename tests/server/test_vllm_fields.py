"""No field of vLLM's request bodies is ignored without a word. `vllm_request_fields.json` lists them, made by
`tools/vllm_request_fields.py` from vLLM's sources; `vllm_field_statuses.json` says of each what becomes of it:

    {"test": "server/test_x.py::test_y"}    it is implemented, and that test shows its effect
    {"without_effect": value}               it changes nothing here, and the documentation says so
    {"refused": value}                      that value is a 400 which names the field
"""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FIELDS = json.loads((TESTS / "data" / "vllm_request_fields.json").read_text())
STATUSES = json.loads((TESTS / "data" / "vllm_field_statuses.json").read_text())
DOCS = "\n".join((TESTS.parent / "docs" / name).read_text() for name in ("api.md", "endpoints.md"))
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "x"}]}
BODIES = {
    "/v1/completions": {"prompt": "xyz", "max_tokens": 2},
    "/v1/chat/completions": CHAT | {"max_tokens": 2},
    "/v1/messages": CHAT | {"max_tokens": 2},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"model": "echo", "input": "x", "max_output_tokens": 2},
    "/tokenize": CHAT,
    "/detokenize": {"tokens": [1]},
}
VOLATILE = ("id", "created", "created_at", "completed_at", "usage", "cairn")
"""What two equal requests are answered differently with."""


def fields_of(endpoint):
    """Those of all versions."""
    return sorted({field for version in FIELDS.values() for field in version[endpoint]})


def status_of(endpoint, field):
    return STATUSES.get(endpoint, {}).get(field) or STATUSES["every endpoint"].get(field)


def answer_of(response):
    assert response.status_code == 200, response.text
    return without_volatile(response.json())


def without_volatile(value):
    if isinstance(value, dict):
        return {name: without_volatile(one) for name, one in value.items() if name not in VOLATILE}
    return [without_volatile(one) for one in value] if isinstance(value, list) else value


@cache
def text_and_tests(path):
    """A file's text, and the names of its tests."""
    text = (TESTS / path).read_text()
    return text, {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}


def problems_of(server, endpoint, field, declared):
    """What its status promises and the server does not do."""
    ((kind, value),) = status_of(endpoint, field).items()
    body = BODIES[endpoint]
    if kind == "test":
        path, _, name = value.partition("::")
        text, tests = text_and_tests(path)
        if name not in tests or not re.search(rf"\b{field}\b", text):
            yield f"{path} has no test {name}, or says nothing of {field}"
        if field not in declared:
            yield f"{field} is no field of the API's document"
    elif kind == "without_effect":
        if f"`{field}`" not in DOCS:
            yield f"the documentation does not say that `{field}` changes nothing"
        if answer_of(server.post(endpoint, body | {field: value})) != answer_of(server.post(endpoint, body)):
            yield f"{field} changes something"
    else:
        response = server.post(endpoint, body | {field: value})
        error = response.json().get("error") or {}
        if response.status_code != 400 or (error.get("param") or "").partition(".")[0] != field:
            yield f"{field}: {value} is answered with {response.status_code} and {response.text[:100]}"
        answer_of(server.post(endpoint, body | {field: None}))


@pytest.mark.parametrize("endpoint", list(FIELDS["0.33.0"]))
def test_every_field_of_vllms_has_the_status_that_it_is_said_to_have(server, endpoint):
    document = server.get("/openapi.json").json()
    content = document["paths"][endpoint]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    declared = document["components"]["schemas"][name]["properties"]
    missing = [field for field in fields_of(endpoint) if status_of(endpoint, field) is None]
    assert not missing, f"vllm_field_statuses.json says nothing of {endpoint}'s {missing}"
    assert [text for field in fields_of(endpoint) for text in problems_of(server, endpoint, field, declared)] == []


def test_no_status_is_of_a_field_that_vllm_does_not_have():
    known = {endpoint: set(fields_of(endpoint)) for endpoint in FIELDS["0.33.0"]}
    assert STATUSES.keys() <= known.keys() | {"every endpoint"}
    assert STATUSES["every endpoint"].keys() <= set().union(*known.values())
    for endpoint, statuses in STATUSES.items():
        assert endpoint == "every endpoint" or statuses.keys() <= known[endpoint]
        assert list(statuses) == sorted(statuses)
