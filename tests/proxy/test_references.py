"""What a prefill server hands over is junk: the decode server computes, and the client hears nothing of it."""

import json

import pytest
from starlette.responses import JSONResponse, Response

from cairn.proxy.protocol import BadReference, handover_of
from tiers import first_of

NESTED = b"[" * 100_000 + b"]" * 100_000
HINT = {"engine": "d-0", "host": "127.0.0.1", "port": 5601}


def reference(answers, **changes):
    return json.dumps(answers.handover(1) | changes).encode()


def prefilled(reference):
    """A prefill server's answer with these bytes as its `kv_transfer_params`."""

    async def answer(server, seen):
        content = b'{"choices": [], "kv_transfer_params": ' + reference + b"}"
        return Response(content, media_type="application/json")

    return answer


def refusing(param, status=400):
    """A decode server that refuses every request with a reference in it, in this field's name."""

    async def answer(server, seen):
        if "kv_transfer_params" in seen.json:
            return JSONResponse({"error": {"message": "no", "param": param}}, status)
        return JSONResponse({"choices": [{"index": 0, "text": "hello"}]})

    return answer


JUNK = {
    "text": b'"nonsense"',
    "list": b"[1]",
    "number": b"7",
    "no UTF-8": b'{"a_key_of_its_own": "\xff"}',
    "digits": b'{"a_key_of_its_own": ' + b"9" * 5000 + b"}",
    "no number": b'{"a_key_of_its_own": 1e400}',
    "size": b'{"a_key_of_its_own": "' + b"x" * (4 << 20) + b'"}',
    "host": b'{"remote_host": ["127.0.0.1"]}',
    "long host": b'{"remote_host": "' + b"h" * 254 + b'"}',
    "port": b'{"remote_port": 70000}',
    "port as text": b'{"remote_port": "5600"}',
    "blocks": b'{"remote_block_ids": {"0": 1}}',
    "block": b'{"remote_block_ids": [[1, -1]]}',
    "group": b'{"remote_block_ids": [["1"]]}',
    "flag": b'{"do_remote_prefill": "yes"}',
    "wrong way": b'{"do_remote_prefill": false, "do_remote_decode": true}',
    "engine": b'{"remote_engine_id": ""}',
    "request": b'{"remote_request_id": 12}',
    "ranks": b'{"tp_size": 0}',
    "tokens": b'{"remote_num_tokens": -5}',
}


@pytest.mark.parametrize(
    ("name", "stream"), first_of([*((name, False) for name in JUNK), ("group", True)], JUNK, (False, True))
)
def test_what_no_server_would_take_is_never_sent(setting, name, stream):
    p, d = setting.prefill(prefilled(JUNK[name])), setting.decode(refusing("kv_transfer_params"))
    proxy = setting.proxy([p], [d])
    response = proxy.ask(stream=stream)
    assert response.status_code == 200 and "hello" in response.text
    assert (len(p.seen), len(d.seen)) == (1, 1) and "kv_transfer_params" not in d.seen[0].json
    assert proxy.metric("decode_only_total", reason="bad_reference") == proxy.metric("decode_only_total") == 1
    assert proxy.metric("upstream_failures_total", pool="prefill", server=p.url, kind="reference") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "junk", [b'{"a_key_of_its_own": ' + NESTED + b"}", b'"\\ud800"', b"NaN", b"{"], ids=["nested", "pair", "NaN", "cut"]
)
def test_an_answer_that_cannot_be_read_at_all_is_another_prefill_servers_to_give(setting, junk, stream):
    pool, d = [setting.prefill(prefilled(junk)) for _ in range(2)], setting.decode(refusing("kv_transfer_params"))
    proxy = setting.proxy(pool, [d])
    response = proxy.ask(stream=stream)
    assert response.status_code == 200 and "hello" in response.text
    assert [len(server.seen) for server in (*pool, d)] == [1, 1, 1] and "kv_transfer_params" not in d.seen[0].json
    assert proxy.metric("decode_only_total", reason="prefill_failed") == proxy.metric("decode_only_total") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "param"),
    [(400, "kv_transfer_params.remote_host"), (422, "kv_transfer_params"), (413, None)],
)
def test_what_the_decode_server_refuses_it_is_sent_without(setting, answers, status, param, stream):
    """The same server, once; one that fails then is replaced as ever, and nothing is prefilled again."""
    p, pool = setting.prefill(), [setting.decode(), setting.decode()]
    for d in pool:
        d.script += [refusing(param, status), answers.status(500)]
    proxy = setting.proxy([p], pool)
    assert proxy.ask(stream=stream).status_code == 200
    first, second = sorted(pool, key=lambda d: -len(d.seen))
    assert [len(server.seen) for server in (p, first, second)] == [1, 2, 1]
    assert ["kv_transfer_params" in seen.json for seen in (*first.seen, *second.seen)] == [True, False, False]
    assert proxy.metric("decode_only_total", reason="bad_reference") == proxy.metric("decode_only_total") == 1
    assert proxy.metric("upstream_failures_total", pool="prefill", kind="reference") == 1
    assert proxy.metric("retries_total", pool="decode") == 1


def test_a_refusal_of_what_the_client_sent_is_the_clients(setting):
    p, d = setting.prefill(), setting.decode(refusing("max_tokens"))
    proxy = setting.proxy([p], [d])
    response = proxy.ask()
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    assert len(d.seen) == 1 and proxy.metric("decode_only_total") == 0
    assert proxy.metric("first_byte_seconds_count") == 1


@pytest.mark.parametrize("hint_refused", [True, False])
def test_a_prefill_server_that_refuses_what_the_proxy_has_added(setting, answers, hint_refused):
    """A hint that P refuses is forgotten; where P refuses without one, too, D does it alone."""

    async def refusing_prefill(server, seen):
        if not hint_refused or "cairn_decode_hint" in seen.json["kv_transfer_params"]:
            return JSONResponse({"error": {"message": "no", "param": "kv_transfer_params.cairn_decode_hint"}}, 400)
        return await default(server, seen)

    p, d = setting.prefill(), setting.decode(answers.decoded("y" * 100, hint=HINT))
    default = p.default
    proxy = setting.proxy([p], [d])
    prompt = "x" * 100
    assert proxy.ask(prompt=prompt).status_code == 200
    p.default, d.default = refusing_prefill, answers.decoded("z")
    for _ in range(2):
        assert proxy.ask(prompt=prompt + "y" * 100 + "next").status_code == 200
    told = ["cairn_decode_hint" in seen.json["kv_transfer_params"] for seen in p.seen]
    assert told == [False, True, False, False]
    assert proxy.metric("hints") == 0
    assert proxy.metric("decode_only_total", reason="prefill_failed") == (0 if hint_refused else 2)


@pytest.mark.parametrize(
    "hint",
    [HINT | {"num_tokens": "5"}, HINT | {"num_tokens": -1}, HINT | {"host": "h" * 254}, HINT | {"engine": "a\nb"}],
)
def test_a_hint_that_prefill_servers_refuse_is_not_kept(setting, answers, hint):
    proxy = setting.proxy([setting.prefill()], [setting.decode(answers.decoded("hello", hint=hint))])
    assert proxy.ask(prompt="x" * 100).status_code == 200
    assert proxy.metric("hints") == 0


@pytest.mark.parametrize("blocks", [None, [], [1, 2], [[1, 2], []], [[0], [(1 << 31) - 1]]])
def test_references_of_other_servers_go_through(answers, blocks):
    given = reference(answers, remote_block_ids=blocks, dcp_size=1, transfer_mode="pull", kv_of_another="connector")
    assert bytes(handover_of(b'{"kv_transfer_params": ' + given + b"}")) == given


def test_only_the_reference_is_wrong(answers):
    """An answer that cannot be read at all is another matter: another prefill server is asked."""
    with pytest.raises(BadReference):
        handover_of(b'{"kv_transfer_params": 1}')
    with pytest.raises(ValueError) as unreadable:
        handover_of(b"[1]")
    assert not isinstance(unreadable.value, BadReference)
