"""`kv_transfer_params`: what a request's mean to the scheduler."""

import numpy as np
import pytest

from cairn.engine.contract import KvTransferConfig
from cairn.engine.transfers.kv_transfer import RankMemory, build_transfer, parse_role
from cairn.errors import InvalidRequest
from cairn.transfer.contract import KvSource, TransferRole
from cairn.transfer.geometry import AttentionUnits, ModelUnits
from cairn.transfer.memory import PoolMemory
from cairn.transfer.peers import PeerPolicy
from cairn.types import ManualClock
from doubles.memory_link import MemoryFabric
from transfer.world import GEOMETRY, LAYOUT, PAGE_BYTES

DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
HINT = {"engine": "d", "host": "127.0.0.1", "port": 7}
PREFILLED = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_request_id": "r~" + "ab" * 16,
    "remote_host": "127.0.0.1",
    "remote_port": 5,
    "remote_block_ids": [[1, 2]],
}


class Part:
    """As much of a transfer as parsing needs."""

    policy = PeerPolicy()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, TransferRole()),
        ({}, TransferRole()),
        (DECODE, TransferRole(kv_export=True)),
        (DECODE | {"cairn_decode_hint": HINT}, TransferRole(KvSource("d", "127.0.0.1", 7), kv_export=True)),
        (
            DECODE | {"cairn_decode_hint": HINT | {"num_tokens": 229}},
            TransferRole(KvSource("d", "127.0.0.1", 7, end=229), kv_export=True),
        ),
        (PREFILLED, TransferRole(KvSource("p", "127.0.0.1", 5, "r", bytes.fromhex("ab" * 16)))),
        (
            PREFILLED | {"remote_prefill_cached_tokens": 64},
            TransferRole(KvSource("p", "127.0.0.1", 5, "r", bytes.fromhex("ab" * 16)), prefill_cached_tokens=64),
        ),
    ],
)
def test_what_is_asked_for_becomes_a_source_or_kv_export(params, expected):
    assert parse_role(params, Part()) == expected


def test_without_a_part_in_transfers_only_ordinary_requests_are_taken():
    assert parse_role(None, None) == parse_role({"do_remote_decode": False}, None) == TransferRole()
    for params in (DECODE, PREFILLED):
        with pytest.raises(InvalidRequest, match="--kv-transfer-config"):
            parse_role(params, None)


@pytest.mark.parametrize("has_secret", [False, True])
def test_a_listed_peer_is_spoken_to_by_whoever_has_a_secret(tmp_path, has_secret):
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    config = KvTransferConfig(port=0, peers=("10.0.0.5",), secret_file=str(secret) if has_secret else None)
    memory = RankMemory(
        PoolMemory(np.zeros((4, PAGE_BYTES), np.uint8)), GEOMETRY, ModelUnits((AttentionUnits(1, 1, 2),), 1)
    )
    made = build_transfer(config, memory, LAYOUT, ManualClock(), make_link=MemoryFabric().link)
    refusal = made.policy.refusal("10.0.0.5")
    made.close()
    assert (refusal is None) is has_secret
