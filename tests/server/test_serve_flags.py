"""What vLLM's flags and its smaller endpoints do over HTTP."""

import datetime
import ipaddress
import json
import re
import ssl

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cairn.errors import ConfigError
from cairn.http.tls import TlsOptions, check_tls
from cairn.server.openai.prompts import parse_template_kwargs
from cairn.server.options import ServerOptions
from cairn.server.run import tls_options
from cairn.server.stat_logger import ThroughputLogger
from doubles.byte_tokenizer import ByteTokenizer

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
COMPLETION = {"prompt": "hello", "max_tokens": 4}
PAGE = {"Origin": "https://chat.example"}


def text_of(response):
    """Of an answer, or of the chunks of a stream."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    choices = [
        choice for chunk in (chunks_of(response) if is_stream else [response.json()]) for choice in chunk["choices"]
    ]
    messages = [choice.get("delta") or choice.get("message") for choice in choices]
    texts = [
        choice.get("text") or (message or {}).get("content") for choice, message in zip(choices, messages, strict=True)
    ]
    return "".join(text for text in texts if text)


def chunks_of(response):
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_several_names(serve):
    server = serve({"served_model_name": ["first", "second"], "model": "folder"})
    assert [card["id"] for card in server.get("/v1/models").json()["data"]] == ["first", "second"]
    assert server.get("/v1/models/second").json()["id"] == "second"
    for name in ("first", "second", None):
        answer = server.post("/v1/completions", COMPLETION | {"model": name})
        assert (answer.status_code, answer.json()["model"]) == (200, "first")
    refused = server.post("/v1/chat/completions", CHAT | {"model": "folder"})
    assert refused.status_code == 404 and "'first' or 'second' is" in refused.json()["error"]["message"]
    assert server.metric('vllm:generation_tokens_total{engine="0",model_name="first"') == 12
    assert server.metric('vllm:generation_tokens_total{engine="0",model_name="second"') is None


def test_usage_in_every_chunk_by_flag(serve, server):
    forced = serve({"enable_force_include_usage": True})
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        streamed = body | {"stream": True}
        assert all("usage" not in chunk or not chunk["usage"] for chunk in chunks_of(server.post(path, streamed)))
        for given in (streamed, streamed | {"stream_options": {"include_usage": False}}):
            told = [chunk["usage"]["completion_tokens"] for chunk in chunks_of(forced.post(path, given))]
            assert len(told) >= 2 and told[-1] == 4 and told == sorted(told)
        assert forced.post(path, body).json()["usage"]["completion_tokens"] == 4


def test_cached_tokens_are_in_no_usage_by_flag(serve, server):
    silent = serve({"enable_prompt_tokens_details": False})
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        for given, tells in ((server, True), (silent, False)):
            whole = given.post(path, body).json()["usage"]["prompt_tokens_details"]
            told = [chunk["usage"] for chunk in chunks_of(given.post(path, streamed)) if chunk.get("usage")][-1]
            assert ((whole is not None), (told.get("prompt_tokens_details") is not None)) == (tells, tells)


def test_most_log_probabilities_by_flag(serve, server):
    few = serve({"max_logprobs": 2})
    for path, body, name in (
        ("/v1/completions", COMPLETION, "logprobs"),
        ("/v1/completions", COMPLETION, "prompt_logprobs"),
        ("/v1/chat/completions", CHAT | {"logprobs": True}, "top_logprobs"),
    ):
        assert few.post(path, body | {name: 2}).status_code == 200
        assert server.post(path, body | {name: 3}).status_code == 200
        error = few.post(path, body | {name: 3}).json()["error"]
        assert error["param"] == name and "at most 2 (--max-logprobs)" in error["message"]


def test_log_probabilities_of_the_whole_vocabulary(serve, server):
    """By -1, where the flag allows as many."""
    every, size = serve({"max_logprobs": -1}), 259
    chat = CHAT | {"logprobs": True, "top_logprobs": -1}
    text = COMPLETION | {"logprobs": -1, "prompt_logprobs": -1, "return_tokens_as_token_ids": True}
    for one in every.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]:
        assert len({tuple(entry["bytes"]) for entry in one["top_logprobs"]}) > 250
        assert len(one["top_logprobs"]) == size
    choice = every.post("/v1/completions", text).json()["choices"][0]
    assert [len(one) for one in choice["logprobs"]["top_logprobs"]] == [size] * 4
    assert choice["prompt_logprobs"][0] is None
    assert [one.keys() for one in choice["prompt_logprobs"][1:]] == [{str(token) for token in range(size)}] * 4
    streamed = chunks_of(every.post("/v1/chat/completions", chat | {"stream": True}))
    told = [
        one for chunk in streamed for own in chunk["choices"] if own["logprobs"] for one in own["logprobs"]["content"]
    ]
    assert [len(one["top_logprobs"]) for one in told] == [size] * 4
    response = {"input": "hello", "max_output_tokens": 2, "top_logprobs": -1}
    (message,) = every.post("/v1/responses", response).json()["output"]
    assert [len(one["top_logprobs"]) for one in message["content"][0]["logprobs"]] == [size] * 2
    for path, body, name in (
        ("/v1/chat/completions", chat, "top_logprobs"),
        ("/v1/completions", COMPLETION | {"logprobs": -1}, "logprobs"),
        ("/v1/completions", COMPLETION | {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/responses", response, "top_logprobs"),
    ):
        error = server.post(path, body).json()["error"]
        assert error["param"] == name and "all 259 tokens; this server gives at most 20" in error["message"]
        assert every.post(path, body | {name: -2}).json()["error"]["param"] == name
        assert every.post(path, body | {name: size + 1}).json()["error"]["param"] == name
    error = every.post("/v1/chat/completions", chat | {"max_tokens": None}).json()["error"]
    assert error["param"] == "top_logprobs" and "max_tokens of at most 4032" in error["message"]


def test_metrics_of_each_request_by_flag(serve, server):
    """As vLLM has them: null where there are none, left out of a chunk, and of one request with one answer."""
    told = serve({"enable_per_request_metrics": True})
    times = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        assert server.post(path, body).json()["metrics"] is None
        whole = told.post(path, body).json()["metrics"]
        assert whole.keys() == times and all(value >= 0 for value in whole.values())
        assert told.post(path, body | {"max_tokens": 1}).json()["metrics"]["mean_itl_ms"] is None
        assert told.post(path, body | {"n": 2}).json()["metrics"] is None
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1}
        *chunks, last = chunks_of(told.post(path, streamed))
        assert not any("metrics" in chunk for chunk in chunks)
        assert last["metrics"].keys() == times - {"mean_itl_ms"}
        assert not any("metrics" in chunk for chunk in chunks_of(server.post(path, streamed)))
    response = {"input": "hello", "max_output_tokens": 4}
    assert told.post("/v1/responses", response).json()["metrics"].keys() == times
    assert "metrics" not in server.post("/v1/responses", response).json()


def test_tokens_in_one_event_by_flag(serve):
    """Those of the first and the last event aside."""
    server = serve({"stream_interval": 4})
    body = {"prompt": "hello", "max_tokens": 24, "ignore_eos": True, "stream": True, "return_token_ids": True}
    for given, interval in ((body, 4), (body | {"stream_interval": 30}, 30)):
        chunks = chunks_of(server.post("/v1/completions", given))
        sizes = [len(ids) for chunk in chunks for choice in chunk["choices"] if (ids := choice.get("token_ids"))]
        assert sum(sizes) == 24 and all(size >= interval for size in sizes[1:-1])


def test_the_throughput_line_is_left_out_by_flag(serve, monkeypatch):
    made = []
    monkeypatch.setattr("cairn.server.app.ThroughputLogger", lambda now: made.append(now) or ThroughputLogger(now))
    quiet = serve({"disable_log_stats": True})
    assert quiet.post("/v1/completions", COMPLETION).status_code == 200 and made == []
    serve({"disable_log_stats": False}).until(lambda: len(made) == 1)


def test_default_variables_of_the_template(serve):
    defaults = parse_template_kwargs('{"documents": [{"text": "d"}], "reasoning_effort": "low"}')
    server = serve(default_template_kwargs=defaults)

    def prompt(**more):
        server.post("/v1/chat/completions", CHAT | more)
        return bytes(token % 256 for (token,) in memory(server.requests[-1].prompt)).decode(errors="replace")

    def memory(packed):
        return [(token,) for token in memoryview(packed).cast("q")]

    assert '"low"' in prompt() and '"d"' in prompt()
    assert '"high"' in prompt(reasoning_effort="high") and '"low"' not in prompt(reasoning_effort="high")
    other = prompt(chat_template_kwargs={"reasoning_effort": "other"})
    assert '"other"' in other and '"d"' in other, "a request's variables win one by one"


@pytest.mark.parametrize("text", ['{"messages": 1}', '{"a": NaN}', f'{{"a": {"[" * 99}{"]" * 99}}}'])
def test_default_variables_that_are_none(text):
    with pytest.raises(ConfigError, match=r"^--default-chat-template-kwargs: "):
        parse_template_kwargs(text)


def test_invocations(serve):
    """A chat or a completion, counted and refused as these are: two may be open because the count of one that has been
    answered goes down a moment later."""
    server = serve({"api_key": ["key"], "max_open": 2})
    key = {"Authorization": "Bearer key"}

    def post(path, body):
        return server.post(path, body, headers=key)

    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        for given in (body, body | {"stream": True}):
            one, other = (post(where, given | {"seed": 1, "temperature": 0}) for where in (path, "/invocations"))
            assert one.status_code == other.status_code == 200
            assert text_of(one) == text_of(other) != ""
    for body, param in (
        ({"messages": [], "prompt": "a"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"prompt": "a", "top_p": "x"}, "top_p"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({}, "messages"),
    ):
        refused = post("/invocations", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert post("/invocations", [CHAT]).status_code == 400
    assert server.post("/invocations", CHAT).status_code == 401


def test_tokenizer_info_by_flag(serve, server):
    assert server.get("/tokenizer_info").status_code == 404
    shown = serve({"enable_tokenizer_info_endpoint": True}, tokenizer=ByteTokenizer(chat_template="{{ x }}"))
    info = shown.get("/tokenizer_info").json()
    assert (info["tokenizer_class"], info["chat_template"]) == ("ByteTokenizer", "{{ x }}")


def test_pages_of_documentation_by_flag(serve, server):
    assert [server.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404, 404, 200]
    shown = serve({"enable_docs": True, "api_key": ["key"], "root_path": "/cairn"})
    with httpx.Client(base_url=shown.url) as http:
        for path in ("/docs", "/redoc"):
            page = http.get(path)
            assert page.status_code == 200 and "/cairn/openapi.json" in page.text
            hosts = set(re.findall(r"(?:src|href)=[\"']?https?://([^/\"']+)", page.text))
            assert hosts == {"cdn.jsdelivr.net"}, "the documentation names where scripts come from"
        document = http.get("/cairn/openapi.json")
        assert document.json()["servers"] == [{"url": "/cairn"}] and "/docs" not in document.json()["paths"]
        assert http.get("/v1/models").status_code == 401
    assert serve({"disable_fastapi_docs": True}).get("/openapi.json").status_code == 404


def test_a_path_that_a_proxy_puts_in_front(serve):
    """Paths are the same with and without it, for the key and for the count of open requests as well."""
    server = serve({"root_path": "/a/b", "api_key": ["key"], "max_open": 2})
    key = {"Authorization": "Bearer key"}
    for root in ("", "/a/b"):
        assert server.get(f"{root}/health").status_code == 200
        assert server.get(f"{root}/v1/models").status_code == 401
        assert server.get(f"{root}/v1/models", headers=key).status_code == 200
        assert server.post(f"{root}/v1/completions", COMPLETION, headers=key).status_code == 200
    for path in ("/a/bv1/models", "/a/v1/models", "/a/b/a/b/health", "/A/B/health"):
        assert server.get(path, headers=key).status_code == 404
    assert server.get("/a/b/a/b/health").status_code == 401
    errors = server.post("/a/b/v1/messages", {}, headers=key).json()
    assert errors["type"] == "error", "in the API's own form"


def test_pages_of_other_hosts(serve, server):
    asking = PAGE | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    allowing = serve(
        {
            "allowed_origins": '["https://chat.example"]',
            "allow_credentials": True,
            "api_key": ["key"],
            "allowed_methods": "POST",
        }
    )
    with httpx.Client() as http:
        path = "/v1/chat/completions"
        asked = http.options(allowing.url + path, headers=asking)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE["Origin"]
        assert asked.headers["access-control-allow-credentials"] == "true"
        assert http.options(allowing.url + path, headers=asking | {"Origin": "https://x.example"}).status_code == 400
        put = asking | {"Access-Control-Request-Method": "PUT"}
        assert http.options(allowing.url + path, headers=put).status_code == 400
        refused = http.post(allowing.url + path, json=CHAT, headers=PAGE)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE["Origin"])
        assert http.options(server.url + path, headers=asking).status_code == 405
        plain = http.post(server.url + path, json=CHAT, headers=PAGE)
        assert plain.status_code == 200 and "access-control-allow-origin" not in plain.headers


# -- HTTPS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a certificate for 127.0.0.1, of its key, and of the same key encrypted."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    for file, lock in (
        ("key.pem", serialization.NoEncryption()),
        ("locked.pem", serialization.BestAvailableEncryption(b"secret")),
    ):
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
        (folder / file).write_bytes(pem)
    return folder


def test_https(serve, certificate):
    files = {"ssl_certfile": str(certificate / "cert.pem"), "ssl_keyfile": str(certificate / "key.pem")}
    server = serve(files)
    trust = ssl.create_default_context(cafile=files["ssl_certfile"])
    with httpx.Client(verify=trust, base_url=f"https://127.0.0.1:{server.port}") as http:
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        streamed = http.post("/v1/completions", json=COMPLETION | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{server.port}/health")


def test_https_with_certificates_of_clients(serve, certificate):
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    server = serve({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": cert, "ssl_cert_reqs": 2})
    url, trust = f"https://127.0.0.1:{server.port}/health", ssl.create_default_context(cafile=cert)
    with pytest.raises(httpx.HTTPError):
        httpx.get(url, verify=trust)
    trust.load_cert_chain(cert, key)
    assert httpx.get(url, verify=trust).status_code == 200


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"certfile": "none.pem"}, "--ssl-certfile"),
        ({"certfile": "cert.pem"}, "--ssl-certfile"),
        ({"certfile": "cert.pem", "keyfile": "locked.pem"}, "--ssl-certfile .* --ssl-keyfile .* must not be encrypted"),
        ({"certfile": "cert.pem", "keyfile": "key.pem", "ca_certs": "key.pem"}, "--ssl-ca-certs"),
    ],
)
def test_certificates_that_are_none(certificate, files, said):
    check_tls(TlsOptions(certfile=str(certificate / "cert.pem"), keyfile=str(certificate / "key.pem")))
    with pytest.raises(ConfigError, match=f"^{said}"):
        check_tls(TlsOptions(**{name: str(certificate / file) for name, file in files.items()}))


def test_options_of_https_that_do_not_fit(certificate):
    both = {"certfile": str(certificate / "cert.pem"), "keyfile": str(certificate / "key.pem")}
    for more, said in (({"cert_reqs": 1}, "--ssl-cert-reqs"), ({"ciphers": "none of them"}, "--ssl-ciphers")):
        with pytest.raises(ConfigError, match=f"^{said}"):
            check_tls(TlsOptions(**both, **more))
    with pytest.raises(ConfigError, match=r"^--ssl-keyfile needs --ssl-certfile"):
        tls_options(ServerOptions(model="m", ssl_keyfile="key.pem"))
