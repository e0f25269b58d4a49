"""vLLM's own request fields, on both endpoints, whole and as streams. The engine echoes."""

import json

import msgspec
import numpy as np
import pytest

from cairn.engine.contract import GenerateOutput
from cairn.server.openai.generate import OutputBuffer
from doubles.byte_tokenizer import ByteTokenizer
from server.asking import ask, stream

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hm</think>yes"}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
REUSED = "kv_transfer_params.prompt_token_ids"


@pytest.fixture(scope="module")
def thinker(running_server):
    """A server whose template knows `<think>`, and which writes tokens as ids unless told otherwise."""
    running = running_server(
        {"return_tokens_as_token_ids": True}, ByteTokenizer(chat_template="<think>"), block_size=32
    )
    yield running
    running.drain()
    running.join()


def refused(server, path, **body):
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]


def prompt_of(server):
    return np.frombuffer(server.requests[-1].prompt, np.int64).tolist()


# -- truncation_side ---------------------------------------------------------------------------------------------------


def test_truncation_side_says_which_end_is_cut_off(server):
    cut = {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2, "max_tokens": 1, "return_token_ids": True}
    for side, expected in ((None, [7, 8]), ("left", [7, 8]), ("right", [5, 6])):
        (choice,) = ask(server, TEXT, **cut, truncation_side=side)["choices"]
        assert choice["prompt_token_ids"] == prompt_of(server) == expected
    body = {"messages": [{"role": "user", "content": text} for text in ("a", "b")], "max_tokens": 1}
    whole = [257, *b"user\na", 258, 257, *b"user\nb", 258, 257, *b"assistant\n"]
    ask(server, CHAT, **body, truncate_prompt_tokens=12, truncation_side="right")
    assert prompt_of(server) == whole[:12]
    assert [end.position for end in server.requests[-1].boundaries] == [8]
    ask(server, CHAT, **body, truncate_prompt_tokens=12)
    assert prompt_of(server) == whole[-12:]
    assert [end.position for end in server.requests[-1].boundaries] == [1]
    assert refused(server, TEXT, prompt="x", truncation_side="middle") == "truncation_side"


# -- return_tokens_as_token_ids ----------------------------------------------------------------------------------------


def test_tokens_are_called_by_their_ids(server, thinker):
    told = {"prompt": [0xC3, 97], "max_tokens": 2, "logprobs": 1, "echo": True}
    (choice,) = ask(server, TEXT, **told, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:195", "token_id:97"] * 2
    assert choice["logprobs"]["top_logprobs"][2].keys() == {"token_id:0", "token_id:195"}
    assert choice["logprobs"]["text_offset"] == ask(server, TEXT, **told)["choices"][0]["logprobs"]["text_offset"]
    for one, fields, expected in (
        (server, {}, "u"),
        (server, {"return_tokens_as_token_ids": True}, "token_id:117"),
        (thinker, {}, "token_id:117"),
        (thinker, {"return_tokens_as_token_ids": False}, "u"),
    ):
        body = {"messages": [USER], "max_tokens": 1, "logprobs": True, "top_logprobs": 1} | fields
        entry = ask(one, CHAT, **body)["choices"][0]["logprobs"]["content"][0]
        assert (entry["token"], entry["bytes"]) == (expected, [117])
        assert [top["token"] for top in entry["top_logprobs"]] == [expected]
        (streamed,) = [c["logprobs"] for chunk in stream(one, CHAT, **body) for c in chunk["choices"] if c["logprobs"]]
        assert streamed["content"] == [entry]


# -- logprob_token_ids -------------------------------------------------------------------------------------------------


def test_tokens_that_are_listed_are_told_of_beside_the_sampled_one(server):
    value = {token: -1 - token / 1024 for token in range(259)}
    fields = {"max_tokens": 1, "logprob_token_ids": [200, 98, 200], "return_tokens_as_token_ids": True}
    body = {"prompt": "abc", "logprobs": 5} | fields
    expected = {f"token_id:{token}": value[token] for token in (97, 200, 98)}
    (choice,) = ask(server, TEXT, **body)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [expected] and choice["logprobs"]["tokens"] == ["token_id:97"]
    chunks = [c["logprobs"] for chunk in stream(server, TEXT, **body) for c in chunk["choices"] if c["logprobs"]]
    assert [chunk["top_logprobs"] for chunk in chunks] == [[expected]]
    for sampled, top in ((97, 5), (98, None), (200, 0)):
        body = {"messages": [USER], "logprobs": True, "top_logprobs": top, "allowed_token_ids": [sampled]} | fields
        (entry,) = ask(server, CHAT, **body)["choices"][0]["logprobs"]["content"]
        told = {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
        assert told == {f"token_id:{token}": value[token] for token in (sampled, 200, 98)}
        assert len(entry["top_logprobs"]) == len(told) and entry["top_logprobs"][0]["token"] == entry["token"]
    assert ask(server, TEXT, prompt="abc", logprobs=1, max_tokens=1, logprob_token_ids=[])["choices"][0]["logprobs"]
    for path, wrong in (
        (TEXT, {"prompt": "x", "logprob_token_ids": [5]}),
        (TEXT, {"prompt": "x", "logprob_token_ids": [5], "logprobs": 1, "echo": True, "max_tokens": 0}),
        (TEXT, {"prompt": "x", "logprob_token_ids": [259], "logprobs": 1}),
        (TEXT, {"prompt": "x", "logprob_token_ids": list(range(129)), "logprobs": 1}),
        (CHAT, {"messages": [USER], "logprob_token_ids": [5]}),
    ):
        assert refused(server, path, **wrong) == "logprob_token_ids"


# -- repetition_detection ----------------------------------------------------------------------------------------------


def test_an_answer_that_repeats_itself_ends(server):
    limit = {"max_pattern_size": 4, "min_count": 3}
    body = {"prompt": "ab", "ignore_eos": True, "max_tokens": 40, "return_token_ids": True}
    for fields, length in (
        ({"repetition_detection": limit}, 9),
        ({"repetition_detection": limit | {"min_pattern_size": 3}}, 9),
        ({"repetition_detection": limit, "min_tokens": 14}, 14),
        ({"repetition_detection": limit | {"min_pattern_size": 4}}, 40),
        ({"repetition_detection": {"max_pattern_size": 0}}, 40),
        ({"repetition_detection": None}, 40),
    ):
        before = server.metric('vllm:request_success_total{engine="0",finished_reason="repetition"')
        (choice,) = ask(server, TEXT, **body, **fields)["choices"]
        assert choice["token_ids"] == ([97, 98, 256] * 14)[:length]
        ending = ("length", None) if length == 40 else ("repetition", "repetition_detected")
        assert (choice["finish_reason"], choice["stop_reason"]) == ending
        server.until(lambda: server.core.stats().num_running == 0)
        after = server.metric('vllm:request_success_total{engine="0",finished_reason="repetition"')
        assert after == before + (length < 40)
        last = stream(server, TEXT, **body, **fields)[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ending
    for wrong in (
        {"max_pattern_size": -1},
        {"max_pattern_size": 4097, "min_count": 2},
        {"max_pattern_size": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": 2, "min_count": 2, "other": 1},
        {"max_pattern_size": "x"},
    ):
        for path, body in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": [USER]})):
            assert refused(server, path, **body, repetition_detection=wrong).startswith("repetition_detection")


# -- thinking_token_budget ---------------------------------------------------------------------------------------------


def test_reasoning_ends_where_its_budget_does(thinker, server):
    echoed = "user\nhm</think>yesassistant\n<think>"
    body = {"messages": [USER], "max_tokens": 60} | THINKING
    for budget in (0, 3, 6, None, -1, 7, 100):
        choice = ask(thinker, CHAT, **body, thinking_token_budget=budget)["choices"][0]
        text = echoed if budget in (None, -1, 100) else echoed[:budget] + "</think>" + echoed[budget + 8 :]
        thought, _, said = text.partition("</think>")
        assert (choice["message"].get("reasoning") or "") == thought.rstrip("\n")
        # the mark that the echo ends with opens nothing
        assert choice["message"]["content"] == said.lstrip("\n").removesuffix("\n<think>")
        chunks = stream(thinker, CHAT, **body, thinking_token_budget=budget)
        deltas = [part["delta"] for chunk in chunks for part in chunk["choices"]]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == thought.rstrip("\n")
    # What is there of the reasoning counts; the newlines behind its beginning do not.
    begun = {"messages": [USER, {"role": "assistant", "content": "<think>\nabc"}], "continue_final_message": True}
    choice = ask(thinker, CHAT, **begun, max_tokens=20, thinking_token_budget=5)["choices"][0]
    assert choice["message"]["reasoning"] == "us"
    # its one token begins the mark that is to come
    for prompt, expected in (("<think>\nabcd", "</think>a"), ("abcdefghij", "abcdefghi")):
        (choice,) = ask(thinker, TEXT, prompt=prompt, max_tokens=9, thinking_token_budget=5)["choices"]
        assert choice["text"] == expected
    (choice,) = ask(thinker, TEXT, prompt="<think>abcdefgh", max_tokens=18, thinking_token_budget=2)["choices"]
    assert choice["text"].startswith("</think>")
    for wrong in (-2, 1 << 31, 1.5, "x"):
        assert refused(thinker, CHAT, **body, thinking_token_budget=wrong) == "thinking_token_budget"
    assert refused(server, CHAT, messages=[USER], thinking_token_budget=5) == "thinking_token_budget"
    ask(server, CHAT, messages=[USER], max_tokens=1, thinking_token_budget=-1)


def test_anthropics_budget_is_the_same(thinker, server):
    body = {"model": "echo", "messages": [USER], "max_tokens": 60}
    for budget, thought in ((3, "use"), (1000, "user\nhm")):
        fields = {"thinking": {"type": "enabled", "budget_tokens": budget}}
        blocks = ask(thinker, "/v1/messages", **body, **fields)["content"]
        assert (blocks[0]["type"], blocks[0]["thinking"]) == ("thinking", thought)
        ask(server, "/v1/messages", **body, **fields)  # a model without reasoning has nothing to bound


# -- include_reasoning -------------------------------------------------------------------------------------------------


def test_include_reasoning_false_leaves_reasoning_and_its_tokens_out(thinker, server):
    body = {"messages": [USER], "max_tokens": 40, "logprobs": True, "return_token_ids": True} | THINKING
    shown = ask(thinker, CHAT, **body)["choices"][0]
    assert shown["message"]["reasoning"] == "user\nhm" and shown["logprobs"]["content"] and shown["token_ids"]
    hidden = ask(thinker, CHAT, **body, include_reasoning=False)
    message = hidden["choices"][0]["message"]
    assert message["content"] == shown["message"]["content"] and not message.get("reasoning")
    assert not message.get("reasoning_content") and hidden["choices"][0]["logprobs"] is None
    assert not hidden["choices"][0].get("token_ids") and "hm" not in json.dumps(hidden)
    assert hidden["usage"]["completion_tokens"] == len(shown["token_ids"])
    chunks = stream(thinker, CHAT, **body, include_reasoning=False)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    assert not any(delta.get("reasoning") or delta.get("reasoning_content") for delta in deltas)
    assert not any(c["logprobs"] or c.get("token_ids") for chunk in chunks for c in chunk["choices"])
    # A model without reasoning has nothing to hide.
    plain = ask(server, CHAT, **body, include_reasoning=False)["choices"][0]
    assert plain["logprobs"]["content"] and plain["token_ids"]
    assert refused(server, CHAT, messages=[USER], include_reasoning="maybe") == "include_reasoning"


def test_usage_counts_the_tokens_of_reasoning_shown_or_not(thinker, server):
    body = {"messages": [USER], "max_tokens": 40, "return_token_ids": True} | THINKING
    shown = ask(thinker, CHAT, **body)
    said = bytes(token for token in shown["choices"][0]["token_ids"] if token < 256)
    num_reasoning = said.index(b"</think>") - (len("<think>") if said.startswith(b"<think>") else 0)
    assert num_reasoning > 0 and shown["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    hidden = ask(thinker, CHAT, **body, include_reasoning=False)
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    *_, last = stream(thinker, CHAT, **body, stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    cut = ask(thinker, CHAT, **body | {"max_tokens": 3})["usage"]
    assert cut["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert ask(server, CHAT, **body)["usage"]["completion_tokens_details"] is None


@pytest.mark.parametrize("thought", ["hm\n\n", "\nhm", "hm", "hm\n</thin"])
def test_every_api_counts_the_same_tokens_of_reasoning(thinker, thought):
    """Newlines next to the marks are left out of the text, and are tokens of the reasoning all the same."""
    said = f"{thought}</think>yes"
    chat = ask(thinker, CHAT, messages=[{"role": "user", "content": said}], max_tokens=40, **THINKING)
    response = ask(thinker, "/v1/responses", model="echo", input=said, max_output_tokens=40, **THINKING)
    count = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == count == len(f"user\n{thought}")


def test_whether_the_prompt_opens_the_reasoning_is_looked_up_once(thinker, monkeypatch):
    decoded = []
    decode = thinker._tokenizer.decode
    monkeypatch.setattr(thinker._tokenizer, "decode", lambda ids: (decoded.append(list(ids)), decode(ids))[1])
    ask(thinker, CHAT, messages=[USER], max_tokens=40, thinking_token_budget=3, **THINKING)
    assert decoded.count(prompt_of(thinker)[-32:]) == 1
    decoded.clear()
    ask(thinker, TEXT, prompt="<think>\nabcd", max_tokens=9)
    assert list(b"<think>\nabcd") not in decoded


# -- kv_transfer_params.prompt_token_ids -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["server", "transfer_server"])
def test_the_prompt_is_the_ids_that_a_router_hands_on(request, name):
    server = request.getfixturevalue(name)
    ids = [257, *b"user\nq", 258]
    for path, body in ((CHAT, {"messages": [USER]}), (TEXT, {"prompt": "ignored"})):
        body |= {"max_tokens": 3, "return_token_ids": True, "kv_transfer_params": {"prompt_token_ids": ids}}
        answer = ask(server, path, **body)
        assert prompt_of(server) == ids and answer["usage"]["prompt_tokens"] == len(ids)
        assert (answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]) == ids
        assert b"prompt_token_ids" not in (server.requests[-1].kv_transfer_params or b"")
        assert (stream(server, path, **body)[0]["choices"] and prompt_of(server)) == ids
    ask(server, CHAT, messages=[USER], max_tokens=1, kv_transfer_params={"prompt_token_ids": None})
    assert len(prompt_of(server)) > len(ids)
    for wrong in ([], "abc", [1, -1], [1, 259], [1, 10**30], [True], [1.5], {"a": 1}):
        wrong = {"prompt_token_ids": wrong}
        assert refused(server, CHAT, messages=[USER], kv_transfer_params=wrong) == REUSED
    long = {"prompt_token_ids": [1] * 5000}
    assert refused(server, CHAT, messages=[USER], kv_transfer_params=long) == REUSED
    two = {"prompt": ["a", "b"], "kv_transfer_params": {"prompt_token_ids": ids}}
    assert refused(server, TEXT, **two) == "kv_transfer_params"


# -- what a prompt is --------------------------------------------------------------------------------------------------


def test_a_chats_prompt_is_told_as_text(server):
    body = {"messages": [USER], "max_tokens": 2, "n": 2, "return_token_ids": True, "return_prompt_text": True}
    answer = ask(server, CHAT, **body)
    assert answer["prompt_text"] == server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert "hm</think>yes" in answer["prompt_text"]
    chunks = stream(server, CHAT, **body)
    assert [chunk.get("prompt_text") for chunk in chunks] == [answer["prompt_text"]] * 2 + [None] * (len(chunks) - 2)
    assert ask(server, CHAT, **body | {"return_prompt_text": False})["prompt_text"] is None
    assert refused(server, TEXT, prompt="x", return_prompt_text=True) == "return_prompt_text"


def test_a_chats_special_tokens_are_the_templates(server, serve):
    class Opening(ByteTokenizer):
        """Writes a special token before each text."""

        def encode(self, text, add_special_tokens=True):
            return [257] * add_special_tokens + super().encode(text)

    opening = serve(tokenizer=Opening())
    for path in (CHAT, "/tokenize"):
        for sent in (None, False):
            assert opening.post(path, {"messages": [USER], "add_special_tokens": sent}).status_code == 200
        assert refused(opening, path, messages=[USER], add_special_tokens=True) == "add_special_tokens"
        assert server.post(path, {"messages": [USER], "add_special_tokens": True}).status_code == 200
    assert opening.post("/tokenize", {"prompt": "x"}).json()["tokens"] == [257, *b"x"]
    assert opening.post("/tokenize", {"prompt": "x", "add_special_tokens": False}).json()["tokens"] == [*b"x"]


# -- stream_interval ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_stream_interval_is_how_many_tokens_a_chunk_has(server, path):
    body = {"messages": [USER]} if path == CHAT else {"prompt": "user\nhm</think>y"}
    body |= {"max_tokens": 12, "n": 2, "return_token_ids": True, "ignore_eos": True}
    body |= {"logprobs": True} if path == CHAT else {"logprobs": 0}
    for interval in (None, 1, 4, 100):
        chunks = stream(server, path, **body, stream_interval=interval)
        pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice.get("token_ids")]
        for index in (0, 1):
            own = [piece for piece in pieces if piece["index"] == index]
            sizes = [len(piece["token_ids"]) for piece in own]
            # What comes while the stream is busy is sent together, too.
            assert sum(sizes) == 12 and all(size >= (interval or 1) for size in sizes[1:-1])
            assert interval != 100 or len(sizes) <= 2
            key = "content" if path == CHAT else "tokens"
            assert [len(piece["logprobs"][key]) for piece in own] == sizes
            text = "".join(piece["text"] if path == TEXT else piece["delta"]["content"] for piece in own)
            assert text == ("user\nhm</thi" if index == 0 else "ser\nhm</thin")
            assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["length"]
    assert ask(server, path, **body, stream_interval=4)["usage"]["completion_tokens"] == 24
    for wrong in (0, -1, 1.5, 1 << 31):
        assert refused(server, path, **body, stream_interval=wrong) == "stream_interval"


def test_a_buffer_sends_the_first_and_the_last_output_at_once():
    def sizes(interval, outputs):
        buffer = OutputBuffer(interval)
        sent = [buffer.add(prompt, output) for prompt, output in outputs]
        assert [token for one in sent if one for token in one.token_ids] == [
            token for _, output in outputs for token in output.token_ids
        ]
        return [one and len(one.token_ids) for one in sent]

    def outputs(*counts):
        made = [GenerateOutput(request_id="r", token_ids=[place] * count) for place, count in enumerate(counts)]
        return [(0, output) for output in made[:-1]] + [(0, msgspec.structs.replace(made[-1], finish_reason="stop"))]

    assert sizes(1, outputs(1, 1, 1)) == [1, 1, 1]
    assert sizes(3, outputs(1, 1, 1, 1, 1, 1)) == [1, None, None, 3, None, 2]
    assert sizes(3, outputs(2, 5, 2, 0)) == [2, 5, None, 2]
    # Each answer counts for itself.
    buffer = OutputBuffer(2)
    both = [(0, GenerateOutput(request_id="a", token_ids=[1])), (1, GenerateOutput(request_id="b", token_ids=[2]))]
    assert [bool(buffer.add(*one)) for one in both * 3] == [True, True, False, False, True, True]


# -- vllm_xargs --------------------------------------------------------------------------------------------------------


def test_unknown_extra_arguments_are_refused_by_name(server):
    for known in (None, {}, {"session_id": "s" * 1000, "prompt_cache_key": "k"}):
        ask(server, TEXT, prompt="x", max_tokens=1, vllm_xargs=known)
    for wrong in ({"my_processor": 1}, {"session_id": 5}):
        assert refused(server, TEXT, prompt="x", vllm_xargs=wrong) == f"vllm_xargs.{next(iter(wrong))}"
    assert refused(server, CHAT, messages=[USER], vllm_xargs=[1]) == "vllm_xargs"
