"""Whatever `kv_transfer_params` say: 400 that names the key, or the right answer, and a server that lives.

All of it is HTTP, so any engine may be behind `transfer_server`.
"""

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cairn.proxy.app import create_app
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService
from tiers import more

BODY = {"prompt": "hostile", "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hostile"}], "max_tokens": 3, "temperature": 0}
PATHS = {"/v1/completions": BODY, "/v1/chat/completions": CHAT}
FOREIGN = [
    *("10.0.0.1", "169.254.169.254", "8.8.8.8", "0.0.0.0", "::", "fe80::1", "::ffff:10.0.0.1", "[::1]", "::1%lo"),
    *("example.com", "metadata.google.internal", "localhost.example.com", "127.0.0.1.nip.io", "localhost."),
    *("2130706433", "0x7f000001", "127.1", "127.0.0.1:5600", "http://127.0.0.1", "127.0.0.1@10.0.0.1", "127.0.0.1/8"),
]
KEYS = [
    *("do_remote_decode", "do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id"),
    *("remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode"),
    *("remote_prefill_cached_tokens", "remote_blocks_expiry_time", "cairn_decode_hint", "unknown"),
]
NUMBERS = st.one_of(st.sampled_from([-1, 0, 1, 10**9, 10**30, -(2**63)]), st.integers(), st.floats())
TEXTS = st.one_of(
    st.text(st.characters() | st.sampled_from(["\ud800", "\x00", "\u202e"]), max_size=8),
    st.sampled_from([*FOREIGN, "", "localhost", "pull", "push", "x~" + "0" * 32, "x" * 100_000, "~", "x~" + "G" * 32]),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(string.ascii_letters, max_size=5), inner),
    max_leaves=8,
)
CHANGES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)
GONE = st.sets(st.sampled_from(KEYS), max_size=2)


@pytest.fixture(scope="module")
def reference(transfer_server):
    """The right answers, and what is handed over, once for each endpoint."""

    def of(path):
        plain = ask(transfer_server, path, None)
        asked = ask(transfer_server, path, {"do_remote_decode": True})
        assert plain.status_code == asked.status_code == 200, asked.text
        return said(plain), asked.json()["kv_transfer_params"]

    return {path: of(path) for path in PATHS}


@pytest.fixture(autouse=True)
def server_lives(transfer_server):
    yield
    assert transfer_server.get("/health").status_code == 200
    transfer_server.until(lambda: transfer_server.metric("vllm:num_requests_running") == 0)
    assert transfer_server.metric("vllm:num_requests_waiting") == 0


def ask(server, path, params):
    content = json.dumps(PATHS[path] | {"kv_transfer_params": params}).encode()
    return server.post(path, content=content, headers={"Content-Type": "application/json"})


def said(answer):
    (choice,) = answer.json()["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def check(answer, right):
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 200:
        assert said(answer) == right
    else:
        error = answer.json()["error"]
        assert error["message"] and error["param"].startswith("kv_transfer_params"), error


QUICK = settings(deadline=None)
NUM_EXAMPLES = pytest.mark.parametrize("max_examples", [50, more(150)])


@NUM_EXAMPLES
def test_any_json(transfer_server, reference, max_examples):
    @settings(QUICK, max_examples=max_examples)
    @given(params=VALUES)
    def check_params(params):
        for path, (right, _) in reference.items():
            check(ask(transfer_server, path, params), right)

    check_params()


@NUM_EXAMPLES
def test_a_reference_that_somebody_has_changed(transfer_server, reference, max_examples):
    @settings(QUICK, max_examples=max_examples)
    @given(changes=CHANGES, gone=GONE)
    def check_changed(changes, gone):
        for path, (right, params) in reference.items():
            params = {key: value for key, value in (params | changes).items() if key not in gone}
            answer = ask(transfer_server, path, params)
            check(answer, right)
            required = {"remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"}
            if params.get("do_remote_prefill") is True and (gone & required or params["remote_host"] in FOREIGN):
                assert answer.status_code == 400

    check_changed()


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("path", PATHS)
def test_foreign_hosts(transfer_server, reference, path, host):
    error = ask(transfer_server, path, reference[path][1] | {"remote_host": host}).json()["error"]
    assert error["param"] == "kv_transfer_params.remote_host" and "--kv-peer-allowlist" in error["message"]


@pytest.mark.parametrize("size", [10**9, 10**30, -1, 0, 1.5, True, "1", [1]])
@pytest.mark.parametrize("key", ["tp_size", "dcp_size", "pp_size", "remote_port"])
def test_absurd_sizes(transfer_server, reference, key, size):
    error = ask(transfer_server, "/v1/completions", reference["/v1/completions"][1] | {key: size}).json()["error"]
    assert error["param"] == f"kv_transfer_params.{key}"


@pytest.mark.parametrize("brackets", ["[]", '{"a": }'])
@pytest.mark.parametrize("key", ["unknown", "remote_block_ids", "remote_host", "cairn_decode_hint"])
@pytest.mark.parametrize("depth", [40, 500, 950, 5_000, 100_000])
def test_nesting(transfer_server, key, depth, brackets):
    nested = brackets[:-1] * depth + "1" + brackets[-1] * depth
    body = f'{{"prompt": "x", "kv_transfer_params": {{"do_remote_prefill": true, "{key}": {nested}}}}}'
    answer = transfer_server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_more_than_anybody_needs(transfer_server, reference):
    params = reference["/v1/completions"][1]
    for ids in ([list(range(1 << 20))], [[1]] * 1000, [[2**31]], [1] * 100_000):
        answer = ask(transfer_server, "/v1/completions", params | {"remote_block_ids": ids})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("kv_transfer_params")
    answer = ask(transfer_server, "/v1/completions", params | {"unknown": "x" * (17 << 20)})
    assert answer.status_code == 413


# -- behind `cairn proxy` --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_host", FOREIGN[0]),
        *(more("remote_host", host) for host in FOREIGN[1:3]),
        ("remote_request_id", "no reference"),
        more("transfer_mode", "push"),
        ("remote_engine_id", "a\x00b"),
        ("unknown", [[[[]]]] * 3),
    ],
)
def test_what_a_prefill_server_has_made_up_is_not_the_clients_error(
    transfer_server, reference, run_app, key, value, stream
):
    right, given = reference["/v1/completions"]
    while key == "unknown" and len(json.dumps(value)) < 400:
        value = [value]
    junk = given | {key: value}
    prefill = run_app(
        Starlette(
            routes=[
                Route("/health", lambda request: Response()),
                Route("/v1/completions", lambda request: JSONResponse({"kv_transfer_params": junk}), methods=["POST"]),
            ]
        )
    )
    assert ask(transfer_server, "/v1/completions", junk).status_code == 400
    options = ProxyOptions(prefill=[prefill.url], decode=[transfer_server.url])
    proxy = run_app(create_app(ProxyService(options)))
    answer = proxy.http.post("/v1/completions", json=BODY | {"stream": stream})
    assert answer.status_code == 200 and "error" not in answer.text, answer.text
    assert stream or said(answer) == right
    assert 'cairn_proxy:decode_only_total{reason="bad_reference"} 1.0' in proxy.http.get("/metrics").text
