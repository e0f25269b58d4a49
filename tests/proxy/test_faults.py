"""Servers that fail, in each way and at each moment; clients that leave; proxies that drain."""

import json
import socket
import threading

import httpx
import pytest
from starlette.responses import StreamingResponse

from tiers import first_of, more

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


class Broken:
    """Healthy, and closes the connection on every other request, having read it. `seen`: all but those to release."""

    def __init__(self):
        self.seen = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                received = connection.recv(65536)
                if received.startswith(b"GET"):
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                else:
                    self.seen += not received.startswith(b"POST /release_kv_transfer ")

    def stop(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def broken():
    server = Broken()
    yield server
    server.stop()


def first_choice(proxy, pool):
    """The server of the pool that the plain request goes to, found by asking; the records are cleared again."""
    proxy.ask()
    (first,) = [server for server in pool if server.seen]
    for server in pool:
        server.seen.clear()
    return first, next(server for server in pool if server is not first)


# -- prefill ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [429, 500, 503, 302])
def test_a_prefill_server_that_fails_is_replaced_by_another(setting, answers, code):
    pool, d = [setting.prefill(), setting.prefill()], setting.decode()
    proxy = setting.proxy(pool, [d])
    bad, good = first_choice(proxy, pool)
    bad.script.append(answers.status(code, headers={"Location": "http://127.0.0.1:1/"}))
    assert proxy.ask().json()["choices"][0]["text"] == "hello"
    assert (len(bad.seen), len(good.seen), len(d.seen)) == (1, 1, 2)
    assert d.seen[1].json["kv_transfer_params"]["remote_request_id"] == "cmpl-1"
    assert proxy.metric("retries_total", pool="prefill") == 1 and proxy.metric("decode_only_total") == 0
    assert proxy.metric("upstream_failures_total", pool="prefill", server=bad.url, kind="status") == 1


def test_without_a_prefill_server_that_works_the_decode_server_does_it_alone(setting, answers):
    pool, d = [setting.prefill(answers.status(500)), setting.prefill(answers.status(502))], setting.decode()
    proxy = setting.proxy(pool, [d])
    assert proxy.ask(stream=True).text.endswith("data: [DONE]\n\n")
    assert [len(server.seen) for server in pool] == [1, 1]
    assert d.seen[0].json == {"model": "m", "prompt": "hello", "stream": True}
    assert proxy.metric("decode_only_total", reason="prefill_failed") == 1


def test_prefill_attempts_are_bounded(setting, answers):
    pool = [setting.prefill(*[answers.status(500)] * 3) for _ in range(3)]
    proxy = setting.proxy(pool, [setting.decode()], max_attempts=2)
    assert proxy.ask().status_code == 200
    assert sum(len(server.seen) for server in pool) == 2


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_what_a_prefill_server_refuses_the_client_hears_unchanged(setting, answers, code):
    refusal = {"error": {"message": "prompt is too long", "param": "prompt"}}
    pool, d = [setting.prefill(answers.status(code, refusal)) for _ in range(2)], setting.decode()
    proxy = setting.proxy(pool, [d])
    response = proxy.ask(stream=True)
    assert (response.status_code, response.json()) == (code, refusal)
    assert sum(len(server.seen) for server in pool) == 1 and not d.seen
    assert proxy.metric("requests_total", outcome="refused") == 1


def test_a_prefill_server_that_takes_too_long(setting, answers):
    p, d = setting.prefill(answers.never), setting.decode()
    proxy = setting.proxy([p], [d], prefill_timeout=0.2)
    assert proxy.ask().status_code == 200
    answers.until(lambda: p.num_cancelled == 1)
    assert "kv_transfer_params" not in d.seen[0].json
    assert proxy.metric("upstream_failures_total", pool="prefill", kind="timeout") == 1


def test_a_prefill_server_that_breaks_the_connection(setting, broken):
    d = setting.decode()
    proxy = setting.proxy([broken], [d])
    assert proxy.ask().status_code == 200
    assert broken.seen == 1 and "kv_transfer_params" not in d.seen[0].json
    assert proxy.metric("upstream_failures_total", pool="prefill", kind="broken") == 1


def test_a_prefill_server_that_is_gone(setting):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [d])
    setting.stop(p)
    assert proxy.ask().status_code == 200 and proxy.ask().status_code == 200
    assert proxy.metric("upstream_up", pool="prefill") == 0
    assert proxy.metric("upstream_failures_total", pool="prefill", kind="unreached") == 1
    assert proxy.metric("decode_only_total", reason="prefill_failed") == 1
    assert proxy.metric("decode_only_total", reason="prefill_down") == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"choices": []}, "not_offered"),
        ({"choices": [], "kv_transfer_params": None}, "not_offered"),
        ({"choices": [], "kv_transfer_params": {}}, "not_offered"),
        ({"choices": [], "kv_transfer_params": "no"}, "bad_reference"),
        (["no", "object"], "prefill_failed"),
    ],
)
def test_a_prefill_server_that_hands_nothing_over(setting, answers, body, reason):
    p, d = setting.prefill(answers.status(200, body)), setting.decode()
    proxy = setting.proxy([p], [d])
    assert proxy.ask().status_code == 200
    assert "kv_transfer_params" not in d.seen[0].json and len(p.seen) == 1
    assert proxy.metric("decode_only_total", reason=reason) == 1


def test_a_prefill_answer_without_end(setting, answers):
    p, d = setting.prefill(answers.status(200, {"x": "x" * 5000})), setting.decode()
    proxy = setting.proxy([p], [d], max_body_bytes=4096)
    assert proxy.ask().status_code == 200
    assert proxy.metric("upstream_failures_total", pool="prefill", kind="answer") == 1


# -- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["status", "headers_only", "redirect"])
def test_a_decode_server_that_fails_before_its_first_byte(setting, answers, fault, stream):
    p, pool = setting.prefill(), [setting.decode(), setting.decode()]
    proxy = setting.proxy([p], pool)
    bad, good = first_choice(proxy, pool)
    faults = {"status": answers.status(503), "redirect": answers.status(307), "headers_only": answers.headers_only}
    bad.script.append(faults[fault])
    response = proxy.ask(stream=stream)
    assert response.status_code == 200
    assert response.text.count("hel") == 1 and "error" not in response.text
    # What was handed over is good for one use: the second server gets another hand-over than the first.
    ids = [server.seen[0].json["kv_transfer_params"]["remote_request_id"] for server in (bad, good)]
    assert ids == ["cmpl-2", "cmpl-3"]
    assert proxy.metric("retries_total", pool="decode") == 1


def test_a_decode_server_that_breaks_the_connection(setting, broken):
    p, d = setting.prefill(), setting.decode()
    proxy = setting.proxy([p], [broken, d])
    for number in range(20):
        assert proxy.ask(prompt=f"{number}").status_code == 200
    assert broken.seen > 0 and len(d.seen) == 20 and len(p.seen) == 20 + broken.seen
    ids = [seen.json["kv_transfer_params"]["remote_request_id"] for seen in d.seen]
    assert len(set(ids)) == 20


def test_a_hand_over_that_never_arrived_is_used_for_the_next_server(setting):
    p, pool = setting.prefill(), [setting.decode(), setting.decode()]
    proxy = setting.proxy([p], pool)
    gone, left = first_choice(proxy, pool)
    setting.stop(gone)
    assert proxy.ask().status_code == 200
    assert len(p.seen) == 2 and left.seen[0].json["kv_transfer_params"]["remote_request_id"] == "cmpl-2"
    assert proxy.metric("upstream_up", server=gone.url) == 0
    assert proxy.ask().status_code == 200
    assert proxy.metric("retries_total", pool="decode") == 1


def test_a_hand_over_that_a_full_server_has_turned_away_is_used_for_the_next_one(setting, answers):
    p, pool = setting.prefill(), [setting.decode(), setting.decode()]
    proxy = setting.proxy([p], pool)
    full, other = first_choice(proxy, pool)
    full.script.append(answers.status(429, headers={"Retry-After": "1"}))
    assert proxy.ask().status_code == 200
    assert len(p.seen) == 2 and full.seen[-1].json["kv_transfer_params"] == other.seen[0].json["kv_transfer_params"]
    assert proxy.metric("upstream_failures_total", pool="decode", server=full.url, kind="status") == 1


def test_what_was_prefilled_but_used_is_prefilled_again_or_done_without(setting, answers):
    p, pool = setting.prefill(), [setting.decode(), setting.decode()]
    proxy = setting.proxy([p], pool)
    bad, good = first_choice(proxy, pool)
    bad.script.append(answers.status(500))
    p.script[:] = [p.default, answers.status(500)]
    assert proxy.ask().status_code == 200
    assert "kv_transfer_params" in bad.seen[0].json and "kv_transfer_params" not in good.seen[0].json


@pytest.mark.parametrize("code", [400, 404, 409])
def test_what_a_decode_server_refuses_the_client_hears_unchanged(setting, answers, code):
    pool = [setting.decode(answers.status(code)), setting.decode(answers.status(code))]
    response = setting.proxy([setting.prefill()], pool).ask()
    assert response.status_code == code and response.json()["error"]["message"] == f"told to say {code}"
    assert sum(len(server.seen) for server in pool) == 1


@pytest.mark.parametrize("code", [429, 503])
def test_when_all_decode_servers_fail_the_client_hears_the_last(setting, answers, code):
    pool = [setting.decode(answers.status(code, headers={"Retry-After": "1"})) for _ in range(2)]
    response = setting.proxy([setting.prefill()], pool).ask(stream=True)
    assert response.status_code == code and response.json()["error"]["message"] == f"told to say {code}"
    assert response.headers["retry-after"] == "1" and [len(server.seen) for server in pool] == [1, 1]
    proxy = setting.proxy([setting.prefill()], [setting.decode(answers.status(503)) for _ in range(2)])
    assert proxy.ask(stream=True).status_code == 503
    assert proxy.metric("requests_total", outcome="failed") == 1


def test_when_no_decode_server_says_anything(setting, answers):
    proxy = setting.proxy([setting.prefill()], [setting.decode(answers.headers_only)])
    response = proxy.ask(stream=True)
    assert response.status_code == 502
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("Bad Gateway", 502) and "connection broke" in error["message"]


def test_a_decode_server_that_is_silent(setting, answers):
    d = setting.decode(answers.never)
    proxy = setting.proxy([setting.prefill()], [d], stall_timeout=0.2)
    assert proxy.ask().status_code == 502
    answers.until(lambda: d.num_cancelled == 1)
    assert proxy.metric("upstream_failures_total", pool="decode", kind="timeout") == 1


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_stream_that_breaks_ends_with_an_error_and_is_not_begun_again(setting, answers, path):
    pool = [setting.decode(answers.decoded("one", "two", cut=True)) for _ in range(2)]
    proxy = setting.proxy([setting.prefill()], pool)
    body = {"prompt": "x"} if path != CHAT else {"messages": MESSAGES}
    response = proxy.ask(path, stream=True, **body)
    *events, error, done = response.text.rstrip("\n").split("\n\n")
    assert response.status_code == 200 and done == "data: [DONE]"
    told = json.loads(error.removeprefix("data: "))["error"]
    assert told["code"] == 502 and "mid-answer" in told["message"]
    assert "".join(events).count("one") == 1 and sum(len(server.seen) for server in pool) == 1
    assert proxy.metric("requests_total", outcome="cut_off") == 1


def test_a_stream_that_stalls_ends_with_an_error(setting, answers):
    d = setting.decode(answers.decoded("one", "two", hold_after=1))
    proxy = setting.proxy([setting.prefill()], [d], stall_timeout=1.0)
    text = proxy.ask(stream=True).text
    assert "one" in text and "silent for too long" in text and "two" not in text
    answers.until(lambda: d.num_cancelled == 1)


def test_the_deadline_of_a_whole_request(setting, answers):
    d = setting.decode(answers.decoded("one", "two", hold_after=1), answers.never)
    proxy = setting.proxy([setting.prefill()], [d], request_timeout=1.5)
    text = proxy.ask(stream=True).text
    assert "one" in text and "was not there within 1.5 s" in text and text.endswith("data: [DONE]\n\n")
    response = proxy.ask()
    assert (response.status_code, response.json()["error"]["type"]) == (504, "Gateway Timeout")
    answers.until(lambda: d.num_cancelled == 2)
    assert proxy.metric("requests_total", outcome="late") == proxy.metric("requests_total", outcome="cut_off") == 1


def test_an_answer_that_is_no_stream_and_breaks_is_seen_to_be_cut(setting):
    async def half(server, seen):
        async def parts():
            yield b'{"choices": ['
            raise ConnectionError("told to break")

        return StreamingResponse(parts(), media_type="application/json")

    d = setting.decode(half)
    proxy = setting.proxy([setting.prefill()], [d])
    with pytest.raises(httpx.RemoteProtocolError):
        proxy.ask()
    assert len(d.seen) == 1
    assert proxy.ask().status_code == 200


# -- health ----------------------------------------------------------------------------------------------------------


def test_servers_that_are_down_are_not_asked(setting, answers):
    p, pool = setting.prefill(), [setting.decode(), setting.decode()]
    pool[0].health = 503
    proxy = setting.proxy([p], pool, health_interval=0.05)
    for number in range(10):
        assert proxy.ask(prompt=str(number)).status_code == 200
    assert not pool[0].seen and len(pool[1].seen) == 10
    assert proxy.get("/health").json() == {"status": "ok", "prefill_instances": 1, "decode_instances": 1}
    pool[1].health = 503
    answers.until(lambda: proxy.get("/health").status_code == 503)
    assert proxy.get("/healthcheck").status_code == proxy.get("/ping").status_code == 503
    response = proxy.ask()
    assert response.status_code == 503 and "no decode server is up" in response.json()["error"]["message"]
    assert len(p.seen) == 10
    pool[0].health = 200
    answers.until(lambda: proxy.get("/ping").status_code == 200)
    assert proxy.ask().status_code == 200 and len(pool[0].seen) == 1


QUICK_CHECKS = {"health_interval": 0.05, "health_timeout": 0.5}


@pytest.mark.parametrize("num_waiting", [5, more(1)])
def test_a_prefill_server_that_freezes_is_left_for_another_one(setting, answers, num_waiting):
    """All that wait for it go to the other one, once the health checks have found it down; it is asked for nothing."""
    pool, d = [setting.prefill(), setting.prefill()], setting.decode()
    proxy = setting.proxy(pool, [d], running_tokens=0, **QUICK_CHECKS)
    frozen, other = first_choice(proxy, pool)
    frozen.default = answers.never
    asking = [Background(proxy.ask) for _ in range(num_waiting)]
    answers.until(lambda: len(frozen.seen) == num_waiting)
    frozen.health = None
    assert [background.result().status_code for background in asking] == [200] * num_waiting
    assert (len(frozen.seen), len(other.seen), len(d.seen)) == (num_waiting, num_waiting, 1 + num_waiting)
    assert all("kv_transfer_params" in seen.json for seen in d.seen)
    assert proxy.metric("retries_total", pool="prefill") == num_waiting
    assert proxy.metric("upstream_failures_total", server=frozen.url, kind="down") == num_waiting
    answers.until(lambda: frozen.num_cancelled == num_waiting)
    assert proxy.metric("upstream_open") == 0


def test_the_only_prefill_server_freezes(setting, answers):
    p, d = setting.prefill(answers.never), setting.decode()
    proxy = setting.proxy([p], [d], **QUICK_CHECKS)
    asking = Background(lambda: proxy.ask(stream=True))
    answers.until(lambda: p.seen)
    p.health = None
    assert asking.result().text.endswith("data: [DONE]\n\n")
    assert len(d.seen) == 1 and "kv_transfer_params" not in d.seen[0].json
    assert proxy.metric("decode_only_total", reason="prefill_failed") == 1


@pytest.mark.parametrize(("stream", "begun"), first_of([(False, True), (True, False)], (False, True), (False, True)))
def test_a_decode_server_that_freezes_before_its_first_byte(setting, answers, stream, begun):
    p, pool = setting.prefill(), [setting.decode(), setting.decode()]
    proxy = setting.proxy([p], pool, **QUICK_CHECKS)
    frozen, other = first_choice(proxy, pool)

    async def head(server, seen):
        async def nothing():
            await server.held()
            yield b""

        return StreamingResponse(nothing(), media_type="text/event-stream")

    frozen.script.append(head if begun else answers.never)
    asking = Background(lambda: proxy.ask(stream=stream))
    answers.until(lambda: len(frozen.seen) == 1)
    frozen.health = None
    response = asking.result()
    assert response.status_code == 200 and response.text.count("hel") == 1
    # It may have fetched what was handed over.
    ids = [server.seen[0].json["kv_transfer_params"]["remote_request_id"] for server in (frozen, other)]
    assert ids == ["cmpl-2", "cmpl-3"]
    assert proxy.metric("upstream_failures_total", pool="decode", server=frozen.url, kind="down") == 1


def test_a_decode_server_that_freezes_after_its_first_byte_is_waited_for(setting, answers):
    pool = [setting.decode(answers.decoded("one", "two", hold_after=1)) for _ in range(2)]
    proxy = setting.proxy([setting.prefill()], pool, **QUICK_CHECKS)
    body = {"prompt": "x", "stream": True}
    with proxy.http.stream("POST", proxy.url + "/v1/completions", json=body) as response:
        chunks = response.iter_raw()
        assert b"one" in next(chunks)
        (frozen,) = [server for server in pool if server.seen]
        frozen.health = None
        answers.until(lambda: proxy.metric("upstream_up", server=frozen.url) == 0)
        frozen.hold.set()
        assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
    assert sum(len(server.seen) for server in pool) == 1


def test_the_only_decode_server_freezes_until_another_one_comes_up(setting, answers):
    """Nobody else could answer: it is waited for. Then somebody can."""
    pool = [setting.decode(answers.never), setting.decode()]
    pool[1].health = 503
    proxy = setting.proxy([setting.prefill()], pool, **QUICK_CHECKS)
    asking = Background(proxy.ask)
    answers.until(lambda: pool[0].seen)
    pool[0].health = None
    answers.until(lambda: proxy.metric("upstream_up", pool="decode") == 0)
    pool[1].health = 200
    assert asking.result().status_code == 200
    assert [len(server.seen) for server in pool] == [1, 1] and proxy.metric("retries_total", pool="decode") == 1


def test_a_server_that_is_shutting_down_finishes_what_it_has_begun(setting, answers):
    """Its /health says 503: it is given nothing new, and keeps what it has."""
    pools = [setting.prefill(), setting.prefill()], [setting.decode(), setting.decode()]
    for server in (*pools[0], *pools[1]):
        server.script.append(answers.held_back(server.default))
    proxy = setting.proxy(*pools, **QUICK_CHECKS)
    asking = Background(proxy.ask)
    for number, pool in enumerate(pools):
        answers.until(lambda pool=pool: any(server.seen for server in pool))
        (leaving,) = [server for server in pool if server.seen]
        leaving.health = 503
        answers.until(lambda server=leaving: proxy.metric("upstream_up", server=server.url) == 0)
        assert number == 1 or not any(server.seen for server in pools[1])
        leaving.hold.set()
    assert asking.result().status_code == 200
    assert [sum(len(server.seen) for server in pool) for pool in pools] == [1, 1]
    assert proxy.metric("retries_total") == proxy.metric("upstream_failures_total") == 0


def test_without_prefill_servers_it_is_still_healthy(setting):
    proxy = setting.proxy(["http://127.0.0.1:1"], [setting.decode()])
    assert proxy.get("/health").status_code == 200
    assert proxy.ask().status_code == 200
    assert proxy.metric("decode_only_total", reason="prefill_down") == 1


# -- clients that leave ----------------------------------------------------------------------------------------------


def hang_up(proxy, body, when):
    content = json.dumps({"model": "m", "prompt": "x"} | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as connection:
        connection.sendall(head.encode() + content)
        when(connection)


def test_a_client_that_leaves_while_prefilling(setting, answers):
    p, d = setting.prefill(answers.never), setting.decode()
    proxy = setting.proxy([p], [d])
    hang_up(proxy, {}, lambda connection: answers.until(lambda: p.seen))
    answers.until(lambda: p.num_cancelled == 1)
    answers.until(lambda: proxy.metric("requests_total", outcome="gone") == 1)
    assert not d.seen and proxy.metric("upstream_open") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_decoding(setting, answers, stream):
    d = setting.decode(answers.decoded("one", "two", hold_after=1) if stream else answers.never)
    proxy = setting.proxy([setting.prefill()], [d])
    left = (lambda connection: connection.recv(4096)) if stream else (lambda connection: answers.until(lambda: d.seen))
    hang_up(proxy, {"stream": stream}, left)
    answers.until(lambda: d.num_cancelled == 1)
    answers.until(lambda: proxy.metric("requests_total", outcome="gone") == 1)
    assert proxy.metric("upstream_open") == 0


# -- draining --------------------------------------------------------------------------------------------------------


class Background:
    def __init__(self, function):
        self._results = []
        self._thread = threading.Thread(target=lambda: self._results.append(function()), daemon=True)
        self._thread.start()

    def result(self):
        self._thread.join(10)
        return self._results[0]


def test_draining_finishes_what_is_open_and_takes_no_more(setting, answers):
    d = setting.decode(answers.decoded("one", "two", hold_after=1))
    proxy = setting.proxy([setting.prefill()], [d])
    with httpx.Client(timeout=10, verify=False) as client:
        url = proxy.url + "/v1/completions"
        streamed = Background(lambda: client.post(url, json={"prompt": "x", "stream": True}))
        answers.until(lambda: d.seen)
        proxy.drain()
        answers.until(lambda: proxy.get("/health").status_code == 503)
        refused = proxy.ask()
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        d.hold.set()
        assert "two" in streamed.result().text and "error" not in streamed.result().text
    assert proxy.join() == 0


def test_draining_has_an_end(setting, answers):
    d = setting.decode(answers.decoded("one", "two", hold_after=1), answers.never)
    proxy = setting.proxy([setting.prefill()], [d], shutdown_timeout=0.1)
    with httpx.Client(timeout=10, verify=False) as client:
        url = proxy.url + "/v1/completions"
        streamed = Background(lambda: client.post(url, json={"prompt": "x", "stream": True}))
        answers.until(lambda: len(d.seen) == 1)
        whole = Background(lambda: client.post(url, json={"prompt": "x"}))
        answers.until(lambda: len(d.seen) == 2)
        proxy.drain()
        assert "one" in streamed.result().text and "shutting down" in streamed.result().text
        assert whole.result().status_code == 503
    assert proxy.join() == 0
    answers.until(lambda: d.num_cancelled == 2)
