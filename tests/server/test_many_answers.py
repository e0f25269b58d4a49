"""Several answers, several prompts, and what is told of tokens, on both endpoints, whole and as streams."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from cairn.server.openai.logprobs import TextOffsetTracker
from cairn.types import SamplingParams
from server.asking import ask, stream

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EOS = 256


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    server.until(lambda: server.core.stats().num_running == server.core.stats().num_waiting == 0)


def texts_of(chunks):
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


# -- n and several prompts ---------------------------------------------------------------------------------------------


def test_n_answers_have_indices_of_their_own_and_one_prompt(server):
    answer = ask(server, TEXT, prompt="abc", n=3, seed=7)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "abc"), (1, "bca"), (2, "cab")]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 12)
    assert server.requests[-1].n == 3 and server.requests[-1].sampling.seed == 7
    assert answer["cairn"]["cache"]["prompt_tokens"] == 3


def test_a_prompt_is_counted_once_however_many_answers_it_has(serve):
    server = serve()
    usage = ask(server, TEXT, prompt=["abc", "de"], n=3)["usage"]
    assert server.metric("vllm:request_prompt_tokens_sum") == usage["prompt_tokens"] == 5
    assert server.metric("vllm:request_prompt_tokens_count") == 2
    assert server.metric("vllm:request_generation_tokens_sum") == usage["completion_tokens"]
    assert server.metric("vllm:request_generation_tokens_count") == 6


def test_n_answers_of_a_chat(server):
    answer = ask(server, CHAT, messages=[{"role": "user", "content": "x"}], n=2, max_tokens=6)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    first, second = (choice["message"]["content"] for choice in answer["choices"])
    assert first != second and second.startswith(first[1:5])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_streamed_answers_say_the_same_as_whole_ones(server, path, n):
    body = {"prompt": "Grüße, 世界"} if path == TEXT else {"messages": [{"role": "user", "content": "Grüße, 世界"}]}
    whole = ask(server, path, **body, n=n, max_tokens=12)
    chunks = stream(server, path, **body, n=n, max_tokens=12, stream_options={"include_usage": True})
    said = [choice["text"] if path == TEXT else choice["message"]["content"] for choice in whole["choices"]]
    assert texts_of(chunks) == dict(enumerate(said))
    absent = {"prompt_tokens_details": None, "completion_tokens_details": None}
    assert chunks[-1]["usage"] | absent == whole["usage"] | absent
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert finishes == ["length"] * n
    if path == CHAT:
        assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:n]] == ["assistant"] * n


def test_no_piece_of_a_stream_splits_a_character(server):
    chunks = stream(server, TEXT, prompt="日本語🙂é", max_tokens=40)
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == "日本語🙂é" and all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("prompts", [["ab", "cd", "e"], [[97, 98], [99, 100], [101]]])
def test_several_prompts_are_answered_in_order(server, prompts):
    answer = ask(server, TEXT, prompt=prompts, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ba", "cd", "dc", "e", "e"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 5
    assert [cache["prompt_tokens"] for cache in answer["cairn"]["cache"]] == [2, 2, 1]
    assert texts_of(stream(server, TEXT, prompt=prompts, n=2)) == {
        i: choice["text"] for i, choice in enumerate(answer["choices"])
    }


def test_one_of_several_prompts_that_cannot_be_taken_takes_all_with_it(serve):
    server = serve(max_waiting=2, max_num_seqs=1)
    answer = server.post(TEXT, {"prompt": ["a", [1] * 5000]})
    assert answer.status_code == 400, answer.text
    server.until(lambda: server.core.stats().num_running == server.core.stats().num_waiting == 0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "body", [{"prompt": ["a"] * 4}, {"prompt": ["ab", "cd"], "n": 2}, {"prompt": ["a"] * 200}, {"prompt": "a", "n": 4}]
)
def test_more_answers_than_may_ever_wait_are_no_matter_of_trying_again(serve, body, streamed):
    server = serve(max_waiting=3, max_num_seqs=1)
    answer = server.post(TEXT, body | {"stream": streamed})
    assert answer.status_code == 400 and "retry-after" not in answer.headers
    assert answer.json()["error"]["param"] == ("n" if body["prompt"] == "a" else "prompt")
    assert texts_of(stream(server, TEXT, prompt=["ab", "cd", "ef"])) == {0: "ab", 1: "cd", 2: "ef"}


@pytest.mark.parametrize("streamed", [False, True])
def test_the_prompts_of_one_body_are_taken_together_or_not_at_all(serve, streamed):
    """No stream begins and then breaks because a later prompt has found no room."""
    server = serve(model="echo:pause_after=1", max_waiting=3, max_num_seqs=1)
    body = {"prompt": ["ab", "cd"], "max_tokens": 2}
    with ThreadPoolExecutor() as beside:
        first = beside.submit(server.post, TEXT, body)
        server.until(lambda: server.core.stats().num_running == server.core.stats().num_waiting == 1)
        second = beside.submit(server.post, TEXT, {"prompt": "ef"})
        server.until(lambda: server.core.stats().num_waiting == 2)
        refused = server.post(TEXT, body | {"stream": streamed})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert (server.core.stats().num_running, server.core.stats().num_waiting) == (1, 2)
        server.core.resume()
        assert [choice["text"] for choice in first.result().json()["choices"]] == ["ab", "cd"]
        assert second.result().status_code == 200
    # what was refused has not begun
    reasons = ("stop", "length", "abort", "error")
    counted = [server.metric(f'vllm:request_success_total{{engine="0",finished_reason="{one}"') for one in reasons]
    assert counted == [1, 2, 0, 0]


def test_a_stream_of_many_that_is_left_is_aborted(serve):
    server = serve(model="echo:pause_after=3")
    with server.client() as client:
        body = {"model": "echo", "prompt": ["abcdef", "ghijkl"], "n": 2, "max_tokens": 6, "stream": True}
        with client.completions.create(**body) as chunks:
            next(iter(chunks))
            server.until(lambda: server.core.stats().num_running == 4)
    server.until(lambda: server.core.stats().num_running == 0)


def test_return_token_ids_of_several(server):
    answer = ask(server, TEXT, prompt=["ab", "c"], n=2, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[97, 98], [97, 98], [99], [99]]
    assert [choice["token_ids"] for choice in answer["choices"]][1] == [98, 97, EOS]
    chunks = stream(server, TEXT, prompt=["ab", "c"], return_token_ids=True)
    named = [choice for chunk in chunks for choice in chunk["choices"] if choice["prompt_token_ids"] is not None]
    assert sorted((choice["index"], tuple(choice["prompt_token_ids"])) for choice in named) == [
        (0, (97, 98)),
        (1, (99,)),
    ]


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_logprobs_of_a_completion(server):
    (choice,) = ask(server, TEXT, prompt="aé", logprobs=2)["choices"]
    told = choice["logprobs"]
    assert told["tokens"] == ["a", "\ufffd", "\ufffd", "<end>"]
    assert told["text_offset"] == [0, 1, 1, 2]
    assert told["token_logprobs"] == [-1 - token / 1024 for token in (97, 0xC3, 0xA9, EOS)]
    assert told["top_logprobs"][0] == {"a": -1 - 97 / 1024, "\x00": -1.0, "\x01": -1 - 1 / 1024}
    assert [*told["top_logprobs"][0]] == ["a", "\x00", "\x01"]


@pytest.mark.parametrize(
    ("spelled", "offsets"),
    [
        ([b"\xc3", b"xy", b"z"], [0, 1, 3]),
        ([b"a\xe2\x82", b"\xac", b"b"], [0, 1, 2]),
        ([b"a\xe2\x82", b"\xe2", b"\x82\xacb", b"c"], [0, 2, 2, 4]),
        ([b"\xf0\x9f", b"", b"\x98", b"x"], [0, 0, 0, 1]),
        ([b"\xe0", b"\x80", b"x"], [0, 1, 2]),
        ([b"\xef\xbf", b"\xbd", b"x"], [0, 0, 1]),
    ],
)
def test_places_behind_characters_that_are_left_unfinished(spelled, offsets):
    places = TextOffsetTracker()
    assert [places.next(one) for one in spelled] == offsets
    # where a token begins with a character of its own, the text goes on there as the token does
    text = b"".join(spelled).decode(errors="replace")
    assert all(text[at:].startswith(one.decode()) for at, one in zip(offsets, spelled, strict=True) if one.isascii())


def test_text_offsets_of_a_prompt_that_leaves_a_character_unfinished(server):
    body = {"prompt": [0xC3, *b"xy"], "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = ask(server, TEXT, **body)["choices"]
    assert choice["text"] == "\ufffdxy" and choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_logprobs_0_tells_of_the_token_alone(server):
    (choice,) = ask(server, TEXT, prompt="a", logprobs=0)["choices"]
    assert choice["logprobs"]["top_logprobs"][0] == {"a": -1 - 97 / 1024}
    (choice,) = ask(server, TEXT, prompt="a")["choices"]
    assert choice["logprobs"] is None


def test_logprobs_of_a_chat_have_bytes_that_add_up_to_the_text(server):
    body = {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    (choice,) = ask(server, CHAT, **body, max_tokens=7)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 7 and all(len(entry["top_logprobs"]) == 3 for entry in content)
    for entry in content:
        first, *others = entry["top_logprobs"]
        assert first == {name: entry[name] for name in ("token", "logprob", "bytes")} not in others
        assert [other["logprob"] for other in others] == sorted((other["logprob"] for other in others), reverse=True)
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"] != ""
    (plain,) = ask(server, CHAT, **(body | {"top_logprobs": None}), max_tokens=1)["choices"]
    assert plain["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_streamed_logprobs_are_those_of_the_whole_answer(server, path):
    if path == TEXT:
        body = {"prompt": "aéz🙂", "logprobs": 1, "stop": ["zzz"]}
    else:
        body = {"messages": [{"role": "user", "content": "aéz🙂"}], "logprobs": True, "top_logprobs": 1}
    whole = ask(server, path, **body, max_tokens=8, n=2)["choices"]
    pieces = [choice for chunk in stream(server, path, **body, max_tokens=8, n=2) for choice in chunk["choices"]]
    for choice in whole:
        told = [piece["logprobs"] for piece in pieces if piece["index"] == choice["index"] and piece["logprobs"]]
        for name, values in choice["logprobs"].items():
            assert [value for one in told for value in one[name]] == values


# -- echo and the prompt's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_echo_puts_the_prompt_before_the_answer(server, prompt):
    (choice,) = ask(server, TEXT, prompt=prompt, echo=True, max_tokens=2)["choices"]
    assert choice["text"] == "abcab"
    assert texts_of(stream(server, TEXT, prompt=prompt, echo=True, max_tokens=2, n=2)) == {0: "abcab", 1: "abcbc"}


def test_echo_with_logprobs_tells_of_the_prompt_too(server):
    (choice,) = ask(server, TEXT, prompt="abc", echo=True, max_tokens=2, logprobs=1)["choices"]
    told = choice["logprobs"]
    assert told["tokens"] == list("abcab") and told["text_offset"] == [0, 1, 2, 3, 4]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == [-1 - ord(letter) / 1024 for letter in "bcab"]
    assert server.requests[-1].prompt_logprobs == 1
    pieces = stream(server, TEXT, prompt="abc", echo=True, max_tokens=2, logprobs=1)
    joined = [token for chunk in pieces for choice in chunk["choices"] for token in choice["logprobs"]["tokens"]]
    assert joined == list("abcab")


def test_every_streamed_answer_that_echoes_tells_of_its_prompt(server):
    body = {"prompt": ["abc", "xyz"], "echo": True, "max_tokens": 2, "logprobs": 1, "n": 2}
    whole = ask(server, TEXT, **body)["choices"]
    found = {}
    for chunk in stream(server, TEXT, **body):
        for choice in chunk["choices"]:
            told = found.setdefault(choice["index"], {name: [] for name in choice["logprobs"]})
            for name, values in choice["logprobs"].items():
                told[name] += values
    assert found == {choice["index"]: choice["logprobs"] for choice in whole}
    assert found[3]["tokens"] == list("xyzyz") and found[3]["text_offset"] == [0, 1, 2, 3, 4]


def test_echo_of_a_prompt_alone(server):
    answer = ask(server, TEXT, prompt="abc", echo=True, max_tokens=0, logprobs=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == list("abc") and answer["usage"]["completion_tokens"] == 0


def test_a_prompt_of_one_token_has_logprobs_of_nothing(server):
    (choice,) = ask(server, TEXT, prompt="a", echo=True, max_tokens=0, logprobs=1, prompt_logprobs=1)["choices"]
    assert choice["logprobs"]["tokens"] == ["a"] and choice["logprobs"]["token_logprobs"] == [None]
    assert choice["prompt_logprobs"] == [None]


def test_prompt_logprobs_by_token_id(server):
    (choice,) = ask(server, TEXT, prompt="abc", max_tokens=1, prompt_logprobs=1)["choices"]
    first, second, _ = choice["prompt_logprobs"]
    assert first is None
    assert [*second.items()] == [
        ("98", {"logprob": -1 - 98 / 1024, "rank": 99, "decoded_token": "b"}),
        ("0", {"logprob": -1.0, "rank": 1, "decoded_token": "\x00"}),
    ]
    answer = ask(server, CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=1, prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (answer["usage"]["prompt_tokens"] - 1)


# -- what reaches the engine -------------------------------------------------------------------------------------------


def test_all_of_it_reaches_the_engine(server):
    ask(
        server,
        TEXT,
        prompt="x",
        min_p=0.5,
        frequency_penalty=-2,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "6": 0.5},
        min_tokens=2,
        max_tokens=5,
        priority=-3,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        logprobs=3,
    )
    asked = server.requests[-1]
    drawn = asked.sampling
    assert (drawn.min_p, drawn.frequency_penalty, drawn.presence_penalty, drawn.repetition_penalty) == (
        0.5,
        -2,
        1.5,
        1.25,
    )
    assert drawn.logit_bias == ((5, -100), (6, 0.5))
    assert (asked.stop_conditions.min_tokens, asked.priority, asked.logprobs) == (2, -3, 3)
    assert (asked.skip_special_tokens, asked.prompt_logprobs) == (False, None)
    assert asked.stop_conditions.include_stop_str_in_output is True


def test_defaults_reach_the_engine_as_such(server):
    ask(server, TEXT, prompt="x")
    asked = server.requests[-1]
    assert (asked.n, asked.sampling, asked.stop_conditions.min_tokens) == (1, SamplingParams(), 0)
    assert (asked.logprobs, asked.prompt_logprobs, asked.priority, asked.skip_special_tokens) == (None, None, 0, True)


def test_stop_strings_across_tokens_and_within_the_output(server):
    assert ask(server, TEXT, prompt="abcdef", stop=["cd"])["choices"][0]["text"] == "ab"
    (choice,) = ask(server, TEXT, prompt="abcdef", stop=["cd"], include_stop_str_in_output=True)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abcd", "stop", "cd")
    assert ask(server, TEXT, prompt="abcdab", stop=["ab"], min_tokens=2)["choices"][0]["text"] == "abcd"


def test_special_tokens_are_shown_where_asked_for(server):
    assert ask(server, TEXT, prompt="ab", skip_special_tokens=False)["choices"][0]["text"] == "ab<end>"


@pytest.mark.parametrize("words", ["So far", ""])
def test_the_last_message_is_continued(server, words):
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": words}]
    asked = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    ask(server, CHAT, **asked, add_generation_prompt=False)
    ask(server, CHAT, **asked)
    one, other = (request.prompt for request in server.requests[-2:])
    assert one == other
    tokens = server.post("/tokenize", {key: asked[key] for key in ("messages", "continue_final_message")}).json()[
        "tokens"
    ]
    assert bytes(token for token in tokens if token < EOS).endswith(b"assistant\n" + words.encode())
    assert tokens[-1] < EOS


def test_a_prompt_for_another_server_has_one_answer_here(transfer_server):
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = transfer_server.post(TEXT, {"prompt": "abc", "n": 4, "max_tokens": 1, "kv_transfer_params": params}).json()
    assert len(answer["choices"]) == 1 and answer["kv_transfer_params"]["do_remote_prefill"] is True
    fetched = {"prompt": "abc", "n": 3, "kv_transfer_params": answer["kv_transfer_params"], "logprobs": 0}
    answer = transfer_server.post(TEXT, fetched).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "bca", "cab"]


def test_several_prompts_cannot_be_handed_over(transfer_server):
    params = {"do_remote_decode": True}
    answer = transfer_server.post(TEXT, {"prompt": ["a", "b"], "kv_transfer_params": params})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"
