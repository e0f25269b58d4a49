"""The OpenAPI document: what the framework knows of the routes, and what it cannot know: what bodies look like where
their types in `requests` do not say it, and what answers look like."""

from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any, TypeAlias

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from cairn.server.messages import TEMPLATE_SWITCHES
from cairn.server.service import Service

Schema: TypeAlias = dict[str, Any]

_PROBES = frozenset({"/health", "/ping", "/ready"})
_TEXT: Mapping[str, str] = MappingProxyType({"/metrics": "text/plain", "/cache/ui": "text/html"})
_EMPTY = frozenset({*_PROBES, "/reset_prefix_cache"})
_MODEL_FIELDS = ("id", "object", "created", "owned_by", "root", "parent", "max_model_len")


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


# -- schemas -----------------------------------------------------------------------------------------------------------


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}]}


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _array(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items} | limits


def error() -> Schema:
    """OpenAI's error object: `param` names the field."""
    said: Schema = {
        "message": {"type": "string"},
        "type": {"enum": ["invalid_request_error", "server_error"]},
        "param": {"type": ["string", "null"]},
        "code": {"type": "string"},
    }
    return _object({"error": _object(said)})


def fields(model_name: str, vocab_size: int, max_model_len: int) -> dict[str, Schema]:
    """Fields of several bodies, by name."""
    token, text = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}, {"type": "string", "minLength": 1}
    stop = {"type": "string", "minLength": 1, "maxLength": 256}
    schema: Schema = {"anyOf": [{"type": "object"}, {"type": "boolean"}]}
    return {
        "model": nullable({"const": model_name}),
        "prompt": {
            "anyOf": [
                text,
                _array(token, minItems=1),
                _array(text, minItems=1, maxItems=256),
                _array(_array(token, minItems=1), minItems=1, maxItems=256),
            ]
        },
        "tokens": _array(token),
        "stop": nullable(stop, _array(stop, maxItems=16)),
        "stop_token_ids": nullable(_array(token, maxItems=64)),
        "allowed_token_ids": nullable(_array(token, minItems=1, maxItems=1024)),
        "bad_words": nullable(_array({"type": "string", "pattern": "[!-~]", "maxLength": 256}, maxItems=128)),
        "truncate_prompt_tokens": nullable({"const": -1}, {"type": "integer", "minimum": 1, "maximum": max_model_len}),
        "logit_bias": nullable(
            {
                "type": "object",
                "patternProperties": {"^[0-9]{1,12}$": {"type": "number", "minimum": -100, "maximum": 100}},
                "additionalProperties": False,
                "maxProperties": 1024,
            }
        ),
        "tools": nullable(_array(_tool(), maxItems=1024)),
        "tool_choice": nullable({"enum": ["none", "auto", "required"]}, _named_tool()),
        "response_format": nullable(
            _object({"type": {"enum": ["text", "json_object"]}}),
            _object({"type": {"const": "json_schema"}, "json_schema": _object({"schema": schema})}),
        ),
        "structured_outputs": nullable(
            *(
                {**_object({name: kind}), "maxProperties": 1}
                for name, kind in (("json", schema), ("regex", text), ("choice", _choices()), ("grammar", text))
            )
        ),
        "guided_json": nullable(schema, text),
        "guided_regex": nullable(text),
        "guided_choice": nullable(_choices()),
        "guided_grammar": nullable(text),
        "chat_template_kwargs": nullable(_switches()),
    }


def _choices() -> Schema:
    return _array({"type": "string", "minLength": 1}, minItems=1, maxItems=1024)


def _tool() -> Schema:
    function = _object({"name": {"type": "string", "minLength": 1}}, parameters={"type": "object"})
    return _object({"type": {"const": "function"}, "function": function})


def calls() -> Schema:
    """Tool calls of an earlier answer."""
    text: Schema = {"type": "string"}
    function = _object({"name": {"type": "string", "minLength": 1}}, arguments={"anyOf": [text, {"type": "object"}]})
    call = _object({"type": {"const": "function"}, "function": function}, id={"type": "string"})
    return _array(call, maxItems=1024)


def _named_tool() -> Schema:
    return _object({"type": {"const": "function"}, "function": _object({"name": {"type": "string", "minLength": 1}})})


def _switches() -> Schema:
    kinds: dict[type, Schema] = {
        bool: {"type": ["boolean", "null"]},
        str: {"type": ["string", "null"], "maxLength": 64},
    }
    switches = {name: kinds[kind] for name, kind in TEMPLATE_SWITCHES.items()}
    return {"type": "object", "properties": switches, "additionalProperties": False}


# -- answers -----------------------------------------------------------------------------------------------------------


def answers() -> dict[str, Schema]:
    """By path: the body of a 200, for the paths that answer with JSON."""
    count: Schema = {"type": "integer", "minimum": 0}
    card = _object({name: {} for name in _MODEL_FIELDS})
    tokenized = {"count": count, "max_model_len": count, "tokens": _array(count), "token_strs": {"type": "null"}}
    cache_parts = ("object", "server", "enabled", "pool", "tree", "paths", "history", "lost", "visits")
    return {
        "/v1/completions": _answer("text_completion", text={"type": "string"}),
        "/v1/chat/completions": _answer("chat.completion", message=_object({"role": {"const": "assistant"}})),
        "/tokenize": _object(tokenized),
        "/detokenize": _object({"prompt": {"type": "string"}}),
        "/v1/models": _object({"object": {"const": "list"}, "data": _array(card)}),
        "/v1/models/{name}": card,
        "/load": _object({"server_load": count}),
        "/version": _object({"version": {"type": "string"}}),
        "/server_info": _object({name: {} for name in ("version", "model_name", "engine", "limits")}),
        "/cache": _object({name: {} for name in cache_parts}),
    }


def _answer(kind: str, **said: Schema) -> Schema:
    count: Schema = {"type": "integer", "minimum": 0}
    choice = {
        "index": count,
        **said,
        "finish_reason": {"enum": ["stop", "length", "tool_calls", "abort"]},
        "stop_reason": {"type": ["string", "integer", "null"]},
        "logprobs": {"type": ["object", "null"]},
    }
    cached = _object({"cached_tokens": count})
    usage = {"prompt_tokens": count, "completion_tokens": count, "total_tokens": count, "prompt_tokens_details": cached}
    return _object(
        {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": count,
            "model": {"type": "string"},
            "choices": _array(_object(choice), minItems=1),
            "usage": _object(usage),
            "kv_transfer_params": {"type": ["object", "null"]},
            "cairn": _object({"cache": {"type": ["object", "array", "null"]}}),
        }
    )
