"""What goes to the prefill server, what to the decode server, and what comes back."""

import json

import httpx
import openai
import pytest
from starlette.responses import JSONResponse, StreamingResponse

CHAT = {
    "model": "m",
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    "max_tokens": 7,
    "max_completion_tokens": 9,
    "min_tokens": 2,
    "min_completion_tokens": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 3,
    "logprobs": True,
    "top_logprobs": 2,
    "echo": True,
    "a_field_of_tomorrow": [1, {"x": None}],
}
LIMITS = ("max_tokens", "max_completion_tokens")


def test_the_exact_json_to_both(setting, answers):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d])
    response = proxy.ask("/v1/chat/completions", **CHAT)
    assert response.status_code == 200
    expected = {key: CHAT[key] for key in ("model", "messages", "a_field_of_tomorrow")}
    expected |= {"stream": False, "max_tokens": 1, "max_completion_tokens": 1}
    expected["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        # what D will be asked for, to be checked before anything is computed
        "cairn_client_fields": {key: CHAT[key] for key in CHAT if key not in expected or key in ("stream", *LIMITS)},
    }
    assert [seen.path for seen in (*p.seen, *d.seen)] == ["/v1/chat/completions"] * 2
    sent = p.seen[0].json
    key = sent["kv_transfer_params"].pop("cairn_release_key")
    assert len(key) == 32 and set(key) <= set("0123456789abcdef")
    assert sent == expected
    assert d.seen[0].json == CHAT | {"kv_transfer_params": answers.handover(1)}


def test_without_prefill_servers_a_decode_server_does_it_all(setting):
    d, other = setting.decode(), setting.decode()
    proxy = setting.proxy([], [d, other])
    for _ in range(3):
        assert proxy.ask(prompt="the same beginning", max_tokens=5).status_code == 200
    assert proxy.get("/health").status_code == 200
    seen = [*d.seen, *other.seen]
    assert len(seen) == 3 and not (d.seen and other.seen), "prompts that begin alike meet at one server"
    assert all(body.json["max_tokens"] == 5 and "kv_transfer_params" not in body.json for body in seen)


def test_max_completion_tokens_is_not_made_up(setting):
    p, d = setting.prefill(), setting.decode()
    setting.proxy([p], [d]).ask(max_tokens=5)
    assert p.seen[0].json["max_tokens"] == 1 and "max_completion_tokens" not in p.seen[0].json
    assert d.seen[0].json["max_tokens"] == 5 and "max_completion_tokens" not in d.seen[0].json


def test_what_is_handed_over_goes_through_byte_for_byte(setting, answers):
    odd = b'{ "do_remote_prefill":true,"f":1.50e+01, "n" : 123456789012345678901234567890,"s":"\\u00fc" }'

    async def oddly(server, seen):
        response = answers.status(200, {})
        response = await response(server, seen)
        response.body = b'{"kv_transfer_params": ' + odd + b"}"
        response.headers["content-length"] = str(len(response.body))
        return response

    p, d = setting.prefill(oddly), setting.decode()
    assert setting.proxy([p], [d]).ask(temperature=0.10).status_code == 200
    assert odd in d.seen[0].content


def test_headers(setting):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d])
    sent = {"X-Request-Id": "r-1", "Authorization": "Bearer k", "Cookie": "c", "X-Forwarded-For": "1.2.3.4"}
    response = proxy.ask(headers=sent | {"traceparent": "00-1-2-01"})
    assert response.headers["x-request-id"] == "r-1"
    for seen in (p.seen[0], d.seen[0]):
        assert seen.headers["x-request-id"] == "r-1" and seen.headers["authorization"] == "Bearer k"
        assert seen.headers["content-type"] == "application/json" and seen.headers["traceparent"] == "00-1-2-01"
        assert "cookie" not in seen.headers
    given = proxy.ask().headers["x-request-id"]
    assert p.seen[1].headers["x-request-id"] == d.seen[1].headers["x-request-id"] == given != "r-1"


@pytest.mark.parametrize(
    ("peer", "said", "told"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("127.0.0.2", None, "127.0.0.2"),
        ("127.0.0.2", "203.0.113.5", "127.0.0.2"),
        ("127.0.0.2", "127.0.0.1", "127.0.0.2"),
        ("127.0.0.1", "203.0.113.5", "203.0.113.5"),
        ("127.0.0.1", "198.51.100.1, 203.0.113.5", "203.0.113.5"),
        ("127.0.0.1", "203.0.113.5, 127.0.0.1", "203.0.113.5"),
        ("127.0.0.1", "::ffff:203.0.113.5", "203.0.113.5"),
        ("127.0.0.1", "[2001:DB8::0:1]:4711", "2001:db8::1"),
        ("127.0.0.1", "unknown", None),
        ("127.0.0.1", "203.0.113.5\t\x7f\xff", None),
        ("127.0.0.1", "9" * 20_000, None),
        ("127.0.0.1", "fe80::1%" + "x" * 20_000, "fe80::1"),
    ],
)
def test_the_clients_address_is_the_proxys_to_tell(setting, peer, said, told):
    """What a client says of itself counts where it connects from a trusted address, and goes on nowhere as it came."""
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d])
    headers = {} if said is None else {"X-Forwarded-For": said.encode("latin-1")}
    with httpx.Client(transport=httpx.HTTPTransport(local_address=peer), timeout=10) as http:
        response = http.post(f"{proxy.url}/v1/completions", json={"prompt": "x"}, headers=headers)
        assert response.status_code == 200
        assert http.get(f"{proxy.url}/v1/models", headers=headers).status_code == 200
    assert [seen.headers.get("x-forwarded-for") for seen in (*p.seen, *d.seen)] == [told] * 3


def test_only_proxies_that_are_named_are_believed(setting):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d], forwarded_allow_ips="10.0.0.0/8")
    assert proxy.ask(headers={"X-Forwarded-For": "203.0.113.5"}).status_code == 200
    assert {seen.headers["x-forwarded-for"] for seen in (*p.seen, *d.seen)} == {"127.0.0.1"}


def test_headers_of_the_answer_are_chosen_too(setting, answers):
    d = setting.decode(answers.status(429, headers={"Retry-After": "3", "Set-Cookie": "a=b"}))
    response = setting.proxy([setting.prefill()], [d]).ask()
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert "set-cookie" not in response.headers and response.json()["error"]["message"] == "told to say 429"


@pytest.mark.parametrize("stream", [False, True])
def test_a_cookie_that_a_server_sets_for_one_client_comes_with_no_other_clients_request(setting, answers, stream):
    """P, D and the health checks all set one; the client that asks for the models is a third."""
    cookie = {"Set-Cookie": "session=of-client-a; Path=/"}

    async def prefilled(server, seen):
        return JSONResponse({"choices": [], "kv_transfer_params": answers.handover(1)}, headers=cookie)

    async def decoded(server, seen):
        return JSONResponse({"choices": [{"index": 0, "text": "hello"}]}, headers=cookie)

    p, d = setting.prefill(prefilled), setting.decode(decoded)
    proxy = setting.proxy([p], [d])
    assert proxy.ask(stream=stream, user="a").status_code == 200
    proxy.http.cookies.clear()
    assert proxy.ask(stream=stream, user="b").status_code == proxy.get("/v1/models").status_code == 200
    assert (len(p.seen), len(d.seen)) == (2, 3)
    assert [seen for seen in (*p.seen, *d.seen) if "cookie" in seen.headers] == []


def test_an_answer_that_is_not_streamed(setting):
    proxy = setting.proxy([setting.prefill()], [setting.decode()])
    response = proxy.ask()
    assert response.json()["choices"][0]["text"] == "hello"
    assert response.headers["content-type"] == "application/json"
    assert proxy.metric("requests_total", outcome="answered") == 1
    assert proxy.metric("prefill_seconds_count") == proxy.metric("first_byte_seconds_count") == 1
    assert proxy.metric("request_seconds_count") == 1


def test_the_first_chunk_arrives_before_the_last_is_made(setting, answers):
    d = setting.decode(answers.decoded("one", "two", hold_after=1))
    proxy = setting.proxy([setting.prefill()], [d])
    body = {"prompt": "x", "stream": True}
    with proxy.http.stream("POST", proxy.url + "/v1/completions", json=body) as response:
        chunks = response.iter_raw()
        first = next(chunks)
        assert b'"one"' in first and not d.hold.is_set()
        assert proxy.metric("upstream_open", pool="decode") == 1 and proxy.metric("upstream_open", pool="prefill") == 0
        d.hold.set()
        rest = b"".join(chunks)
    assert b'"two"' in rest and rest.endswith(b"data: [DONE]\n\n")
    answers.until(lambda: proxy.metric("upstream_open", pool="decode") == 0)


def test_the_openai_client(setting):
    proxy = setting.proxy([setting.prefill()], [setting.decode()])
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="k", max_retries=0, timeout=10) as client:
        stream = client.chat.completions.create(model="m", messages=CHAT["messages"], stream=True)
        assert "".join(chunk.choices[0].delta.content for chunk in stream) == "hello"
        assert [model.id for model in client.models.list()] == ["m"]


@pytest.mark.parametrize("given", [None, {"do_remote_prefill": True, "remote_host": "10.0.0.1"}, "nonsense", [1]])
def test_a_clients_own_transfer_params_reach_nobody(setting, answers, given):
    p, d = setting.prefill(answers.status(500)), setting.decode()
    proxy = setting.proxy([p], [d])
    assert proxy.ask(kv_transfer_params=given).status_code == 200
    assert proxy.ask(kv_transfer_params=given).status_code == 200
    assert "kv_transfer_params" not in d.seen[0].json
    assert p.seen[1].json["kv_transfer_params"]["remote_host"] is None
    assert d.seen[1].json["kv_transfer_params"] == answers.handover(2)


def test_several_prompts_are_not_handed_over(setting):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d])
    assert proxy.ask(prompt=["a", "b"]).status_code == 200
    assert not p.seen and "kv_transfer_params" not in d.seen[0].json
    assert proxy.metric("decode_only_total", reason="batch") == 1
    assert proxy.ask(prompt=["a"]).status_code == 200
    assert len(p.seen) == 1


@pytest.mark.parametrize(
    ("path", "body", "alone"),
    [
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0}, True),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": None}, False),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "echo": 1}, True),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": False}, False),
        ("/v1/completions", {"prompt": "a", "echo": True}, False),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "stream": False}, True),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "stream": True}, False),
        ("/v1/chat/completions", CHAT | {"logprobs": False, "prompt_logprobs": 1}, True),
    ],
)
def test_prompts_whose_log_probabilities_are_told_are_not_handed_over(setting, path, body, alone):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d])
    assert proxy.ask(path, **body).status_code == 200
    assert len(p.seen) == (not alone) and ("kv_transfer_params" in d.seen[0].json) == (not alone)
    assert proxy.metric("decode_only_total", reason="prompt_logprobs") == alone


def test_prompts_that_begin_alike_go_to_the_same_servers(setting):
    pool_p, pool_d = [setting.prefill() for _ in range(3)], [setting.decode() for _ in range(3)]
    proxy = setting.proxy(pool_p, pool_d)
    shared = "s" * 600
    for number in range(6):
        proxy.ask(prompt=f"{shared} and then {number}")
    assert sorted(len(server.seen) for server in pool_p) == sorted(len(server.seen) for server in pool_d) == [0, 0, 6]
    for number in range(40):
        proxy.ask(prompt=f"{number} begins differently")
    assert all(server.seen for server in (*pool_p, *pool_d))


def test_the_second_turn_is_told_where_the_answer_is(setting, answers):
    hint = {"engine": "d-0", "host": "127.0.0.1", "port": 5601, "a_key_of_tomorrow": [1]}
    p, d = setting.prefill(), setting.decode(answers.decoded("hel", "lo", hint=hint))
    proxy = setting.proxy([p], [d])
    first = proxy.ask("/v1/chat/completions", **CHAT)
    assert first.text.endswith("data: [DONE]\n\n")
    said = [{"role": "assistant", "content": "hello", "refusal": None}, {"role": "user", "content": "and?"}]
    proxy.ask("/v1/chat/completions", **CHAT | {"messages": CHAT["messages"] + said})
    other = [{"role": "assistant", "content": "good bye"}, {"role": "user", "content": "and?"}]
    proxy.ask("/v1/chat/completions", **CHAT | {"messages": CHAT["messages"] + other})
    hints = [seen.json["kv_transfer_params"].get("cairn_decode_hint") for seen in p.seen]
    assert hints == [None, hint, None]
    assert proxy.metric("hints") == proxy.metric("hints_stored_total") == proxy.metric("hints_sent_total") == 1


def test_the_second_turn_of_an_answer_that_was_not_streamed(setting, answers):
    hint = {"engine": "d-0", "host": "127.0.0.1", "port": 5601}
    p, d = setting.prefill(), setting.decode(answers.decoded("y" * 100, hint=hint))
    proxy = setting.proxy([p], [d])
    prompt = "x" * 100
    assert proxy.ask(prompt=prompt).status_code == 200
    proxy.ask(prompt=prompt + "y" * 100 + "next")
    proxy.ask(prompt=prompt + "z" * 100 + "next")
    assert ["cairn_decode_hint" in seen.json["kv_transfer_params"] for seen in p.seen] == [False, True, False]


def test_the_hint_is_known_before_the_client_has_its_last_bytes(setting, answers):
    """The next turn may be sent on [DONE], before the decode server has ended its answer."""
    hint = {"engine": "d-0", "host": "127.0.0.1", "port": 5601}

    async def lingering(server, seen):
        async def parts():
            async for part in (await answers.decoded("hello", hint=hint)(server, seen)).body_iterator:
                yield part
            await server.held()

        return StreamingResponse(parts(), media_type="text/event-stream")

    d = setting.decode(lingering)
    proxy = setting.proxy([setting.prefill()], [d])
    with proxy.http.stream("POST", proxy.url + "/v1/chat/completions", json=CHAT) as response:
        got, chunks = b"", response.iter_raw()
        while not got.endswith(b"data: [DONE]\n\n"):
            got += next(chunks)
        assert proxy.metric("hints") == 1 and proxy.metric("upstream_open", pool="decode") == 1
        d.hold.set()


@pytest.mark.parametrize(
    "hint",
    [
        {"engine": "d", "host": "h", "port": 70000},
        {"engine": "", "host": "h", "port": 1},
        {"host": "h", "port": 1},
        "h:1",
        {"engine": "d", "host": "h", "port": 1, "more": "x" * 4096},
    ],
)
def test_a_hint_that_is_none_is_forgotten(setting, answers, hint):
    proxy = setting.proxy([setting.prefill()], [setting.decode(answers.decoded("hello", hint=hint))])
    response = proxy.ask("/v1/chat/completions", **CHAT)
    assert json.dumps(hint) in response.text
    assert proxy.metric("hints") == 0
