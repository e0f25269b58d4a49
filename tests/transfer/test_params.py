"""`kv_transfer_params` as proxies send them, and as nobody should."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.errors import InvalidRequest
from cairn.transfer.contract import KvSource, TransferRole
from cairn.transfer.params import parse_kv_transfer_params, remote_request_id
from cairn.transfer.peers import PeerPolicy

NONCE = bytes(range(16))
LOOPBACK = PeerPolicy()
TO_P = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TO_D = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[12, 13, 14], [7]],
    "remote_engine_id": "0b1e6a4c",
    "remote_request_id": remote_request_id("cmpl-1", NONCE),
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 41,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 32,
}
SOURCE = KvSource("0b1e6a4c", "127.0.0.1", 5600, "cmpl-1", NONCE)
READ = TransferRole(SOURCE, prefill_cached_tokens=32)


def parse(value):
    return parse_kv_transfer_params(value, LOOPBACK)


def test_the_three_kinds_of_the_protocol():
    assert parse(None) is None and parse({}) is None
    assert parse({"do_remote_decode": False, "do_remote_prefill": None}) is None
    assert parse(TO_P) == TransferRole(kv_export=True)
    assert parse(TO_D) == READ


def test_only_five_keys_must_be_there():
    kept = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")
    params = {"do_remote_prefill": True, "of_another_kind": [1]} | {key: TO_D[key] for key in kept}
    assert parse(params) == TransferRole(SOURCE)


@pytest.mark.parametrize("request_id", ["cmpl-1", "a~b", "~", "chat/é", "x" * 256])
def test_the_nonce_survives_in_any_request_id(request_id):
    params = TO_D | {"remote_request_id": remote_request_id(request_id, NONCE)}
    assert (parse(params).source.request_id, parse(params).source.nonce) == (request_id, NONCE)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("do_remote_prefill", (1, 0, "true", [], {}, 1.0)),
        ("do_remote_decode", (True, 1, "false", [True])),
        ("remote_engine_id", (None, "", 5, ["x"], {"a": 1}, "x" * 257, "a\nb", "a\x00", "\ud800")),
        (
            "remote_request_id",
            (None, "", 5, "cmpl-1", "cmpl-1~", "cmpl-1~zz", "~" + "0" * 32, "cmpl-1~" + "0" * 31, "cmpl-1~" + "A" * 32),
        ),
        ("remote_request_id", ("cmpl-1~" + "0 " * 16, "x" * 10**6, "cmpl-1~" + "0" * 34, ["x"], True)),
        (
            "remote_host",
            (None, "", 5, "10.0.0.5", "example.com", "169.254.169.254", "127.0.0.1.example.com", "127.0.0.1:22"),
        ),
        (
            "remote_host",
            ("0.0.0.0", "::", "2130706433", "0x7f.1", "127.1", "[::1]", "fe80::1%lo", " 127.0.0.1", "x" * 10**6),
        ),
        (
            "remote_host",
            ("localhost.", "127.0.0.1/../x", "user@127.0.0.1", "127.0.0.1\n", ["127.0.0.1"], {}),
        ),
        ("remote_port", (None, 0, -1, 65536, 10**9, 2**70, 5600.0, "5600", True, [5600])),
        ("remote_block_ids", (None, 5, "x", {}, [5], [[-1]], [[2**31]], [[True]], [[1.0]], [["1"]], [[[1]]], [None])),
        ("remote_block_ids", ([[]] * 17, [[0] * (2**20 + 1)])),
        ("tp_size", (0, -1, 10**9, "1", 1.0, True, [1], {})),
        ("dcp_size", (0, 2, "1", True)),
        ("pp_size", (0, 2, 10**9, [])),
        ("remote_num_tokens", (-1, 10**9, "41", 41.0, True)),
        ("remote_prefill_cached_tokens", (-1, 10**9, "32")),
        ("transfer_mode", ("push", "", 5, ["pull"])),
    ],
)
def test_a_wrong_value_is_refused_by_name(key, values):
    for value in values:
        with pytest.raises(InvalidRequest) as raised:
            parse(TO_D | {key: value})
        assert raised.value.param == f"kv_transfer_params.{key}", value
        assert len(raised.value.message) < 300, "what came in is not sent back at length"


@pytest.mark.parametrize("value", [5, "x", [], True, 1.5, [TO_D]])
def test_something_else_than_an_object_is_refused(value):
    with pytest.raises(InvalidRequest) as raised:
        parse(value)
    assert raised.value.param == "kv_transfer_params"


def test_a_listed_host_is_allowed_with_a_secret_only():
    params = TO_D | {"remote_host": "10.0.0.5"}
    assert parse_kv_transfer_params(params, PeerPolicy(["10.0.0.0/8"], has_secret=True)).source.host == "10.0.0.5"
    with pytest.raises(InvalidRequest, match="kv-secret-file"):
        parse_kv_transfer_params(params, PeerPolicy(["10.0.0.0/8"]))
    with pytest.raises(InvalidRequest, match="allowlist"):
        parse_kv_transfer_params(params, PeerPolicy(["10.1.0.0/16"], has_secret=True))


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["127.0.0.1", "localhost", "10.0.0.1", "x" * 10_000, 10**9, -1, 10**30, "pull"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PARAMS = st.fixed_dictionaries({}, optional={key: st.just(value) | ODD for key, value in TO_D.items()}) | ODD


@settings(max_examples=500, deadline=None)
@given(PARAMS)
def test_hostile_json_is_refused_by_name_or_read_right(value):
    value = json.loads(json.dumps(value))
    try:
        parsed = parse(value)
    except InvalidRequest as error:
        assert error.status == 400 and error.param.split(".")[0] == "kv_transfer_params"
        return
    asked = value if isinstance(value, dict) else {}
    match parsed:
        case None:
            assert not asked.get("do_remote_decode") and not asked.get("do_remote_prefill")
        case TransferRole(kv_export=True):
            assert asked["do_remote_decode"] is True
        case TransferRole(source=source):
            assert asked["do_remote_prefill"] is True and not asked.get("do_remote_decode")
            assert source.host == asked["remote_host"] and LOOPBACK.refusal(source.host) is None
            assert source.port == asked["remote_port"] and 1 <= source.port <= 65535
            assert remote_request_id(source.request_id, source.nonce) == asked["remote_request_id"]
