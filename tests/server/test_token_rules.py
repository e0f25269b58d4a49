"""`allowed_token_ids`, `bad_words` and `truncate_prompt_tokens`: from the body to what the engine is asked."""

import numpy as np
import pytest

from cairn.engine.contract import EngineConfig
from cairn.errors import InvalidRequest
from cairn.server.openai.engine_request import encode_bad_words
from doubles.echo_core import build_echo_core
from doubles.engine_requests import generate_request

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def ask(server, path, **body):
    body = {"max_tokens": 5} | body
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json(), server.requests[-1]


def prompt_of(request):
    return np.frombuffer(request.prompt, "<i8").tolist()


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_they_reach_the_engine(server, path):
    prompt = {"prompt": "x"} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
    _, asked = ask(server, path, **prompt, allowed_token_ids=[5, 258, 5], bad_words=["ab", " c"])
    assert asked.sampling.allowed_token_ids == (5, 258, 5)
    assert asked.sampling.bad_words == ((97, 98), (32, 97, 98), (99,), (32, 99))
    _, asked = ask(server, path, **prompt)
    assert (asked.sampling.allowed_token_ids, asked.sampling.bad_words) == (None, ())
    _, asked = ask(server, path, **prompt, allowed_token_ids=None, bad_words=[], truncate_prompt_tokens=None)
    assert (asked.sampling.allowed_token_ids, asked.sampling.bad_words) == (None, ())


def test_every_prompt_of_a_request_has_them(server):
    before = len(server.requests)
    ask(server, TEXT, prompt=["one", "three"], bad_words=["z"], allowed_token_ids=[1], truncate_prompt_tokens=3)
    one, three = sorted(server.requests[before:], key=lambda request: prompt_of(request) != [*b"one"])
    assert (prompt_of(one), prompt_of(three)) == ([*b"one"], [*b"ree"])
    assert one.sampling.bad_words == three.sampling.bad_words == ((122,), (32, 122))
    assert one.sampling.allowed_token_ids == three.sampling.allowed_token_ids == (1,)


def test_spellings_of_a_word():
    """As vLLM has it: with and without a space before it, once where that makes no difference."""

    def encode(text, add_special_tokens):
        assert not add_special_tokens
        return {"word": [1, 2], " word": [3], "a": [4], " a": [4]}.get(text, [])

    assert encode_bad_words(encode, ["word", "\n word", "a"]) == [[1, 2], [3], [1, 2], [3], [4]]
    with pytest.raises(InvalidRequest, match=r"bad_words\[1\]") as caught:
        encode_bad_words(encode, ["a", "nothing"])
    assert caught.value.param == "bad_words"


def test_a_word_that_the_model_has_no_tokens_for_is_refused():
    class Wide:
        chat_template, image_markers = "", ()

        def encode(self, text, add_special_tokens=True):
            return [300]

    core = build_echo_core(EngineConfig(model="echo"))
    words = encode_bad_words(Wide().encode, ["x"])
    with pytest.raises(InvalidRequest) as caught:
        core.submit(generate_request(request_id="a", prompt=np.array([1], "<i8").tobytes(), bad_words=words))
    assert caught.value.param == "bad_words"


# -- truncate_prompt_tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "kept"), [(1, "j"), (3, "hij"), (10, "abcdefghij"), (11, "abcdefghij"), (4096, None)])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_the_last_tokens_are_kept(server, keep, kept, as_tokens):
    text = "abcdefghij"
    body, asked = ask(server, TEXT, prompt=[*text.encode()] if as_tokens else text, truncate_prompt_tokens=keep)
    assert prompt_of(asked) == [*(kept or text).encode()]
    assert body["usage"]["prompt_tokens"] == len(kept or text)
    assert body["cairn"]["cache"]["prompt_tokens"] == len(kept or text)


def test_a_prompt_that_is_too_long_otherwise(serve):
    server = serve(max_model_len=32)
    prompt = "x" * 100 + "0123456789"
    assert server.post(TEXT, {"prompt": prompt, "max_tokens": 5}).status_code == 400
    _, asked = ask(server, TEXT, prompt=prompt, truncate_prompt_tokens=10)
    assert prompt_of(asked) == [*b"0123456789"]
    # room for the answer is left by itself
    for max_tokens, room in ((5, 27), (31, 1), (1, 31)):
        _, asked = ask(server, TEXT, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=max_tokens)
        assert prompt_of(asked) == [*prompt.encode()][-room:]
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": None}
    _, asked = ask(server, CHAT, **chat, truncate_prompt_tokens=-1)
    assert len(prompt_of(asked)) == 31
    for keep, max_tokens, param in ((32, 1, "prompt"), (33, 1, "truncate_prompt_tokens"), (30, 5, "max_tokens")):
        body = {"prompt": prompt, "truncate_prompt_tokens": keep, "max_tokens": max_tokens}
        answer = server.post(TEXT, body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    answer = server.post(TEXT, {"prompt": prompt, "truncate_prompt_tokens": -1, "max_tokens": 32})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"


def test_an_echo_and_the_ids_are_of_what_was_kept(server):
    body, _ = ask(
        server, TEXT, prompt="abcdefghij", truncate_prompt_tokens=3, echo=True, return_token_ids=True, max_tokens=2
    )
    assert body["choices"][0]["text"].startswith("hij") and body["choices"][0]["prompt_token_ids"] == [*b"hij"]


def test_places_move_with_the_prompt_and_those_cut_off_are_gone(server):
    messages = [{"role": "system", "content": "s" * 20}, {"role": "user", "content": "u" * 20}]
    _, whole = ask(server, CHAT, messages=messages)
    n = len(prompt_of(whole))
    system, user = (place.position for place in whole.boundaries)
    for keep in (n, n - 5, n - system + 1, n - system, n - user + 1, n - user, 1):
        _, asked = ask(server, CHAT, messages=messages, truncate_prompt_tokens=keep)
        cut = n - keep
        assert prompt_of(asked) == prompt_of(whole)[cut:]
        expected = [(place.position - cut, place.kind) for place in whole.boundaries if place.position > cut]
        assert [(place.position, place.kind) for place in asked.boundaries] == expected


def test_truncating_shares_the_cache_with_the_same_tokens(serve):
    server = serve()
    ask(server, TEXT, prompt="0123456789")
    body, _ = ask(server, TEXT, prompt="somewhat longer 0123456789", truncate_prompt_tokens=10)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 10


def test_only_prompts_that_are_answered_are_cut(server):
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [65]})):
        answer = server.post(path, body | {"truncate_prompt_tokens": 5})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"
