"""What the fake core says and counts of transfers. No bytes move: whatever a well-formed request names "arrives"."""

import json
from typing import Any

from cairn.engine.contract import CacheReport, EngineConfig, GenerateRequest, KvTransferConfig, TransferReport
from cairn.engine.wire import transfer_params
from cairn.errors import InvalidRequest
from cairn.transfer.params import RemoteDecode, RemotePrefill, parse_kv_transfer_params, remote_request_id
from cairn.transfer.peers import PeerPolicy
from cairn.transfer.wire import NONCE_BYTES

__all__ = ["FakeTransfers", "RemoteRole"]

RemoteRole = RemoteDecode | RemotePrefill | None

_ENGINE_ID = "fake-engine"
_SECONDS = 0.001


class FakeTransfers:
    """Reads requests as a real engine does, and makes up answers that have the form of a real one's.

    Nonces are counted instead of drawn: the same requests give the same references.
    """

    def __init__(self, config: EngineConfig, bytes_per_token: int) -> None:
        self._config: KvTransferConfig | None = config.kv_transfer
        self._block_size = config.block_size
        self._bytes_per_token = bytes_per_token
        self._tensor_parallel_size = config.tensor_parallel_size
        self._num_offered = 0
        peers, secret = (self._config.peers, self._config.secret_file) if self._config else ((), None)
        self._policy = PeerPolicy(peers, has_secret=secret is not None)

    @property
    def side_channel(self) -> str | None:
        return None if self._config is None else f"{self._config.host}:{self._config.port}"

    @property
    def recomputes(self) -> bool:
        """Whether a request goes on by itself when nothing arrives."""
        return self._config is not None and self._config.on_failure == "recompute"

    def role_of(self, request: GenerateRequest) -> RemoteRole:
        """What a request asks for. Raises InvalidRequest that names the key."""
        role = parse_kv_transfer_params(transfer_params(request), self._policy)
        if role is not None and self._config is None:
            raise InvalidRequest("kv_transfer_params: this engine takes no part in transfers", "kv_transfer_params")
        return role

    def response(self, role: RemoteRole, request_id: str, cache: CacheReport) -> bytes | None:
        """`kv_transfer_params` of the answer to a request that has ended well."""
        match role:
            case RemoteDecode():
                return self._dump(self._handed_over(request_id, cache))
            case RemotePrefill():
                return self._dump({"cairn_decode_hint": {"engine": _ENGINE_ID, **self._address("host", "port")}})
        return None

    def report(self, received_tokens: int) -> TransferReport:
        """Of the transfer that brought so many tokens, one descriptor a page."""
        pages = -(-received_tokens // self._block_size)
        return TransferReport(
            seconds=_SECONDS, num_bytes=received_tokens * self._bytes_per_token, num_descriptors=pages
        )

    def _handed_over(self, request_id: str, cache: CacheReport) -> dict[str, Any]:
        self._num_offered += 1
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(-(-cache.prompt_tokens // self._block_size)))],
            "remote_engine_id": _ENGINE_ID,
            "remote_request_id": remote_request_id(request_id, self._num_offered.to_bytes(NONCE_BYTES, "big")),
            **self._address("remote_host", "remote_port"),
            "tp_size": self._tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": cache.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cache.cached_tokens,
        }

    def _address(self, host_key: str, port_key: str) -> dict[str, Any]:
        assert self._config is not None, "only an engine with a side channel hands anything over"
        return {host_key: self._config.host, port_key: self._config.port}

    @staticmethod
    def _dump(params: dict[str, Any]) -> bytes:
        return json.dumps(params).encode()
