"""The OpenAPI document: FastAPI's, with the types of answers, and the statuses that each path may answer with."""

from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any, TypeAlias

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec.json import schema_components

from cairn.engine.contract import CacheView, EngineInfo
from cairn.http.error_responses import ANTHROPIC_PATH
from cairn.http.handover import RELEASE_PATH
from cairn.server.anthropic.responses import (
    AnthropicErrorResponse,
    CountTokensResponse,
    MessagesEvent,
    MessagesResponse,
)
from cairn.server.openai.responses import (
    ChatChunk,
    ChatResponse,
    CompletionChunk,
    CompletionResponse,
    DetokenizeResponse,
    TokenizeResponse,
)
from cairn.server.openai_responses.responses import DeletedResponse, InputItemList, ResponsesEvent, ResponsesResponse
from cairn.server.options import ServerOptions
from cairn.server.responses import (
    CacheHead,
    ErrorResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    ServerInfoResponse,
    StatusResponse,
    TokenizerInfoResponse,
    VersionResponse,
)

Schema: TypeAlias = dict[str, Any]

_PROBES = frozenset({"/health", "/ping", "/ready"})
_TEXT_BODIES: Mapping[str, str] = MappingProxyType({"/metrics": "text/plain", "/cache/ui": "text/html"})
_EMPTY_BODIES = frozenset({*_PROBES, "/reset_prefix_cache", RELEASE_PATH})
_RESPONSES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "/v1/completions": (CompletionResponse,),
        "/v1/chat/completions": (ChatResponse,),
        "/v1/messages": (MessagesResponse,),
        "/v1/messages/count_tokens": (CountTokensResponse,),
        "/v1/responses": (ResponsesResponse,),
        "/v1/responses/{response_id}": (ResponsesResponse,),
        "/v1/responses/{response_id}/cancel": (ResponsesResponse,),
        "/v1/responses/{response_id}/input_items": (InputItemList,),
        "DELETE /v1/responses/{response_id}": (DeletedResponse,),
        "/invocations": (ChatResponse, CompletionResponse),
        "/tokenize": (TokenizeResponse,),
        "/tokenizer_info": (TokenizerInfoResponse,),
        "/detokenize": (DetokenizeResponse,),
        "/v1/models": (ModelList,),
        "/v1/models/{name}": (ModelCard,),
        "/load": (LoadResponse,),
        "/version": (VersionResponse,),
        "/server_info": (ServerInfoResponse,),
        "/cache": (CacheHead, CacheView),
    }
)
"""By path, or method and path: the types whose fields the JSON body of a 200 has."""

_EITHER = frozenset({"/invocations"})
"""Paths of which a body has the fields of one of the types, not of all."""

_LOOKUPS = ("/v1/models/", "/v1/responses/")
_REQUEST_ID: Mapping[str, Any] = MappingProxyType(
    {"name": "X-Request-Id", "in": "header", "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"}}
)
_CHUNKS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "/v1/completions": (CompletionChunk,),
        "/v1/chat/completions": (ChatChunk,),
        "/v1/messages": (MessagesEvent,),
        "/v1/responses": (ResponsesEvent,),
        "/invocations": (ChatChunk, CompletionChunk),
    }
)
_ERRORS: Mapping[int, str] = MappingProxyType(
    {
        400: "the request is wrong; `param` names the field",
        401: "the API key is missing or wrong",
        404: "another model is served here, or what is named is not kept",
        408: "the body did not come in time",
        409: "pages are held: nothing has been dropped",
        413: "the body is too large",
        415: "the body is in another encoding than gzip",
        429: "too many requests are open",
        500: "the engine could not answer",
        502: "what another server was to send did not come",
        503: "the server cannot serve at the moment",
        504: "the answer was not there in time",
    }
)


_ENDED_BY_DONE = frozenset({"/v1/completions", "/v1/chat/completions", "/invocations"})


def build_openapi_document(
    app: FastAPI, options: ServerOptions, info: EngineInfo, gated: Set[str], open_paths: Set[str]
) -> dict[str, Any]:
    """`gated`: paths that generate or tokenize; `open_paths`: those that need no key."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    if options.root_path is not None:
        document["servers"] = [{"url": options.root_path}]
    has_keys = bool(options.api_key)
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    for path, method, operation in operations:
        statuses = operation["responses"]
        statuses.pop("422", None)
        statuses["200"] = {"description": "done", **_content(path, method)}
        if path in gated:
            operation.setdefault("parameters", []).append(dict(_REQUEST_ID))
        for status in _error_statuses(path, method, operation, gated):
            statuses[str(status)] = _error_schema(path, status)
        if has_keys and path not in open_paths:
            operation["security"] = [{"key": []}]
            statuses["401"] = _error_schema(path, 401)
    parts = document.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _add_model_limits(schemas, options, info)
    types = [kind for kinds in (*_RESPONSES.values(), *_CHUNKS.values()) for kind in kinds]
    types += [ErrorResponse, AnthropicErrorResponse, StatusResponse]
    schemas |= schema_components(types, ref_template="#/components/schemas/{name}")[1]
    # `/server_info` has the cache's fields among the engine's.
    engine, cache = schemas["EngineInfo"], schemas.pop("CacheInfo")
    engine["properties"] = {**engine["properties"], **cache["properties"]}
    engine["required"] = [name for name in (*engine["required"], *cache["required"]) if name != "cache"]
    del engine["properties"]["cache"]
    if has_keys:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _reference(kind: Any) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _joined(how: str, kinds: tuple[Any, ...]) -> Schema:
    parts = [_reference(kind) for kind in kinds]
    return parts[0] if len(parts) == 1 else {how: parts}


def _content(path: str, method: str) -> Schema:
    if path in _EMPTY_BODIES:
        return {}
    if path in _TEXT_BODIES:
        return {"content": {_TEXT_BODIES[path]: {"schema": {"type": "string"}}}}
    kinds = _RESPONSES.get(f"{method.upper()} {path}", _RESPONSES.get(path, ()))
    how = "anyOf" if path in _EITHER else "allOf"
    content: Schema = {"application/json": {"schema": _joined(how, kinds)}}
    if path in _CHUNKS:
        chunk = _joined("anyOf", _CHUNKS[path])
        data: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk}
        if path in _ENDED_BY_DONE:
            data = {"anyOf": [data, {"const": "[DONE]"}]}
        content["text/event-stream"] = {
            "schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}
        }
    return {"content": content}


def _error_statuses(path: str, method: str, operation: dict[str, Any], gated: Set[str]) -> Iterator[int]:
    if operation.get("parameters") or (method == "post" and path not in _PROBES):
        yield 400
    if method == "post":
        yield from (408, 413, 415)
    if path in gated or path.startswith(_LOOKUPS):
        yield 404
    if path in gated:
        yield from (429, 500, 502, 503, 504)
    if path == "/reset_prefix_cache":
        yield 409
    if path in _EMPTY_BODIES or path == "/cache":
        yield 503


def _error_schema(path: str, status: int) -> Schema:
    kind: Any = ErrorResponse
    if path.startswith(ANTHROPIC_PATH):
        kind = AnthropicErrorResponse
    elif status == 503 and path in _PROBES:
        kind = StatusResponse
    content = {"application/json": {"schema": _reference(kind)}}
    refusal: Schema = {"description": _ERRORS[status], "content": content}
    if status == 429:
        refusal["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
    return refusal


def _add_model_limits(schema: Any, options: ServerOptions, info: EngineInfo) -> None:
    """The model's name, vocabulary and length, which only a running server knows."""
    most = options.max_logprobs
    least = -1 if most == -1 or most >= info.vocab_size else 0
    limits: dict[str, Schema] = {
        "token-id": {"maximum": info.vocab_size - 1},
        "to-model-len": {"maximum": info.max_model_len},
        "num-logprobs": {"minimum": least, "maximum": info.vocab_size if most == -1 else most},
        "model-name": {"enum": [*options.model_names]},
    }
    if isinstance(schema, dict):
        schema |= limits.get(str(schema.get("format")), {})
        schema = [*schema.values()]
    for inner in schema if isinstance(schema, list) else ():
        _add_model_limits(inner, options, info)
