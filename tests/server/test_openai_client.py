"""The server as the official OpenAI client sees it."""

import asyncio

import openai
import pytest

EOS = 256


def test_a_completion(server):
    with server.client() as client:
        answer = client.completions.create(model="echo", prompt="hello", max_tokens=50)
    assert answer.object == "text_completion" and answer.model == "echo" and answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("hello", "stop", 0)
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == 11


def test_a_completion_defaults_to_sixteen_tokens(server):
    with server.client() as client:
        answer = client.completions.create(model="echo", prompt="a" * 40)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 16


def test_the_second_time_says_what_was_cached(server):
    with server.client() as client:
        first, second = (client.completions.create(model="echo", prompt="?een twice") for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert first.model_extra["cairn"]["cache"] == {
        "prompt_tokens": 10,
        "matched_tokens": 0,
        "cached_tokens": 0,
        "computed_tokens": 10,
        "reason": "never_seen",
        "lost_tokens": {"never_seen": 10},
        "received_tokens": 0,
        "tier_tokens": 0,
        "prefill_cached_tokens": None,
        "held_breakpoints": 0,
    }
    assert second.usage.prompt_tokens_details.cached_tokens == 10
    assert second.model_extra["cairn"]["cache"]["reason"] == "none"


def test_another_salt_sees_nothing_of_it(server):
    with server.client() as client:
        answers = [
            client.completions.create(model="echo", prompt="salted", extra_body={"cache_salt": salt})
            for salt in ("one", "one", "two", "a b", "a b", "é" * 1024, "é" * 1024)
        ]
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, 6, 0, 0, 6, 0, 6]


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]], ["hi"]])
def test_a_prompt_in_any_of_its_forms(server, prompt):
    with server.client() as client:
        assert client.completions.create(model="echo", prompt=prompt).choices[0].text == "hi"


def test_a_completion_as_a_stream(server):
    with server.client() as client, client.completions.create(model="echo", prompt="Grüße", stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Grüße"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].model_extra["cairn"]["cache"]["prompt_tokens"] == 7
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("everywhere", [False, True])
def test_usage_comes_in_a_chunk_of_its_own(server, everywhere):
    options = {"include_usage": True, "continuous_usage_stats": everywhere}
    with (
        server.client() as client,
        client.completions.create(model="echo", prompt="usage", stream=True, stream_options=options) as stream,
    ):
        *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage.completion_tokens == 6 and last.usage.prompt_tokens_details.cached_tokens >= 0
    assert last.model_extra["cairn"]["cache"]["prompt_tokens"] == 5
    assert all("cairn" not in chunk.model_extra for chunk in chunks)
    assert all((chunk.usage is not None) == everywhere for chunk in chunks)


@pytest.mark.parametrize("n", [1, 2])
def test_usage_everywhere_comes_with_what_opens_a_chat_too(server, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "content": "usage"}]
    with (
        server.client() as client,
        client.chat.completions.create(
            model="echo", messages=messages, n=n, stream=True, stream_options=options
        ) as stream,
    ):
        chunks = list(stream)
    said = [chunk.usage.completion_tokens for chunk in chunks]
    assert said[:n] == [0] * n and said == sorted(said) and said[-1] > 0
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}


def test_a_chat(server):
    with server.client() as client:
        answer = client.chat.completions.create(
            model="echo",
            messages=[
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            ],
        )
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "stop"
    assert choice.message.content == "system\nbe briefuser\nonetwoassistant\n"
    # by what other tests have sent before
    assert answer.model_extra["cairn"]["cache"]["reason"] in ("too_short", "never_seen")


def test_a_chat_as_a_stream(server):
    options = {"include_usage": True}
    messages = [{"role": "user", "content": "hi"}]
    with (
        server.client() as client,
        client.chat.completions.create(model="echo", messages=messages, stream=True, stream_options=options) as stream,
    ):
        first, *chunks, last = list(stream)
    assert first.object == "chat.completion.chunk"
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "user\nhiassistant\n"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == [] and last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_a_chat_without_generation_prompt(server):
    with server.client() as client:
        answer = client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "x"}], extra_body={"add_generation_prompt": False}
        )
    assert answer.choices[0].message.content == "user\nx"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chats_length(server, field):
    with server.client() as client:
        answer = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "x"}], **{field: 3})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_request(server, stream):
    with server.client() as client:
        options = {"return_token_ids": True}
        answer = client.completions.create(model="echo", prompt="ab", stream=stream, extra_body=options)
        chunks = [chunk.choices[0].model_extra for chunk in (list(answer) if stream else [answer])]
        chat = client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "x"}], stream=stream, max_tokens=2, extra_body=options
        )
        chat_chunks = list(chat) if stream else [chat]
    assert chunks[0]["prompt_token_ids"] == [97, 98]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == [97, 98, EOS]
    assert chat_chunks[0].model_extra["prompt_token_ids"][-10:] == list(b"assistant\n")
    answers = [chunk.choices[0].model_extra.get("token_ids", []) for chunk in chat_chunks]
    assert [token for tokens in answers for token in tokens] == list(b"us")


def test_stops(server):
    with server.client() as client:

        def ask(**options):
            return client.completions.create(model="echo", prompt="abcdef", max_tokens=9, **options).choices[0]

        assert (ask(stop="cd").text, ask(stop="cd").model_extra["stop_reason"]) == ("ab", "cd")
        assert ask(stop=["zz", "ef"]).text == "abcd"
        long = "x" * 1023 + "y"
        answer = client.completions.create(model="echo", prompt=f"ab{long}", max_tokens=1100, stop=long)
        assert answer.choices[0].text == "ab"
        assert ask(extra_body={"stop_token_ids": [100]}).model_extra["stop_reason"] == 100
        assert ask(extra_body={"ignore_eos": True}).text == "abcdefab"


def test_sampling_parameters_arrive(server):
    with server.client() as client:
        answer = client.completions.create(
            model="echo",
            prompt="x",
            temperature=0.5,
            top_p=0.9,
            seed=-(2**63),
            user="me",
            n=1,
            presence_penalty=0,
            extra_body={"top_k": -1, "min_p": 0.0, "some_unknown_field": {"deep": []}, "repetition_penalty": 1},
        )
    assert answer.choices[0].text == "x"


def test_nulls_mean_defaults(server):
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "n", "logit_bias", "cache_salt")
    body = {"model": None, "prompt": "x"} | dict.fromkeys(names)
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "x"


def test_models(server):
    with server.client() as client:
        (model,) = client.models.list().data
        assert (model.id, model.model_extra["max_model_len"]) == ("echo", 4096)
        assert client.models.retrieve("echo").id == "echo"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("another/model")


def test_the_asynchronous_client_and_many_at_once(server):
    async def scenario():
        async with server.async_client() as client:

            async def whole(i):
                answer = await client.completions.create(model="echo", prompt=f"number {i}")
                return answer.choices[0].text

            async def streamed(i):
                stream = await client.completions.create(model="echo", prompt=f"number {i}", stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(ask(i) for i in range(12) for ask in (whole, streamed)))

    assert asyncio.run(scenario()) == [f"number {i}" for i in range(12) for _ in range(2)]
