"""`kv_transfer_params` of a request, as proxies send them: strict, pure, and never trusted as an address.

    {"do_remote_decode": true, ...}    prefill here; another server will decode        -> kv_export
        "cairn_decode_hint": {...}     who may still have the last turn's answer       -> source without a lease
    {"do_remote_prefill": true, ...}   decode here what another server has prefilled   -> source with a lease
    null, or both false                an ordinary request                             -> None

Keys that are not listed here are ignored, and null is the same as missing. Only the form of the block ids is checked:
which pages are read is the producer's answer to a claim with the nonce that is part of `remote_request_id`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from cairn.errors import InvalidRequest
from cairn.transfer.contract import KvSource, Tokens, TransferRole
from cairn.transfer.peers import PeerPolicy
from cairn.transfer.wire import NONCE_BYTES

HINT: Final = "cairn_decode_hint"
"""Where a decoding server says, in its answer, who it is; a proxy sends it along with the next turn's prefill."""

RELEASE_KEY: Final = "cairn_release_key"
"""What the id of a request to prefill ends with, so that its sender can let go of it without knowing its lease."""

_NAME: Final = "kv_transfer_params"
_MARK: Final = "~"
_Body = TypeVar("_Body", bound=msgspec.Struct)

_EngineId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_One = Annotated[int, msgspec.Meta(ge=1, le=1)]
_Blocks = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]], msgspec.Meta(max_length=1 << 20)]


class _Flags(msgspec.Struct):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


class Hint(msgspec.Struct):
    """The value of `HINT`: who has `num_tokens` tokens of a conversation."""

    engine: _EngineId
    host: _Host
    port: _Port
    num_tokens: Tokens | None = None


class _Prefilled(msgspec.Struct):
    """No context or pipeline parallelism, and pages are pulled."""

    remote_block_ids: Annotated[list[_Blocks], msgspec.Meta(max_length=16)]
    remote_engine_id: _EngineId
    remote_request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    remote_host: _Host
    remote_port: _Port
    remote_num_tokens: Tokens | None = None
    remote_prefill_cached_tokens: Tokens | None = None
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    dcp_size: _One | None = None
    pp_size: _One | None = None
    transfer_mode: Literal["pull"] | None = None


def remote_request_id(request_id: str, nonce: bytes) -> str:
    """The lease's name in `kv_transfer_params`. The nonce is part of it, so no proxy can lose it."""
    return f"{request_id}{_MARK}{nonce.hex()}"


def split_reference(reference: str) -> tuple[str, bytes] | None:
    """Request id and nonce of what `remote_request_id` has made; None for anything else."""
    request_id, mark, nonce = reference.rpartition(_MARK)
    # Compared with its own spelling: fromhex also takes spaces and capitals.
    if mark and request_id and len(nonce) == 2 * NONCE_BYTES and set(nonce) <= set("0123456789abcdef"):
        return request_id, bytes.fromhex(nonce)
    return None


def parse_kv_transfer_params(value: object, policy: PeerPolicy) -> TransferRole | None:
    """Raises InvalidRequest that names the key, for everything that is not exactly what the protocol says."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{_NAME} must be an object or null, not {type(value).__name__}", _NAME)
    flags = _convert(value, _Flags)
    if flags.do_remote_decode and flags.do_remote_prefill:
        raise _wrong("do_remote_decode", "and do_remote_prefill must not both be true")
    if flags.do_remote_prefill:
        return _remote_prefill(_convert(value, _Prefilled), policy)
    return TransferRole(_hint(value.get(HINT), policy), kv_export=True) if flags.do_remote_decode else None


def _hint(value: object, policy: PeerPolicy) -> KvSource | None:
    """A server that may not be spoken to is as good as no hint: whoever sent it does not know this server's peers."""
    if value is None:
        return None
    hint = _convert(value, Hint, f"{HINT}.")
    source = KvSource(hint.engine, hint.host, hint.port, end=hint.num_tokens)
    return None if policy.refusal(source.host) is not None else source


def _remote_prefill(params: _Prefilled, policy: PeerPolicy) -> TransferRole:
    if (refusal := policy.refusal(params.remote_host)) is not None:
        raise _wrong("remote_host", refusal)
    if (reference := split_reference(params.remote_request_id)) is None:
        raise _wrong("remote_request_id", "is not a reference of a cairn server: send it back as it was given")
    source = KvSource(params.remote_engine_id, params.remote_host, params.remote_port, *reference)
    return TransferRole(source, prefill_cached_tokens=params.remote_prefill_cached_tokens)


def _convert(value: object, kind: type[_Body], prefix: str = "") -> _Body:
    """Raises InvalidRequest that names the key."""
    try:
        body = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        named = re.match(r"\w+", path) or re.search(r"(?<=required field `)\w+", what)
        raise _wrong(prefix + named[0] if named else prefix[:-1], f"is wrong: {what[:200]}") from error
    for key, text in msgspec.structs.asdict(body).items():
        if isinstance(text, str) and not text.isprintable():
            raise _wrong(prefix + key, "must not hold control characters")
    return body


def _wrong(key: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{_NAME}.{key} {what}", f"{_NAME}.{key}")
