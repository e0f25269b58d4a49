"""What servers under test take and say, held to their own OpenAPI document strictly: no field that it does not have."""

import copy
import itertools
import json

import jsonschema_rs
from typing_extensions import is_typeddict

import cairn.server.anthropic.responses
import cairn.server.openai.responses
import cairn.server.openai_responses.responses
import cairn.server.responses
from cairn.server.openai.requests import ChatRequest, CompletionRequest

STREAM, JSON = "text/event-stream", "application/json"
MODULES = (
    cairn.server.responses,
    cairn.server.anthropic.responses,
    cairn.server.openai.responses,
    cairn.server.openai_responses.responses,
)
BODIES = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
OPEN = ("CacheHead", "TokenizerInfoResponse")  # other fields are another type's, or the checkpoint's


def _plain_numbers(path, body):
    """The document names one spelling of a number, the server takes pydantic's others as well: false for 0, "5" for 5.
    A body with nothing but these is held to the document as it was read."""
    if path not in BODIES:
        return body
    read = BODIES[path].model_validate(body).model_dump(mode="json", exclude_unset=True)
    return read if _differ_in_numbers_alone(body, read) else body


def _differ_in_numbers_alone(body, read):
    if isinstance(read, bool | int | float):
        return isinstance(body, bool | int | float | str)
    if isinstance(read, dict):
        return (
            isinstance(body, dict)
            and body.keys() == read.keys()
            and all(_differ_in_numbers_alone(body[name], read[name]) for name in read)
        )
    if isinstance(read, list):
        return (
            isinstance(body, list)
            and len(body) == len(read)
            and all(itertools.starmap(_differ_in_numbers_alone, zip(body, read, strict=True)))
        )
    return body == read


class ApiContract:
    """One document, made strict: objects of answers have the fields that it names and no others."""

    def __init__(self, document):
        document = copy.deepcopy(document)
        self._paths, self._parts = document["paths"], document["components"]
        for name, kind in (pair for module in MODULES for pair in vars(module).items()):
            if is_typeddict(kind) and name not in OPEN and name in self._parts["schemas"]:
                self._parts["schemas"][name]["additionalProperties"] = False
        self._validators = {}
        self.num_checked = 0

    def check(self, response):
        """The answer is what the document says; the body of a request that was answered with 200 is, too."""
        request, status = response.request, str(response.status_code)
        operation = self._paths.get(request.url.path, {}).get(request.method.lower())
        if operation is None:
            return
        assert status in operation["responses"], f"{request.method} {request.url.path} says {status}"
        kind = response.headers.get("content-type", "").partition(";")[0]
        told = operation["responses"][status].get("content", {})
        assert kind in told or not told, f"{request.url.path} says {status} in {kind}"
        if kind == JSON:
            self._validate(told[JSON]["schema"], response.json())
        elif kind == STREAM:
            data = told[STREAM]["schema"]["properties"]["data"]
            chunk = data.get("anyOf", [data])[0]["contentSchema"]
            schema = {"anyOf": [chunk, {"$ref": "#/components/schemas/ErrorResponse"}]}
            for event in response.text.split("\n\n")[:-1]:
                if event != "data: [DONE]":
                    self._validate(schema, json.loads(event.partition("data: ")[2]))
        if status == "200" and "requestBody" in operation:
            body = json.loads(request.content)
            self._validate(operation["requestBody"]["content"][JSON]["schema"], _plain_numbers(request.url.path, body))

    def _validate(self, schema, value):
        key = json.dumps(schema)
        if key not in self._validators:
            self._validators[key] = jsonschema_rs.Draft202012Validator({**schema, "components": self._parts})
        error = next(self._validators[key].iter_errors(value), None)
        assert error is None, f"{key}: {error} in {json.dumps(value)[:2000]}"
        self.num_checked += 1
