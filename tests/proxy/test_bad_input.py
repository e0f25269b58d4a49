"""Whatever a client sends: an error in OpenAI's form, or an answer; the proxy lives."""

import gzip
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import __version__
from cairn.errors import InvalidRequest
from cairn.http.handover import CLIENT_FIELDS, REPLACED_FIELDS
from cairn.proxy.forward import parse_request
from cairn.proxy.protocol import decode_body, handover_of, parse_body, prefill_body


def post(proxy, content, path="/v1/completions", **headers):
    return proxy.http.post(proxy.url + path, content=content, headers=headers)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"prompt": "a", "stream": 2}', "stream must be true or false"),
        (b'{"prompt": "a", "stream": "ja"}', "stream must be true or false"),
    ],
)
def test_bodies(setting, content, said):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d])
    response = post(proxy, content)
    error = response.json()["error"]
    assert response.status_code == 400 and said in error["message"] and error["code"] == 400
    assert not p.seen and not d.seen
    assert proxy.ask().status_code == 200
    assert proxy.metric("requests_total", outcome="refused") == 1


@pytest.mark.parametrize("prompt", [b"1e400", b"-1e999", b"9" * 5000, b"[" + b"9" * 5000 + b"]", b'["a", 1e400]'])
def test_a_prompt_that_cannot_be_read_is_for_a_server_to_refuse(setting, answers, prompt):
    refusal = {"error": {"message": "the prompt is no prompt", "param": "prompt"}}
    p, d = setting.prefill(answers.status(400, refusal)), setting.decode()
    proxy = setting.proxy([p], [d])
    response = post(proxy, b'{"prompt": ' + prompt + b"}")
    assert (response.status_code, response.json()) == (400, refusal)
    assert b'"prompt":' + prompt in p.seen[0].content and not d.seen


def test_a_body_in_gzip_is_unpacked_for_the_servers(setting):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d], max_body_bytes=1000)
    packed = {"Content-Encoding": "gzip"}
    assert post(proxy, gzip.compress(b'{"prompt": "abc"}'), **packed).status_code == 200
    for server in (p, d):
        assert json.loads(server.seen[0].content)["prompt"] == "abc"
        assert "content-encoding" not in server.seen[0].headers
    assert post(proxy, gzip.compress(b'{"prompt": "' + b"a" * 1000 + b'"}'), **packed).status_code == 413
    assert len(p.seen) == len(d.seen) == 1


def test_a_body_that_is_too_large(setting):
    p = setting.prefill()
    proxy = setting.proxy([p], [setting.decode()], max_body_bytes=1000)
    assert post(proxy, json.dumps({"prompt": "x" * 900})).status_code == 200
    for content in (b"x" * 1001, iter([b"x" * 600] * 2)):
        response = post(proxy, content)
        assert response.status_code == 413 and response.json()["error"]["code"] == 413
    assert len(p.seen) == 1


def test_a_body_that_does_not_come(setting):
    proxy = setting.proxy([setting.prefill()], [setting.decode()], body_seconds=0.1)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_no_more_requests_than_allowed(setting, answers):
    d = setting.decode(answers.decoded("one", "two", hold_after=1))
    proxy = setting.proxy([setting.prefill()], [d], max_open=1)
    with proxy.http.stream("POST", proxy.url + "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        answers.until(lambda: d.seen)
        refused = proxy.ask()
        assert refused.status_code == 429 and "try again later" in refused.json()["error"]["message"]
        assert proxy.get("/health").status_code == 200
        d.hold.set()
        response.read()
    answers.until(lambda: proxy.ask().status_code == 200)
    assert proxy.metric("requests_total", outcome="turned_away") >= 1


def test_the_api_key(setting):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d], api_key=["secret", "other"])
    for headers in (None, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        response = proxy.ask(headers=headers)
        assert response.status_code == 401 and response.json()["error"]["type"] == "Unauthorized"
        assert proxy.get("/v1/models", headers=headers).status_code == 401
    assert not p.seen and not d.seen
    for path in ("/health", "/healthcheck", "/ping", "/version", "/metrics"):
        assert proxy.get(path).status_code == 200
    headers = {"Authorization": "Bearer secret"}
    assert proxy.ask(headers=headers).status_code == proxy.get("/v1/models", headers=headers).status_code == 200
    assert {seen.headers["authorization"] for seen in (*p.seen, *d.seen)} == {"Bearer secret"}
    assert proxy.get("/v1/models", headers={"Authorization": "Bearer other"}).status_code == 200
    assert d.seen[-1].headers["authorization"] == "Bearer other"


def test_paths_methods_and_ids(setting):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d])
    for path in ("/", "/v1/embeddings", "/v1/completions/", "/v1/../secret", "//evil.example/v1/completions"):
        response = post(proxy, b"{}", path)
        assert response.status_code == 404 and response.json()["error"]["type"] == "Not Found"
    response = proxy.get("/v1/completions")
    assert response.status_code == 405 and response.json()["error"]["type"] == "Method Not Allowed"
    for request_id in ("", "a b", "x" * 129):
        response = proxy.ask(headers={"X-Request-Id": request_id})
        assert response.status_code == 400 and "X-Request-Id" in response.json()["error"]["message"]
    assert not p.seen and not d.seen
    assert proxy.get("/version").json() == {"version": __version__}


def test_models_come_from_a_decode_server(setting, answers):
    p, d, gone = setting.prefill(), setting.decode(), setting.decode()
    proxy = setting.proxy([p], [gone, d])
    setting.stop(gone)
    assert proxy.get("/v1/models").json()["data"] == [{"id": "m"}]
    assert [seen.path for seen in d.seen] == ["/v1/models"] and not p.seen
    setting.stop(d)
    assert proxy.get("/v1/models").status_code == 503


# -- without a server ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
NAMES = ("model", "prompt", "messages", "cache_salt", "prompt_cache_key", "kv_transfer_params")


@pytest.mark.more
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from((*NAMES, *sorted(REPLACED_FIELDS))) | st.text(max_size=5), JSON, max_size=8))
def test_any_object_is_refused_or_forwarded_whole(body):
    try:
        request = parse_request("/v1/completions", json.dumps(body).encode())
    except InvalidRequest as error:
        assert error.param == "stream" and not isinstance(body["stream"], bool)
        return
    own = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    assert json.loads(request.decode_content(None)) == own
    sent = json.loads(prefill_body("/v1/completions", request.body, None, "a key"))
    of_the_answer = {name: value for name, value in own.items() if name in REPLACED_FIELDS}
    assert sent["kv_transfer_params"][CLIENT_FIELDS] == of_the_answer
    changed = {"kv_transfer_params", *of_the_answer}
    assert {name: sent.get(name, "gone") for name in own if name not in changed} == {
        name: value for name, value in own.items() if name not in changed
    }
    assert sent["max_tokens"] == 1 and sent["stream"] is False and "stream_options" not in sent


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps({"kv_transfer_params": value}).encode()))
def test_any_prefill_answer_is_a_hand_over_or_none(answer):
    try:
        params = handover_of(answer)
    except ValueError:
        return
    whole = json.loads(answer)
    if params is None:
        assert not whole.get("kv_transfer_params")
    else:
        assert json.loads(bytes(params)) == whole["kv_transfer_params"]


def test_a_field_twice_is_the_last():
    assert json.loads(decode_body(parse_body(b'{"n": 1, "n": 2}'), None)) == {"n": 2}
