"""Clients that go away, engines that die, servers that drain: nobody is left waiting."""

import json
import socket
import threading
import time

import httpx
import openai
import pytest

from doubles.byte_tokenizer import ByteTokenizer

PAUSED = "echo:pause_after=2"
BODY = {"model": "echo", "prompt": "hello"}
PATHS = [
    ("/v1/completions", BODY),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
]


class Background:
    """Calls a function in a thread; `result()` waits for what it gave or raised."""

    def __init__(self, function):
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function):
        try:
            self._outcome = function(), None
        except Exception as error:
            self._outcome = None, error

    def result(self):
        self._thread.join(15)
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def running(server, count):
    server.until(lambda: server.core.stats().num_running == count)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_client_that_goes_away_frees_its_request(serve, path, body, stream):
    server = serve(model=PAUSED)
    content = json.dumps(body | {"stream": stream}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode() + content)
        running(server, 1)
    running(server, 0)
    server.assert_nothing_is_held()
    server.until(lambda: server.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1)
    server.core.resume()
    assert server.post(path, body).status_code == 200


def test_a_client_that_leaves_a_stream_frees_its_request(serve):
    server = serve(model=PAUSED)
    with server.client() as client:
        stream = client.completions.create(**BODY, stream=True)
        assert next(iter(stream)).choices[0].text
        running(server, 1)
        stream.close()
    running(server, 0)


def test_a_client_that_hangs_up_in_the_middle_of_its_request(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.post("/v1/completions", BODY).status_code == 200


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_the_engines_death_before_the_first_byte_is_503(serve, path, body):
    server = serve(model="echo:fail_at_step=1")
    response = server.post(path, body | {"stream": True})
    assert response.status_code == 503
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("Service Unavailable", 503) and "told to fail" in error["message"]
    assert server.join() == 1


def test_the_engines_death_answers_whole_requests_with_503(serve):
    server = serve(model="echo:fail_at_step=3")
    with server.client() as client, pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**BODY)
    assert caught.value.status_code == 503
    assert server.join() == 1


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_the_engines_death_in_a_stream_is_an_error_event(serve, path, body):
    server = serve(model="echo:fail_at_step=3")
    response = server.post(path, body | {"stream": True})
    assert response.status_code == 200
    *_, error, done = response.text.strip().split("\n\n")
    shown = json.loads(error.removeprefix("data: "))["error"]
    assert "told to fail" in shown.pop("message")
    assert shown == {"type": "Service Unavailable", "param": None, "code": 503}
    assert done == "data: [DONE]"
    assert server.join() == 1


def test_the_openai_client_sees_the_error_event(serve):
    server = serve(model="echo:fail_at_step=3")
    with (
        server.client() as client,
        pytest.raises(openai.APIError, match="told to fail"),
        client.completions.create(**BODY, stream=True) as stream,
    ):
        list(stream)


def test_an_audit_that_fails_ends_the_server(serve):
    server = serve(model="echo:bad_audit=true")
    assert server.join() == 1


def test_draining_finishes_what_is_open_and_takes_no_more(serve):
    server = serve(model=PAUSED)
    streamed = Background(lambda: server.post("/v1/completions", BODY | {"stream": True}))
    whole = Background(lambda: server.post("/v1/completions", BODY))
    running(server, 2)
    server.drain()
    server.until(lambda: server.get("/health").status_code == 503)
    refused = server.post("/v1/completions", BODY)
    assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
    assert server.get("/metrics").status_code == 200
    server.core.resume()
    assert whole.result().json()["choices"][0]["text"] == "hello"
    assert streamed.result().text.endswith("data: [DONE]\n\n")
    assert server.join() == 0


@pytest.mark.parametrize("twice", [False, True])
def test_draining_has_an_end(serve, twice):
    server = serve(model=PAUSED, options={"shutdown_timeout": 60.0 if twice else 0.1})
    streamed = Background(lambda: server.post("/v1/completions", BODY | {"stream": True}))
    never = Background(lambda: server.post("/v1/completions", BODY))
    running(server, 2)
    server.drain()
    if twice:
        server.drain()
    assert '"error"' in streamed.result().text
    assert never.result().status_code == 503
    assert server.join() == 0


def test_a_server_that_is_full_says_so(serve):
    server = serve(model=PAUSED, options={"max_open": 1})
    first = Background(lambda: server.post("/v1/completions", BODY))
    running(server, 1)
    refused = server.post("/v1/completions", BODY)
    assert refused.status_code == 429 and "try again later" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1" and refused.json()["error"]["type"] == "Too Many Requests"
    assert server.get("/health").status_code == 200
    server.core.resume()
    assert first.result().status_code == 200


def test_an_engine_that_is_full_says_so(serve):
    server = serve(model=PAUSED, max_num_seqs=1, max_waiting=1)
    first = Background(lambda: server.post("/v1/completions", BODY))
    running(server, 1)
    second = Background(lambda: server.post("/v1/completions", BODY))
    server.until(lambda: server.core.stats().num_waiting == 1)
    refused = server.post("/v1/completions", BODY)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    server.core.resume()
    assert first.result().status_code == second.result().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_a_deadline(serve, stream):
    server = serve(model=PAUSED, options={"request_timeout": 0.6})
    response = server.post("/v1/completions", BODY | {"stream": stream})
    assert response.status_code == (200 if stream else 504)
    assert "not there within 0.6 s" in response.text
    running(server, 0)
    assert server.metric('vllm:request_success_total{engine="0",finished_reason="error"') == 1


def test_the_prompt_is_made_within_the_deadline(serve):
    class Slow(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            time.sleep(0.4)
            return [1]

    server = serve(tokenizer=Slow(), options={"request_timeout": 0.1})
    assert server.post("/v1/completions", BODY).status_code == 504


def test_a_bug_is_a_500_that_tells_nothing(serve, caplog):
    class Broken(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            raise ZeroDivisionError("secret")

    server = serve(tokenizer=Broken())
    response = server.post("/v1/completions", BODY)
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["type"] == "InternalServerError"
    assert server.get("/health").status_code == 200


def test_the_log_has_an_address_that_clients_can_use(serve, caplog):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    caplog.set_level("INFO")
    server = serve({"host": "::1"})
    url = f"http://[::1]:{server.port}"
    assert f"serving echo on {url}" in caplog.messages
    assert httpx.get(f"{url}/health", timeout=10, verify=False).status_code == 200
