"""What names a session comes to the engine as a hash, by every API's own fields and headers."""

import pytest

from cairn.http.sessions import name_session

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
BODIES = {
    CHAT: {"messages": [USER], "max_tokens": 2},
    TEXT: {"prompt": "hi", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "echo", "messages": [USER], "max_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_header_names_a_session(server, path):
    names = []
    for headers in ({}, {"x-session-affinity": "s"}, {"X-Claude-Code-Session-Id": "s"}, {"session-id": "other"}):
        assert server.post(path, BODIES[path], headers=headers).status_code == 200
        names.append(server.requests[-1].session)
    assert names[0] == "" and names[1] == names[2] != names[3]
    assert all(len(name) == 32 and int(name, 16) >= 0 for name in names[1:])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"prompt_cache_key": "s"}),
        (CHAT, {"vllm_xargs": {"session_id": "s"}}),
        (TEXT, {"prompt_cache_key": "s"}),
        (RESPONSES, {"prompt_cache_key": "s"}),
        ("/v1/messages", {"metadata": {"user_id": "s"}}),
    ],
)
def test_a_field_names_a_session(server, path, fields):
    assert server.post(path, BODIES[path] | fields).status_code == 200
    name = server.requests[-1].session
    assert len(name) == 32
    assert server.post(path, BODIES[path] | fields | {"cache_salt": "t"}).status_code == 200
    assert server.requests[-1].session not in ("", name)


@pytest.mark.parametrize("text", ["s" * 1_000_000, "Zoë 🪨", "\ud83e", "\0", "a" * 32])
def test_a_name_may_be_any_text(text):
    name = name_session({"session_id": text}, ())
    assert name is not None and len(name) == 32 and name != text
    assert name != name_session({"session_id": text + "s"}, ())


@pytest.mark.parametrize("body", [{"session_id": ["s"]}, {"metadata": 5, "vllm_xargs": "s"}, {"metadata": None}])
def test_what_is_no_text_is_no_name(body):
    assert name_session(body, [(b"session-id", b"")]) is None
