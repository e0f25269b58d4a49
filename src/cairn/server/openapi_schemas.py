"""What the bodies look like where their types in `requests` do not say it, and what the answers look like."""

from typing import Any, TypeAlias

from cairn.server.messages import TEMPLATE_SWITCHES

Schema: TypeAlias = dict[str, Any]

_MAX_MODEL_FIELDS = ("id", "object", "created", "owned_by", "root", "parent", "max_model_len")


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
    card = _object({name: {} for name in _MAX_MODEL_FIELDS})
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
