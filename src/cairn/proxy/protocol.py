"""The JSON between proxy, prefill and decode servers.

The flow is the one that vLLM's and llm-d's proxies speak: the prefill server is asked for one token and answers with
`kv_transfer_params`; that object goes, byte for byte, into the client's own body, which the decode server gets. Values
that the proxy has no business with are never parsed, so they come through as they were sent.

What the proxy adds is the key DECODE_HINT, in both directions an object {"engine": str, "host": str, "port": int}:

- decode server -> proxy: in `kv_transfer_params` of an answer (of any chunk, when streamed), it says where the pages
  of this answer can be claimed. Further keys of the object are kept.
- proxy -> prefill server: in `kv_transfer_params` of the next turn, the same object.
"""

from typing import Annotated

import msgspec

from cairn.errors import InvalidRequest

__all__ = [
    "DECODE_HINT",
    "Body",
    "bool_field",
    "decode_body",
    "handover_of",
    "parse_body",
    "prefill_body",
    "text_field",
    "valid_hint",
]

DECODE_HINT = "cairn_decode_hint"

Body = dict[str, msgspec.Raw]
"""A JSON object with its values as they were written."""

_MAX_HINT_BYTES = 2048
_PREFILL_LEAVES_OUT = (
    *("stream_options", "min_tokens", "min_completion_tokens"),
    # nobody reads that answer, and a prompt that is told of would be computed whatever is cached
    *("n", "echo", "logprobs", "top_logprobs", "prompt_logprobs"),
)
_REMOTE_DECODE = (
    ("do_remote_decode", True),
    ("do_remote_prefill", False),
    ("remote_engine_id", None),
    ("remote_block_ids", None),
    ("remote_host", None),
    ("remote_port", None),
)


class _Hint(msgspec.Struct):
    engine: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _WithParams(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def parse_body(data: bytes) -> Body:
    """A client's body. Raises InvalidRequest when it is no JSON object."""
    try:
        data.decode()
        return msgspec.json.decode(data, type=Body)
    except msgspec.ValidationError:
        raise InvalidRequest("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def text_field(body: Body, name: str) -> str:
    """The text in a field, empty when there is none or it is something else."""
    try:
        return msgspec.json.decode(body[name], type=str) if name in body else ""
    except msgspec.DecodeError:
        return ""


def bool_field(body: Body, name: str) -> bool:
    """The truth in a field, false when there is none or null. Raises InvalidRequest for anything else."""
    try:
        return bool(msgspec.json.decode(body[name], type=bool | None)) if name in body else False
    except msgspec.DecodeError:
        raise InvalidRequest(f"{name} must be true or false", name) from None


def prefill_body(body: Body, hint: msgspec.Raw | None) -> bytes:
    """What the prefill server gets: the same prompt, one token, and the order to keep the result."""
    one_token: dict[str, object] = {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in body:
        one_token["max_completion_tokens"] = 1
    params: dict[str, object] = dict(_REMOTE_DECODE)
    if hint is not None:
        params[DECODE_HINT] = hint
    kept = {name: value for name, value in body.items() if name not in _PREFILL_LEAVES_OUT}
    return msgspec.json.encode({**kept, **one_token, "kv_transfer_params": params})


def decode_body(body: Body, handover: msgspec.Raw | None) -> bytes:
    """What the decode server gets: the client's own body, with the prefill server's `handover` when there is one.

    A client's own `kv_transfer_params` go to nobody: they name addresses that servers connect to.
    """
    own = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    return msgspec.json.encode(own if handover is None else {**own, "kv_transfer_params": handover})


def handover_of(answer: bytes) -> msgspec.Raw | None:
    """The `kv_transfer_params` of a prefill server's answer; None when it has handed nothing over.

    Raises ValueError when the answer is no JSON object, or hands over something that is no object.
    """
    try:
        params = msgspec.json.decode(answer, type=_WithParams).kv_transfer_params
        return params if msgspec.json.decode(params, type=Body | None) else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def valid_hint(params: Body) -> msgspec.Raw | None:
    """A copy of the hint among a decode server's `kv_transfer_params`; None when there is none that is well formed."""
    hint = params.get(DECODE_HINT)
    if hint is None or len(bytes(hint)) > _MAX_HINT_BYTES:
        return None
    try:
        msgspec.json.decode(hint, type=_Hint)
    except (msgspec.DecodeError, RecursionError):
        return None
    return hint.copy()
