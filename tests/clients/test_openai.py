"""openai's client: chats, completions, tools, parsed answers, errors."""

import asyncio
import json

import openai
import pytest

from conftest import ENOUGH, PARAMETERS, Place

HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
STRICT_TOOL = {"type": "function", "function": TOOL["function"] | {"strict": True}}


def test_models(client, server):
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model


def test_a_chat_and_the_same_as_a_stream(client, server):
    asked = {"model": server.model, "messages": HELLO, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason, whole.usage.completion_tokens) == ("assistant", "length", 8)
    assert choice.message.tool_calls is None or choice.message.tool_calls == []
    assert choice.logprobs is None
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_the_streams_helper_adds_up_to_the_answer(client, server):
    asked = {"model": server.model, "messages": HELLO, "max_tokens": 8, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content
    with client.chat.completions.stream(**asked, stop=text[-3:]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and "content.done" in kinds
    assert final.choices[0].finish_reason == "stop" and text.startswith(final.choices[0].message.content)


def test_a_named_tool_and_the_turn_behind_it(client, server):
    named = {"type": "function", "function": {"name": "weather"}}
    first = client.chat.completions.create(
        model=server.model, messages=HELLO, tools=[TOOL], tool_choice=named, max_tokens=ENOUGH
    )
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in PARAMETERS["properties"][
        "city"]["enum"]  # fmt: skip
    answered = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = client.chat.completions.create(model=server.model, messages=answered, tools=[TOOL], max_tokens=4)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > 0


def test_required_tools_as_a_stream(client, server):
    with client.chat.completions.stream(
        model=server.model, messages=HELLO, tools=[STRICT_TOOL], tool_choice="required", max_tokens=ENOUGH,
        parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["weather"]
    assert json.loads(done[0].arguments)["city"] in ("Oslo", "Rome")


def test_an_answer_parsed_into_a_model(client, server):
    parsed = client.chat.completions.parse(model=server.model, messages=HELLO, response_format=Place, max_tokens=ENOUGH)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=server.model, messages=HELLO, response_format=Place, max_tokens=1)


def test_reasoning_effort(client, server):
    answer = client.chat.completions.create(model=server.model, messages=HELLO, max_tokens=4, reasoning_effort="low")
    assert answer.usage.completion_tokens == 4


def test_attributes_of_vllms_are_there_and_null(client, server):
    choice = client.chat.completions.create(model=server.model, messages=HELLO, max_tokens=2).choices[0]
    assert (choice.message.reasoning, choice.token_ids, choice.stop_reason) == (None, None, None)
    answer = client.completions.create(model=server.model, prompt="Once", max_tokens=2)
    choice = answer.choices[0]
    assert (choice.prompt_logprobs, choice.token_ids, choice.prompt_token_ids) == (None, None, None)


def test_completions_in_their_forms(client, server):
    answer = client.completions.create(
        model=server.model, prompt=["Once", "Twice"], max_tokens=3, n=2, seed=1, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {len(choice.logprobs.tokens) for choice in answer.choices} == {3}
    assert answer.usage.completion_tokens == 12
    by_ids = client.completions.create(
        model=server.model, prompt=[5, 6, 7], max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert by_ids.choices[0].prompt_token_ids == [5, 6, 7] and len(by_ids.choices[0].token_ids) == 3
    chunks = list(client.completions.create(model=server.model, prompt="Once", max_tokens=3, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_many_at_once_and_each_its_own(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client:
            prompts = [f"Prompt {i}" for i in range(12)]
            asked = [
                client.completions.create(model=server.model, prompt=p, max_tokens=4, temperature=0) for p in prompts
            ]
            together = await asyncio.gather(*asked)
            alone = await client.completions.create(model=server.model, prompt=prompts[7], max_tokens=4, temperature=0)
            return [answer.usage.completion_tokens for answer in together], len({a.id for a in together}), alone

    tokens, ids, alone = asyncio.run(ask())
    assert tokens == [4] * 12 and ids == 12
    assert alone.usage.prompt_tokens_details.cached_tokens > 0


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=server.model, prompt="x", max_tokens=-1)
    assert refused.value.param == "max_tokens" and refused.value.status_code == 400
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=server.model, input="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client.completions.create(model=server.model, prompt=[5] * 40_000, max_tokens=1)


def test_a_stream_that_is_left_ends_at_the_server(client, server):
    stream = client.completions.create(model=server.model, prompt="Once", max_tokens=20_000, stream=True,
                                       extra_body={"ignore_eos": True})  # fmt: skip
    next(iter(stream))
    stream.close()
    load = client.with_options(base_url=server.root)
    for _ in range(200):
        if load.get("/load", cast_to=object) == {"server_load": 0}:
            return
    pytest.fail("the request went on")
