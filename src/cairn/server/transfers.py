"""`kv_transfer_params` of a body, on its way to the engine: any JSON object, where this server can take part at all."""

import json
from typing import Any

from cairn.engine.contract import EngineInfo
from cairn.errors import InvalidRequest

_NAME = "kv_transfer_params"
_FLAGS = ("do_remote_decode", "do_remote_prefill")
_MAX_DEPTH = 32


def transfer_params(params: dict[str, Any] | None, info: EngineInfo) -> bytes | None:
    """The JSON that the engine gets; None when there is nothing for it.

    Raises InvalidRequest for what is no JSON, is nested too deeply, or asks a server without a side channel for a
    transfer. What else the object may say is the engine's to judge.
    """
    if params is None:
        return None
    if info.side_channel is None:
        _refuse_transfers(params)
        return None
    if _depth_exceeds(params, _MAX_DEPTH):
        raise InvalidRequest(f"{_NAME} is nested more than {_MAX_DEPTH} levels deep", _NAME)
    try:
        # Not msgspec: it writes NaN as null, and null means something here.
        return json.dumps(params, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{_NAME} has text that is not valid Unicode: {error.reason}", _NAME) from None
    except ValueError:
        raise InvalidRequest(f"{_NAME} has a number that is none", _NAME) from None


def _refuse_transfers(params: dict[str, Any]) -> None:
    for flag in _FLAGS:
        wanted = params.get(flag)
        if wanted is None or wanted is False:
            continue
        param = f"{_NAME}.{flag}"
        if wanted is True:
            raise InvalidRequest(
                f"{param}: this server takes no part in transfers; start it with --kv-transfer-config", param
            )
        raise InvalidRequest(f"{param} must be true or false, not {type(wanted).__name__}", param)


def _depth_exceeds(value: object, limit: int) -> bool:
    """Whether lists and objects stand in each other more than `limit` deep."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return limit == 0 or any(_depth_exceeds(one, limit - 1) for one in inner)
