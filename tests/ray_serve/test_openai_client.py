"""openai's client, which knows nothing of Ray."""

import asyncio
import json

import openai
import pytest
from exchanges import HELLO, KEY, MODEL, NAMED, TOOL


@pytest.fixture
def client(two_replicas):
    with two_replicas.client() as client:
        yield client


def test_a_chat_and_the_same_as_a_stream(client):
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content and whole.usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_tools_and_models(client):
    answer = client.completions.create(model=MODEL, prompt=["Once", "Twice"], max_tokens=3, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    chosen = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[TOOL], tool_choice=NAMED, max_tokens=600, temperature=0
    )
    (call,) = chosen.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert [model.id for model in client.models.list()] == [MODEL]


def test_errors_are_the_clients_own(client, two_replicas):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="", max_tokens=3)
    assert refused.value.param == "prompt"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        two_replicas.client().with_options(api_key="other").completions.create(model=MODEL, prompt="a")


def test_many_at_once_and_each_its_own(two_replicas):
    prompts = [f"Prompt {number}" for number in range(24)]

    async def ask():
        async with openai.AsyncOpenAI(
            base_url=f"{two_replicas.url}/v1", api_key=KEY, max_retries=0, timeout=60
        ) as client:
            asked = (
                client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0, echo=True)
                for prompt in prompts
            )
            return await asyncio.gather(*asked)

    answers = asyncio.run(ask())
    assert all(answer.choices[0].text.startswith(prompt) for answer, prompt in zip(answers, prompts, strict=True))
    assert len({answer.id for answer in answers}) == len(prompts)
