"""The endpoints around generation: tokens, health, metrics, ids and the API key."""

import gzip
import http.client

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cairn import __version__
from doubles.echo_core import BYTES_PER_TOKEN


def test_tokenize_and_back(server):
    answer = server.post("/tokenize", {"model": "echo", "prompt": "hü"}).json()
    assert answer == {"count": 3, "max_model_len": 4096, "tokens": [104, 195, 188], "token_strs": None}
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hü"}


def test_a_body_in_gzip(server):
    def post(data, encoding="gzip"):
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        return httpx.post(f"{server.url}/tokenize", content=data, headers=headers, timeout=10)

    assert post(gzip.compress(b'{"prompt": "ab"}')).json()["tokens"] == [97, 98]
    assert post(gzip.compress(b'{"prompt": "' + b"a" * (16 << 20) + b'"}')).status_code == 413
    error = post(b'{"prompt": "ab"}').json()["error"]
    assert error["code"] == 400 and "no gzip" in error["message"]
    error = post(b'{"prompt": "ab"}', "zstd").json()["error"]
    assert error["code"] == 415 and "send gzip" in error["message"]


def test_tokens_as_the_vocabulary_spells_them(server):
    chat = {"messages": [{"role": "user", "content": "ü"}], "return_token_strs": True}
    strs = server.post("/tokenize", chat).json()["token_strs"]
    assert strs == ["<start>", *"user\n", "Ã", "¼", "<stop>", "<start>", *"assistant\n"]
    assert server.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()["token_strs"] == ["a", "b"]


def test_tokenize_a_chat(server):
    messages = [{"role": "user", "content": "x"}]
    whole = server.post("/tokenize", {"messages": messages}).json()
    bare = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert bare["tokens"] == [257, *b"user\nx", 258]
    assert whole["tokens"] == bare["tokens"] + [257, *b"assistant\n"]


def test_health_and_version(server):
    assert server.get("/health").status_code == 200
    assert server.get("/ping").status_code == server.post("/ping").status_code == 200
    assert server.get("/version").json() == {"version": __version__}


def test_the_request_id_comes_back(server):
    given = server.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123" and given.json()["id"] == "cmpl-abc-123"
    in_body = server.post("/v1/completions", {"prompt": "x", "request_id": "from-body"})
    assert in_body.json()["id"] == "cmpl-from-body"
    made = server.get("/v1/models")
    assert len(made.headers["x-request-id"]) == 32


def test_probes_get_a_request_id_by_flag(server, serve):
    every = serve({"enable_request_id_headers": True})
    for path in ("/health", "/ping", "/load", "/version", "/metrics"):
        assert "x-request-id" not in server.get(path).headers
        assert server.get(path, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
        assert len(every.get(path).headers["x-request-id"]) == 32


def test_two_requests_may_have_the_same_id(serve):
    server = serve(model="echo:pause_after=1")
    with server.client() as client:
        headers = {"X-Request-Id": "same"}
        streams = [
            client.completions.create(model="echo", prompt="ab", stream=True, extra_headers=headers) for _ in range(2)
        ]
        server.core.resume()
        assert ["".join(chunk.choices[0].text for chunk in stream) for stream in streams] == ["ab", "ab"]


def test_metrics_count(serve):
    server = serve(model="echo", block_size=32)
    for prompt, options in (("abc", {}), ("abc", {}), ("abcd", {"max_tokens": 2})):
        server.post("/v1/completions", {"prompt": prompt} | options)
    server.until(lambda: server.metric("cairn:audits_total"))
    metric = server.metric
    assert metric("vllm:prompt_tokens_total") == 10
    assert metric("vllm:generation_tokens_total") == 4 + 4 + 2
    assert metric("vllm:prefix_cache_queries_total") == 10
    assert metric("vllm:prefix_cache_hits_total") == 6
    assert metric("cairn:computed_prompt_tokens_total") == 4
    assert metric('vllm:request_success_total{engine="0",finished_reason="stop"') == 2
    assert metric('vllm:request_success_total{engine="0",finished_reason="length"') == 1
    assert metric('cairn:miss_requests_total{engine="0",model_name="echo",reason="none"') == 1
    assert metric("vllm:time_to_first_token_seconds_count") == 3
    assert metric("vllm:e2e_request_latency_seconds_count") == 3
    assert metric("vllm:request_queue_time_seconds_count") == 3
    assert metric("vllm:request_prompt_tokens_sum") == 10
    assert metric("vllm:request_generation_tokens_sum") == 10
    assert metric("vllm:kv_cache_usage_perc") == 0
    num_pages = (128 << 20) // (32 * BYTES_PER_TOKEN)
    # the texts and the states behind them that are cached
    assert metric("cairn:free_pages") == num_pages - 6
    text = server.get("/metrics").text
    info = next(f for f in text_string_to_metric_families(text) if f.name == "vllm:cache_config_info").samples[0]
    assert info.labels["block_size"] == "32" and info.labels["num_gpu_blocks"] == str(num_pages)


def test_a_full_hit_runs_no_forward_pass_for_its_first_token(server):
    body = {"prompt": "full hit", "max_tokens": 1}
    server.post("/v1/completions", body)
    before = server.metric("cairn:forward_passes_total")
    server.post("/v1/completions", body)
    assert server.metric("cairn:forward_passes_total") == before


class TestApiKey:
    @pytest.fixture
    def locked(self, serve):
        return serve(options={"api_key": ["0ther", "s3cret"]})

    def test_with_the_key(self, locked):
        with locked.client(api_key="s3cret") as client:
            assert client.completions.create(model="echo", prompt="x").choices[0].text == "x"

    def test_without_the_right_key(self, locked):
        for key in ("-", "s3cre", "s3crets", "S3CRET", "schlüssel"):
            response = locked.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
            assert response.status_code == 401 and response.json()["error"]["type"] == "Unauthorized"
        assert locked.get("/v1/models").status_code == 401
        with locked.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.completions.create(model="echo", prompt="x")

    def test_every_other_path_is_locked(self, locked):
        for path in (
            "/v1/models",
            "/openapi.json",
            "/tokenize",
            "/nothing",
            "//health",
            "/health/",
            "/version/../v1/models",
        ):
            connection = http.client.HTTPConnection("127.0.0.1", locked.port, timeout=10)
            connection.request("GET", path, headers={"Host": "health"})
            assert connection.getresponse().status == 401, path
            connection.close()

    def test_an_absolute_target_and_a_forged_host_do_not_open_it(self, locked):
        for target, host in (
            ("http://x/v1/models", "x"),
            ("/v1/models", "x/health?"),
            ("/v1/models?/health", "/health"),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", locked.port, timeout=10)
            connection.putrequest("GET", target, skip_host=True)
            connection.putheader("Host", host)
            connection.endheaders()
            assert connection.getresponse().status in (400, 401), target
            connection.close()

    def test_monitors_need_no_key(self, locked):
        for path in ("/health", "/metrics", "/ping", "/version"):
            assert locked.get(path).status_code == 200
