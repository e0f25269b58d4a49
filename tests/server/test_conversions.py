"""Numbers and booleans in other JSON types that say the same are taken as vLLM takes them: by pydantic's table."""

import httpx
import pytest

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def ask(server, path, **fields):
    """The engine's request and the answer. Asked past the document, which tells of one type for each field."""
    body = {"max_tokens": 2} | (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    response = httpx.post(server.url + path, json=body | fields, timeout=10)
    assert response.status_code == 200, response.text
    return server.requests[-1], response


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(
    ("field", "value", "meant", "of"),
    [
        ("max_tokens", 5.0, 5, "stop_conditions"),
        ("max_tokens", "5", 5, "stop_conditions"),
        ("max_tokens", " 5.0 ", 5, "stop_conditions"),
        ("max_tokens", True, 1, "stop_conditions"),
        ("ignore_eos", "yes", True, "stop_conditions"),
        ("ignore_eos", 1, True, "stop_conditions"),
        ("stop_token_ids", ["5", 6.0], [5, 6], "stop_conditions"),
        ("temperature", "0.5", 0.5, "sampling"),
        ("temperature", "1e-1", 0.1, "sampling"),
        ("top_k", "3", 3, "sampling"),
        ("seed", 7.0, 7, "sampling"),
        ("logit_bias", {"5": "1"}, ((5, 1.0),), "sampling"),
        ("allowed_token_ids", ["5", 6.0], (5, 6), "sampling"),
        ("n", "2", 2, None),
        ("skip_special_tokens", "off", False, None),
        ("logprobs", 1, None, None),
    ],
)
def test_numbers_and_booleans_in_other_types(server, path, field, value, meant, of):
    request, _ = ask(server, path, **{field: value})
    if field == "logprobs":
        assert request.logprobs == (1 if path == COMPLETIONS else 0)
        return
    found = getattr(request if of is None else getattr(request, of), field)
    assert found == meant and type(found) is type(meant)


def test_a_stream_that_is_asked_for_in_words(server):
    _, response = ask(server, CHATS, stream="true", stream_options={"include_usage": "yes"})
    assert response.headers["content-type"].startswith("text/event-stream") and '"usage"' in response.text


def test_prompts_of_token_ids(server):
    """Texts that are numbers stay texts, as in vLLM: they are several prompts."""
    ask(server, COMPLETIONS, prompt=[1.0, 2, "3"])
    assert memoryview(server.requests[-1].prompt).cast("q").tolist() == [1, 2, 3]
    ask(server, COMPLETIONS, prompt=["1", "2"])
    assert [memoryview(one.prompt).cast("q").tolist() for one in server.requests[-2:]] == [[ord("1")], [ord("2")]]
