"""`kv_transfer_params` through HTTP: what is asked, what comes back, and what is counted of it."""

import itertools
import json

import httpx
import pytest

from cairn.engine.contract import KvTransferConfig
from cairn.proxy.app import create_app as cairn_proxy
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService
from cairn.proxy.stream_inspector import StreamInspector
from doubles.echo_core import BYTES_PER_TOKEN
from server.strangers_proxy import create_app as strangers_proxy
from tiers import first_of

ASKS_FOR_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TEXT = {"prompt": "hello"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PATHS = [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]
ONE_OF_EACH = pytest.mark.parametrize(
    ("path", "stream"),
    first_of([("/v1/completions", False), ("/v1/chat/completions", True)], dict(PATHS), (False, True)),
)
TAKES_PART = KvTransferConfig(port=0)
SALTS = itertools.count()


def events_of(text):
    """The JSON of a stream's events, [DONE] at the end."""
    *events, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def handed_over(server, path, body):
    answer = server.post(path, body | {"max_tokens": 1, "kv_transfer_params": ASKS_FOR_DECODE})
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def port_of(server):
    """Where other servers ask it for pages."""
    return int(server.core.info.side_channel.rpartition(":")[2])


@pytest.fixture(scope="module")
def pair(running_server):
    """A server that prefills and one that decodes; both can do both. What they are asked has to be `unseen`."""
    both = running_server(kv_transfer=TAKES_PART), running_server(kv_transfer=TAKES_PART)
    yield both
    for server in both:
        server.drain()
        assert server.join() == 0


def unseen(body):
    """The same with a cache of its own."""
    return body | {"cache_salt": f"salt-{next(SALTS)}"}


def handed_over_by_one_that_is_gone(serve, path, body):
    prefill = serve(kv_transfer=TAKES_PART)
    params = handed_over(prefill, path, body)
    prefill.drain()
    assert prefill.join() == 0
    return params


def text_of(choice):
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"])["content"]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_prompt_is_handed_over(serve, path, body):
    server = serve(kv_transfer=TAKES_PART)
    params = handed_over(server, path, body)
    assert json.loads(server.requests[0].kv_transfer_params) == ASKS_FOR_DECODE
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    assert (params["remote_host"], params["remote_port"]) == ("localhost", port_of(server))
    assert server.post(path, body).json()["kv_transfer_params"] is None
    assert server.requests[1].kv_transfer_params is None


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_what_was_handed_over_goes_to_the_engine_as_it_came(pair, path, body):
    prefill, server = pair
    body = unseen(body)
    params = handed_over(prefill, path, body)
    others = {"not_ours": {"ü": [1.5, 123456789012345678901234567890, None]}, "": "\x7f\u2028"}
    answer = server.post(path, body | {"kv_transfer_params": params | others}).json()
    assert json.loads(server.requests[-1].kv_transfer_params) == params | others
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert answer["cairn"]["cache"] == {
        "prompt_tokens": prompt_tokens,
        "matched_tokens": prompt_tokens,
        "cached_tokens": 0,
        "received_tokens": prompt_tokens,
        "tier_tokens": 0,
        "computed_tokens": 0,
        "prefill_cached_tokens": 0,
        "held_breakpoints": 0,
        "reason": "none",
        "lost_tokens": {},
    }
    hint = answer["kv_transfer_params"]["cairn_decode_hint"]
    assert (hint["host"], hint["port"]) == ("localhost", port_of(server))
    assert hint["engine"] == handed_over(server, path, body)["remote_engine_id"] != params["remote_engine_id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_usage_tells_what_the_prefill_server_had_cached(pair, path, body, stream):
    prefill, server = pair
    body = unseen(body)
    handed_over(prefill, path, body)
    params = handed_over(prefill, path, body)
    body = body | {"kv_transfer_params": params}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = events_of(server.post(path, body).text)[-1]
    else:
        answer = server.post(path, body).json()
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": prompt_tokens}
    assert answer["cairn"]["cache"]["prefill_cached_tokens"] == prompt_tokens
    assert answer["cairn"]["cache"]["cached_tokens"] == 0


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_in_a_stream_they_are_on_the_last_choice_and_the_tap_finds_them(pair, path, body, include_usage):
    prefill, server = pair
    body = unseen(body)
    params = handed_over(prefill, path, body)
    body |= {"stream": True, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}} if include_usage else {}
    answer = server.post(path, body | {"kv_transfer_params": params})
    events = events_of(answer.text)
    with_params = [event for event in events if "kv_transfer_params" in event]
    assert len(with_params) == 1 and with_params[0]["choices"][0]["finish_reason"] == "stop"
    assert with_params[0] is events[-2 if include_usage else -1]
    inspector = StreamInspector(stream=True)
    inspector.feed(answer.content)
    found = inspector.summarize()
    assert inspector.done and json.loads(bytes(found.hint))["port"] == port_of(server)
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]
    assert found.token_ids == ids and bytes(ids[:-1]).decode() == found.text
    plain = server.post(path, body)
    assert "kv_transfer_params" not in plain.text


@ONE_OF_EACH
def test_a_transfer_that_fails_before_the_first_byte_is_an_http_error(serve, path, stream):
    body = dict(PATHS)[path]
    server = serve(kv_transfer=KvTransferConfig(port=0, on_failure="fail"))
    params = handed_over_by_one_that_is_gone(serve, path, body)
    answer = server.post(path, body | {"stream": stream, "kv_transfer_params": params})
    assert answer.status_code == 502 and answer.headers["content-type"] == "application/json"
    port = params["remote_port"]
    assert answer.json()["error"] == {
        "message": f"the prompt could not be fetched from localhost:{port}: it cannot be connected to: "
        "Connection refused",
        "type": "Bad Gateway",
        "param": None,
        "code": 502,
    }
    assert server.metric("vllm:nixl_num_failed_transfers_total") == 1
    assert server.metric('vllm:request_success_total{engine="0",finished_reason="error"') == 1
    assert server.metric("vllm:num_requests_running") == 0
    assert server.post(path, body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_prompt_that_finds_no_room_to_be_held_is_refused(serve, path, body, stream):
    """As one that finds the queue full: later it may be taken. It is in no count of answers."""
    server = serve(model="echo:no_lease_room=true", kv_transfer=TAKES_PART)
    held = server.post(path, body | {"kv_transfer_params": ASKS_FOR_DECODE})
    assert held.status_code == 200 and held.json()["kv_transfer_params"]["do_remote_prefill"] is True
    other = {"prompt": "another prompt"} if "prompt" in body else {"messages": [{"role": "user", "content": "another"}]}
    answer = server.post(path, body | other | {"stream": stream, "kv_transfer_params": ASKS_FOR_DECODE})
    assert answer.status_code == 429 and answer.headers["Retry-After"] == "1"
    assert answer.json()["error"] == {
        "message": "what is held for other servers has left no room for this prompt for 0 s: try again later",
        "type": "Too Many Requests",
        "param": None,
        "code": 429,
    }
    assert server.metric('vllm:request_success_total{engine="0",finished_reason="error"') == 0
    assert server.metric("vllm:num_requests_running") == 0
    assert server.post(path, body).status_code == 200


def test_a_transfer_that_fails_is_recomputed(serve):
    server = serve(kv_transfer=TAKES_PART)
    params = handed_over_by_one_that_is_gone(serve, "/v1/completions", TEXT)
    answer = server.post("/v1/completions", TEXT | {"kv_transfer_params": params}).json()
    assert answer["choices"][0]["text"] == "hello" and answer["cairn"]["cache"]["reason"] == "remote_failed"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert server.metric("vllm:nixl_bytes_transferred_count") == 0


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_decode": False, "do_remote_prefill": None}, {"remote_host": "10.0.0.1", "other": [1]}],
)
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_server_without_transfers_takes_what_asks_for_none(server, path, body, params):
    answer = server.post(path, body | {"kv_transfer_params": params})
    assert answer.status_code == 200 and answer.json()["kv_transfer_params"] is None
    assert server.requests[-1].kv_transfer_params is None


@pytest.mark.parametrize("flag", ["do_remote_decode", "do_remote_prefill"])
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_server_without_transfers_refuses_them(server, path, body, flag):
    error = server.post(path, body | {"kv_transfer_params": {flag: True}}).json()["error"]
    assert error["param"] == f"kv_transfer_params.{flag}" and "--kv-transfer-config" in error["message"]
    for wrong in (1, "true", [], 10**9):
        answer = server.post(path, body | {"kv_transfer_params": {flag: wrong}})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == f"kv_transfer_params.{flag}"


def test_only_so_deep(serve):
    server = serve(kv_transfer=TAKES_PART)
    for nested, status in (
        ("[" * 31 + "]" * 31, 200),
        ("[" * 32 + "]" * 32, 400),
        ('[0,{"a":' * 16 + "[]" + "}]" * 16, 400),
    ):
        answer = send(server, f'{{"unknown": {nested}}}')
        assert answer.status_code == status
        assert status == 200 or "32 levels" in answer.json()["error"]["message"]
    assert len(server.requests) == 1


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"\\ud800"', '{"\\udfff": 1}', "1e999"])
def test_what_is_no_json_does_not_get_to_the_engine(transfer_server, value):
    """It would be read differently there, or not at all."""
    before = len(transfer_server.requests)
    answer = send(transfer_server, f'{{"do_remote_decode": false, "unknown": {value}}}')
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"
    assert len(transfer_server.requests) == before


def send(server, params):
    """A request with parameters that are spelled out."""
    content = f'{{"prompt": "x", "kv_transfer_params": {params}}}'
    return server.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})


# -- what is counted -------------------------------------------------------------------------------------------------


def test_metrics_of_transfers(serve):
    prefill, server = (serve(kv_transfer=TAKES_PART, block_size=2) for _ in range(2))
    for prompt in ("hello", "hello", "hello!!"):
        params = handed_over(prefill, "/v1/completions", {"prompt": prompt})
        server.post("/v1/completions", {"prompt": prompt, "kv_transfer_params": params})
    server.post("/v1/completions", {"prompt": "other"})
    metric = server.metric
    assert metric("vllm:external_prefix_cache_queries_total") == metric("vllm:external_prefix_cache_hits_total") == 7
    sources = {
        source: metric(f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="echo",source="{source}"')
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert sources == {"local_compute": 5, "local_cache_hit": 5 + 5, "external_kv_transfer": 5 + 2}
    assert sum(sources.values()) == metric("vllm:prompt_tokens_total")
    assert metric("vllm:nixl_xfer_time_seconds_count") == 2 and metric("vllm:nixl_xfer_time_seconds_sum") > 0
    # each with the pages of its tokens and one of the state behind them, page by page
    num_pages = (3 + 1) + (2 + 1)
    num_bytes = num_pages * 2 * BYTES_PER_TOKEN
    for name, total in (("nixl_bytes_transferred", num_bytes), ("nixl_num_descriptors", num_pages)):
        assert metric(f"vllm:{name}_count") == 2 and metric(f"vllm:{name}_sum") == total
    assert metric('vllm:nixl_num_descriptors_bucket{engine="0",le="10.0"') == 2
    assert metric("vllm:nixl_num_kv_expired_reqs_total") == metric("vllm:nixl_num_failed_transfers_total") == 0
    assert metric("cairn:leased_pages") == metric("cairn:quarantined_pages") == metric("cairn:open_transfers") == 0
    assert metric("cairn:side_channel_dropped_total") == 0


def test_what_cannot_be_filled_is_absent(server):
    server.post("/v1/completions", TEXT)
    text = server.get("/metrics").text
    for name in ("nixl", "external", "leased_pages", "quarantined", "open_transfers", "side_channel"):
        assert name not in text


def test_a_request_that_is_aborted_is_counted_with_its_sources(serve):
    server = serve(model="echo:pause_after=1")
    with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "hello", "stream": True}) as response:
        assert next(response.iter_lines())
    server.until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:prompt_tokens_by_source_total") == server.metric("vllm:prompt_tokens_total") == 5


# -- behind proxies --------------------------------------------------------------------------------------------------


@ONE_OF_EACH
def test_a_strangers_proxy(serve, run_app, path, stream):
    """What the page says, and nothing else, is enough."""
    body = dict(PATHS)[path]
    key = {"api_key": ["s3cret"]}
    prefill, decode = (serve(options=key, kv_transfer=TAKES_PART) for _ in range(2))
    proxy = run_app(strangers_proxy(prefill.url, decode.url))
    headers = {"X-Request-Id": "one-id", "Authorization": "Bearer s3cret"}
    ours = body | {"max_tokens": 4, "max_completion_tokens": 4, "stream": stream, "ignore_eos": True}
    ours |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = proxy.http.post(path, json=ours, headers=headers)
    assert answer.status_code == 200, answer.text

    (at_p,), (at_d,) = prefill.requests, decode.requests
    assert (at_p.stop_conditions.max_tokens, at_d.stop_conditions.max_tokens) == (1, 4) and at_p.prompt == at_d.prompt
    assert json.loads(at_p.kv_transfer_params) == ASKS_FOR_DECODE
    asked = json.loads(at_d.kv_transfer_params)
    assert asked["do_remote_prefill"] is True
    assert (asked["remote_host"], asked["remote_port"]) == ("localhost", port_of(prefill))
    assert {at.request_id.rpartition("-")[0].partition("-")[2] for at in (at_p, at_d)} == {"one-id"}
    assert asked["remote_request_id"].rpartition("~")[0] == at_p.request_id
    pieces = events_of(answer.text) if stream else [answer.json()]
    said = "".join(text_of(choice) for piece in pieces for choice in piece["choices"])
    assert said == ("hell" if path == "/v1/completions" else "user")
    assert pieces[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert pieces[-1]["cairn"]["cache"]["received_tokens"] == len(at_d.prompt) // 8


def test_a_strangers_proxy_passes_refusals_on(serve, run_app):
    prefill, decode = (serve(kv_transfer=TAKES_PART) for _ in range(2))
    proxy = run_app(strangers_proxy(prefill.url, decode.url))
    answer = proxy.http.post("/v1/completions", json={"prompt": ""})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt" and decode.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_cairns_own_proxy_and_the_second_turn(serve, run_app, stream):
    prefill, decode = (serve(kv_transfer=TAKES_PART) for _ in range(2))
    options = ProxyOptions(prefill=[prefill.url], decode=[decode.url])
    proxy = run_app(cairn_proxy(ProxyService(options)))
    turn = [{"role": "user", "content": "hello"}]
    # As much of an echo as the first message is: the echo answers with its whole prompt.
    body = {"messages": turn, "stream": stream, "max_tokens": 50}
    answer = proxy.http.post("/v1/chat/completions", json=body)
    pieces = events_of(answer.text) if stream else [answer.json()]
    said = "".join(text_of(choice) for piece in pieces for choice in piece["choices"])
    turn += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    assert proxy.http.post("/v1/chat/completions", json=body | {"messages": turn}).status_code == 200
    first, second = (json.loads(request.kv_transfer_params) for request in prefill.requests)
    assert first == ASKS_FOR_DECODE
    hint = second.pop("cairn_decode_hint")
    assert second == ASKS_FOR_DECODE and (hint["host"], hint["port"]) == ("localhost", port_of(decode))
