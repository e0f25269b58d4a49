"""What D refuses costs P nothing: P, which sees the client's own fields, refuses it before it computes; and what has
been handed over for nothing is released, not kept until its lease runs out."""

import asyncio
import threading
from contextlib import suppress

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from cairn.engine.contract import EngineConfig, KvTransferConfig
from cairn.proxy.app import create_app
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService
from doubles.echo_core import build_echo_core
from doubles.engine_requests import generate_request

TAKES_PART = KvTransferConfig(port=0)
MAX_WAITING = 100
PROMPT = "two hundred tokens, " * 10
SAID = [{"role": "user", "content": PROMPT}]
BODIES = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": SAID},
    "/v1/messages": {"model": "echo", "max_tokens": 8, "messages": SAID},
    "/v1/responses": {"input": PROMPT},
}
MISSING = object()
"""In a case: the field is left out."""

BY_ALL_OF_OPENAI = (
    *({"max_tokens": value} for value in (4000, -1, "many", 1.5, 1 << 40, [1])),
    *({"min_tokens": 9, "max_tokens": 8}, {"min_tokens": -1}, {"min_tokens": "few"}),
    *({"n": value} for value in (0, 999, MAX_WAITING + 1, -1, "two")),
    *({"stream_options": {"include_usage": True}}, {"stream_options": 5}, {"stream": True, "stream_options": [1]}),
    {"model": "another"},
)
REFUSED = {
    "/v1/completions": (
        *BY_ALL_OF_OPENAI,
        *({"max_tokens": 0}, {"max_tokens": 0, "logprobs": 1}, {"echo": "loud"}),
        *({"logprobs": value} for value in (99, -2, -1, "all")),
        *({"top_logprobs": 3}, {"logprob_token_ids": [5]}, {"logprobs": 1, "logprob_token_ids": [1 << 20]}),
    ),
    "/v1/chat/completions": (
        *BY_ALL_OF_OPENAI,
        {"max_tokens": 0},
        *({"max_completion_tokens": value} for value in (4000, 0, -1, "many")),
        {"max_tokens": 8, "max_completion_tokens": 4000},
        {"min_tokens": 9, "max_completion_tokens": 8},
        *({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 99}, {"logprobs": "maybe"}, {"echo": [1]}),
    ),
    "/v1/messages": (
        *({"max_tokens": value} for value in (4000, 0, -1, "many", None, MISSING)),
        *({"stop_sequences": [""]}, {"model": "another"}),
    ),
    "/v1/responses": (
        *({"max_output_tokens": value} for value in (4000, 0, -1, "many")),
        *({"max_tokens": 5}, {"max_completion_tokens": 5}, {"min_tokens": 2}, {"n": 2}, {"prompt_logprobs": 1}),
        *({"include": ["nonsense"]}, {"include": ["message.output_text.logprobs"], "top_logprobs": 99}),
        *({"top_logprobs": "all"}, {"stream_options": 5}, {"store": "maybe"}, {"background": "maybe"}),
        *({"background": True, "store": False}, {"background": True, "stream": True}),
        {"model": "another"},
    ),
}
TAKEN = {
    "/v1/completions": (
        *({"n": 3}, {"min_tokens": 3, "max_tokens": 4}, {"echo": True}, {"logprobs": 5, "logprob_token_ids": [5]}),
        *({"stream": True, "stream_options": {"include_usage": True}}, {"stream": None, "n": None, "max_tokens": None}),
        {"max_tokens": 3000, "truncate_prompt_tokens": 50},
    ),
    "/v1/chat/completions": (
        {"n": 2, "logprobs": True, "top_logprobs": 3, "max_completion_tokens": 9},
        {"stream": True, "echo": True, "logprobs": True, "stream_options": {"include_usage": True}},
    ),
    "/v1/messages": ({"stream": True}, {"max_tokens": 3000}),
    "/v1/responses": (
        *({"background": True}, {"stream": True, "store": False}, {"max_completion_tokens": None}),
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
}
COMPUTED_WHERE_ANSWERED = (
    ("/v1/completions", {"prompt_logprobs": 0}),
    ("/v1/completions", {"prompt_logprobs": 2}),
    ("/v1/completions", {"echo": True, "logprobs": 0}),
    ("/v1/completions", {"echo": "yes", "logprobs": 1, "stream": True}),
    ("/v1/chat/completions", {"prompt_logprobs": 1}),
    ("/v1/chat/completions", {"echo": True, "logprobs": True}),
)


class Trio:
    """P, D and a proxy in front of both. What it has been asked for once, P has cached: `unseen` makes it another's."""

    def __init__(self, running_server, running_app):
        self.p, self.d = (running_server(kv_transfer=TAKES_PART, max_waiting=MAX_WAITING) for _ in range(2))
        self.proxy = running_app(create_app(ProxyService(ProxyOptions(prefill=[self.p.url], decode=[self.d.url]))))
        self._num_salts = 0

    def end(self):
        self.proxy.end()
        for server in (self.p, self.d):
            server.drain()
            assert server.join() == 0

    def unseen(self, path, changes):
        self._num_salts += 1
        body = BODIES[path] | changes | {"cache_salt": f"salt-{self._num_salts}"}
        return {name: value for name, value in body.items() if value is not MISSING}

    def routed(self, pool):
        """How many tokens the proxy has sent to a pool."""
        lines, name = self.proxy.http.get("/metrics").text.splitlines(), f'routed_tokens_total{{pool="{pool}"'
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"cairn_proxy:{name}"))

    def costs(self):
        """What P has computed and keeps."""
        stats = self.p.core.stats()
        return stats.tokens.computed_prompt, stats.tokens.generation, stats.transfers.leased_pages

    def hand_over(self, prompt=PROMPT):
        """What P says when it is asked as vLLM's proxies do."""
        self._num_salts += 1
        self.salt = {"cache_salt": f"salt-{self._num_salts}"}
        body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}} | self.salt
        return self.p.post("/v1/completions", body).json()["kv_transfer_params"]

    def assert_released(self, num_expired=0):
        self.p.until(lambda: not self.p.core.stats().transfers.leased_pages)
        assert self.p.core.stats().transfers.expired_leases == num_expired


@pytest.fixture(scope="module")
def trio(running_server, running_app):
    made = Trio(running_server, running_app)
    yield made
    made.end()


@pytest.mark.parametrize(("path", "changes"), [(path, changes) for path, cases in REFUSED.items() for changes in cases])
def test_what_d_would_refuse_p_refuses_before_it_computes(trio, path, changes):
    body = trio.unseen(path, changes)
    of_d = trio.d.post(path, body)
    before, at_d = trio.costs(), trio.routed("decode")
    answer = trio.proxy.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]) == (of_d.status_code, of_d.json()["error"])
    assert answer.status_code == (404 if changes.get("model") == "another" else 400)
    assert trio.costs() == before and trio.routed("decode") == at_d


@pytest.mark.parametrize(("path", "changes"), [(path, changes) for path, cases in TAKEN.items() for changes in cases])
def test_what_d_takes_p_takes(trio, path, changes):
    body = trio.unseen(path, changes)
    (computed, generated, _), num_asked = trio.costs(), len(trio.d.requests)
    answer = trio.proxy.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    trio.d.until(lambda: len(trio.d.requests) > num_asked)  # in the background it may still be on its way
    of_p, of_d = trio.p.requests[-1], trio.d.requests[-1]
    assert of_p.prefill_only and not of_d.prefill_only and of_p.prompt == of_d.prompt
    assert b"do_remote_prefill" in of_d.kv_transfer_params
    trio.assert_released()
    assert trio.costs() == (computed + len(of_p.prompt) // 8, generated + 1, 0)


@pytest.mark.parametrize(("path", "changes"), COMPUTED_WHERE_ANSWERED)
def test_a_prompt_whose_log_probabilities_are_told_is_computed_where_it_is_answered(trio, path, changes):
    body = trio.unseen(path, changes)
    before = trio.costs()
    for _ in range(2):
        answer = trio.proxy.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
    assert trio.costs() == before and trio.d.requests[-1].kv_transfer_params is None


def test_d_tells_no_cached_tokens_of_p_for_a_prompt_that_it_computes_itself(trio):
    for _ in range(2):
        params = trio.hand_over("computed by D, whatever P had cached")
        answer = trio.d.post(
            "/v1/completions",
            {"prompt": "computed by D, whatever P had cached", "prompt_logprobs": 1, "kv_transfer_params": params},
        )
        assert answer.json()["cairn"]["cache"]["prefill_cached_tokens"] is None
    trio.assert_released()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, {"model": "another"}),
        (400, {"max_tokens": 4000}),
        (400, {"max_tokens": "many"}),
        (400, {"min_tokens": 9, "max_tokens": 8}),
        (400, {"n": 999}),
        (400, {"stream_options": {}}),
        (400, {"best_of": 4}),
        (400, {"guided_regex": "("}),
        (400, {"prompt": []}),
    ],
)
def test_what_d_refuses_it_lets_go_of(trio, status, body):
    """Whoever stands in front: P was asked for one token."""
    params = trio.hand_over()
    assert trio.costs()[2] > 0
    answer = trio.d.post("/v1/completions", {"prompt": PROMPT, "kv_transfer_params": params} | trio.salt | body)
    assert answer.status_code == status, answer.text
    trio.assert_released()


@pytest.mark.parametrize("n", [0, 999])
def test_p_looks_at_the_number_of_answers_though_it_gives_one(trio, n):
    before = trio.costs()
    params = {"do_remote_decode": True}
    answer = trio.p.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "n": n, "kv_transfer_params": params})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n") and trio.costs() == before


def test_client_fields_that_are_no_object_are_refused(trio):
    params = {"do_remote_decode": True, "cairn_client_fields": [1]}
    answer = trio.p.post("/v1/completions", {"prompt": PROMPT, "kv_transfer_params": params})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params.cairn_client_fields"


def test_only_who_knows_all_of_a_lease_can_let_go_of_it(trio):
    """Not with a nonce that was made up, nor with one's own and the id of another's request."""
    params, own = trio.hand_over(), trio.hand_over("another prompt " * 4)
    theirs, mine = params["remote_request_id"].partition("~"), own["remote_request_id"].partition("~")
    wrong = [theirs[0] + "~" + "0" * 32, theirs[0] + "~" + mine[2], mine[0] + "~" + theirs[2], theirs[0], "~", "", 5]
    leased = trio.costs()[2]
    for server in (trio.p, trio.d):
        for reference in wrong:
            answer = server.post(
                "/release_kv_transfer", {"kv_transfer_params": params | {"remote_request_id": reference}}
            )
            assert answer.status_code == 200
        refused = {"prompt": PROMPT, "n": 0}
        for reference in wrong:
            server.post("/v1/completions", refused | {"kv_transfer_params": params | {"remote_request_id": reference}})
    # what was asked first is over when what is asked last is
    for reference in (own, params):
        assert trio.costs()[2] > 0
        trio.d.post("/release_kv_transfer", {"kv_transfer_params": reference})
        trio.p.until(lambda before=leased: trio.costs()[2] < before)
        leased = trio.costs()[2]
    trio.assert_released()


@pytest.mark.parametrize("params", [MISSING, None, "x", [1]])
def test_a_release_that_says_nothing_is_refused(trio, params):
    body = {} if params is MISSING else {"kv_transfer_params": params}
    answer = trio.p.post("/release_kv_transfer", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")


class Decoder:
    """A D that never gets to claim anything. `answer`: a status, None for none at all."""

    def __init__(self, run_app, answer):
        self.num_asked, self.answer = 0, answer
        paths = [Route("/health", lambda request: Response()), Route("/v1/completions", self.decode, methods=["POST"])]
        self.url = run_app(Starlette(routes=paths)).url

    async def decode(self, request):
        await request.body()
        self.num_asked += 1
        if self.answer is not None:
            return Response(b'{"error": {"message": "no"}}', self.answer, media_type="application/json")
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        return Response(status_code=499)


@pytest.mark.parametrize("answer", [400, 401, 404, 413, 422, 429, 500, 503])
def test_what_no_server_has_taken_the_proxy_lets_go_of(trio, run_app, answer):
    decoder = Decoder(run_app, answer)
    options = ProxyOptions(prefill=[trio.p.url], decode=[decoder.url], max_attempts=1)
    proxy = run_app(create_app(ProxyService(options)))
    assert proxy.http.post("/v1/completions", json={"prompt": PROMPT}).status_code == answer
    trio.assert_released()


def test_prompts_of_clients_that_leave_before_d_claims_them_are_released(trio, run_app):
    """All ten, when D has been asked and has claimed nothing."""
    decoder = Decoder(run_app, None)
    proxy = run_app(create_app(ProxyService(ProxyOptions(prefill=[trio.p.url], decode=[decoder.url]))))

    async def leave():
        async with httpx.AsyncClient(base_url=proxy.url, timeout=30) as http:
            asking = [
                asyncio.create_task(http.post("/v1/completions", json={"prompt": f"{number} {PROMPT}"}))
                for number in range(10)
            ]
            while decoder.num_asked < 10:
                await asyncio.sleep(0.01)
            assert trio.costs()[2] >= 10
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(asyncio.wait_for(leave(), 30))
    trio.assert_released()


def test_prompts_of_clients_that_leave_while_p_answers_are_released(trio, run_app):
    """All ten, when P has leased them and its answer is on its way: nobody but P knows yet what they are called."""
    num_asked = 0

    async def relay(request):
        """P's answers are held back."""
        nonlocal num_asked
        async with httpx.AsyncClient(base_url=trio.p.url, timeout=30) as http:
            sent = {"content": await request.body(), "headers": {"Content-Type": "application/json"}}
            answer = await http.request(request.method, request.url.path, **sent)
        if request.url.path == "/v1/completions":
            assert answer.json()["kv_transfer_params"]["do_remote_prefill"] is True
            num_asked += 1
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
        return Response(answer.content, answer.status_code, media_type="application/json")

    paths = ("/health", "/v1/completions", "/release_kv_transfer")
    p = run_app(Starlette(routes=[Route(path, relay, methods=["GET", "POST"]) for path in paths]))
    proxy = run_app(create_app(ProxyService(ProxyOptions(prefill=[p.url], decode=[trio.d.url]))))

    async def leave():
        async with httpx.AsyncClient(base_url=proxy.url, timeout=30) as http:
            asking = [
                asyncio.create_task(http.post("/v1/completions", json={"prompt": f"{number} {PROMPT}"}))
                for number in range(10)
            ]
            while num_asked < 10:
                await asyncio.sleep(0.01)
            assert trio.costs()[2] >= 10
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(asyncio.wait_for(leave(), 30))
    trio.assert_released()


@pytest.mark.parametrize("key", ["0" * 32, "", "-", "0", 5, None, "0" * 31 + "%"])
def test_a_key_of_ones_own_lets_go_of_nobody_elses_prompt(trio, key):
    params = trio.hand_over()
    leased = trio.costs()[2]
    for server in (trio.p, trio.d):
        body = {"do_remote_decode": True, "cairn_release_key": key}
        assert server.post("/release_kv_transfer", {"kv_transfer_params": body}).status_code == 200
    # the engine looks at this after that
    assert trio.p.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert trio.costs()[2] == leased > 0
    trio.p.post("/release_kv_transfer", {"kv_transfer_params": params})
    trio.assert_released()


def test_prompts_of_clients_that_leave_d_itself_are_released(trio):
    """All ten, when D's engine has not looked at them yet."""
    handed_over = [trio.hand_over(f"{number} {PROMPT}") for number in range(10)]
    blocked, go_on = threading.Event(), threading.Event()
    poll = trio.d.core.poll

    def wait():
        blocked.set()
        go_on.wait(10)
        trio.d.core.poll = poll
        return poll()

    async def leave():
        async with httpx.AsyncClient(base_url=trio.d.url, timeout=30) as http:
            asking = [
                asyncio.create_task(
                    http.post("/v1/completions", json={"prompt": f"{number} {PROMPT}", "kv_transfer_params": params})
                )
                for number, params in enumerate(handed_over)
            ]
            while (await http.get("/load")).json()["server_load"] < 10:
                await asyncio.sleep(0.01)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            while (await http.get("/load")).json()["server_load"]:
                await asyncio.sleep(0.01)

    trio.d.core.poll = wait
    assert blocked.wait(10)
    with suppress(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(leave(), 30))
    go_on.set()
    trio.assert_released()


def test_a_prompt_whose_client_has_left_before_it_was_told_is_released():
    """The engine has ended the request when it hears that nobody waits for it."""
    core = build_echo_core(EngineConfig(model="echo", kv_cache_memory_bytes=64 << 20, kv_transfer=TAKES_PART))
    core.start(lambda: None)
    params = b'{"do_remote_decode": true}'
    core.submit(
        generate_request(
            request_id="r", prompt=np.arange(200, dtype="<i8").tobytes(), kv_transfer_params=params, max_tokens=1
        )
    )
    while not any(output.finish_reason for output in core.step()):
        pass
    assert core.stats().transfers.leased_pages > 0
    core.abort("another")
    core.abort("r")
    waiting = threading.Event()
    for _ in range(1000):
        core.poll()
        if not core.stats().transfers.leased_pages:
            break
        waiting.wait(0.01)
    assert core.stats().transfers.leased_pages == core.stats().transfers.expired_leases == 0
    core.close()
