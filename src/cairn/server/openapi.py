"""The OpenAPI document: what the framework knows of the routes, and what it cannot know."""

from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from cairn.server.openapi_schemas import Schema, answers, calls, error, fields, nullable, reference
from cairn.server.service import Service

_PROBES = frozenset({"/health", "/ping", "/ready"})
_TEXT: Mapping[str, str] = MappingProxyType({"/metrics": "text/plain", "/cache/ui": "text/html"})
_EMPTY = frozenset({*_PROBES, "/reset_prefix_cache"})


def document(app: FastAPI, service: Service, gated: Set[str], open_paths: Set[str]) -> dict[str, Any]:
    """`gated`: paths that make work; `open_paths`: those that need no key."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    locked = bool(service.options.api_key)
    for path, operation, method in _operations(found):
        responses = operation["responses"]
        responses.pop("422", None)
        responses["200"] = {"description": "done", **_content(path)}
        if path in gated:
            operation.setdefault("parameters", []).append(_request_id())
        for status in _refusals(path, method, operation, gated):
            responses[str(status)] = _refusal(path, status)
        if locked and path not in open_paths:
            operation["security"] = [{"key": []}]
            responses["401"] = _refusal(path, 401)
    parts = found.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _correct(schemas, service)
    schemas["Error"] = error()
    if locked:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def _operations(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            yield path, operation, method


def _request_id() -> Schema:
    schema = {"type": "string", "pattern": "^[!-~]{1,128}$"}
    return {"name": "X-Request-Id", "in": "header", "required": False, "schema": schema}


def _content(path: str) -> Schema:
    if path in _EMPTY:
        return {}
    if path in _TEXT:
        return {"content": {_TEXT[path]: {"schema": {"type": "string"}}}}
    content: Schema = {"application/json": {"schema": answers()[path]}}
    if path.endswith("completions"):
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    return {"content": content}


def _refusals(path: str, method: str, operation: dict[str, Any], gated: Set[str]) -> Iterator[int]:
    if operation.get("parameters") or (method == "post" and path not in _PROBES):
        yield 400
    if method == "post":
        yield from (408, 413)
    if path in gated or path.startswith("/v1/models/"):
        yield 404
    if path in gated:
        yield from (429, 500, 503, 504)
    if path == "/reset_prefix_cache":
        yield 409
    if path in _EMPTY or path == "/cache":
        yield 503


def _refusal(path: str, status: int) -> Schema:
    texts = {
        400: "the request is wrong; `param` names the field",
        401: "the API key is missing or wrong",
        404: "another model is served here",
        408: "the body did not come in time",
        409: "pages are held: nothing has been dropped",
        413: "the body is too large",
        429: "too many requests are open",
        500: "the engine could not answer",
        503: "the server cannot serve at the moment",
        504: "the answer was not there in time",
    }
    schema = _status() if status == 503 and path in _PROBES else reference("Error")
    refusal: Schema = {"description": texts[status], "content": {"application/json": {"schema": schema}}}
    if status == 429:
        refusal["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
    return refusal


def _status() -> Schema:
    return {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}


def _correct(schemas: dict[str, Schema], service: Service) -> None:
    """Types that are checked by hand, behind the framework."""
    info = service.engine.info
    known = fields(service.options.model_name, info.vocab_size, info.max_model_len)
    for schema in schemas.values():
        properties = schema.get("properties", {})
        for name in properties.keys() & known.keys():
            properties[name] = known[name]
    part: Schema = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    if service.engine.info.reads_images:
        part = {"anyOf": [part, {"type": "object", "required": ["type"]}]}
    schemas["TokenizeRequest"]["properties"]["prompt"] = nullable({"type": "string", "minLength": 1})
    message = schemas["Message"]["properties"]
    message["content"] = nullable({"type": "string"}, {"type": "array", "items": part})
    message["tool_calls"] = nullable(calls())
    for name in ("reasoning", "reasoning_content"):
        message[name] = nullable({"type": "string"})
