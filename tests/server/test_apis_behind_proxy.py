"""Anthropic's messages and OpenAI's responses through cairn's proxy: handed over, recognized, in their own words."""

import json

import pytest

from cairn.engine.contract import KvTransferConfig
from cairn.proxy.app import create_app
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService
from tiers import first, first_of

TAKES_PART = KvTransferConfig(port=0)


def messages_body(turns):
    roles = ("user", "assistant")
    said = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
    return {"model": "echo", "max_tokens": 40, "system": "Be kind.", "messages": said}


def responses_body(turns):
    said = [
        {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": text}]}
        if place % 2
        else {"role": "user", "content": text}
        for place, text in enumerate(turns)
    ]
    return {"model": "echo", "max_output_tokens": 40, "instructions": "Be kind.", "input": said}


def text_of_message(answer):
    return "".join(block["text"] for block in answer["content"])


def text_of_response(answer):
    return "".join(part["text"] for item in answer["output"] for part in item["content"])


APIS = {
    "/v1/messages": (messages_body, text_of_message),
    "/v1/responses": (responses_body, text_of_response),
}


def read_stream(path, text):
    """The events, and the text that they add up to."""
    events = [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n")[:-1]]
    wanted = "content_block_delta" if path == "/v1/messages" else "response.output_text.delta"
    deltas = [event["delta"] for event in events if event["type"] == wanted]
    return events, "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)


@pytest.mark.parametrize(("path", "stream"), first_of(zip(APIS, (False, True), strict=True), APIS, (False, True)))
def test_prompts_are_handed_over_and_the_second_turn_is_known(serve, run_app, path, stream):
    make_body, text_of = APIS[path]
    prefill, decode = (serve(kv_transfer=TAKES_PART) for _ in range(2))
    proxy = run_app(create_app(ProxyService(ProxyOptions(prefill=[prefill.url], decode=[decode.url]))))
    turns = ["hello"]
    for _ in range(2):
        answer = proxy.http.post(path, json=make_body(turns) | {"stream": stream})
        assert answer.status_code == 200, answer.text
        said = read_stream(path, answer.text)[1] if stream else text_of(answer.json())
        turns += [said, "more"]
    at_p, at_d = prefill.requests, decode.requests
    assert [request.prefill_only for request in (*at_p, *at_d)] == [True, True, False, False]
    assert [request.stop_conditions.max_tokens for request in (*at_p, *at_d)] == [40, 40, 40, 40]
    assert prefill.core.stats().tokens.generation == 2
    assert [request.prompt for request in at_p] == [request.prompt for request in at_d]
    assert all(json.loads(request.kv_transfer_params)["do_remote_prefill"] is True for request in at_d)
    hints = [json.loads(request.kv_transfer_params).get("cairn_decode_hint") for request in at_p]
    assert hints[0] is None and hints[1]["host"] == "localhost"
    stored = proxy.http.get(f"/v1/responses/{'x' * 37}")
    assert stored.status_code == 404


def test_a_response_is_gone_on_with_where_it_is_stored(serve, run_app):
    """Whichever server the prompt prefers, whether the proxy remembers it or has to ask."""
    prefill = serve(kv_transfer=TAKES_PART)
    servers = [serve(kv_transfer=TAKES_PART) for _ in range(3)]
    options = ProxyOptions(prefill=[prefill.url], decode=[server.url for server in servers])
    proxy, other = (run_app(create_app(ProxyService(options))) for _ in range(2))
    for turn in range(3):
        first = proxy.http.post("/v1/responses", json=responses_body([f"hello {turn}"])).json()
        owner = next(server for server in servers if server.requests)
        num_prefilled = len(prefill.requests)
        for wanted in ({"previous_response_id": first["id"]}, {}):
            sent = responses_body(["more"]) | wanted
            if not wanted:
                sent["input"].insert(0, {"type": "item_reference", "id": first["output"][0]["id"]})
            second = proxy.http.post("/v1/responses", json=sent)
            assert second.status_code == 200, second.text
        assert len(owner.requests) == 3 and len(prefill.requests) == num_prefilled
        for client in (proxy, other):
            assert client.http.get(f"/v1/responses/{first['id']}").json() == first
            items = client.http.get(f"/v1/responses/{first['id']}/input_items?limit=1").json()
            assert items["data"][0]["content"][0]["text"] == f"hello {turn}"
            assert client.http.post(f"/v1/responses/{first['id']}/cancel").status_code == 400
        assert other.http.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
        gone = proxy.http.post("/v1/responses", json=responses_body(["more"]) | {"previous_response_id": first["id"]})
        assert gone.status_code == 404 and gone.json()["error"]["param"] == "previous_response_id"
        for server in servers:
            server.requests.clear()


def test_tokens_are_counted_by_a_decode_server(serve, run_app):
    prefill, decode = (serve({"api_key": ["k"]}, kv_transfer=TAKES_PART) for _ in range(2))
    proxy = run_app(create_app(ProxyService(ProxyOptions(prefill=[prefill.url], decode=[decode.url], api_key=["k"]))))
    sent = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
    for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}):
        counted = proxy.http.post("/v1/messages/count_tokens", json=sent, headers=headers)
        assert counted.status_code == 200 and counted.json()["input_tokens"] > 5
    assert prefill.requests == decode.requests == []


@pytest.mark.parametrize("path", APIS)
def test_errors_are_in_the_apis_own_form(serve, run_app, path):
    proxy = run_app(create_app(ProxyService(ProxyOptions(decode=["http://127.0.0.1:1"], api_key=["k"]))))
    for headers, status in (({}, 401), ({"Authorization": "Bearer k"}, 503)):
        answer = proxy.http.post(path, json=APIS[path][0](["hello"]), headers=headers)
        found = answer.json()
        assert answer.status_code == status
        assert ("type" in found and found["type"] == "error") == (path == "/v1/messages")
        assert found["error"]["message"]


@pytest.mark.parametrize("path", first(1, APIS))
def test_a_server_that_ends_in_mid_stream_ends_the_stream(serve, run_app, path):
    decode = serve(model="echo:pause_after=2")
    proxy = run_app(create_app(ProxyService(ProxyOptions(decode=[decode.url], request_timeout=1.5))))
    answer = proxy.http.post(path, json=APIS[path][0](["hello"]) | {"stream": True})
    events, _ = read_stream(path, answer.text)
    assert events[-1]["type"] == "error" and "DONE" not in str(events)
    if path == "/v1/responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
