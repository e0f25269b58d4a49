"""The JSON between proxy, prefill and decode servers.

The flow is the one that vLLM's and llm-d's proxies speak: the prefill server is asked for one token and answers with
`kv_transfer_params`, the reference; that object goes, byte for byte, into the client's own body, which the decode
server gets. Values that the proxy has no business with are never changed, so they come through as they were sent. A
reference that no server would take is dropped: the client must not hear of a field that it never sent.

What the proxy adds is the key DECODE_HINT, in both directions an object {"engine": str, "host": str, "port": int}:

- decode server -> proxy: in `kv_transfer_params` of an answer (of any chunk, when streamed), it says where the pages
  of this answer can be claimed. Further keys of the object are kept.
- proxy -> prefill server: in `kv_transfer_params` of the next turn, the same object.

and CLIENT_FIELDS and RELEASE_KEY, for a prefill server: see `http.handover`.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from cairn.errors import InvalidBody, InvalidRequest
from cairn.http.handover import CLIENT_FIELDS, ITEM_ID, RELEASE_KEY, REPLACED_FIELDS

DECODE_HINT = "cairn_decode_hint"
HANDOVER_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
"""What is asked for there has a prompt that a prefill server can compute."""

Body = dict[str, msgspec.Raw]
"""A JSON object with its values as they were written."""

_MAX_HINT_BYTES = 2048
_MAX_REFERENCE_BYTES = 4 << 20
_ONE_TOKEN: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {"/v1/responses": MappingProxyType({"stream": False, "max_output_tokens": 1, "store": False})}
)
_REMOTE_DECODE = (
    ("do_remote_decode", True),
    ("do_remote_prefill", False),
    ("remote_engine_id", None),
    ("remote_block_ids", None),
    ("remote_host", None),
    ("remote_port", None),
)


_ITEM_ID = re.compile(f'"{ITEM_ID}"'.encode())

_BOOLEAN: TypeAdapter[bool | None] = TypeAdapter(bool | None)

_EngineId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_NumTokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 26)]
_NumRanks = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
_BlockIds = Annotated[list[_BlockId], msgspec.Meta(max_length=1 << 20)]


class _Hint(msgspec.Struct):
    engine: _EngineId
    host: _Host
    port: _Port
    num_tokens: _NumTokens | None = None


class _Reference(msgspec.Struct):
    """The known keys, with the types that every server reads; the connector decides which of them are required.

    vLLM has one list of blocks where there is one group of layers, else a list for each.
    """

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: _EngineId | None = None
    remote_request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] | None = None
    remote_host: _Host | None = None
    remote_port: _Port | None = None
    remote_block_ids: Annotated[list[_BlockId | _BlockIds], msgspec.Meta(max_length=1 << 20)] | None = None
    tp_size: _NumRanks | None = None
    dcp_size: _NumRanks | None = None
    pp_size: _NumRanks | None = None
    remote_num_tokens: _NumTokens | None = None
    remote_prefill_cached_tokens: _NumTokens | None = None


class _WithParams(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct):
    param: str | None = None


class _WithError(msgspec.Struct):
    error: _Error


class BadReference(ValueError):
    """A prefill server's `kv_transfer_params` that no decode server would accept."""


def parse_body(data: bytes) -> Body:
    """A client's body. Raises InvalidBody when it is no JSON object."""
    try:
        data.decode()
        return msgspec.json.decode(data, type=Body)
    except msgspec.ValidationError:
        raise InvalidBody("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidBody("the body is nested too deeply") from None


def text_field(body: Body, name: str) -> str:
    """The text in a field, empty when there is none or it is something else."""
    try:
        return msgspec.json.decode(body[name], type=str) if name in body else ""
    except msgspec.DecodeError:
        return ""


def bool_field(body: Body, name: str) -> bool:
    """The boolean in a field as servers read it, false when there is none or null. Raises InvalidRequest for anything
    else."""
    try:
        return bool(_BOOLEAN.validate_json(bytes(body[name]))) if name in body else False
    except ValidationError:
        raise InvalidRequest(f"{name} must be true or false", name) from None


def wants_prompt_logprobs(path: str, body: Body) -> bool:
    """Whether the answer tells log-probabilities of the prompt: then all of it is computed where it is answered."""
    is_completion, is_chat = path == "/v1/completions", path == "/v1/chat/completions"
    if not (is_completion or is_chat):
        return False
    if _is_given(body, "prompt_logprobs"):
        return True
    # 0 are those of the tokens themselves; and a chat's stream has no place for those of an echo
    has_logprobs = _is_given(body, "logprobs") if is_completion else _is_true(body, "logprobs")
    return has_logprobs and _is_true(body, "echo") and not (is_chat and _is_true(body, "stream"))


def _is_given(body: Body, name: str) -> bool:
    return bytes(body.get(name, b"null")).strip() != b"null"


def _is_true(body: Body, name: str) -> bool:
    """Whether servers read a field as true. What else is wrong with it, they say."""
    try:
        return _BOOLEAN.validate_json(bytes(body.get(name, b"null"))) is True
    except ValidationError:
        return False


def stored_response_of(body: Body) -> str:
    """The id of the stored response that a body of /v1/responses goes on from, or refers to an item of; empty for
    none."""
    previous, items = text_field(body, "previous_response_id"), bytes(body.get("input", b""))
    match = _ITEM_ID.search(items) if not previous and b'"item_reference"' in items else None
    return previous if match is None else f"resp_{match[1].decode()}"


def prefill_body(path: str, body: Body, hint: msgspec.Raw | None, key: str) -> bytes:
    """The body for the prefill server: the same prompt, one token, and `do_remote_decode`. What the client wants of its
    answer goes along to be checked. `key`: what it is released by where its answer is not waited for."""
    one_token = dict(_ONE_TOKEN.get(path) or {"stream": False, "max_tokens": 1})
    if "max_completion_tokens" in body:
        one_token["max_completion_tokens"] = 1
    client_fields = {name: value for name, value in body.items() if name in REPLACED_FIELDS}
    params: dict[str, object] = {**dict(_REMOTE_DECODE), CLIENT_FIELDS: client_fields, RELEASE_KEY: key}
    if hint is not None:
        params[DECODE_HINT] = hint
    kept = {name: value for name, value in body.items() if name not in REPLACED_FIELDS}
    return msgspec.json.encode({**kept, **one_token, "kv_transfer_params": params})


def release_body(key: str) -> bytes:
    """What lets go of the prompt that a prefill server has computed for a `prefill_body` with this key."""
    return msgspec.json.encode({"kv_transfer_params": {"do_remote_decode": True, RELEASE_KEY: key}})


def decode_body(body: Body, handover: msgspec.Raw | None) -> bytes:
    """The body for the decode server: the client's own, with the prefill server's `handover` when there is one.

    A client's own `kv_transfer_params` go to nobody: they name addresses that servers connect to.
    """
    fields = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    return msgspec.json.encode(fields if handover is None else {**fields, "kv_transfer_params": handover})


def handover_of(answer: bytes) -> msgspec.Raw | None:
    """The `kv_transfer_params` of a prefill server's answer; None when it has handed nothing over.

    Raises ValueError when the answer is no JSON object, and BadReference when only what it hands over is wrong: no
    object, not valid Unicode, larger than any server reads, or with a known key that has a value of another kind.
    """
    try:
        params = msgspec.json.decode(answer, type=_WithParams).kv_transfer_params
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if len(bytes(params)) > _MAX_REFERENCE_BYTES:
        raise BadReference(f"it has {len(bytes(params))} bytes; at most {_MAX_REFERENCE_BYTES} are read")
    try:
        # A value of an unknown key is passed over by a typed decoder, whatever its bytes are; an untyped one reads all.
        given = msgspec.json.decode(params, type=dict[str, Any] | None)
        reference = msgspec.json.decode(params, type=_Reference | None)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise BadReference(str(error)) from None
    if reference is not None and reference.do_remote_decode:
        raise BadReference("it would have the decode server hand the prompt over in its turn")
    return params if given else None


def refuses_params(status: int, content: bytes) -> bool:
    """Whether a server's answer is a refusal of `kv_transfer_params`, of which the client has sent none that went
    through."""
    if status not in (400, 422):
        return False
    try:
        param = msgspec.json.decode(content, type=_WithError).error.param
    except (msgspec.DecodeError, RecursionError):
        return False
    return param is not None and param.startswith("kv_transfer_params")


def valid_hint(params: Body) -> msgspec.Raw | None:
    """A copy of the hint among a decode server's `kv_transfer_params`; None when there is no valid one."""
    hint = params.get(DECODE_HINT)
    if hint is None or len(bytes(hint)) > _MAX_HINT_BYTES:
        return None
    try:
        read = msgspec.json.decode(hint, type=_Hint)
    except (msgspec.DecodeError, RecursionError):
        return None
    return hint.copy() if (read.engine + read.host).isprintable() else None
