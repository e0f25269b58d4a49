"""`kv_transfer_params` of a request, as proxies send them: strict, pure, and never trusted as an address.

    {"do_remote_decode": true, ...}    prefill here; another server will decode        -> kv_export
        "cairn_decode_hint": {...}     who may still have the last turn's answer       -> source without a lease
    {"do_remote_prefill": true, ...}   decode here what another server has prefilled   -> source with a lease
    null, or both false                an ordinary request                             -> None

Keys that are not listed here are ignored, and null is the same as missing. Only the form of the block ids is checked:
which pages are read is the producer's answer to a claim with the nonce that is part of `remote_request_id`.
"""

from collections.abc import Mapping
from typing import Final

from cairn.errors import InvalidRequest
from cairn.transfer.contract import KvSource, TransferRole
from cairn.transfer.peers import PeerPolicy
from cairn.transfer.wire import NONCE_BYTES

HINT: Final = "cairn_decode_hint"
"""Where a decoding server says, in its answer, who it is; a proxy sends it along with the next turn's prefill."""

RELEASE_KEY: Final = "cairn_release_key"
"""What the id of a request to prefill ends with, so that its sender can let go of it without knowing its lease."""

_NAME: Final = "kv_transfer_params"
_MARK: Final = "~"
_MAX_ENGINE_ID: Final = 256
_MAX_REQUEST_ID: Final = 512
_MAX_HOST: Final = 253
_MAX_GROUPS: Final = 16
_MAX_BLOCKS: Final = 1 << 20
_MAX_NUMBER: Final = (1 << 31) - 1
_MAX_TOKENS: Final = 1 << 26
_MAX_RANKS: Final = 1024


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
    decode, prefill = _flag(value, "do_remote_decode"), _flag(value, "do_remote_prefill")
    if decode and prefill:
        raise _wrong("do_remote_decode", "and do_remote_prefill must not both be true")
    if prefill:
        return _remote_prefill(value, policy)
    return TransferRole(_hint(value.get(HINT), policy), kv_export=True) if decode else None


def _hint(hint: object, policy: PeerPolicy) -> KvSource | None:
    """A server that may not be spoken to is as good as no hint: whoever sent it does not know this server's peers."""
    if hint is None:
        return None
    if not isinstance(hint, Mapping):
        raise _wrong(HINT, f"must be an object or null, not {type(hint).__name__}")
    source = KvSource(
        engine_id=_text(hint, "engine", _MAX_ENGINE_ID, f"{HINT}.engine"),
        host=_text(hint, "host", _MAX_HOST, f"{HINT}.host"),
        port=_required(_integer(hint, "port", 1, 65535, name=f"{HINT}.port"), f"{HINT}.port"),
        end=_integer(hint, "num_tokens", 0, _MAX_TOKENS, name=f"{HINT}.num_tokens"),
    )
    return None if policy.refusal(source.host) is not None else source


def _remote_prefill(params: Mapping[object, object], policy: PeerPolicy) -> TransferRole:
    host = _text(params, "remote_host", _MAX_HOST)
    refusal = policy.refusal(host)
    if refusal is not None:
        raise _wrong("remote_host", refusal)
    for key in ("dcp_size", "pp_size"):
        if _integer(params, key, 1, _MAX_RANKS, default=1) != 1:
            raise _wrong(key, "must be 1: context and pipeline parallelism are not supported")
    if params.get("transfer_mode") not in (None, "pull"):
        raise _wrong("transfer_mode", "must be 'pull'")
    _check_block_ids(params)
    request_id, nonce = _reference(params)
    _integer(params, "tp_size", 1, _MAX_RANKS)
    _integer(params, "remote_num_tokens", 0, _MAX_TOKENS)
    source = KvSource(
        engine_id=_text(params, "remote_engine_id", _MAX_ENGINE_ID),
        host=host,
        port=_required(_integer(params, "remote_port", 1, 65535), "remote_port"),
        request_id=request_id,
        nonce=nonce,
    )
    return TransferRole(source, prefill_cached_tokens=_integer(params, "remote_prefill_cached_tokens", 0, _MAX_TOKENS))


def _reference(params: Mapping[object, object]) -> tuple[str, bytes]:
    reference = split_reference(_text(params, "remote_request_id", _MAX_REQUEST_ID))
    if reference is None:
        raise _wrong("remote_request_id", "is not a reference of a cairn server: send it back as it was given")
    return reference


def _check_block_ids(params: Mapping[object, object]) -> None:
    groups = params.get("remote_block_ids")
    if not isinstance(groups, list):
        raise _wrong("remote_block_ids", "must be a list with one list of block ids per group")
    if len(groups) > _MAX_GROUPS:
        raise _wrong("remote_block_ids", f"has {len(groups)} groups; at most {_MAX_GROUPS} are taken")
    for group in groups:
        if not isinstance(group, list) or len(group) > _MAX_BLOCKS:
            raise _wrong("remote_block_ids", f"must hold lists of at most {_MAX_BLOCKS} block ids")
        if not all(type(block) is int and 0 <= block <= _MAX_NUMBER for block in group):
            raise _wrong("remote_block_ids", f"must hold integers from 0 to {_MAX_NUMBER}")


def _flag(params: Mapping[object, object], key: str) -> bool:
    value = params.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong(key, f"must be true or false, not {type(value).__name__}")
    return value


def _text(params: Mapping[object, object], key: str, longest: int, name: str | None = None) -> str:
    value, name = params.get(key), name or key
    if value is None:
        raise _wrong(name, "is missing")
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        raise _wrong(name, f"must be a text of 1 to {longest} characters")
    if not value.isprintable():
        raise _wrong(name, "must not hold control characters")
    return value


def _integer(
    params: Mapping[object, object],
    key: str,
    low: int,
    high: int,
    default: int | None = None,
    name: str | None = None,
) -> int | None:
    value = params.get(key)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise _wrong(name or key, f"must be an integer from {low} to {high}")
    return value


def _required(value: int | None, key: str) -> int:
    if value is None:
        raise _wrong(key, "is missing")
    return value


def _wrong(key: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{_NAME}.{key} {what}", f"{_NAME}.{key}")
