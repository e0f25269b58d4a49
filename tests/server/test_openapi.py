"""The OpenAPI document is true: requests made from it, right and wrong ones, get the answers that it foretells.

Schemathesis makes the requests: seeded, and a bounded number for each operation.
"""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cairn.engine.contract import RANGES
from cairn.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cairn.server.openai_responses.requests import ResponsesRequest

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ROLES = ("user", "assistant", "system", "user")
TELLING = ["/v1/models", "/health", "/ping", "/ready", "/load", "/version", "/server_info", "/metrics", "/cache/ui"]
RIGHT = [
    ("POST", "/v1/completions", 80, {200, 400}),
    ("POST", "/v1/chat/completions", 50, {200, 400}),
    ("POST", "/v1/messages", 50, {200, 400}),
    ("POST", "/v1/messages/count_tokens", 25, {200, 400}),
    ("POST", "/v1/responses", 80, {200, 400, 404}),
    ("GET", "/v1/responses/{response_id}", 10, {400, 404}),
    ("DELETE", "/v1/responses/{response_id}", 5, {404}),
    ("POST", "/v1/responses/{response_id}/cancel", 5, {404}),
    ("GET", "/v1/responses/{response_id}/input_items", 10, {404}),
    ("POST", "/invocations", 40, {200, 400}),
    ("POST", "/tokenize", 120, {200, 400}),  # few have either a prompt or messages
    ("POST", "/detokenize", 30, {200, 400}),
    ("POST", "/reset_prefix_cache", 5, {200, 400}),
    ("POST", "/release_kv_transfer", 5, {200, 400}),
    ("GET", "/v1/models/{name}", 3, {404}),
    ("GET", "/cache", 5, {200}),
    ("POST", "/ping", 1, {200}),
    *(("GET", path, 1, {200}) for path in TELLING),
]
WRONG = [
    ("POST", "/v1/completions", 40),
    ("POST", "/v1/chat/completions", 25),
    ("POST", "/v1/messages", 25),
    ("POST", "/v1/messages/count_tokens", 12),
    ("POST", "/v1/responses", 40),
    ("GET", "/v1/responses/{response_id}", 5),
    ("GET", "/v1/responses/{response_id}/input_items", 5),
    ("POST", "/invocations", 20),
    ("POST", "/tokenize", 12),
    ("POST", "/detokenize", 15),
    ("POST", "/reset_prefix_cache", 5),
    ("POST", "/release_kv_transfer", 5),
    ("GET", "/cache", 5),
]


@pytest.fixture(scope="module")
def schema(server):
    """What is asked of the server leaves nothing behind in it."""
    loaded = schemathesis.openapi.from_dict(server.get("/openapi.json").json())
    loaded.config.update(base_url=server.url)
    yield loaded
    server.assert_nothing_is_held()
    assert server.get("/ready").status_code == 200 and server.get("/load").json() == {"server_load": 0}


def messages_of(body):
    messages = body.get("messages") if isinstance(body, dict) else None
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(message.get("role"), str):
            yield message


def ask(operation, mode, most):
    """The statuses of the answers to `most` requests."""
    statuses = set()

    @settings(
        max_examples=most,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case):
        for message in messages_of(case.body):
            message["role"] = ROLES[len(message["role"]) % 4]  # which ones there are is the template's to say
        response = case.call(timeout=20)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    one()
    return statuses


def test_the_document_has_every_operation(schema):
    found = {(one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()}
    assert found == {(method, path) for method, path, *_ in RIGHT}


@pytest.mark.parametrize("body", [CompletionRequest, ChatRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest])
def test_the_document_has_every_field(server, body):
    document = server.get("/openapi.json").json()
    told = document["components"]["schemas"][body.__name__]["properties"]
    assert told.keys() == body.model_fields.keys()
    empty = {name for name, field in told.items() if not field.keys() - {"title", "default"}}
    assert empty == set(), "anything may be there?"


def test_the_document_types_every_body(server):
    """Whatever is sent and said as JSON has a type with fields of its own; tests hold both to it (`ApiContract`)."""
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
    wanted = {("post", path) for path in (*paths, "/invocations", "/tokenize", "/detokenize", "/release_kv_transfer")}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            bodies = [operation["requestBody"]] if "requestBody" in operation else []
            assert bool(bodies) == ((method, path) in wanted), path
            for told in (*bodies, *operation["responses"].values()):
                schema = told.get("content", {}).get("application/json", {}).get("schema")
                parts = [schema] if schema is not None else []
                for how in ("allOf", "anyOf", "oneOf"):
                    parts = schema.get(how, parts) if schema is not None else []
                for part in parts:
                    assert schemas[part["$ref"].rpartition("/")[2]]["properties"], (path, told)


def test_the_ranges_of_the_document_are_the_cores(server):
    """Told once: what the core refuses is what the document calls too much. How many log-probabilities
    there may be is the server's flag."""
    fields = server.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    shared = {name: allowed for name, allowed in RANGES.items() if name in fields and allowed.lengths is None}
    for name in ("logprobs", "prompt_logprobs"):
        (number,) = (one for one in fields[name]["anyOf"] if one["type"] == "integer")
        assert (number["minimum"], number["maximum"]) == (0, 20) and shared.pop(name)
    assert len(shared) == 11
    for name, allowed in shared.items():
        least, most = fields[name].get("minimum", fields[name].get("exclusiveMinimum")), fields[name]["maximum"]
        assert most == allowed.high and (least == allowed.low or name in ("max_tokens", "top_k"))
        # that a prompt and its answer are too long together is known before, by the client's words for them
        for wrong in (int(least) - 1, *([int(most) + 1] if name != "max_tokens" else [])):
            server.requests.clear()
            error = server.post("/v1/completions", {"prompt": "x", name: wrong}).json()["error"]
            assert error["param"] == name and str(allowed) in error["message"]
            assert len(server.requests) == 1, "nobody but the core has looked"


@pytest.mark.more
@pytest.mark.parametrize(("method", "path", "most", "statuses"), RIGHT)
def test_what_the_document_calls_right(schema, method, path, most, statuses):
    found = ask(schema[path][method], GenerationMode.POSITIVE, most)
    assert found & {200, 404} == statuses & {200, 404} and found <= statuses


@pytest.mark.more
@pytest.mark.parametrize(("method", "path", "most"), WRONG)
def test_what_the_document_calls_wrong(schema, method, path, most):
    assert 400 in ask(schema[path][method], GenerationMode.NEGATIVE, most)


def test_a_locked_server_says_which_paths_want_a_key(serve):
    server = serve(options={"api_key": ["k"]})
    document = server.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            locked = server._http.request(method, server.url + path).status_code == 401
            assert "422" not in operation["responses"], "errors of a form that is never sent"
            assert locked == ("security" in operation) == ("401" in operation["responses"]), path
